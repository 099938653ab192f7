"""Messages as large as they may be: long names, many groups, many rows; each is legal enough to be looked at."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from gt.wire import codec
from gt.wire.link import hello
from gt.wire.messages import Message, Ops
from tests.attacks import mutate

LETTERS = [chr(0x4E00 + n) for n in range(150)]
COUNTS = (10, 100, 1000, 20_000)
LENGTHS = (10, 63, 200, 1000, 4000)
BUDGET = 30_000  # characters of a config, which has its own limit
BODY = 4 << 20  # bytes of a message


def word(rng: random.Random, length: int) -> str:
    """A name of so many letters, like every other of its length: what a search for the nearest one takes longest for."""
    letters = (LETTERS * (length // len(LETTERS) + 1))[:length]
    rng.shuffle(letters)
    return "".join(letters)


def heavy(rng: random.Random, recording: Sequence[tuple[Message, tuple]]) -> tuple[bytes, list, str]:
    """(Hello, what follows, text of it): one message of a recording with one field blown up, after a large config."""
    length = rng.choice(LENGTHS)
    groups = min(BUDGET // (length + 20), rng.choice((2, 20, 1400)))
    config = "".join(f"{word(rng, length)}: {{workers: [{n % 2}]}}\n" for n in range(max(groups, 1)))[:32_000]
    config = config.rpartition("\n")[0] + "\n"
    start = codec.pack(hello("client", config, "attack.yaml", switches={"workers": 2}))
    if rng.random() < 0.15:
        return start, [], f"Hello.config: {groups} groups of {length} letters"
    kinds = sorted({type(m).__name__ for m, _ in recording})
    kind = rng.choice([*kinds, *["Ops"] * 6])
    at = next(n for n, (m, _) in enumerate(recording) if type(m).__name__ == kind)
    message, frames = recording[at]
    name = rng.choice([one.name for one in fields(message)] or [""])
    if not name:
        return start, [(codec.pack(message), frames)], f"{kind}: as it is"
    count = rng.choice(COUNTS)
    new = blown_up(rng, message, name, count, length)
    body = mutate._flat((new, (), ""))[0]
    if len(body) > BODY:
        return start, [], f"{kind}.{name}: too long to send"
    return start, [(body, frames if kind == "Ops" else ())], f"{kind}.{name}: {count} of {length} letters, {groups} groups"


def blown_up(rng: random.Random, message: Message, name: str, count: int, length: int) -> Message:
    """The message with a field of so many rows, whose names have so many letters."""
    value = getattr(message, name)
    count = min(count, BODY // (3 * length + 40))
    if isinstance(message, Ops) and name == "origins":
        rows = [[n + 1, "f.py", 1, word(rng, length), False, -1] for n in range(count)]
        return replace(message, origins=rows)
    if isinstance(message, Ops) and name == "templates":
        form = value[0][1] if value else ["aten.neg.default", [], {}, [], 0, [], [], False, False]
        rows = [[16 + n, [f"aten.{word(rng, length)}.default" if n % 2 else form[0], *form[1:]]] for n in range(count)]
        return replace(message, templates=rows)
    new: Any = value
    if isinstance(value, str):
        new = word(rng, length * min(count, 100))
    elif isinstance(value, dict):
        new = {word(rng, length): n for n in range(count)}
    elif isinstance(value, list):
        new = (list(value) or [0]) * count if len(value) < 100 else list(value)
    return replace(message, **{name: new})
