"""`python -m tests.client.checkpoint.random_layouts [--seeds N] [--first N] [--captured]`: random states saved and loaded.

Each seed draws a model, its optimizers, a state around them, and two layouts. The state that is saved in the first is loaded in
the second, by plain torch and by torch.distributed.checkpoint: equal to the bit. Training goes on with the same losses. With
--captured its steps are replays, and one of both layouts at least offloads its state.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import gt
from tests.helpers.serving import serving
from tests.system.parity.strategies.test_zero_random import OPTIMIZERS, Model

BEFORE, AFTER, ROWS, CLOSE = 2, 3, 16, 1e-5
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip
SHAPES = [(), (1,), (0,), (3, 0, 2), (7,), (2, 3), (5, 1, 3), (1, 1, 1, 1), (13, 17), (4, 2, 2, 3)]

Connect = Callable[[str], None]


class Odd(Model):
    """A random model with buffers of odd dtypes and shapes, one of them not saved, and Python values of its own."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        for n in range(draw.randrange(4)):
            self.register_buffer(f"odd{n}", values(draw))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.notes: Any = None

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return super().forward(words)

    def get_extra_state(self) -> Any:
        return {"notes": self.notes}

    def set_extra_state(self, state: Any) -> None:
        self.notes = state["notes"]


def values(draw: random.Random) -> torch.Tensor:
    """A tensor of any dtype and shape; maybe a view with strides of its own."""
    shape, dtype = draw.choice(SHAPES), draw.choice(DTYPES)
    made = (torch.randn(shape, generator=torch.Generator().manual_seed(draw.randrange(1 << 30))) * 50).to(dtype)
    kind = draw.randrange(4)
    if kind == 0 and made.dim() > 1:
        return made.transpose(0, -1)
    if kind == 1 and made.dim() and made.shape[0] > 2:
        return made[1::2]
    return made


def nested(draw: random.Random, device: Callable[[], str], depth: int = 0) -> Any:
    """A state of Python's values and tensors."""
    kind = draw.randrange(14 if depth < 3 else 10)
    if kind < 3:
        return values(draw).to(device())
    if kind < 10:
        return draw.choice([
            None, True, -5, 1 << 80, 0.1, math.inf, -math.inf, "text é\n\0", b"\x00\xff", 1 + 2j, torch.bfloat16, -0.0, "",
        ])  # fmt: skip
    parts = [nested(draw, device, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 10:
        return tuple(parts)
    if kind == 11:
        return parts
    keys = [draw.choice([n, f"k{n}", "a.b", "", (n, "x"), 0.5 + n, None, "__metadata__", f"../{n}"]) for n in range(len(parts))]
    return dict(zip(keys, parts))


# ---- layouts


def offloading(draw: random.Random, folder: Path) -> tuple[str, dict[str, Any]]:
    """A config that offloads, on the host or in streamed parts, with small buckets in most."""
    zero = draw.choice([0, 1, 2, 3])
    away = (
        f"optimizer: {draw.choice(['cpu', 'nvme'])}, step: {draw.choice(['host', 'host', 'device'])}, path: {folder / 'away'}"
    )
    away += ", params: cpu" if zero == 3 and draw.random() < 0.5 else ""
    bucket = draw.choice(["1B", "2KiB", "25MiB"])
    workers = [*range(draw.choice([2, 3, 4, 8]))]
    return f"gt: {{data_parallel: {workers}, zero: {zero}, bucket: {bucket}, offload: {{{away}}}}}", {}


def layout(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A config, and the groups of the model's modules."""
    zero = draw.choice(["", "zero: 1", "zero: 2", "zero: 3"])
    kind = draw.choice(["one", "data", "data", "offload", "tensor", "mesh", "stages"])
    if kind == "one":
        return "", {}
    if kind in ("data", "offload"):
        rest = f", {zero}" if zero else ""
        if kind == "offload":
            rest = draw.choice([", zero: 1, offload: {optimizer: cpu}", ", zero: 3, offload: {optimizer: cpu, params: cpu}"])
        return f"gt: {{data_parallel: {[*range(draw.choice([2, 3, 4, 8]))]}{rest}}}", {}
    rows = {"tensor": ["[0, 1]", "[0, 1, 2]", "[0, 1, 2, 3]"], "mesh": ["[[0, 1], [2, 3]]", "[[0, 1, 2], [5, 4, 3]]"]}
    if kind == "stages":
        first, second = draw.choice([("[0]", "[1]"), ("[0, 1]", "[2, 3]")])
        zero = "" if first == "[0]" else zero  # nothing to shard over
        text = f"p0: {{workers: {first}}}\np1: {{workers: {second}}}"
        groups = {"": "p1", "table": "p0", "blocks.*": ["p0", "p1"], "head": "p1"}
    else:
        workers = draw.choice(rows[kind])
        text = "\n".join(f"s{suffix}: {{workers: {workers}}}" for suffix in ("", "_colpar", "_rowpar"))
        groups = {"blocks.*.up": "s_colpar", "blocks.*.down": "s_rowpar", "": "s"}
        zero = zero if kind == "mesh" else ""
    return text + (f"\ngt: {{{zero}}}" if zero else ""), groups


class Training:
    """A model with one or two optimizers on a device, and the position in its data."""

    captured = False  # whether steps are replays

    def __init__(self, seed: int, groups: dict[str, Any], init: int, meta: bool = False) -> None:
        draw = random.Random(seed)
        torch.manual_seed(init)
        with torch.device("meta" if meta else "cpu"):
            self.model = Odd(draw)
        if not meta:
            self.place(groups)
        weights = [p for p in self.model.parameters() if p.requires_grad]
        cut = draw.randrange(1, len(weights)) if draw.random() < 0.4 else len(weights)
        self._parts = [(part, draw.choice(OPTIMIZERS)) for part in (weights[:cut], weights[cut:]) if part]
        if not meta:
            self.optimize()

    def place(self, groups: dict[str, Any]) -> None:
        """Onto the remote device, into the groups that name modules of it."""
        self.model.to("remote")
        names = [name for name, _ in self.model.named_modules()]
        used = {k: g for k, g in groups.items() if "*." not in k or any(n.endswith(k.rpartition(".")[2]) for n in names)}
        if used:
            gt.signal.apply(self.model, used)

    def optimize(self) -> None:
        """Make the optimizers, of the weights that the model has now."""
        self.optimizers = [choose(part) for part, choose in self._parts]
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizers[0], 0.9)

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizers": self.optimizers, "schedule": self.schedule, "random": gt.RandomState()}

    def steps(self, first: int, count: int) -> list[float]:
        def step(batch: torch.Tensor) -> torch.Tensor:
            loss = self.model(batch)
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        call, losses = gt.compile(step) if self.captured else step, []
        for n in range(first, first + count):
            batch = torch.randint(0, self.model.words, (ROWS,), generator=torch.Generator().manual_seed(n))
            loss = call(batch.to("remote"))
            self.schedule.step()
            losses.append(float(loss))
        return losses


# ---- comparison


def here(thing: Any) -> Any:
    """The state with copies of all tensors on the CPU."""
    if isinstance(thing, torch.Tensor):
        return thing.detach().cpu().clone()
    if callable(getattr(thing, "state_dict", None)):
        thing = thing.state_dict()
    if isinstance(thing, dict):
        return {key: here(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return type(thing)(here(value) for value in thing)
    return thing


def tensors(states: list) -> list:
    """Tensors of optimizers' states, and no options of groups."""
    return [[state["state"][key] for key in sorted(state["state"])] for state in states]


def check(got: Any, want: Any, name: str = "state") -> None:
    """AssertionError unless both are equal to the bit, types of Python's values included."""
    if isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype and got.shape == want.shape, f"{name}: {got.dtype}{got.shape}, {want.dtype}{want.shape}"
        a, b = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (got, want))
        assert torch.equal(a, b), f"{name} differs: {got} {want}"
    elif isinstance(want, dict):
        assert list(got) == list(want), f"{name} has {list(got)}, want {list(want)}"
        for key in want:
            check(got[key], want[key], f"{name}[{key!r}]")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want) and isinstance(got, type(want)), f"{name} is {got}, want {want}"
        for n, value in enumerate(want):
            check(got[n], value, f"{name}[{n}]")
    else:
        assert repr(got) == repr(want) or type(want).__module__ == "numpy", f"{name} is {got!r}, want {want!r}"


# ---- one seed


class CapturedTraining(Training):
    """Its steps are replays."""

    captured = True


def run(seed: int, connect: Connect, folder: Path, captured: bool = False) -> str:
    """One seed; a line that says what it was. AssertionError for a value that differs."""
    draw = random.Random(seed)
    one, other = layout(draw), layout(draw)
    if captured:
        one, other = draw.choice([(offloading(draw, folder), other), (one, offloading(draw, folder))])
    if draw.random() < 0.3:
        other = one
    connect(one[0])
    kind = CapturedTraining if captured else Training
    training = kind(seed, one[1], 0)
    training.steps(0, BEFORE)
    extra = nested(random.Random(seed), lambda: draw.choice(["cpu", "remote"]))
    state = {**training.state(), "extra": extra, "step": BEFORE}
    want, path = here(state), folder / "checkpoint"
    asynchronous = draw.random() < 0.5
    handle = gt.save(state, path, wait=not asynchronous)
    exchanged(training, want, folder)
    losses = training.steps(BEFORE, AFTER)
    handle.wait()
    check(here(gt.load(path, device="cpu")), want)

    connect(other[0])
    meta = draw.random() < 0.3
    resumed = kind(seed, other[1], 1, meta)
    blank = {"extra": None, "step": 0}
    if meta:
        gt.load(path, into={"model": made_there(resumed.model, path)})
        resumed.place(other[1])
        resumed._parts = repeated(resumed)
        resumed.optimize()
    state = gt.load(path, into={**resumed.state(), **blank})
    resumed.model.scratch.zero_()
    check(here({**resumed.state(), "extra": state["extra"], "step": state["step"]}), want)
    again = resumed.steps(BEFORE, AFTER)
    if one == other:
        assert again == losses, f"{one[0]}: {again}, want {losses}"
    else:
        assert all(abs(a - b) <= CLOSE * max(1, abs(b)) for a, b in zip(again, losses)), (
            f"{one[0]} to {other[0]}: {again}, {losses}"
        )
    theirs(seed, want, folder, other[1])
    return f"{seed}: {one[0] or 'one worker'!r} to {other[0] or 'one worker'!r}{', meta' * meta}{', async' * asynchronous}"


def made_there(model: nn.Module, path: Path) -> nn.Module:
    """A model on the meta device; its buffer that no checkpoint has is made."""
    model.scratch = torch.zeros(3, device="remote")
    return model


def repeated(training: Training) -> list:
    """The shares of optimizers, of the weights that have taken the places of those on the meta device."""
    weights = iter([p for p in training.model.parameters() if p.requires_grad])
    return [([next(weights) for _ in part], choose) for part, choose in training._parts]


def exchanged(training: Training, want: dict, folder: Path) -> None:
    """torch.distributed.checkpoint writes the state, and reads it into another model."""
    model, optimizers = get_state_dict(training.model, training.optimizers)
    dcp.save({"model": model, "optimizers": optimizers}, checkpoint_id=folder / "dcp", no_dist=True)
    own = {name: value for name, value in want["model"].items() if isinstance(value, torch.Tensor)}
    read = {name: torch.empty_like(value) for name, value in own.items()}
    dcp.load({"model": read}, checkpoint_id=folder / "dcp", no_dist=True)
    check(read, own)


def theirs(seed: int, want: dict, folder: Path, groups: dict[str, Any]) -> None:
    """Plain torch reads GT's files, GT reads plain torch's, and this session reads the files of torch's checkpoints."""
    plain = Odd(random.Random(seed))
    files = sorted((folder / "checkpoint").glob("model-*.safetensors"))
    weights = {name: value for file in files for name, value in load_file(file).items()}
    plain.load_state_dict(weights, strict=False)
    own = {name: value for name, value in want["model"].items() if isinstance(value, torch.Tensor)}
    check({name: value for name, value in plain.state_dict().items() if name in own}, own)
    save_file({name: value.clone().contiguous() for name, value in own.items()}, folder / "theirs.safetensors")
    fresh = Training(seed, groups, 2)
    gt.load(folder / "theirs.safetensors", into=fresh.model)
    check(here({name: value for name, value in fresh.model.state_dict().items() if name in own}), own)
    fresh = Training(seed, groups, 3)
    whole = all(len(part["state"]) == sum(len(g["params"]) for g in part["param_groups"]) for part in want["optimizers"])
    model, optimizers = get_state_dict(fresh.model, fresh.optimizers if whole else ())  # torch makes state of unused weights
    read = {"model": model, **({"optimizers": optimizers} if whole else {})}
    dcp.load(read, checkpoint_id=folder / "dcp", no_dist=True)
    set_state_dict(fresh.model, fresh.optimizers if whole else (), model_state_dict=model, optim_state_dict=optimizers)
    if whole:
        check(tensors(here(fresh.optimizers)), tensors(want["optimizers"]))
    check(here({name: value for name, value in fresh.model.state_dict().items() if name in own}), own)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.client.checkpoint.random_layouts", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--captured", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    failed: list[int] = []
    with serving(8, "torch") as server:
        for seed in range(args.first, args.first + args.seeds):
            folder = Path(tempfile.mkdtemp(prefix="gt-layouts-"))
            config = folder / "config.yaml"

            def connect(text: str, config: Path = config) -> None:
                config.write_text(text)
                gt.connect(server.address, config=str(config) if text else "", token="")

            try:
                sys.stdout.write(run(seed, connect, folder, args.captured) + "\n")
                sys.stdout.flush()
            except Exception:
                failed.append(seed)
                sys.stdout.write(f"{seed}: {traceback.format_exc()}\n")
            finally:
                gt.shutdown()
                shutil.rmtree(folder)
    sys.stdout.write(f"{args.seeds} seeds, failed: {failed}\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
