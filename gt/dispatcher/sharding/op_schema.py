"""The dispatcher's view of a template, derived once: name, list arguments, random or not, and cached plans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gt.ir.ops import RANDOM
from gt.ir.template import T, Template, V

# In-place ops that overwrite everything: they heal a failed target, and may initialize a recipe
OVERWRITES = frozenset(
    {"copy_", "fill_", "zero_", "uniform_", "normal_", "random_", "exponential_", "bernoulli_", "log_normal_", "cauchy_",
     "geometric_"}
)  # fmt: skip


LISTS = ("_foreach_", "_fused_", "_amp_foreach")  # prefixes of list ops


@dataclass(eq=False)
class OpSchema:
    """A template with what the planner derives from it once, and the plans that it has made for it."""

    template: Template
    name: str = ""  # aten.add.Tensor -> add
    plans: dict = field(default_factory=dict)  # planner's cache
    columns: tuple[Column, ...] = ()  # list arguments, if it is a list op
    overwrites: bool = False
    random: bool = False

    def __post_init__(self) -> None:
        # Copied into attributes, since the loop of a session's stream reads them for every op.
        op = self.template.op
        self.name = op.split(".")[1] if op.startswith("aten.") else op.rpartition(".")[0]
        if op == "aten.view.dtype":  # a view of another dtype, not of another shape
            self.name = "view.dtype"
        self.random = op in RANDOM
        self.overwrites = self.name in OVERWRITES
        if op.startswith("aten.") and self.name.startswith(LISTS):
            self.columns = _columns(self.template)
        self.specs = list(self.template.ins)
        self.tensors = len(self.specs)
        self.values = self.template.values
        self.results = self.template.results
        self.length = self.tensors + self.values + self.results
        self.listed = frozenset(index for column in self.columns for index in column.tensors)  # tensors in lists
        self.written = frozenset(self.template.writes)
        self.news = [i for i, out in enumerate(self.template.outs) if out.kind in ("new", "view")]

    def arg(self, index: int, default: Any = None) -> Any:
        args = self.template.args
        return args[index] if index < len(args) else default

    def named(self, index: int, name: str, default: Any = None) -> Any:
        """A constant given by position or by name."""
        if index < len(self.template.args):
            return self.template.args[index]
        return dict(self.template.kwargs).get(name, default)


@dataclass(frozen=True, slots=True)
class Column:
    """One list argument: its position among args (int) or kwargs (str), its items, and its tensors by operand number."""

    place: int | str
    items: tuple
    tensors: tuple[int, ...]


def _columns(template: Template) -> tuple[Column, ...]:
    places: list[tuple[int | str, Any]] = [*enumerate(template.args), *template.kwargs]
    return tuple(
        Column(place, tuple(arg), tuple(item.index for item in arg if isinstance(item, T)))
        for place, arg in places
        if isinstance(arg, (list, tuple)) and arg and all(isinstance(item, (T, V)) for item in arg)
    )
