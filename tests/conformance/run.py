"""Runs variants: every sample of an op with one dtype, in each of its forms, in each placement, against plain torch.

A variant is (op, dtype, form, workers); it is equal if all its samples are, in every split.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import gt
from gt.errors import SystemFailure
from tests.helpers.limits import limit

from . import modules
from .compare import EQUAL, UNSUPPORTED, WRONG, difference, host, outcome
from .forms import FORMS as OF_OPS
from .forms import Inputs, Tensors, forms_of
from .forms import leaves as tensors
from .place import Cluster, Split, collectives, placed, splits

FORMS = {**OF_OPS, **modules.FORMS}
assert len(FORMS) == len(OF_OPS) + len(modules.FORMS), "a form of one name with another"
COUNTED = ("function", "train forward")  # forms whose gathers are counted
GATHERS = ("all_gather", "all_to_all")
SLACK = 10  # times torch's tolerances, where sums are of terms of several workers
DOUBLE = {torch.float32: torch.float64, torch.complex64: torch.complex128}
PATIENCE, SLOWER = int(limit(30)), 20  # a sample's seconds in one placement, and times what plain torch took: more is a hang
REFUSALS = 8  # of an op's samples that torch refuses, at most


@dataclass
class Variant:
    """The outcome of one (op, dtype, form, workers)."""

    op: str
    dtype: str
    form: str
    workers: int
    outcome: str = EQUAL
    reason: str = ""
    example: str = ""
    runs: int = 0
    unequal: int = 0
    whole: set[int] = field(default_factory=set)  # samples with a split
    kept: set[int] = field(default_factory=set)  # those of them with one that ran with no gather

    def add(self, found: tuple[str, str], example: Callable[[], str]) -> None:
        self.runs += 1
        self.unequal += found[0] != EQUAL
        if (EQUAL, UNSUPPORTED, WRONG).index(found[0]) > (EQUAL, UNSUPPORTED, WRONG).index(self.outcome):
            self.outcome, self.reason = found
            self.example = example()

    def row(self) -> dict[str, Any]:
        return {
            "op": self.op, "dtype": self.dtype, "form": self.form, "workers": self.workers, "outcome": self.outcome,
            "reason": self.reason, "example": self.example, "runs": self.runs, "unequal": self.unequal,
            "samples_split": len(self.whole), "samples_without_gather": len(self.kept),
        }  # fmt: skip


@dataclass
class Wanted:
    """Plain torch's answer for a sample in one form: results or an error; `random` if torch drew random numbers."""

    results: Tensors
    error: BaseException | None = None
    random: bool = False  # or memory as it is found
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """workers: of 1, 2 and 4. most: samples of an op, at most, drawn by seed (0: all). gathers: whether they are counted.

    gpu: on GPU workers, whose kernels add in another order than the CPU's.
    """

    workers: Sequence[int] = (1, 2, 4)
    most: int = 0
    seed: int = 0
    gathers: bool = True
    gpu: bool = False


def name_of(entry: Any) -> str:
    variant = getattr(entry, "variant_test_name", "")
    return f"{entry.name}.{variant}" if variant else entry.name


def entries() -> dict[str, Any]:
    return {name_of(entry): entry for entry in op_db}


def uninitialised(entry: Any) -> bool:
    """Memory as it is found has no values to compare."""
    return entry.name.startswith(("empty", "new_empty"))


def attempt(form: str, inputs: Inputs) -> Wanted:
    """Plain torch's answer."""
    torch.manual_seed(0)
    try:
        return Wanted(host(FORMS[form](inputs)))
    except Exception as error:
        return Wanted([], error)


class Draws(TorchDispatchMode):
    """Sees whether torch draws random numbers inside, but for those of a generator of ours."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
        return func(*args, **kwargs)


def wanted(entry: Any, form: str, inputs: Inputs) -> Wanted:
    start = time.monotonic()
    with Draws() as draws:
        found = attempt(form, inputs)
    found.seconds = time.monotonic() - start
    found.random = draws.seen or uninitialised(entry)
    return found


def given(entry: Any, sample: Any) -> Inputs:
    """A sample's arguments, each tensor a leaf of autograd (some are views of another that asks for a gradient)."""
    leaves: dict[int, torch.Tensor] = {}

    def leaf(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return leaves.setdefault(id(x), x.detach().requires_grad_(x.requires_grad))

    args, kwargs = pytree.tree_map(leaf, ((sample.input, *sample.args), sample.kwargs))
    return Inputs(entry, args, kwargs, sample)


def samples(entry: Any, dtype: torch.dtype, plan: Plan) -> Iterator[tuple[str, Inputs]]:
    """(form, inputs) of one op, or module, with one dtype."""
    if isinstance(entry, modules.ModuleInfo):
        yield from modules.samples(entry, dtype, plan.most, plan.seed)
        return
    torch.manual_seed(plan.seed)
    grad = entry.supports_autograd and dtype in entry.supported_backward_dtypes("cpu")
    found = list(entry.sample_inputs("cpu", dtype, requires_grad=grad))
    if plan.most and len(found) > plan.most:
        found = random.Random(f"{plan.seed} {name_of(entry)}").sample(found, plan.most)
    for sample in found:
        inputs = given(entry, sample)
        for form in forms_of(entry, inputs, dtype):
            yield form, inputs
    if entry.error_inputs_func is not None and dtype == torch.float32:
        for refused in list(entry.error_inputs("cpu"))[: plan.most or REFUSALS]:
            yield "refusal", given(entry, refused.sample_input)


class Hangs(SystemFailure):
    """Nothing came back."""


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raises Hangs in this thread after so long."""

    def ring(number: int, frame: Any) -> None:
        raise Hangs(f"nothing came back within {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Runner:
    """`run` gives the variants of one op and dtype."""

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        self.cluster, self.plan = cluster, plan
        self.connected = False

    def run(self, entry: Any, dtype: torch.dtype) -> list[Variant]:
        found: dict[tuple, Variant] = {}
        self._connect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number, (form, inputs) in enumerate(samples(entry, dtype, self.plan)):
                self._sample(found, (name_of(entry), str(dtype)[6:], form), number, inputs)
        return list(found.values())

    def _connect(self) -> None:
        self.cluster.connect()
        self.connected = True

    def _sample(self, found: dict[tuple, Variant], key: tuple[str, str, str], number: int, inputs: Inputs) -> None:
        """One sample in one form, in every placement."""
        want = wanted(inputs.entry, key[2], inputs)
        whole: list[Tensors] = []  # what one worker gave
        for workers in self.plan.workers:
            for split in [Split(1)] if workers == 1 else splits(inputs, workers):
                variant = found.get((*key, workers))
                if variant is None:
                    variant = found[(*key, workers)] = Variant(*key, workers)
                if not self.connected:
                    self._connect()
                verdict, kept = self._placed(key[2], inputs, split, want, whole)
                variant.add(verdict, lambda split=split: f"{shown(inputs)} {shown_split(split)}")
                if workers > 1 and kept is not None:
                    variant.whole.add(number)
                    if kept:
                        variant.kept.add(number)

    def _placed(
        self, form: str, inputs: Inputs, split: Split, want: Wanted, whole: list[Tensors]
    ) -> tuple[tuple[str, str], bool | None]:
        """The outcome of one placement, and True if it ran without a gather (None: not counted)."""
        kept = None
        counted = self.plan.gathers and split.workers > 1 and not split.group and form in COUNTED and want.error is None
        try:
            with within(PATIENCE + int(SLOWER * want.seconds)):
                gt.manual_seed(0)
                there = placed(inputs, split)
                before = collectives() if counted else {}
                made = FORMS[form](there)
                got = host(made)  # and so all is done that may have gathered
                if counted:
                    after = collectives()
                    kept = not any(after.get(kind, 0) > before.get(kind, 0) for kind in GATHERS)
        except Exception as error:
            if isinstance(error, SystemFailure):
                self.cluster.broken()
                self.connected = False
            return outcome(error, want.error is not None), None
        if want.error is not None:
            return (WRONG, f"plain torch refuses: {type(want.error).__name__}"), None
        slack = SLACK if split.workers > 1 or self.plan.gpu else 1
        text = difference(got, want.results, not want.random, slack)
        if not text and want.random and not uninitialised(inputs.entry):
            if split.workers == 1:
                whole.append(got)
            elif whole:
                text = difference(got, whole[0], True, slack)
                text = f"other than on one worker: {text}" if text else ""
        if "values" in text and slack > 1 and self._rounding(form, inputs, split, want.random):
            text = ""
        return (WRONG, text) if text else (EQUAL, ""), kept if not text else None

    def _rounding(self, form: str, inputs: Inputs, split: Split, drawn: bool) -> bool:
        """True if the same sample is right in double precision: its condition is too bad for single."""
        if all(t.dtype not in DOUBLE for t in tensors(inputs)):
            return False
        module = copy.deepcopy(inputs.module).double() if inputs.module is not None else None
        double = dataclasses.replace(inputs, args=doubled(inputs.args), kwargs=doubled(inputs.kwargs), module=module)
        plain = attempt(form, double)
        if plain.error is not None:
            return False
        found = []
        for where in (Split(1), split) if drawn else (split,):
            gt.manual_seed(0)
            try:
                found.append(host(FORMS[form](placed(double, where))))
            except Exception:
                return False
        return not difference(found[-1], found[0] if drawn else plain.results, True)


def doubled(tree: Any) -> Any:
    def double(x: Any) -> Any:
        wide = isinstance(x, torch.Tensor) and x.dtype in DOUBLE
        return x.detach().to(DOUBLE[x.dtype]).requires_grad_(x.requires_grad) if wide else x

    return pytree.tree_map(double, tree)


def shown(inputs: Inputs) -> str:
    """A sample's arguments, tensors by their look."""

    def text(x: Any) -> str:
        if isinstance(x, torch.Tensor):
            return f"{str(x.dtype)[6:]}{list(x.shape)}"
        if isinstance(x, (list, tuple)):
            return "[" + ", ".join(map(text, x)) + "]"
        return repr(x)

    given = [*map(text, inputs.args), *(f"{k}={text(v)}" for k, v in inputs.kwargs.items())]
    made = f"{inputs.sample.constructor_input.args} {inputs.sample.constructor_input.kwargs}: " if inputs.module else ""
    return (made + ", ".join(given))[:300]


def shown_split(split: Split) -> str:
    where = split.group or f"tensor {split.index} along {split.dim} over {split.workers}"
    return "" if split.workers == 1 else f"| {where}"
