"""Transfers beside what is computed: nothing touches what they work on before it has waited, and nothing waits without need."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gt.ir.dataflow import summarize
from gt.ir.instr import FREE, Define
from gt.worker.instructions.step import Row
from gt.worker.program.overlap import ON_SIDE_STREAM, RecordedProgram, group_collectives, overlap_transfers

TEAM = {"id": 0, "workers": [0, 1], "rank": 0, "offset": 0, "bytes": 64}
DTYPE = {"shape": [1], "dtype": "float32"}


def op(number: int, name: str, tensors: int, outs: list, *writes: int) -> Define:
    payload = {"op": name, "args": [], "kwargs": {}, "tensors": tensors, "values": 0, "outs": outs, "random": None}
    return Define(number, "op", {**payload, "writes": list(writes)})


DEFINES = {
    define.number: define
    for define in (
        op(50, "aten.add.Tensor", 2, [["new", None, 0]]),
        op(51, "aten.add_.Tensor", 2, [["same", None, 0]], 0),
        op(52, "aten.t.default", 1, [["view", None, 0]]),
        op(53, "aten._foreach_add_.List", 3, [], 0, 1, 2),
        Define(20, "send", {"channel": {}, "boxes": []}),
        Define(21, "all_reduce", {"team": TEAM, "op": "sum"}),
        Define(22, "all_gather", {"team": TEAM, "boxes": [], **DTYPE}),
        Define(23, "reduce_scatter", {"team": TEAM, "op": "sum", "boxes": [], **DTYPE}),
        Define(24, "all_reduce", {"team": TEAM, "op": "sum"}),  # by the host
        Define(30, "recv", {"parts": [], **DTYPE}),
        Define(31, "alias", {}),
    )
}
DIRECT = {20, 21, 22, 23, 30}


class Other:
    """A stream that remembers what was put there."""

    def on_side_stream(self, step: Any, ids: Any, name: str) -> Any:
        assert name in ON_SIDE_STREAM
        return ("aside", step, tuple(ids))

    def join(self, count: int) -> Any:
        return ("join", count)


def program(rng: random.Random, length: int) -> tuple[list, list[Row]]:
    """A stream, its rows."""
    code: list = []
    rows: list[Row] = []
    alive, fresh = list(range(4)), 100

    def take(count: int) -> list[int]:
        return [rng.choice(alive) for _ in range(count)]

    for _ in range(length):
        at = len(code)
        if len(alive) > 6 and rng.random() < 0.3:
            gone = alive.pop(rng.randrange(len(alive)))
            code += [FREE, 0, 1, gone]
        else:
            define = rng.choice(list(DEFINES.values()))
            if define.kind == "op":
                made = [out for out in define.payload["outs"] if out[0] in ("new", "view")]
                operands, makes = take(define.payload["tensors"]), len(made)
            else:
                operands, makes = take(0 if define.kind == "recv" else 1), define.kind not in ("send", "all_reduce")
            outs = list(range(fresh, fresh + makes))
            fresh += makes
            alive += outs
            code += [define.number, 0, *operands, *outs]
        rows.append((at, f"step {at}"))  # type: ignore[arg-type]  # never called
    return code, rows


@pytest.mark.parametrize("seed", range(200))
def test_an_instruction_waits_for_transfers_of_its_tensors(seed: int) -> None:
    rng = random.Random(seed)
    code, rows = program(rng, 60)
    segments: dict[int, list[Row]] = {}
    folded: list[Row] = []
    while len(folded) + sum(len(part) - 1 for part in segments.values()) < len(rows):  # some rows stand for several
        n = len(folded) + sum(len(part) - 1 for part in segments.values())
        count = rng.choice((1, 1, 3))
        part = [row for row in rows[n : n + count] if code[row[0]] == FREE or DEFINES[code[row[0]]].kind in ("op", "alias")]
        if count > 1 and part == rows[n : n + count]:
            segments[rows[n][0]] = part
        folded.append(rows[n])
    marks = {f"mark {n}" for n in range(3)}
    for mark in sorted(marks):
        at = rng.randrange(len(folded))
        folded.insert(at, (folded[at][0], mark))  # type: ignore[arg-type]
    alive = summarize(code, DEFINES.get).sets

    def inside(row: Row) -> list[Row]:
        return [] if row[1] in marks else segments.get(row[0], [row])

    found = overlap_transfers(folded, RecordedProgram(code, DEFINES.get, alive, DIRECT, inside), Other())
    steps = [step for _, step in found if type(step) is not tuple or step[0] == "aside"]
    assert [step[1] if type(step) is tuple else step for step in steps] == [s for _, s in folded]
    shared = _memory(code, rows)
    under_way: list[tuple[set[int], set[int]]] = []  # of each transfer, what it reads and writes, nothing if it is joined
    for n, (at, step) in enumerate(found):
        reads = {i for some, _ in under_way for i in some}
        writes = {i for _, some in under_way for i in some}
        if type(step) is tuple and step[0] == "join":
            waited = set.union(*under_way[step[1] - 1])
            assert waited
            after = {i for row in found[n + 1 : n + 2] for i in _ids(inside(row), code)}
            assert not found[n + 1 :] or all(row[1] in marks for row in found[n + 1 :]) or after & waited
            under_way[: step[1]] = [(set(), set())] * step[1]
        elif type(step) is tuple:
            define = DEFINES[code[at]]
            assert define.kind in ON_SIDE_STREAM and define.number in DIRECT
            first = set(shared[code[at + 2]])
            made = {i for tensor in code[at + 3 : at + 2 + define.operands] for i in shared[tensor]}
            under_way.append((set(), made | first) if define.kind == "all_reduce" else (first, made))
            assert set(step[2]) == set(code[at + 2 : at + 2 + define.operands])
        elif step not in marks:
            for place, _ in inside((at, step)):
                if code[place] == FREE:
                    continue
                define = DEFINES[code[place]]
                assert define.number not in DIRECT - {30}
                operands = code[place + 2 : place + 2 + define.operands]
                assert not writes.intersection(operands)
                changed = operands[:1] if define.number in (51, 24) else operands if define.number == 53 else []
                assert not reads.intersection(changed)
    assert not any(map(any, under_way))  # whatever ends the recording has waited


@pytest.mark.parametrize("before", [True, False])
def test_views_from_an_earlier_definition_of_a_long_program_wait_too(before: bool) -> None:
    code = [*([] if before else [50, 0, 2, 3, 1]), 21, 0, 1, 50, 0, 2, 3, 4]  # 2 may be a view of 1 if 1 is not made here
    places = [0, 3] if before else [0, 5, 8]
    rows = [(at, f"step {at}") for at in places]
    program = RecordedProgram(code, DEFINES.get, summarize(code, DEFINES.get).sets, DIRECT, lambda row: [row])
    found = overlap_transfers(rows, program, Other())  # type: ignore[arg-type]
    assert found.index((places[-1], ("join", 1))) == len(found) - (2 if before else 1)  # type: ignore[arg-type]


def test_a_reader_of_an_earlier_transfer_does_not_wait_for_a_later_one() -> None:
    """An optimizer's first part runs while the last gradients are summed."""
    code = [50, 0, 2, 3, 60, 50, 0, 2, 3, 61, 21, 0, 60, 21, 0, 61, 50, 0, 2, 60, 62, 50, 0, 2, 61, 63]
    rows = [(at, f"step {at}") for at in (0, 5, 10, 13, 16, 21)]
    program = RecordedProgram(code, DEFINES.get, summarize(code, DEFINES.get).sets, DIRECT, lambda row: [row])
    found = overlap_transfers(rows, program, Other())  # type: ignore[arg-type]
    assert [step if type(step) is str else step[:2] for _, step in found] == [
        *("step 0", "step 5", ("aside", "step 10"), ("aside", "step 13")),
        *(("join", 1), "step 16", ("join", 2), "step 21"),
    ]


def test_operands_of_instructions_run_together_are_freed_afterwards() -> None:
    code = [40, 0, 21, 0, 7, FREE, 0, 1, 7, 21, 0, 8, FREE, 0, 1, 8, 50, 0, 1, 2, 3]
    log: list[Any] = []
    rows = [(at, lambda code, place: log.append(place - 2)) for at in (0, 2, 5, 9, 12, 16)]

    @contextlib.contextmanager
    def batch() -> Iterator[tuple]:
        log.append("begin")
        yield ()
        log.append("end")

    defines = {**DEFINES, 40: Define(40, "together", {"count": 2})}

    def each(some: Sequence[Row]) -> None:
        for at, step in some:
            step(code, at + 2)

    plane = SimpleNamespace(batch=batch)
    runner: Any = SimpleNamespace(definition=defines.get, context=SimpleNamespace(plane=plane), run_rows=each)
    found, groups = group_collectives(rows, code, runner)
    for at, step in found:
        step(code, at + 2)
    assert log == ["begin", 2, 9, "end", 5, 12, 16]
    assert {at: [place for place, _ in some] for at, some in groups.items()} == {2: [2, 9]}


def _ids(rows: list[Row], code: list) -> set[int]:
    """All that rows name, and all that shares memory with it."""
    shared = _memory(code, [(at, None) for at, _ in rows])  # type: ignore[list-item]
    return {i for group in shared.values() for i in group} | set(shared)


def _memory(code: list, rows: list[Row]) -> dict[int, set[int]]:
    """Ids with which each may share memory, itself among them: what was there before may be views of one another."""
    older = set(range(4))
    groups = dict.fromkeys(older, older)
    at = 0
    while at < len(code):
        if code[at] == FREE:
            at += 3 + code[at + 2]
            continue
        define = DEFINES[code[at]]
        operands = code[at + 2 : at + 2 + define.operands]
        for tensor in operands:
            groups.setdefault(tensor, {tensor})
        if define.number in (52, 31):
            both = groups[operands[0]] | groups[operands[1]]
            for tensor in both:
                groups[tensor] = both
        at += 2 + define.operands
    named = {t for at, _ in rows if code[at] != FREE for t in code[at + 2 : at + 2 + DEFINES[code[at]].operands]}
    return {tensor: groups[tensor] for tensor in named}
