"""Random programs of views, aliases and writes, as lines of text: each tensor has the bits and properties of the CPU's.

A line is drawn from the CPU's tensors alone, and executed on the CPU and on `remote`. All arithmetic is exact.
"""

from __future__ import annotations

import contextlib
import random
import re
import warnings
from typing import Any

import pytest
import torch

from tests.helpers.inline_session import inline  # noqa: F401

pytestmark = pytest.mark.usefixtures("inline")
PROGRAMS, LINES, MOST = 24, 25, 8  # MOST: tensors alive
DTYPES = ("float32", "float32", "int64", "int64", "int32", "bool")
NUMBERS = ("1", "2", "-1", "True", "torch.tensor(2)")
VIEWS = (
    "{a}.view({shape})", "{a}.view(-1)", "{a}.t()", "{a}.squeeze()", "{a}.unsqueeze(0)", "{a}[None]", "{a}[...]", "{a}[0]",
    "{a}[1:]",
    "{a}[::2]", "{a}[..., :1]", "{a}[..., 0]", "{a}.expand(2, *{shape})", "{a}.transpose(0, -1)", "{a}.narrow(0, 0, 1)",
    "{a}.chunk(2)[-1]", "{a}.split(2, -1)[0]", "{a}.unbind(0)[-1]", "{a}.diagonal()", "{a}.unfold(0, 2, 1)",
    "{a}.movedim(0, -1)",
    "{a}.as_strided((2, 2), (1, 2), 0)", "{a}.reshape(-1)", "{a}.mT", "{a}.flatten()", "{a}.tensor_split(2)[1]",
    "{a}.view_as({a})",
    "{a}.detach()", "{a}.data", "torch.ops.aten.alias({a})", "{a}.contiguous()",
)  # fmt: skip
RESULTS = (
    "{a}.clone()", "{a} + {n}", "{a} * {b}", "{a} - {a}", "{a}.long()", "{a}.flip(0)", "torch.where({a} > 0, {a}, {b})",
    "{a}.sum()", "{a}.amax(0)", "torch.cat([{a}, {a}])", "{a} == {b}", "{a}[{a} > 0]", "{a}.detach().requires_grad_()",
)  # fmt: skip
WRITES = (
    "{a}.add_({n})", "{a}.mul_({b})", "{a}.copy_({b})", "{a}.fill_({n})", "{a}.zero_()", "{a}[...] = {b}", "{a}[0] = {n}",
    "{a}[1:] = {n}", "{a}[..., 0] = {n}", "{a} += {b}", "{a} *= {n}", "{a}.masked_fill_({a} > 0, {n})", "{a}[{a} > 0] = {n}",
    "{a}[torch.tensor([0], device=D)] = {n}", "{a}.clamp_(-1, 2)", "{a}.neg_()", "{a}.data.add_(1)", "{a}.detach().mul_(2)",
    "{a}.data = {b}", "{a}.data = {a}.data.clone()", "{a}.t_()", "{a}.squeeze_()", "{a}.unsqueeze_(0)", "{a}.detach_()",
    "{a}.index_fill_(0, torch.tensor([0], device=D), 3)", "{a}.eq_({b})", "{a}.logical_not_()", "torch.add({a}, 1, out={a})",
    "torch.mul({b}, 2, out={a})", "torch._foreach_add_([{a}, {b}], 1)", "torch._foreach_zero_([{a}])",
    "{a}.copy_({a}.cpu().clone())",
    "{a}.cumsum_(0)", "{a}.tril_()", "{a}.view(-1)[0] = {n}", "{a}.t()[0] = {n}",
    "{a}.requires_grad_()", "{a}.requires_grad_(False)",
)  # fmt: skip
READS = (
    "{a}.tolist()",
    "{a}.sum().item()",
    "bool(({a} > 0).any())",
    "int({a}.amax())",
    "{a}.nonzero().tolist()",
    "{a}.cpu().tolist()",
)
MODES = ("torch.no_grad()", "torch.no_grad()", "torch.enable_grad()")


class Side:
    """The names of a program on one device."""

    def __init__(self, device: str) -> None:
        self.names: dict[str, Any] = {"torch": torch, "D": device, "uploaded": uploaded, "seen": []}

    def run(self, line: str) -> type | None:
        """Execute a line; the type of its error."""
        try:
            exec(line, self.names)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
            return type(error)
        return None

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.names.items() if name[0] == "t" and isinstance(value, torch.Tensor)}


def uploaded(device: str, seed: int, shape: tuple[int, ...], dtype: str, transposed: bool) -> torch.Tensor:
    """A copy on the device of a CPU tensor that changes afterwards."""
    host = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype))
    host = host.transpose(0, -1) if transposed and shape else host
    tensor = host.to(device, copy=True)
    host.zero_()
    return tensor


def properties(tensor: torch.Tensor) -> tuple:
    dims = [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1] if tensor.numel() else []
    grad = tensor.requires_grad, tensor.is_leaf
    return tuple(tensor.shape), dims, tensor.storage_offset(), str(tensor.dtype), *grad


def line(rng: random.Random, here: Side, number: int) -> str:
    """A line of Python that makes, views, writes or reads a tensor."""
    tensors = here.tensors()
    kind = rng.choices(("make", "view", "result", "write", "read"), (2, 6, 2, 8, 2))[0]
    if kind == "make" or len(tensors) < 3:
        shape = tuple(rng.choice((1, 2, 3, 4)) for _ in range(rng.choice((0, 1, 2, 2, 3))))
        return f"t{number} = uploaded(D, {rng.randrange(99)}, {shape}, '{rng.choice(DTYPES)}', {rng.random() < 0.3})"
    names = list(tensors)
    a, b = (rng.choice(names[-5:]) for _ in range(2))
    words = {"a": a, "b": b, "n": rng.choice(NUMBERS), "shape": tuple(tensors[a].shape)}
    form = rng.choice({"view": VIEWS, "result": RESULTS, "write": WRITES, "read": READS}[kind]).format(**words)
    text = {"view": f"t{number} = {form}", "result": f"t{number} = {form}", "write": form, "read": f"seen.append({form})"}[kind]
    return f"with {rng.choice(MODES)}:\n    {text}" if rng.random() < 0.35 else text


def resizes(text: str, here: Side) -> bool:
    """True for an out= of another shape, which on the CPU may give all names of its memory a larger one."""
    if "out=" not in text:
        return False
    source, out = (here.tensors()[name] for name in re.findall(r"t\d+", text)[:2])
    return source.shape != out.shape


def step(rng: random.Random, sides: tuple[Side, Side], number: int) -> str | None:
    """Execute a line on both sides. Returns it; "" for one that the CPU refuses; None if that may have done a part of it."""
    here, there = sides
    text = line(rng, here, number)
    if resizes(text, here):
        return ""
    if here.run(text) is not None:
        return None if "out=" in text or "_foreach" in text else ""
    assert there.run(text) is None, text
    for name in list(here.tensors())[:-MOST]:
        del here.names[name], there.names[name]
    return text


@pytest.mark.parametrize("first", range(0, PROGRAMS, 6))
def test_random_aliases_end_as_on_the_cpu(first: int) -> None:
    compared = 0
    for seed in range(first, first + 6):
        rng, sides, story = random.Random(seed), (Side("cpu"), Side("remote")), []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about programs that nobody would write
            for number in range(LINES):
                text = step(rng, sides, number)
                if text is None:
                    break
                story.append(text)
            else:
                compare(*sides, "\n".join(filter(None, [f"seed {seed}", *story])))
                compared += 1
    assert compared > 1


def compare(here: Side, there: Side, story: str) -> None:
    assert here.names["seen"] == there.names["seen"], story
    mine, theirs = here.tensors(), there.tensors()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        with contextlib.suppress(RuntimeError):  # a view of what changed under no_grad does not say
            assert properties(tensor) == properties(theirs[name]), f"{name}\n{story}"
        got = theirs[name].detach().cpu()
        assert torch.equal(tensor.detach(), got), f"{name}: {tensor.tolist()} here, {got.tolist()} there\n{story}"
