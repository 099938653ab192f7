"""The tensor table's rows: tensors are views of storages; a storage is placed on a mesh or still a recipe.

Knows ids, specs and layouts; never data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gt.dispatcher.sharding.groups import Meaning
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.state.records import Cause, Origin
from gt.ir.layout import Layout, Mesh
from gt.ir.spec import Spec

UNKNOWN = Spec((), (), 0, "uint8")  # until a dynamic op's output has been described


@dataclass(slots=True)
class RecipeStep:
    """One op of a recipe: slots are positions in the recipe's list of values, not tensor ids. seq: number of the op."""

    known: OpSchema
    ins: tuple[int, ...]
    values: tuple
    outs: tuple[int, ...]
    data: Any = None  # gt.upload: ("inline", bytes) or ("host", tensor id)
    seq: int = -1


@dataclass(slots=True, eq=False)
class LaunchCount:
    """Counts the launches of a program. The storages that it writes or makes name it: so a launch need not touch them."""

    launches: int = 0


# States of a storage:
#   unplaced: `recipe` holds the ops that will create it, and the layouts of its tensors are None.
#   placed:   `recipe` is None; the layout of each tensor says which piece each worker has.
# `Table.check` asserts that it is one of both.
class Storage:
    """Memory that one or several tensors view. `failed` says why its content cannot be trusted."""

    __slots__ = (
        "cast_of", "default", "evicted", "failed", "gradient", "home", "host_copy", "made_by", "moved", "origin", "param",
        "programs", "recipe", "rest", "sharded", "slots", "space", "tensors", "trained", "unallocated", "undecided", "writes",
    )  # fmt: skip

    def __init__(self, origin: Origin | None = None) -> None:
        self.origin = origin  # file, line and group of the op that made it
        self.tensors: dict[int, Tensor] = {}  # live views by id, and the root as long as any lives
        self.writes = 0  # writes by single ops, and by programs that are dropped
        self.programs: tuple[LaunchCount, ...] = ()  # launch counts of programs that write it
        self.param = False
        self.cast_of: Storage | None = None  # the parameter that it is, in another dtype
        self.moved = -1  # number of the last op that redistributed or reduced it
        self.failed: Cause | None = None
        self.unallocated = False  # neither it nor a placeholder found memory: an overwrite cannot heal it
        self.recipe: list[RecipeStep] | None = None  # the ops that will create it; None once it is placed
        self.home: Meaning | None = None  # the group that made it, where it is placed if no op in a group uses it first
        self.slots: dict[int, int] = {}  # tensor id -> position among the recipe's values
        self.made_by: tuple | None = None  # (weight, bias) tensors of the matmul that made it, dim split
        self.undecided = False  # a use in a group may choose its layout: each, of whole user data; the first, of a parameter
        self.default = False  # placed without a group: its first use in a group may move it
        self.sharded = False  # a parameter that rests in pieces of the data-parallel axis, once it is placed
        # layout of the root between uses, of a sharded parameter and of its gradient and optimizer state
        self.rest: Layout | None = None
        self.gradient = False  # autograd has added to it
        self.trained = False  # a parameter of which autograd has added to a gradient; a frozen one has none
        self.space: str | None = None  # where it rests between uses, None for on the device
        self.evicted = False  # workers were told to let it rest there; a use since may have brought it back
        self.host_copy: tuple | None = None  # the value of which workers have a copy in host memory, see planning.offload

    @property
    def version(self) -> int:
        """A number that grows with each write."""
        # A launch of a program increases one count, however many storages the program writes; this adds the counts up.
        return self.writes + sum([program.launches for program in self.programs])

    def views(self) -> list[Tensor]:
        """Its live views, each behind its base: so they can be made again on a base that is already in place."""
        # They are kept in the order in which they were made. Ids are no such order: a client chooses them as it likes.
        return [tensor for tensor in self.tensors.values() if tensor.base is not None]

    def written_by(self, program: LaunchCount) -> None:
        """Each launch of a program, which has had none yet, writes it."""
        self.programs += (program,)

    def forget(self, program: LaunchCount) -> None:
        """A program of it is dropped: its launches still count. It may be told so twice."""
        programs = tuple([count for count in self.programs if count is not program])
        if len(programs) < len(self.programs):
            self.programs = programs
            self.writes += program.launches

    def declare_parameter(self) -> None:
        """It is a weight. One that is whole on its workers already is split by its first use in a group, as a new one is."""
        self.param = True
        self.undecided = self._whole_on_several()

    def note_cast(self, parameter: Storage) -> None:
        """It is a cast of a parameter: a weight, whose first use is that of the parameter."""
        self.param, self.cast_of, self.sharded = True, parameter, parameter.sharded
        self.default, self.undecided = parameter.default, parameter.undecided

    def note_placed(self, grouped: bool) -> None:
        """It was placed by an op in a group, or for want of one."""
        self.default = not grouped
        self.undecided = self.undecided or (self.param and not grouped and self._whole_on_several())

    def _whole_on_several(self) -> bool:
        """True if each of several workers has all of it, which a use in their group may cut."""
        layout = next(iter(self.tensors.values())).layout
        return layout is not None and len(layout.mesh.workers) > 1 and layout.replicated


class Tensor:
    """An id with its metadata and layout. `via` makes a view again from `base` when its storage moves."""

    __slots__ = ("base", "children", "copies", "id", "layout", "released", "spec", "storage", "sums", "via")

    def __init__(self, tensor_id: int, spec: Spec | None, storage: Storage, layout: Layout | None) -> None:
        self.id, self.storage, self.layout = tensor_id, storage, layout
        self.spec = spec or UNKNOWN
        self.base: Tensor | None = None
        self.children = 0  # views made of this tensor that still live
        self.via: tuple[OpSchema, tuple, int] | None = None  # (template, values, index among its outputs)
        self.copies: dict[Layout, tuple[int, int]] | None = None  # layout -> (storage version, id of the copy)
        self.sums: tuple[int, Tensor] | None = None  # (storage version, its row sums: a tensor that no table holds)
        self.released = False  # freed by the client, kept for its live views
        storage.tensors[tensor_id] = self

    def leave(self) -> None:
        """Its session is over: break its reference cycles, so that memory is freed without the collector."""
        self.storage.tensors.clear()
        self.base = self.via = self.copies = self.sums = None

    def above(self, steps: int) -> Tensor:
        """The tensor that it is a view of, so many views up."""
        tensor = self
        for _ in range(steps):
            assert tensor.base is not None
            tensor = tensor.base
        return tensor

    def descent(self, steps: int | None = None) -> tuple:
        """Each view from it to the base so many steps up, or to the root: the op that makes it, and the form of its base."""
        rows: list[tuple] = []
        tensor = self
        while tensor.base is not None and len(rows) != steps:
            rows.append((tensor.via, tensor.base.spec.form))
            tensor = tensor.base
        return tuple(rows)

    def may_choose(self, mesh: Mesh) -> bool:
        """True if the first use of a parameter, which is whole on each worker of this mesh, may choose its layout."""
        storage, layout = self.storage, self.layout
        return storage.param and storage.undecided and layout is not None and layout.mesh == mesh and layout.replicated

    @property
    def movable(self) -> bool:
        """True for a parameter that no group has used yet."""
        return self.storage.param and (self.storage.default or self.storage.undecided)

    @property
    def whole(self) -> bool:
        """True if it has each byte of its storage, as a transposed tensor does."""
        root = self
        while root.base is not None:
            if root.via is not None and root.via[0].name in ("as_strided", "expand", "unfold"):  # may have a byte several times
                return False
            root = root.base
        return self is root or self.spec.nbytes == root.spec.nbytes

    @property
    def placed(self) -> bool:
        return self.layout is not None


@dataclass(slots=True)
class Table:
    """One session's tensors. check() asserts the invariants.

    relaid: grows whenever a placed tensor gets another layout. Comparisons of layouts stay valid while it is the same.
    """

    rows: dict[int, Tensor] = field(default_factory=dict)
    relaid: int = 0

    def new(self, tensor_id: int, spec: Spec | None, layout: Layout | None, origin: Origin | None = None) -> Tensor:
        tensor = Tensor(tensor_id, spec, Storage(origin), layout)
        self.rows[tensor_id] = tensor
        return tensor

    def view(self, tensor_id: int, spec: Spec | None, base: Tensor, layout: Layout | None, via: tuple) -> Tensor:
        tensor = Tensor(tensor_id, spec, base.storage, layout)
        tensor.base, tensor.via = base, via
        base.children += 1
        self.rows[tensor_id] = tensor
        return tensor

    def check(self) -> None:
        for tensor_id, tensor in self.rows.items():
            assert tensor.id == tensor_id and tensor.storage.tensors[tensor_id] is tensor
            assert (tensor.storage.recipe is None) == tensor.placed, f"%{tensor_id} is neither placed nor a recipe"
            assert tensor.base is None or tensor.base.storage is tensor.storage
            assert _mesh(tensor) == _mesh(tensor.base or tensor), f"%{tensor_id} is on another mesh than its base"
            assert not tensor.released or tensor.children


def _mesh(tensor: Tensor) -> Mesh | None:
    return tensor.layout.mesh if tensor.layout is not None else None
