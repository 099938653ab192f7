"""A fragment, its sealed program, and its call while it is recorded. Tensors are numbers of its pattern."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gt.dispatcher.programs.fragments.fragment_code import WorkerCode
from gt.dispatcher.programs.fragments.fragment_pattern import FragmentCall, FragmentPattern
from gt.dispatcher.sharding.groups import Meaning
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.state.failures import Planned
from gt.dispatcher.state.tensors import Tensor
from gt.ir.instr import Define
from gt.ir.layout import Layout
from gt.ir.spec import Spec


@dataclass(slots=True)
class MadeTensor:
    """A tensor that is alive behind a fragment. base: of a view: whether from before, and its number."""

    number: int
    spec: Spec
    layout: Layout
    base: tuple[bool, int] | None
    known: OpSchema | None  # for a view: the op that made it, and which output it is
    index: int
    default: bool  # this and the next three describe its storage, see state/tensors.py
    undecided: bool
    home: Meaning | None
    rest: Layout | None


@dataclass(slots=True)
class FragmentProgram:
    """The sealed program of one fragment. Tensors are numbers of its pattern."""

    code: dict[int, WorkerCode]
    defines: dict[int, Define]  # by worker
    uses: list[Define]  # definitions that its code names
    journal: list[Planned]
    forms: list[tuple]  # of each tensor from before: Spec.form
    bases: list[tuple[int, int]]  # further tensors that the code names: (number, steps) is that tensor's base, so many views up
    descents: list[tuple[int, int | None, tuple]]  # (number, steps, Tensor.descent) of each whose storage the code moves
    layouts: list[Layout | None]  # of each tensor from before, then of each of `bases`
    changed: list[tuple[int, Layout]]  # (number, layout) of each that has another layout afterwards
    views: list[tuple[int, int]]  # (number, count) of each that is changed or rebound: tensors of its storage before the call
    rebound: list[int]  # numbers of tensors whose memory is replaced
    sharing: tuple[int, ...]  # by tensor from before: the first one that shares its memory
    moved: tuple[int, ...]  # numbers of tensors from before that the program frees
    writes: tuple[int, ...]  # numbers of tensors from before whose memory it writes
    flags: list[tuple[bool, bool]]  # by tensor from before: `default` and `undecided` of its storage afterwards
    rests: list[tuple[int, Layout | None]]  # (number, layout) of tensors whose storage rests in another layout afterwards
    makes: list[MadeTensor]
    live: frozenset[int]  # numbers of tensors that may be alive afterwards
    constants: list[tuple[list[int], int]]
    size: int
    launches: int = 0


@dataclass(eq=False, slots=True)
class Fragment:
    number: int
    key: tuple
    pattern: FragmentPattern
    rests: tuple[bool, ...]  # by tensor from before: True if it is at rest, which changes how ops on it are planned
    program: FragmentProgram | None = None
    tries: int = 0
    misfits: int = 0  # calls in a row for which its program did not serve
    why: str = ""  # the reason why it has no program
    kept: set[int] = field(default_factory=set)  # numbers of tensors that were alive behind some call
    held: set[int] = field(default_factory=set)  # numbers of tensors from before that were alive behind some call


@dataclass(slots=True)
class FragmentRecording:
    """A fragment's call while it is recorded."""

    fragment: Fragment
    call: FragmentCall
    backend: str
    ins: list[Tensor]
    older: list[tuple[Layout | None, int]]  # by entry of `ins`: the layout in which its storage rested before, and its tensors
    numbers: list[int] = field(default_factory=list)  # op numbers, as its instructions carry them


def sharing(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """For each tensor, the first that shares its memory."""
    homes: dict[int, int] = {}
    return tuple([homes.setdefault(id(t.storage), n) for n, t in enumerate(tensors)])
