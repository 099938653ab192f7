"""Codec of messages: msgpack `[code, *fields]`, where the code is the index in messages.CODES.

Received bytes are checked here, once: size, nesting, and the type of every field by the dataclass annotations. A ProtocolError
names the message and field that does not fit. Knows nothing of sockets.
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

SMALL = 32 << 10  # bytes of a body that unpacks within milliseconds, whatever its content
MAX_ASKED = 3 << 19  # bytes of a body from a peer to the dispatcher, at most
MOST_CONTAINERS = 96 << 10  # lists and maps in one field
_CONTAINERS = bytes([*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF])  # first bytes of lists and maps in msgpack
MAX_DEPTH = 24  # nested containers, without the message's own list
_TYPES: dict[str, type] = {"int": int, "str": str, "list": list, "Numbers": list, "dict": dict, "bool": bool, "float": float}
_NUMBERS = frozenset({int, float, bool})
_ATOMS = frozenset({int, float, bool, str, bytes, type(None)})
_NUMBER_OF = {cls: number for number, cls in enumerate(CODES)}
_STREAMS = frozenset(f"{cls.__name__}.{field.name}" for cls in CODES for field in fields(cls) if field.type == "Numbers")
_FIELDS: tuple[tuple[tuple[str, type], ...], ...] = tuple(
    tuple((field.name, _TYPES[str(field.type)]) for field in fields(cls)) for cls in CODES
)


def _getter(names: list[str]) -> Any:
    """A function from a message to the tuple of its fields. attrgetter gives no tuple for a single name."""
    if len(names) > 1:
        return attrgetter(*names)
    if names:
        one = attrgetter(names[0])
        return lambda message: (one(message),)
    return lambda message: ()


_VALUES = tuple(_getter([name for name, _ in row]) for row in _FIELDS)


class _Local(threading.local):
    """A packer for each thread, because it has one buffer."""

    def __init__(self) -> None:
        self.packer = msgpack.Packer()


_local = _Local()


def pack(message: Message) -> bytes:
    """The body of a message; ProtocolError for a type that msgpack lacks, or a body above MAX_BODY."""
    number = _NUMBER_OF[type(message)]
    try:
        body = _local.packer.pack((number, *_VALUES[number](message)))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        _local.packer = msgpack.Packer()  # the old packer may hold half a body
        raise _blame(message, error) from None
    if len(body) > messages.MAX_BODY:
        raise ProtocolError(f"{type(message).__name__} has {len(body)} bytes, at most {messages.MAX_BODY} fit a body")
    return body


def unpack(body: bytes | memoryview) -> Message:
    """The message of a body. Any bytes give a message or a ProtocolError."""
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
    """Raise ProtocolError for a body that would take long to unpack.

    A byte of msgpack may become an object of 64 bytes, so containers are counted before any is built. Small bodies pass.
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
            # An upper bound: bytes of numbers and texts may look like containers too.
            count = len(part) - len(part.translate(None, _CONTAINERS))
            if count > (64 + len(part) // 3 if stream else MOST_CONTAINERS):
                raise ProtocolError(f"{CODES[number].__name__}.{name} has about {count} lists, more than are taken")
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise ProtocolError(f"body of {len(body)} bytes is not msgpack: {str(error) or type(error).__name__}") from None


def _check(value: Any, where: str) -> None:
    """Raise ProtocolError unless a field has plain values, nested up to MAX_DEPTH. A flat list of numbers returns fast."""
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
