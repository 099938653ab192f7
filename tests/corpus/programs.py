"""The corpus: a name for each program, its config, and a function that runs it. Nothing is run by importing this."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import random
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import gt
from gt.client import current_session
from gt.ir.schedules import NAMES
from tests.corpus import drawn as pipelines
from tests.dispatcher.programs.test_compile_unplaced import DATA, PAIR, drawn, square, stepped
from tests.helpers import ROOT
from tests.helpers.models import accumulating, mini
from tests.system.parity import test_programs
from tests.system.parity.test_networks import Network, train
from tools import placements

CONFIGS, EXAMPLES = ROOT / "configs", ROOT / "examples"
TEXT = "".join(f"{n} and {n * n % 97}, which is {'even' if n % 2 == 0 else 'odd'};\n" for n in range(400))
EAGER, NETWORKS, UNPLACED, PIPELINES = 180, 80, 60, 180  # random programs of each kind


@dataclass(frozen=True)
class Entry:
    """One program. config: text of its YAML; None where the program has its own. workers: 0 for those that it asks for.

    run: gets an empty folder for its files; its value is text for the corpus.
    """

    name: str
    run: Callable[[Path], str | None]
    config: str | None = None
    workers: int = 0


def entries() -> Iterator[Entry]:
    yield from examples()
    yield from placed()
    if importlib.util.find_spec("transformers") is not None:
        yield from models()
    yield from at_random()


# ---- examples


def script(path: str, *flags: str) -> Callable[[Path], None]:
    """An example, as `python path flags`; FOLDER in a flag is the program's folder. What it prints has times in it."""

    def run(folder: Path) -> None:
        from gt.cli.plan import run as carry_out

        before = _examples_modules()  # examples have modules of the same names
        for name in before:
            del sys.modules[name]
        if path.startswith("gpt2"):
            (folder / "text.txt").write_text(TEXT)
            prepare = runpy.run_path(str(EXAMPLES / "gpt2" / "prepare_data.py"))
            with contextlib.redirect_stdout(io.StringIO()):
                prepare["main"]([str(folder / "text.txt"), "--to", str(folder)])
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                carry_out(str(EXAMPLES / path), [flag.replace("FOLDER", str(folder)) for flag in flags])
        finally:
            for name in _examples_modules():
                del sys.modules[name]
            sys.modules.update(before)

    return run


def _examples_modules() -> dict[str, ModuleType]:
    found = ((name, module) for name, module in list(sys.modules.items()) if name != "__main__")
    return {name: module for name, module in found if str(EXAMPLES) in str(getattr(module, "__file__", ""))}


def gpt2(size: str, stages: int, *flags: str) -> Callable[[Path], None]:
    files = ("-i", "FOLDER/text_train.bin", "-j", "FOLDER/text_val.bin", "--tokenizer", "FOLDER/gpt2_tokenizer.bin")
    few = ("-b", "4", "-t", "16", "-v", "2", "-m", "1", "-g", "4", "-s", "2", "--steps", "4", "--explain")
    return script("gpt2/train.py", *files, *few, "-e", size, "--stages", str(stages), *flags)


def examples() -> Iterator[Entry]:
    yield Entry("examples/quickstart", script("quickstart.py"))
    yield Entry("examples/signal_demo", script("signal_demo.py"))
    for name in NAMES[:3] + NAMES[-1:]:
        yield Entry(f"examples/compile_demo-{name}", script("compile_demo.py", name))
    yield Entry("examples/gpt2-1-bf16", gpt2("d2", 1, "--dtype", "bf16"))
    for size, stages, flags in (
        ("d2", 2, "gpipe"), ("d2", 2, "1f1b"), ("d2", 2, "zb-h1"), ("d2", 2, "auto"), ("d4", 4, "interleaved"),
        ("d4", 4, "zb-v"), ("d2", 2, "zb-h1 --split-head"), ("d2", 2, "1f1b --backend cudagraphs"),
    ):  # fmt: skip
        name = "-".join(flags.replace("--", "").split())
        yield Entry(f"examples/gpt2-{stages}-{name}", gpt2(size, stages, "--schedule", *flags.split()))
    few = ("--steps", "2", "--batch-size", "8", "--seq-len", "16", "--data", str(EXAMPLES / "quickstart.py"))
    for flags in ("", "--order 1f1b", "--compile", "--compile --schedule 1f1b", "--compile --schedule auto"):
        steps = few if "compile" not in flags else ("--steps", "4", *few[2:])
        name = "-".join(flags.replace("--", "").split()) or "gpipe"
        yield Entry(f"examples/tuning_demo-{name}", script("tuning_demo/train.py", *steps, *flags.split()))


# ---- ready configs


def trained(schedule: str | None, backend: str | None = None) -> Callable[[Path], str | None]:
    """The tuning demo's model for the stages of the config; schedule None: eager, "": in the calls' order."""

    def run(folder: Path) -> str | None:
        stages = sum(name[8:].isdigit() for name in gt.signal.groups())
        model = mini(gt.signal.groups(), num_layers=max(2, stages)).to("remote")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        step = accumulating(model, optimizer, 4 if schedule else 2)
        called = step if schedule is None else gt.compile(step, schedule=schedule or None, backend=backend)
        for _ in range(2 if schedule is None else 4):
            x, y = torch.randint(64, (2, 8, 16))
            (called(x.to("remote"), y.to("remote")) if schedule is None else called(x, y)).item()
        return None if schedule is None else called.explain()

    return run


def connected(run: Callable[[Path], str | None]) -> Callable[[Path], str | None]:
    def begin(folder: Path) -> str | None:
        current_session.current()
        return run(folder)

    return begin


def placed() -> Iterator[Entry]:
    for number, path in enumerate(sorted(CONFIGS.glob("*.yaml"))):
        config = path.read_text()
        yield Entry(f"configs/{path.stem}", connected(trained(None)), config)
        schedule = ("gpipe", "1f1b", "zb-h1", "auto")[number % 4] if "pp_stage1" in config else ""
        yield Entry(f"configs/{path.stem}-captured-{schedule or 'plain'}", connected(trained(schedule)), config)
        if not schedule:
            yield Entry(f"configs/{path.stem}-captured-cudagraphs", connected(trained("", "cudagraphs")), config)


def models() -> Iterator[Entry]:
    splits = {str(split): split for split in placements.SPLITS}
    for path, config in placements.files():
        kind = {"qwen": "qwen3"}.get(path.parent.name, path.parent.name)
        layers = max(2, splits[path.stem].pp)
        yield Entry(f"configs/{path.parent.name}-{path.stem}", model(kind, layers, splits[path.stem].pp), config)
    yield Entry("configs/qwen-tp4-qwen2-heads", model("qwen2", 2, 1, 4, 2, 64), (CONFIGS / "qwen" / "tp4.yaml").read_text())
    yield Entry("configs/gpt2-tp2-heads", model("gpt2", 2, 1, 3, 3, 48), (CONFIGS / "gpt2" / "tp2.yaml").read_text())


def model(kind: str, layers: int, stages: int, *sizes: int) -> Callable[[Path], str | None]:
    """A small model of transformers: one eager step, and where it is a pipeline a captured one."""

    def run(folder: Path) -> str | None:
        from tests.config.test_model_configs import LENGTH, WORDS, made

        current_session.current()
        net = made(kind, layers, *sizes).to("remote")
        gt.signal.apply(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(words: torch.Tensor) -> torch.Tensor:
            total = torch.zeros((), device="remote")
            for part in gt.microbatches(words, 2 if stages > 1 else 1):
                loss = net(input_ids=part, labels=part).loss
                loss.backward()
                total = total + loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            return total

        called = gt.compile(step, schedule="1f1b") if stages > 1 else step
        for _ in range(3 if stages > 1 else 2):
            words = torch.randint(WORDS, (8, LENGTH))
            called(words if stages > 1 else words.to("remote")).item()
        return called.explain() if stages > 1 else None

    return run


# ---- at random


class Program(test_programs.Program):
    """A random program that tells its session the shapes that depend on values: it knows them from plain torch."""

    def both(self, text: str, function: Callable, *pairs: tuple[torch.Tensor, torch.Tensor], keep: bool = True) -> None:
        def noted(*tensors: torch.Tensor) -> Any:
            if any(t.device.type != "cpu" for t in tensors):
                return function(*tensors)
            made = function(*tensors)
            session = current_session.current().session
            if hasattr(session, "shapes"):
                session.shapes = [t for t in (made if isinstance(made, tuple) else (made,)) if isinstance(t, torch.Tensor)]
            return made

        super().both(text, noted, *pairs, keep=keep)


def eager(seed: int) -> Callable[[Path], str]:
    def run(folder: Path) -> str:
        current_session.current()
        with torch.no_grad():
            program = Program(seed)
            program.run(30)
        return program.story()

    return run


def network(seed: int) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        current_session.current()
        torch.manual_seed(seed)
        train(Network(seed).to("remote"), seed, "remote")

    return run


def unplaced(seed: int) -> Callable[[Path], str]:
    """A captured step with ops outside of groups, and eager ops on its tensors between its calls."""

    def run(folder: Path) -> str:
        current_session.current()
        ops = drawn(random.Random(seed))
        weights, buffers = [square(), square()], [torch.full((4, 4), n / 2, device="remote") for n in range(3)]
        called = gt.compile(stepped(ops, weights, buffers))
        for n in range(5):
            x = torch.arange(16.0).view(4, 4) / 16 + n
            if n == 3:
                buffers[1].mul_(1.5)
                with gt.signal.context("stage1"):
                    (weights[0].detach() @ weights[1].detach()).sum().item()
            called(x)
        return called.explain()

    return run


def pipeline(seed: int) -> Entry:
    config, run = pipelines.pipeline(seed)
    return Entry(f"random/pipeline-{seed}", connected(lambda folder: run()), config)


def at_random() -> Iterator[Entry]:
    for seed in range(EAGER):
        yield Entry(f"random/eager-{seed}", eager(seed), test_programs.CONFIG)
    for seed in range(NETWORKS):
        yield Entry(f"random/network-{seed}", network(seed), test_programs.CONFIG)
    for seed in range(UNPLACED):
        yield Entry(f"random/unplaced-{seed}", unplaced(seed), (PAIR, DATA)[seed % 2])
    yield from map(pipeline, range(PIPELINES))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing of what programs, torch and transformers say."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
