"""Shared parts of the GPU benchmarks: cases in processes of their own, how a step is timed, a table kept as its rows come.

Every case has a time limit; one that hangs or fails is a row that says so, and the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "gpt2"), str(ROOT / "benchmarks")]
BLOCK = 1.0  # seconds of steps that are waited for together: waiting takes some milliseconds
MADE = 8  # calls of a captured step, after which it is replayed as it will be from then on
STEPS = 4  # whose losses are compared, from the first weights
NOISE = 2e-3  # relative: what bf16 may do to a loss in so many steps, by another order of sums
Row = dict[str, Any]


def without_gt() -> None:
    """A native rival's process has torch alone: the examples' models need GT for nothing but their groups."""
    sys.modules["gt"] = ModuleType("gt")


def tuning_demo() -> ModuleType:
    """The tuning demo's model, under another name than that of examples/gpt2."""
    if "tuning_model" not in sys.modules:
        spec = importlib.util.spec_from_file_location("tuning_model", ROOT / "examples" / "tuning_demo" / "model.py")
        assert spec is not None and spec.loader is not None
        sys.modules["tuning_model"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["tuning_model"])
    return sys.modules["tuning_model"]


def flags(what: str, json_too: bool = True) -> argparse.ArgumentParser:
    """A parser with what all of them take."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here too, after each row")
    parser.add_argument("--seconds", type=float, default=2.5, help="of steps to time in each case")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds after which a case is given up")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    return parser


# ---- time


def timed(
    step: Callable[[], Any], wait: Callable[[], None], seconds: float = 5.0, agree: Callable[[int], int] = lambda n: n
) -> tuple[float, float]:
    """Median over blocks of steps, and over steps that are each waited for, in ms a step.

    agree: what several processes that step together make of a number that each proposes.
    """

    def block(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            step()
        wait()
        return (time.perf_counter() - start) / count * 1e3

    alone = statistics.median(block(1) for _ in range(40))
    count = agree(max(4, int(BLOCK / alone * 1e3)))
    blocks = agree(max(3, int(seconds / (count * alone / 1e3))))
    return statistics.median(block(count) for _ in range(blocks)), alone


class GpuUtilization:
    """The share of time in which a kernel ran on the GPUs, within this context, as nvidia-smi samples it. None without it."""

    def __init__(self) -> None:
        self.share: float | None = None

    def __enter__(self) -> GpuUtilization:
        query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=100"]
        found = shutil.which(query[0])
        self._process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True) if found else None
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._process is None:
            return
        self._process.terminate()
        samples = [int(line) for line in self._process.communicate()[0].split() if line.isdigit()]
        self.share = statistics.fmean(samples) / 100 if samples else None


def link_rate(nbytes: int = 1 << 28, rounds: int = 8) -> float:
    """Bytes a second, both ways together, of pinned copies to and from a GPU at once."""
    import torch

    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    up, down = torch.cuda.Stream(), torch.cuda.Stream()

    def both() -> None:
        with torch.cuda.stream(up):
            device[0].copy_(host[0], non_blocking=True)
        with torch.cuda.stream(down):
            host[1].copy_(device[1], non_blocking=True)

    both()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        both()
    torch.cuda.synchronize()
    return 2 * nbytes * rounds / (time.perf_counter() - start)


class Weights:
    """A copy of the parameters, to restore them: losses of the timed steps are compared, not those of earlier ones."""

    def __init__(self, parameters: Iterable[Any], first: Sequence[Any] | None = None) -> None:
        """first: what they are, where that is on the CPU already."""
        own = [_own(p) for p in parameters]
        self._first = list(zip(own, first or [p.detach().to("cpu", copy=True) for p in own], strict=True))

    def again(self, *optimizers: Any) -> None:
        import torch

        with torch.no_grad():
            for p, value in self._first:
                p.copy_(value)
            for state in (state for optimizer in optimizers for state in optimizer.state.values()):
                for value in state.values():
                    _own(value).zero_()


def _own(tensor: Any) -> Any:
    """This process's part of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def captured(step: Callable, data: Sequence[Any], seconds: float, model: Any, optimizer: Any) -> Row:
    """Times of a captured step from its first call on; then its session is over. Its losses are those of replays."""
    import torch

    import gt

    weights = Weights(model.parameters())
    start = time.perf_counter()
    for _ in range(MADE):
        step(*data).item()
    first = time.perf_counter() - start
    weights.again(optimizer)
    losses = [step(*data).item() for _ in range(STEPS)]
    ms, alone = timed(lambda: step(*data), torch.remote.synchronize, seconds)
    step(*data).item()
    torch.remote.synchronize()  # the loss may be there before all workers have ended the step
    stats = gt.stats()
    print(step.explain(), file=sys.stderr)
    gt.shutdown()
    found = stats.get("schedule", {})
    return {
        "ms": ms, "alone ms": alone, "first s": first, "losses": losses, "schedule": found.get("name"),
        "predicted": found.get("predicted", {}).get("idle"), "measured": found.get("measured", {}),
        "peak MiB": [round(w["peak_bytes"] / 2**20) for w in stats["workers"]], "transport": stats["workers"][0]["transport"],
    }  # fmt: skip


def apart(losses: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference of the first steps' losses; infinite where one is no number."""
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


# ---- processes


def together(
    commands: Sequence[Sequence[object]], seconds: float, partly: bool = False, **variables: str
) -> tuple[Row | None, str]:
    """Run Python programs side by side: what the first printed last, as JSON, and what it said on stderr.

    None (partly: what it had printed until then) and why, if one failed or they took too long; the text says where each was.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    env = {**os.environ, "PYTHONFAULTHANDLER": "1", **variables}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        files = [
            [stack.enter_context((Path(folder) / f"{n}{end}").open("w+")) for end in ("out", "err")]
            for n in range(len(commands))
        ]
        processes = [
            subprocess.Popen([sys.executable, *map(str, command)], stdout=out, stderr=err, env=env, preexec_fn=os.setpgrp)
            for command, (out, err) in zip(commands, files, strict=True)
        ]
        try:
            why = _awaited(processes, time.monotonic() + seconds)
        finally:
            _end(processes)
        texts = [[_text(file) for file in pair] for pair in files]
    lines = texts[0][0].splitlines()
    if why:
        said = [f"-- {n}: {_last(err)}" for n, (_, err) in enumerate(texts) if err.strip()]
        return json.loads(lines[-1]) if partly and lines else None, "\n".join([why.format(seconds=f"{seconds:g}"), *said])
    return (json.loads(lines[-1]), texts[0][1]) if lines else (None, f"it printed nothing\n{texts[0][1][-2500:]}")


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read())


def _last(err: str) -> str:
    """The end of an error; of a process that was told to say where it was, the innermost calls of its main thread."""
    at = err.rfind("Current thread")
    return err.strip()[-1500:] if at < 0 else err[at:].partition("\nExtension modules")[0][:1500]


def _awaited(processes: Sequence[subprocess.Popen], end: float) -> str:
    """The reason why they are no good; "" when all have ended well. The others of one that failed get a moment to say why."""
    while None in (codes := [process.poll() for process in processes]):
        if any(codes):
            end = min(end, time.monotonic() + 3)
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    codes = [process.poll() for process in processes]
    if any(codes):
        return f"exit codes {codes}"
    return "" if None not in codes else "given up after {seconds} s"


def _end(processes: Sequence[subprocess.Popen]) -> None:
    """Kill what is left, and what it started; Python says where it was."""
    left = [process for process in processes if process.poll() is None]
    for process in left:
        process.send_signal(signal.SIGABRT)
    for process in left:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def meeting(script: str, world: int, *rest: object) -> Iterator[list[list[object]]]:
    """Commands of the ranks of a native program that meet through a file."""
    with tempfile.TemporaryDirectory() as folder:
        yield [[script, *rest, "--rank", n, "--world", world, "--meet", f"{folder}/meet"] for n in range(world)]


# ---- the table


class Report:
    """Rows as they come: printed, and written to a file of JSON with all that were there before."""

    def __init__(self, script: str, path: Path | None, columns: dict[str, int], **about: Any) -> None:
        self.script, self.path, self.columns, self.about = script, path, columns, about
        self.rows: dict[str, Row] = {}
        self.bars: list[str] = []
        self.failed = self.ended = False

    def head(self) -> None:
        print("".join(f"{text:>{w}s}" if w > 0 else f"{text:<{-w}s}" for text, w in self.columns.items()), flush=True)

    def row(
        self, name: str, found: Row | None, said: str, cells: Callable[[Row], Sequence[object]], lines: Sequence[str] = ()
    ) -> None:
        """A case's result; said: why there is none. lines: to print below it."""
        if found is None:
            self.failed = True
            self.rows[name] = {"failed": said[:300]}
            print(f"{name}: failed: {said[:6000]}", flush=True)
        else:
            self.rows[name] = found
            texts = [name, *(cell if isinstance(cell, str) else "" if cell is None else f"{cell}" for cell in cells(found))]
            print("".join(f"{t:>{w}s}" if w > 0 else f"{t:<{-w}s}" for t, w in zip(texts, self.columns.values(), strict=False)))
            print("".join(f"    {line.strip()[:300]}\n" for line in lines), end="", flush=True)
        self.keep()

    def bar(self, what: str, value: float, most: float | None = None, least: float | None = None) -> None:
        """Says whether a bar is held."""
        held = (most is None or value <= most) and (least is None or value >= least)  # nan holds none
        self.failed |= not held
        want = f"want at most {most:g}" if most is not None else f"want at least {least:g}"
        self.bars.append(f"{what}: {value:.4g}, {want}" + ("" if held else "  MISSED"))
        print(self.bars[-1], flush=True)
        self.keep()

    def body(self) -> Row:
        return {**self.about, "figures": self.rows, "bars": self.bars, "ended": self.ended}

    def keep(self) -> None:
        from machine import tell

        if self.path:
            tell(self.script, self.body(), self.path, silent=True)

    def end(self) -> int:
        """One line of JSON; the exit code of a benchmark: 1 where a bar was missed or a case failed."""
        from machine import tell

        self.ended = True
        tell(self.script, self.body(), self.path)
        return int(self.failed)


def number(value: float | None, form: str = ".3f") -> str:
    return "" if value is None else format(value, form)
