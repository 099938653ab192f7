"""A message as bytes and back: msgpack `[code, *fields]`, the code being the message's place in messages.CODES.

What comes from outside is checked here, once: size, nesting and the type of every field, from the dataclass
annotations. Whatever does not fit is a ProtocolError that names message and field. Knows nothing of sockets.
"""

from __future__ import annotations

import threading
from dataclasses import fields
from operator import attrgetter
from typing import Any

import msgpack

from gt.errors import ProtocolError
from gt.wire import messages
from gt.wire.messages import CODES, Message

SMALL = 32 << 10  # bytes of a body that is unpacked within milliseconds, whatever is in it
MAX_ASKED = 3 << 19  # bytes of one that a peer sends the dispatcher
MOST_CONTAINERS = 96 << 10  # lists and maps of one field
_CONTAINERS = bytes([*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF])  # first bytes of msgpack's
MAX_DEPTH = 24  # containers within containers, the message's own list not counted
_TYPES: dict[str, type] = {"int": int, "str": str, "list": list, "Numbers": list, "dict": dict, "bool": bool}
_NUMBERS = frozenset({int, float, bool})
_ATOMS = frozenset({int, float, bool, str, bytes, type(None)})
_NUMBER_OF = {cls: number for number, cls in enumerate(CODES)}
_STREAMS = frozenset(f"{cls.__name__}.{field.name}" for cls in CODES for field in fields(cls) if field.type == "Numbers")
_FIELDS: tuple[tuple[tuple[str, type], ...], ...] = tuple(
    tuple((field.name, _TYPES[str(field.type)]) for field in fields(cls)) for cls in CODES
)


def _getter(names: list[str]) -> Any:
    """A function message -> tuple of its fields, also for one name (attrgetter gives no tuple) and for none."""
    if len(names) > 1:
        return attrgetter(*names)
    if names:
        one = attrgetter(names[0])
        return lambda message: (one(message),)
    return lambda message: ()


_VALUES = tuple(_getter([name for name, _ in row]) for row in _FIELDS)


class _Local(threading.local):
    """A packer has one buffer, so each thread has its own."""

    def __init__(self) -> None:
        self.packer = msgpack.Packer()


_local = _Local()


def pack(message: Message) -> bytes:
    """The body of a message; ProtocolError if it has what msgpack lacks, or is larger than MAX_BODY."""
    number = _NUMBER_OF[type(message)]
    try:
        body = _local.packer.pack((number, *_VALUES[number](message)))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        _local.packer = msgpack.Packer()  # the old one may hold half a body
        raise _blame(message, error) from None
    if len(body) > messages.MAX_BODY:
        raise ProtocolError(f"{type(message).__name__} has {len(body)} bytes, at most {messages.MAX_BODY} fit a body")
    return body


def unpack(body: bytes | memoryview) -> Message:
    """The message of a body; any bytes at all give a message or a ProtocolError."""
    if len(body) > messages.MAX_BODY:
        raise ProtocolError(f"body has {len(body)} bytes, at most {messages.MAX_BODY} are accepted")
    try:
        row = msgpack.unpackb(body, strict_map_key=True, ext_hook=_no_extension)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"body of {len(body)} bytes is not msgpack: {str(error) or type(error).__name__}") from None
    if type(row) is not list or not row:
        raise ProtocolError(f"body is a {type(row).__name__}, want a list [code, *fields]")
    number = row[0]
    if type(number) is not int or not 0 <= number < len(CODES):
        raise ProtocolError(f"unknown message code {_short(number)}, known are 0 to {len(CODES) - 1}")
    cls, spec = CODES[number], _FIELDS[number]
    if len(row) != len(spec) + 1:
        raise ProtocolError(f"{cls.__name__} has {len(row) - 1} fields, want {len(spec)}: {[name for name, _ in spec]}")
    for value, (name, want) in zip(row[1:], spec, strict=True):
        if type(value) is not want:
            raise ProtocolError(f"{cls.__name__}.{name} is a {type(value).__name__}, want {want.__name__}")
        if want is list or want is dict:
            _check(value, f"{cls.__name__}.{name}")
    return cls(*row[1:])


def weigh(body: bytes) -> None:
    """Raise ProtocolError for a body that would take long to unpack: what a byte can say to make an object of 64 is counted
    before any is made. Small ones are not looked at.
    """
    if len(body) <= SMALL:
        return
    if len(body) > MAX_ASKED:
        raise ProtocolError(f"body has {len(body)} bytes, at most {MAX_ASKED} are accepted from a peer")
    reader = msgpack.Unpacker(max_buffer_size=MAX_ASKED)
    reader.feed(body)
    try:
        reader.read_array_header()
        number = reader.unpack()
        for name, _ in _FIELDS[number]:
            start = reader.tell()
            reader.skip()
            part, stream = body[start : reader.tell()], f"{CODES[number].__name__}.{name}" in _STREAMS
            # The bytes of a number or text look like these too, if few of a text's.
            count = len(part) - len(part.translate(None, _CONTAINERS))
            if count > (64 + len(part) // 3 if stream else MOST_CONTAINERS):
                raise ProtocolError(f"{CODES[number].__name__}.{name} has about {count} lists, more than are taken")
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise ProtocolError(f"body of {len(body)} bytes is not msgpack: {str(error) or type(error).__name__}") from None


def _check(value: Any, where: str) -> None:
    """Plain values only and MAX_DEPTH at most; a flat list of numbers (an op stream) takes the fast way out."""
    if type(value) is list and _NUMBERS.issuperset(map(type, value)):
        return
    if where in _STREAMS:
        raise ProtocolError(f"{where} holds a {next(type(item).__name__ for item in value if type(item) not in _NUMBERS)}")
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for container in level:
            inner = container.values() if type(container) is dict else container
            if _NUMBERS.issuperset(map(type, inner)):
                continue
            for item in inner:
                if type(item) in _ATOMS:
                    continue
                if type(item) is not list and type(item) is not dict:
                    raise ProtocolError(f"{where} holds a {type(item).__name__}")
                below.append(item)
        if not below:
            return
        level = below
    raise ProtocolError(f"{where} is nested more than {MAX_DEPTH} deep")


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} is not of the protocol")


def _blame(message: Message, error: Exception) -> ProtocolError:
    """The error of the first field that cannot be packed alone."""
    number = _NUMBER_OF[type(message)]
    for (name, _), value in zip(_FIELDS[number], _VALUES[number](message), strict=True):
        try:
            msgpack.packb(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as cause:
            return ProtocolError(f"{type(message).__name__}.{name} cannot be sent: {cause}")
    return ProtocolError(f"{type(message).__name__} cannot be sent: {error}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
