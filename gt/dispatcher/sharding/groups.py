"""The meaning of a signal group: its mesh, and the split of its weights and of activations that enter it.

`axis` in the YAML is a dim of a weight stored [in, out]. *_colpar (1) splits the output features of a matmul's weight and its
bias. *_rowpar (0) splits the weight's input features. Any other group replicates parameters. It also replicates activations
if groups of its name with _colpar or _rowpar exist. Otherwise it splits entering activations along dim `axis` (data parallel).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gt.config.schema import DATA_AXIS, DATA_PARALLEL, MAX_FUSED_PARTS, Config, Group
from gt.ir.layout import Layout, Mesh, Placement, R, Shard

COLUMN, ROW, STAGE, DATA = "column", "row", "stage", "data"
SUFFIXES = {"_colpar": COLUMN, "_rowpar": ROW}
PARTS_DIGITS = len(str(MAX_FUSED_PARTS))  # at most, in the text of `#`
PARTS = "#"  # `name#3` in a context: three weights are fused in each weight used there


@dataclass(frozen=True, slots=True)
class Meaning:
    """kind is COLUMN, ROW, STAGE (tensor-parallel stage) or DATA; backward names the group of the ops that differentiate."""

    name: str
    kind: str
    mesh: Mesh
    axis: int
    backward: str | None = None
    parts: int = 0  # weights that are fused in one, as the user states them

    def entering(self, shape: tuple[int, ...]) -> Layout:
        """Layout in which an activation of this shape enters the mesh."""
        return Layout(self.mesh, tuple(self._enters(name, shape) for name, _ in self.mesh.axes))

    def _enters(self, axis: str, shape: tuple[int, ...]) -> Placement:
        """A single row, such as positions that are broadcast, is replicated."""
        dim = self.split_dim
        return Shard(dim) if axis == DATA_AXIS and len(shape) > dim and shape[dim] != 1 else R

    @property
    def split_dim(self) -> int:
        return self.axis if self.kind == DATA else 0

    def parameter(self, dims: int, dim: int | None) -> Layout:
        """Layout of a parameter that the tensor-parallel axis splits along `dim`, or replicates (None)."""
        split: Placement = R if dim is None else Shard(dim)
        return Layout(self.mesh, tuple(split if name == "tp" else R for name, _ in self.mesh.axes))


def stem(name: str) -> str:
    """The stage a group belongs to: its name less `_colpar` or `_rowpar`."""
    for suffix in SUFFIXES:
        if name.endswith(suffix):
            return name[: -len(suffix)]
    return name


def mesh(rows: tuple[tuple[int, ...], ...], data: bool) -> Mesh:
    """Mesh of the YAML's `workers`: the outer list is data parallel, the inner tensor (or data) parallel."""
    # [[0, 1], [2, 3]] is 2 x 2: 0 and 1 are a tensor-parallel team, 0 and 2 a data-parallel one. [[0, 1]] has one axis, which
    # is data parallel in a group of kind DATA. An axis of one worker is left out.
    inner = DATA_AXIS if data and len(rows) == 1 else "tp"
    axes = [(DATA_AXIS, len(rows)), (inner, len(rows[0]))]
    return Mesh(tuple((name, size) for name, size in axes if size > 1), tuple(w for row in rows for w in row))


class Groups:
    """Meanings of all group names of one config."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._meanings = {name: self._read(group) for name, group in config.groups.items() if group.workers}
        self.everywhere = self._meanings.get(DATA_PARALLEL)  # the group of ops that are in no other
        self._names: dict[tuple[int, ...], str] = {}
        self._with_parts: dict[tuple[str, int], Meaning] = {}
        for name, meaning in self._meanings.items():
            self._names.setdefault(meaning.mesh.workers, stem(name).removeprefix("pp_"))

    def __bool__(self) -> bool:
        return bool(self._meanings)

    @property
    def partial(self) -> bool:
        """True if there are groups of some ops."""
        return any(meaning is not self.everywhere for meaning in self._meanings.values())

    def _kind(self, name: str) -> str:
        for suffix, kind in SUFFIXES.items():
            if name.endswith(suffix):
                return kind
        split = any(name + suffix in self.config.groups for suffix in SUFFIXES)
        return STAGE if split else DATA

    def _read(self, group: Group) -> Meaning:
        kind = STAGE if group.replicated else self._kind(group.name)
        axis = group.axis if group.axis is not None else 0
        return Meaning(group.name, kind, mesh(group.workers, kind == DATA), axis, group.backward)

    def find(self, path: str, backward: bool = False) -> tuple[Meaning | None, list[str]]:
        """Meaning of nested contexts `outer/inner`: the innermost known group's, else everywhere's, and the unknown names."""
        # From the innermost context outwards. A name that is neither a group nor a transfer A_to_B is reported, and passed by.
        missing = []
        for step in reversed(path.split("/") if path else []):
            name, _, parts = step.partition(PARTS)
            fused = parts.isdecimal() and len(parts) <= PARTS_DIGITS
            meaning = self._fused(name, int(parts)) if fused else self._meanings.get(name)
            if meaning is None:
                if self.destination(name) is None and name not in self.config.groups:
                    missing.append(name)
                continue
            if backward and meaning.backward:
                meaning = self._meanings.get(meaning.backward, meaning)
            return meaning, missing
        return self.everywhere, missing

    def _fused(self, name: str, parts: int) -> Meaning | None:
        """The group for weights with `parts` fused in one. Always the same object, because plans are keyed by it."""
        meaning = self._meanings.get(name)
        if meaning is None:
            return None
        return self._with_parts.setdefault((name, parts), replace(meaning, parts=parts))

    def destination(self, name: str, backward: bool = False) -> Meaning | None:
        """Meaning of B for a transfer named A_to_B, of A for its gradient; `pp_` may be left out of group names."""
        # Group names are the user's, and one may have `_to_` in itself: only the first `_to_` of a name counts.
        first, arrow, second = name.partition("_to_")
        source, target = self._lookup(first), self._lookup(second)
        if not arrow or source is None or target is None:
            return None
        return source if backward else target

    def _lookup(self, name: str) -> Meaning | None:
        return self._meanings.get(name) or self._meanings.get(f"pp_{name}")

    def transfer(self, source: Mesh, target: Mesh) -> str:
        """Name of the transfer between two meshes, `stage0_to_stage1`."""
        names = (self._names.get(m.workers, "workers" + "_".join(map(str, m.workers))) for m in (source, target))
        return "_to_".join(names)
