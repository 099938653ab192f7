"""Text of a dispatcher's actions: definitions, instructions by worker, other messages, lines of the instruction log.

Ids are those of the session. A place in a source file is its number among the file's places, so that an edit above it is no
difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from gt.ir.instr import BASE_BITS, FIRST, FREE, KINDS, Define
from gt.wire.messages import Message, Report, Run

SHORT = {FREE: "free"}
TENSORS = frozenset({"src", "dst", "tensor"})  # names of operands that are ids
PLACE = re.compile(r"(?:[\w.+/-]*/|\b)([\w.-]+\.py):(\d+)")
MASK = (1 << BASE_BITS) - 1


class Transcript:
    """Collects lines; str() is the text."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._definitions: dict[str, dict[int, Define]] = {}  # by worker
        self._first: dict[str, str] = {}  # text of a definition -> the worker that was sent it first
        self._places: dict[str, dict[str, int]] = {}

    def add(self, text: str) -> None:
        self.lines += [PLACE.sub(self._place, line.rstrip()) for line in text.splitlines()]

    def __str__(self) -> str:
        return "\n".join(self.lines) + "\n"

    def _place(self, match: re.Match[str]) -> str:
        places = self._places.setdefault(match[1], {})
        return f"{match[1]}:#{places.setdefault(match[2], len(places) + 1)}"

    # ---- messages

    def message(self, peer: str, message: Message, frames: Sequence) -> None:
        if isinstance(message, Run):
            self._run(peer, message)
            return
        name = type(message).__name__
        if isinstance(message, Report):
            self.add(f"{peer} {name} {message.request}\n{pretty(message.body)}")
            return
        # These workers have no GPUs, and no links that could break
        shown = [field for field in message.__dataclass_fields__ if field not in ("gpus", "broken")]
        fields = " ".join(f"{field}={getattr(message, field)!r}" for field in shown)
        sizes = f" + {[len(frame) for frame in frames]} B" if frames else ""
        self.add(f"{peer} {name} {fields}{sizes}".replace("\n", " | "))

    def _run(self, peer: str, run: Run) -> None:
        self.add(f"{peer} Run {run.seq} base={run.base} timed={run.timed}")
        known = self._definitions.setdefault(peer, {})
        for row in run.defines:
            define = Define.from_wire(row)
            known[define.number] = define
            self.add(f"{peer} define {self._definition(peer, define)}")
            if define.kind == "program":
                actions = dict(map(tuple, define.payload["actions"]))
                self.lines += [f"{peer} | {line}" for line in instructions(define.payload["code"], 0, known, actions)]
        self.lines += [f"{peer} {line}" for line in instructions(run.code, run.base, known)]

    def _definition(self, peer: str, define: Define) -> str:
        """With its payload the first time, but for a program's code, which follows as instructions."""
        payload = {key: value for key, value in define.payload.items() if (define.kind, key) != ("program", "code")}
        if define.kind == "program":
            payload["actions"] = [name for _, name in payload["actions"]]
        text = f"#{define.number} {define.kind} {json.dumps(payload, sort_keys=True, default=repr)}"
        first = self._first.setdefault(text, peer)
        return text if first == peer else f"#{define.number} as {first}"


def pretty(body: dict[str, Any]) -> str:
    """A line for each key, and for each item of a list or dict under it."""
    return "\n".join(f"  {where} {json.dumps(value, sort_keys=True, default=repr)}" for where, value in _items(body))


def _items(body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in sorted(body.items()):
        if value and isinstance(value, dict):
            yield from ((f"{key}.{k}", v) for k, v in sorted(value.items()))
        elif value and isinstance(value, list):
            yield from ((f"{key}[{n}]", v) for n, v in enumerate(value))
        else:
            yield key, value


def instructions(code: Sequence, base: int, known: dict[int, Define], actions: dict[int, str] | None = None) -> Iterator[str]:
    """Lines of a stream. actions: names by the place where they begin."""
    at, end = 0, len(code)
    while at < end:
        if actions and at in actions:
            yield f"-- {actions[at] or 'between'}"
        number, seq = code[at], base + code[at + 1]
        if number < FIRST:
            stop = at + 3 + code[at + 2]
            ids = code[at + 3 : stop]  # tensors that die together do so in the order in which an autograd graph ends
            names = " ".join(f"%{i & MASK}" for i in sorted(ids)) if number == FREE else " ".join(map(str, ids))
            yield f"{seq} {SHORT.get(number, f'special {number}')} {names}"
        else:
            define = known[number]
            stop = at + 2 + define.operands
            yield f"{seq} {called(define)} #{number} {' '.join(operands(define, code[at + 2 : stop]))}"
        at = stop


def called(define: Define) -> str:
    return define.payload["op"] if define.kind == "op" else define.kind


def operands(define: Define, values: Sequence) -> Iterator[str]:
    if define.kind == "op":
        tensors = define.payload["tensors"]
        plain = range(tensors, tensors + define.payload["values"])
        for n, value in enumerate(values):
            yield repr(value) if n in plain else f"%{value & MASK}"
        return
    for name, value in zip(KINDS[define.kind][0], values, strict=True):
        yield f"%{value & MASK}" if name in TENSORS else f"{name}={value!r}"
