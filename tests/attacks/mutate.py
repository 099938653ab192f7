"""Messages made wrong: at bytes, as msgpack, field by field, and in their order. Fields are those of gt/wire/messages/.

Whatever has a message's dataclass has its mutations: a new message or field needs nothing written here.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import msgpack

from gt.dispatcher.state.emitter import BASE_BITS
from gt.wire import codec
from gt.wire.link import MAY_SEND
from gt.wire.messages import CODES, Hello, Message, Ops
from tests.helpers.hostile import CONFIGS, WILD, mutated

SENT: dict[str, tuple[type[Message], ...]] = {  # by role, whatever the protocol has
    role: tuple(sorted(may[0] | {Hello}, key=lambda cls: cls.__name__)) for role, may in MAY_SEND.items()
}
# (role, message, field) of whatever a peer may send; every message once, then again with its next field
TARGETS: tuple[tuple[str, type[Message], str], ...] = tuple(
    (role, cls, names[turn % len(names)])
    for turn in range(max(len(fields(cls)) for cls in CODES))
    for role, sent in SENT.items()
    for cls in sent
    if (names := [one.name for one in fields(cls)] or [""]) and (turn < len(names) or not turn)
)
DEFAULTS = {"int": int, "str": str, "bool": bool, "float": float, "list": list, "Numbers": list, "dict": dict}
NUMBERS = [
    -1, 0, 1, 2, 3, 7, 15, 16, 17, 63, 255, 4096, 1 << 20, 1 << 31, 1 << 40, 1 << 53, (1 << 63) - 1, -(1 << 63), 0.5,
    True,
]  # fmt: skip
NUMBERS += [float("inf"), float("nan"), 1 + (1 << BASE_BITS), 1 + (2 << BASE_BITS), 1 + (3 << BASE_BITS)]  # of other sessions
NAMES = [
    *dir(object), *dir(dict), "__builtins__", "__globals__", "__code__", "system", "os", "ops", "_C", "library",
    "load", "save",
]  # fmt: skip
HEADS = (0xC1, 0xDF, 0xDD, 0xC6, 0xDB, 0xC9, 0x9F, 0xC7, 0xD9)
RAW = [
    b"", b"\x90", b"\xc0", b"\x91\x01", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x81\x01\x02", b"\x91" * 5000,
    b"\x92\x01\xc7\x08\x05" + bytes(8), b"\x92\x01\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x81\xa1a" * 2000,
]  # fmt: skip
Step = tuple[bytes, tuple[bytes, ...], str]  # body, frames, class and field that were changed, "" for none


def default(cls: type[Message], rng: random.Random | None = None) -> Message:
    """A message of a class, of plain values, or of wild ones of the right types."""
    values = []
    for one in fields(cls):
        kind = DEFAULTS[str(one.type)]
        pool = [w for w in WILD if type(w) is kind] if rng else []
        values.append(copy.deepcopy(rng.choice(pool or [kind()])) if rng else kind())
    return cls(*values)


def bytes_changed(rng: random.Random, body: bytes) -> bytes:
    """With some bytes changed, cut off or added."""
    how = rng.random()
    if how < 0.1:
        return rng.choice(RAW)
    data = bytearray(body)
    for _ in range(rng.randrange(1, 5)):
        data[rng.randrange(len(data))] = rng.choice((*HEADS, rng.randrange(256), rng.randrange(256)))
    if how < 0.25:
        return bytes(data[: rng.randrange(len(data)) + 1])
    return bytes(data) + (rng.randbytes(rng.randrange(1, 40)) if how < 0.3 else b"")


def packed(value: Any) -> bytes:
    """msgpack of a list that is no message of the protocol, as far as msgpack has it."""
    try:
        return msgpack.packb(value)
    except (ValueError, OverflowError, TypeError):
        return b"\x90"


def structure_changed(rng: random.Random, message: Message) -> bytes:
    """Another number of fields, another code, values within values, or types that the protocol lacks."""
    code = CODES.index(type(message))
    row = [code, *(getattr(message, one.name) for one in fields(message))]
    how = rng.randrange(6)
    if how == 0:
        row[0] = rng.choice([-1, 31, 99, 1 << 40, "x", None, [], 2.0])
    elif how == 1:
        row = row[: rng.randrange(len(row))]
    elif how == 2:
        row += [rng.choice(WILD)]
    elif how == 3 and len(row) > 1:
        row[rng.randrange(1, len(row))] = msgpack.ExtType(rng.randrange(128), b"12345678")
    elif how == 4 and len(row) > 1:
        nested: Any = []
        for _ in range(rng.choice((20, 30, 500))):
            nested = [nested] if rng.random() < 0.7 else {"a": nested}
        row[rng.randrange(1, len(row))] = nested
    else:
        row = mutated(rng, row)
    return packed(row)


def targets(role: str) -> list[tuple[type[Message], str]]:
    """Messages and fields of one role, in the order of TARGETS."""
    return [(cls, name) for other, cls, name in TARGETS if other == role]


def field_changed(rng: random.Random, message: Message, name: str = "") -> tuple[Message, str]:
    """One field made wild, most often within its type; and the field's name. name: of the field, any if it is ""."""
    names = [one.name for one in fields(message)]
    if not names:
        return message, ""
    name = name or rng.choice(names)
    value = getattr(message, name)
    if isinstance(message, Ops) and name == "code" and value and rng.random() < 0.9:
        return replace(message, code=stream_changed(rng, value)), name
    if isinstance(message, Ops) and name == "templates" and value and rng.random() < 0.3:
        return replace(message, templates=names_changed(rng, value)), name
    if isinstance(message, Hello) and name == "config":
        return replace(message, config=rng.choice(CONFIGS)), name
    if isinstance(value, (list, dict)) and value:
        new: Any = mutated(rng, value)
        if type(new) is not type(value) and rng.random() < 0.9:
            new = copy.deepcopy(value) * 2 if isinstance(value, list) else {**value, rng.choice(NAMES): rng.choice(WILD)}
    elif type(value) is int:
        new = (
            rng.choice([w for w in NUMBERS if type(w) is int] + [value - 1, value + 1])
            if rng.random() < 0.9
            else rng.choice(WILD)
        )
    elif isinstance(value, str) and rng.random() < 0.9:
        new = rng.choice([*NAMES, "x" * 100_000, "\x1b[2J\n  1.000000 0 ERROR forged", "é" * 300, "\x00", value + ".__class__"])
    else:
        new = rng.choice(WILD)
    return replace(message, **{name: new}), name


def stream_changed(rng: random.Random, code: list) -> list:
    """An op stream with numbers changed, left out, doubled or moved."""
    made = list(code)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(made)) if made else 0
        how = rng.random()
        if not made:
            return [rng.choice(NUMBERS)]
        if how < 0.5:
            made[at] = rng.choice(NUMBERS)
        elif how < 0.65:
            made[at] = rng.choice(made)
        elif how < 0.75 and isinstance(made[at], int):
            made[at] += rng.choice((-1, 1))
        elif how < 0.85:
            del made[at]
        elif how < 0.95:
            made[at:at] = made[at : at + rng.randrange(1, 6)]
        else:
            made = made[:at]
    return made


def names_changed(rng: random.Random, templates: list) -> list:
    """Templates with an op's name, or the text of a constant, that nobody has as an op."""
    made = copy.deepcopy(templates)
    form = rng.choice(made)[1]
    space, _, _ = form[0].partition(".")
    if rng.random() < 0.7:
        form[0] = f"{space}.{rng.choice(NAMES)}.{rng.choice([*NAMES, 'default'])}"
    else:
        form[2] = {**form[2], rng.choice(("layout", "memory_format", "dtype", "device")): rng.choice(constants(rng))}
    return made


def constants(rng: random.Random) -> list[Any]:
    """Constants of kinds that engines look up."""
    kinds = ("layout", "memory_format", "dtype", "device", "complex", "t", "v")
    return [{rng.choice(kinds): rng.choice([*NAMES, *WILD])} for _ in range(3)]


# ---- order


def sequence(
    rng: random.Random,
    recording: Sequence[tuple[Message, tuple]],
    role: str = "client",
    target: tuple[type[Message], str] | None = None,
) -> tuple[list[Step], str]:
    """A recording with one to three things wrong; what they are. target: a message and field that is wrong besides."""
    steps: list[Any] = [(message, frames, "") for message, frames in recording]
    said = []
    if rng.random() < 0.3:
        steps = steps[: rng.randrange(1, len(steps) + 1)]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kinds = sorted({type(m).__name__ for m, _, _ in steps if isinstance(m, Message)})
        if not kinds:
            break
        kind = rng.choice(kinds)
        at = rng.choice([n for n, (m, _, _) in enumerate(steps) if type(m).__name__ == kind])
        how = rng.choice(("byte", "msgpack", "field", "field", "field", "field", "insert", "drop", "repeat", "swap", "frames"))
        said.append(f"{how} {kind}")
        with contextlib.suppress(Exception):
            steps = _changed(rng, steps, at, how, role)
    if target is not None:
        cls, name = target
        base = next((m for m, _, _ in steps if type(m) is cls), None) or default(cls, rng)
        new, name = field_changed(rng, base, name)
        said.append(f"{cls.__name__}.{name}")
        # Half of the time first: a session whose other faults end it would never say it
        steps.insert(rng.randrange(len(steps) + 1) if rng.random() < 0.5 else 0, (new, (), said[-1]))
    return [_flat(step) for step in steps], ", ".join(said)


def _changed(rng: random.Random, steps: list[Any], at: int, how: str, role: str) -> list[Any]:
    message, frames, _ = steps[at]
    kind = type(message).__name__
    made = list(steps)
    if how == "byte":
        made[at] = (bytes_changed(rng, codec.pack(message)), frames, f"{kind} byte")
    elif how == "msgpack":
        made[at] = (structure_changed(rng, message), frames, f"{kind} msgpack")
    elif how == "field":
        new, name = field_changed(rng, message)
        made[at] = (new, frames, f"{kind}.{name}")
    elif how == "insert":
        cls = rng.choice((*SENT[role], *CODES))
        made.insert(at, (default(cls, rng), (), f"{cls.__name__} inserted"))
    elif how == "drop":
        del made[at]
    elif how == "repeat":
        made.insert(at + rng.randrange(3), (message, frames, f"{kind} repeated"))
    elif how == "swap":
        other = rng.randrange(len(made))
        made[at], made[other] = made[other], made[at]
    else:
        some = [bytes(rng.choice((0, 1, 63, 64, 70_000, (1 << 20) + 1))) for _ in range(rng.randrange(3))]
        made[at] = (message, (*frames, *some) if rng.random() < 0.5 else tuple(some), f"{kind} frames")
    return made


def _flat(step: Any) -> Step:
    message, frames, what = step
    return body_of(message) if isinstance(message, Message) else message, frames, what


def body_of(message: Message) -> bytes:
    """The bytes of a message, as far as msgpack has its fields."""
    try:
        return codec.pack(message)
    except Exception:  # it has what the codec refuses to send: then by hand
        return packed([CODES.index(type(message)), *(getattr(message, one.name) for one in fields(message))])
