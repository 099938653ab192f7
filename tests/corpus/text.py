"""The text of one program: what the dispatcher sends, what the program says of itself, and its plan."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch

import gt
from gt.client.capture import compiled_function
from gt.client.trace import recorder, shape_inference
from tests.corpus.programs import ROOT, Entry, quiet
from tests.corpus.session import written
from tests.corpus.transcript import pretty

COUNTERS = ((recorder, "_ids"), (compiled_function, "_numbers"), (compiled_function, "_slots"))  # of a process


def text(entry: Entry) -> str:
    """The same in every process, whatever ran there before."""
    with afresh() as folder:
        config = _config(entry, folder)
        with written(config, entry.workers) as said:
            outcome = _run(entry, folder)
        said.add(outcome)
    with afresh() as folder:
        config = _config(entry, folder)
        said.add(_plan(entry, config, folder))
    return str(said)


@contextlib.contextmanager
def afresh() -> Iterator[Path]:
    """Counters, random numbers, environment and the garbage collector as at the start of a process; an empty folder."""
    state, threads, places = torch.get_rng_state(), torch.get_num_threads(), random.getstate()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(quiet())
        stack.enter_context(mock.patch.dict(os.environ))
        stack.enter_context(mock.patch("torch.cuda.device_count", return_value=0))
        for module, name in COUNTERS:
            stack.enter_context(mock.patch.object(module, name, itertools.count(1)))
        for name in [name for name in os.environ if name.startswith("GT_")]:
            del os.environ[name]
        torch.set_num_threads(1)
        warm()
        random.seed(0)
        gt.manual_seed(0)
        gc.collect()
        gc.freeze()  # the collections of recordings are of this program alone
        gc.disable()
        try:
            yield folder
        finally:
            gc.enable()
            torch.set_num_threads(threads)
            torch.set_rng_state(state)
            random.setstate(places)


@functools.cache
def warm() -> None:
    """Have torch import what it imports at first use: frames, and the tensors in them, live on in cycles after that."""
    shape_inference.warm()
    weight = torch.nn.Parameter(torch.ones(2))
    weight.sum().backward()
    torch.optim.AdamW([weight]).step()


def _config(entry: Entry, folder: Path) -> str | None:
    if entry.config is None:
        return None
    path = folder / "corpus.yaml"
    path.write_text(entry.config)
    return str(path)


def _run(entry: Entry, folder: Path) -> str:
    """The text that a program returns, or the error of GT that ended it."""
    try:
        found = entry.run(folder) or ""
    except gt.GTError as error:
        found = f"ended with {type(error).__name__}: {error}"
    return f"==== says\n{relative(found, folder)}"


def _plan(entry: Entry, config: str | None, folder: Path) -> str:
    """As gt.plan has it. What a program says while it is planned is not of it alone: gt.plan hooks into its optimizers."""
    try:
        plan = gt.plan(_run, entry, folder, config=config, workers=entry.workers)
    except (ValueError, gt.GTError) as error:
        return relative(f"==== no plan\n{type(error).__name__}: {error}", folder)
    return "\n".join(["==== plan", str(plan), "==== plan as data", pretty(plan.body)])


def relative(text: str, folder: Path) -> str:
    return text.replace(str(folder), "FOLDER").replace(f"{ROOT}/", "")
