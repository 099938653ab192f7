"""Peak memory of a replay on a worker: at most that of eager mode, and under 1F1B that of its micro-batches in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import gt
from gt.worker.executor import Executor
from gt.worker.program import python_codegen
from gt.worker.program.runner import ProgramRunner
from tests.helpers.models import accumulating, mini
from tests.helpers.serving import serving

STAGES = "pp_stage0: {shard: {axis: 0, workers: [0]}}\npp_stage1: {shard: {axis: 0, workers: [1]}}\n"
ROWS = 4  # of a micro-batch


def held(tensors: dict[int, Any]) -> int:
    """Bytes of all storages, each counted once."""
    storages = (t.untyped_storage() for t in tensors.values() if isinstance(t, torch.Tensor))
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


class Peaks(dict):
    """Worker -> most bytes held after any instruction since this was cleared, where they are looked at."""

    watching = True  # to look after every instruction takes most of a step


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Peaks]:
    found = Peaks()
    define, add = Executor.define, python_codegen.SourceWriter.add

    def measured(self: Executor, rows: list) -> None:
        define(self, rows)
        for number, kind, *_ in rows:
            step, size = self.runner.table.steps[number]
            if kind != "program":  # whose rows are bound to these
                self.runner.table.steps[number] = (_watched(self.runner, step, found), size)

    def watched(self: python_codegen.SourceWriter, at: int, lasting: set[int]) -> None:
        """Tensors in variables of the generated code count, too."""
        add(self, at, lasting)
        self.lines.append("seen(locals())")
        self.places.append(at)
        self._generator.scope["seen"] = partial(_see, self._generator.runner, found)

    monkeypatch.setattr(python_codegen.SourceWriter, "add", watched)
    monkeypatch.setattr(Executor, "define", measured)
    yield found


def _watched(runner: ProgramRunner, step: Callable, found: Peaks) -> Callable:
    def run(code: list, at: int) -> None:
        step(code, at)
        _see(runner, found, {})

    return run


def _see(runner: ProgramRunner, found: Peaks, local: dict) -> None:
    if found.watching:
        found[runner] = max(found.get(runner, 0), held({**runner.tensors, **local}))


def peak(config: Path, peaks: Peaks, parts: int, schedule: str | None) -> list[int]:
    """Most bytes of each worker in the last step of so many micro-batches; schedule None: eager. The least-burdened first."""
    config.write_text(STAGES)
    torch.manual_seed(0)
    with serving(2, "torch") as server:
        gt.connect(server.address, config=str(config))
        try:
            model = mini(gt.signal.groups()).to("remote")
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
            step = accumulating(model, optimizer, parts, to_none=False)  # so that the peak has gradients in any schedule
            run = step if schedule is None else gt.compile(step, schedule=schedule or None)
            for n in range(5):
                tokens = torch.randint(64, (parts * ROWS, 17))
                x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
                if schedule is None:
                    x, y = x.to("remote"), y.to("remote")
                peaks.clear()
                peaks.watching = n == 4
                run(x, y).item()
            assert schedule is None or run._programs[0].replays >= 2, run.explain()
            return sorted(peaks.values())
        finally:
            gt.shutdown()


@pytest.mark.usefixtures("plain_threads")
def test_a_replay_holds_no_more_than_eager_mode(peaks: dict, tmp_path: Path) -> None:
    eager, replay = peak(tmp_path / "stages.yaml", peaks, 4, None), peak(tmp_path / "stages.yaml", peaks, 4, "")
    assert all(b <= 1.05 * a for a, b in zip(eager, replay, strict=True)), (eager, replay)


@pytest.mark.usefixtures("plain_threads")
def test_1f1b_holds_its_micro_batches_in_flight_only(peaks: dict, tmp_path: Path) -> None:
    few, many, bounded = (
        peak(tmp_path / "stages.yaml", peaks, n, name) for n, name in ((2, "gpipe"), (8, "gpipe"), (8, "1f1b"))
    )
    assert all(c <= 1.05 * a < b for a, b, c in zip(few, many, bounded, strict=True)), (few, many, bounded)
