"""Codec of messages: msgpack `[code, *fields]`, where the code is the index in messages.CODES.

Received bytes are checked here, once: size, nesting, and the type of every field by the dataclass annotations. A ProtocolError
names the message and field that does not fit. Knows nothing of sockets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgpack

from gt.errors import ProtocolError
from gt.ir.instr import PackedPayload
from gt.wire import messages
from gt.wire.messages import CODES, Message, Run

SMALL_BYTES = 32 << 10  # bytes of a body that unpacks within milliseconds, whatever its content
MAX_ASKED_BYTES = 3 << 19  # bytes of a body from a peer to the dispatcher, at most
MAX_CODE_BYTES = 9  # bytes of the longest number
MAX_CONTAINERS = 96 << 10  # lists and maps in one field
# Bounds of a field in a body that is not small. A byte may become a number or a text, 20 ns each; 10 bytes a key, 1000 ns
MAX_STREAM_NUMBERS = 1 << 18
MAX_LIST_BYTES, MAX_MAP_BYTES = 3 << 18, 1 << 17
_CONTAINERS = bytes([*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF])  # first bytes of lists and maps in msgpack
MAX_DEPTH = 24  # nested containers, without the message's own list
ESCAPES = "backslashreplace"  # for characters that have no form in UTF-8
_NUMBERS = frozenset({int, float, bool})
_PLAIN = frozenset({int, float, bool, str, bytes, type(None), list, dict})
_LONG_LIST = b"\xdd"  # first byte of a list of 65536 or more, before the count in 4 bytes
T = TypeVar("T")


class RowTypes(Generic[T]):
    """Dataclasses whose wire form is `[code, *fields]`; the code of a class is its place among them. what: a row, in errors.

    accepted: for each annotation, the types of values that it admits. A value of another type is refused, a subclass too.
    """

    def __init__(self, what: str, classes: Sequence[type[T]], accepted: Mapping[str, tuple[type, ...]]) -> None:
        self._what, self.classes = what, tuple(classes)
        self.code_of = {cls: code for code, cls in enumerate(classes)}
        self.names = tuple(tuple(one.name for one in fields(cls)) for cls in classes)  # type: ignore[arg-type]
        self.values = tuple(map(_getter, self.names))
        self._accepted = tuple(
            tuple((one.name, accepted[str(one.type)]) for one in fields(cls))  # type: ignore[arg-type]
            for cls in classes
        )

    def row(self, value: T) -> tuple:
        """The wire form of a value."""
        code = self.code_of[type(value)]
        return code, *self.values[code](value)

    def parse(self, row: Any) -> T:
        """The value of a received row; ProtocolError names the field that does not fit."""
        if type(row) is not list or not row:
            raise ProtocolError(f"{self._what} is a {type(row).__name__}, want a list [code, *fields]")
        code = row[0]
        if type(code) is not int or not 0 <= code < len(self.classes):
            raise ProtocolError(f"unknown {self._what} code {_short(code)}, known are 0 to {len(self.classes) - 1}")
        accepted, name = self._accepted[code], self.classes[code].__name__
        if len(row) != len(accepted) + 1:
            raise ProtocolError(f"{name} has {len(row) - 1} fields, want {len(accepted)}: {[*self.names[code]]}")
        # type(), not isinstance: a bool is an int, and would pass as one.
        for value, (field, kinds) in zip(row[1:], accepted, strict=True):
            if type(value) not in kinds:
                raise ProtocolError(f"{name}.{field} is a {type(value).__name__}, want {kinds[0].__name__}")
        return self.classes[code](*row[1:])


def _getter(names: Sequence[str]) -> Callable[[Any], tuple]:
    """A function from an object to the tuple of its fields. attrgetter gives no tuple for a single name."""
    if len(names) > 1:
        return attrgetter(*names)
    if names:
        one = attrgetter(names[0])
        return lambda value: (one(value),)
    return lambda value: ()


_TYPES = {kind.__name__: (kind,) for kind in (int, str, list, dict, bool, float)}
_ROWS: RowTypes[Message] = RowTypes("message", CODES, {**_TYPES, "Numbers": (list,)})
_STREAMS = frozenset(f"{cls.__name__}.{field.name}" for cls in CODES for field in fields(cls) if field.type == "Numbers")
# bytes of each other field with nested values; of a worker's Report as many as a body has
_MAX_BYTES = {
    f"{cls.__name__}.{field.name}": MAX_LIST_BYTES if field.type == "list" else MAX_MAP_BYTES
    for cls in CODES
    for field in fields(cls)
    if field.type in ("list", "dict")
} | {"Report.body": MAX_ASKED_BYTES}
_LATER = frozenset({"Ops.templates", "Ops.origins"})  # the dispatcher checks their rows one by one, a slice of them in a turn
# by code: place in the row, and name, of each field with nested values
_NESTED = tuple(
    tuple(
        (place, f"{cls.__name__}.{field.name}")
        for place, field in enumerate(fields(cls), 1)
        if field.type in ("list", "dict", "Numbers") and f"{cls.__name__}.{field.name}" not in _LATER
    )
    for cls in CODES
)


class _Local(threading.local):
    """A packer for each thread, because it has one buffer."""

    def __init__(self) -> None:
        self.packer = msgpack.Packer()


_local = _Local()


def pack(message: Message) -> bytes:
    """The body of a message; ProtocolError for a type that msgpack lacks, or a body above MAX_BODY_BYTES.

    Characters that have no form in UTF-8 are sent as escapes.
    """
    try:
        try:
            body = _body(message, _local.packer)
        except UnicodeEncodeError:  # as of a file's name whose bytes are not UTF-8: Python has lone surrogates for them
            body = _body(message, msgpack.Packer(unicode_errors=ESCAPES))
            _local.packer = msgpack.Packer()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        _local.packer = msgpack.Packer()  # the old packer may hold half a body
        raise _blame(message, error) from None
    if len(body) > messages.MAX_BODY_BYTES:
        raise ProtocolError(f"{type(message).__name__} has {len(body)} bytes, at most {messages.MAX_BODY_BYTES} fit a body")
    return body


def _body(message: Message, packer: msgpack.Packer) -> bytes:
    # A Run may carry a program whose payload is packed already: its bytes are put into the body as they are.
    if type(message) is Run and any(map(_has_packed_payload, message.defines)):
        return _joined(_ROWS.row(message), message.defines, packer)
    return packer.pack(_ROWS.row(message))


def packed_payload(payload: dict[str, Any]) -> PackedPayload:
    """The payload of a program, packed before a Run carries it."""
    return PackedPayload(payload, _local.packer.pack(payload))


def _has_packed_payload(definition: Any) -> bool:
    return type(definition) is list and bool(definition) and type(definition[-1]) is PackedPayload


def _joined(row: tuple, defines: list, packer: msgpack.Packer) -> bytes:
    """The body of a Run's row, whose definitions may have packed payloads."""
    # The same bytes as `pack` would make. A msgpack list is a header with its length, then its items.
    parts = [packer.pack_array_header(len(row))]
    for field in row:
        if field is not defines:
            parts.append(packer.pack(field))
            continue
        parts.append(packer.pack_array_header(len(defines)))
        for definition in defines:
            if _has_packed_payload(definition):
                parts += packer.pack_array_header(len(definition)), *map(packer.pack, definition[:-1]), definition[-1].packed
            else:
                parts.append(packer.pack(definition))
    return b"".join(parts)


def unpack(body: bytes | memoryview) -> Message:
    """The message of a body. Any bytes give a message or a ProtocolError."""
    if len(body) > messages.MAX_BODY_BYTES:
        raise ProtocolError(f"body has {len(body)} bytes, at most {messages.MAX_BODY_BYTES} are accepted")
    try:
        row = msgpack.unpackb(body, strict_map_key=True, ext_hook=_no_extension)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"body of {len(body)} bytes is not msgpack: {str(error) or type(error).__name__}") from None
    message = _ROWS.parse(row)
    for place, name in _NESTED[row[0]]:
        check(row[place], name)
    return message


def weigh(body: bytes) -> None:
    """Raise ProtocolError for a body that would take long to unpack.

    A byte of msgpack may become an object of 64 bytes, so containers are counted before any is built. Small bodies pass.
    """
    if len(body) <= SMALL_BYTES:
        return
    if len(body) > MAX_ASKED_BYTES:
        raise ProtocolError(f"body has {len(body)} bytes, at most {MAX_ASKED_BYTES} are accepted from a peer")

    # `skip` walks over a field without making objects of it.
    reader = msgpack.Unpacker(max_buffer_size=MAX_ASKED_BYTES)
    reader.feed(body)
    try:
        count, start = reader.read_array_header(), reader.tell()
        reader.skip()
        code = body[start : reader.tell()]
        number = msgpack.unpackb(code) if len(code) <= MAX_CODE_BYTES else None
        if type(number) is not int or not 0 <= number < len(CODES) or count != len(_ROWS.names[number]) + 1:
            raise ProtocolError(f"body of {len(body)} bytes is no message: its code or its number of fields is unknown")
        for name in _ROWS.names[number]:
            start = reader.tell()
            reader.skip()
            _weigh_field(f"{CODES[number].__name__}.{name}", body[start : reader.tell()])
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise ProtocolError(f"body of {len(body)} bytes is not msgpack: {str(error) or type(error).__name__}") from None


def _weigh_field(name: str, part: bytes) -> None:
    """Raise ProtocolError for one field, a part of the body, that would take long."""
    # 1. Bytes of the field, and the count of a stream of numbers.
    stream, most = name in _STREAMS, _MAX_BYTES.get(name, MAX_ASKED_BYTES)
    if len(part) > most:
        raise ProtocolError(f"{name} has {len(part)} bytes, at most {most} are taken")
    if stream and part[:1] == _LONG_LIST and (numbers := int.from_bytes(part[1:5], "big")) > MAX_STREAM_NUMBERS:
        raise ProtocolError(f"{name} has {numbers} numbers, at most {MAX_STREAM_NUMBERS} are taken")

    # 2. Containers, which cost most: an empty list is one byte on the wire and 56 in memory. An upper bound: bytes of numbers
    # and texts may look like containers too, such as two of the three bytes of most ids around 0x8000.
    count = len(part) - len(part.translate(None, _CONTAINERS))
    if count > max(MAX_CONTAINERS, len(part) // 3 if stream else 0):
        raise ProtocolError(f"{name} has about {count} lists, more than are taken")


def check(value: Any, where: str) -> None:
    """Raise ProtocolError unless a field has plain values, nested up to MAX_DEPTH.

    All values of one depth are looked at together, by a few calls: a loop over them in Python takes ten times as long.
    """
    # The usual case, a list of numbers, takes one call.
    if type(value) is list and _NUMBERS.issuperset(map(type, value)):
        return
    if where in _STREAMS:
        raise ProtocolError(f"{where} holds a {next(type(item).__name__ for item in value if type(item) not in _NUMBERS)}")

    # Level by level. Exact types: a bool or a subclass would pass isinstance.
    lists, maps = ([], [value]) if type(value) is dict else ([value if type(value) is list else [value]], [])
    for _ in range(MAX_DEPTH):
        items = [*chain.from_iterable(lists), *chain.from_iterable(map(dict.values, maps))]
        kinds = {*map(type, items)}
        if not kinds <= _PLAIN:
            raise ProtocolError(f"{where} holds a {next(kind.__name__ for kind in map(type, items) if kind not in _PLAIN)}")
        lists = [item for item in items if type(item) is list] if list in kinds else []
        maps = [item for item in items if type(item) is dict] if dict in kinds else []
        if not lists and not maps:
            return
    raise ProtocolError(f"{where} is nested more than {MAX_DEPTH} deep")


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} is not of the protocol")


def _blame(message: Message, error: Exception) -> ProtocolError:
    """The error of the first field that cannot be packed alone."""
    code, *values = _ROWS.row(message)
    for name, value in zip(_ROWS.names[code], values, strict=True):
        try:
            msgpack.packb(value, unicode_errors=ESCAPES)
        except (TypeError, ValueError, OverflowError, RecursionError) as cause:
            return ProtocolError(f"{type(message).__name__}.{name} cannot be sent: {cause}")
    return ProtocolError(f"{type(message).__name__} cannot be sent: {error}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
