"""Gradients and state that captured steps make: the memory that programs write, and the tensor object that names it now.

A backward pass of torch makes a new gradient, a step a new average, and one that somebody has kept stays as it is. A replay
writes the same memory each time. So who holds one beside its parameter or attribute gets a copy before, known by reference
counts.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_
from sys import getrefcount
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils._pytree import tree_leaves

from gt.client.capture.state_walk import StateItem, StateSnapshot
from gt.client.device.remote_tensor import Alias, Ref, RemoteTensor, is_leaf, make, memory_id, rebind, tensor_identity
from gt.client.device.sparse_tensor import RemoteSparse
from gt.client.trace.dispatch import call
from gt.client.trace.op_info import info_of
from gt.client.values.fingerprints import is_scalar_like

_COPY, _CLONE = info_of(torch.ops.aten.copy_.default), info_of(torch.ops.aten.clone.default)
VIEWED = "the program holds a view or a detached alias of"
MAX_OBJECTS_PER_ARGUMENT = 1000  # in which tensors that require grad are looked for
_NO_BATCHES = torch.nn.Module, torch.optim.Optimizer, type, ModuleType, FunctionType, MethodType
FREE, OBJECT, VIEW = range(3)  # who has it beside its place in Python: nobody; its object; another tensor of its memory


class NamedMemory:
    """The memory of one gradient or state, shared by the programs that use it.

    tensor: the object that names it. Nothing else of GT holds that.
    """

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: RemoteTensor) -> None:
        self.tensor = tensor

    def holder(self, parameter: bool, places: int = 0) -> int:
        """The kind of its holder beside GT and its places in Python: VIEW, OBJECT or FREE.

        parameter: whether it is a parameter's .grad. places: in containers and attributes.
        """
        objects, tensors, names = _alone()[parameter]
        # C++ has a reference more where autograd or a view keeps the
        # tensor. An alias, as of detach(), has a reference to its Ref
        if self.tensor._use_count() > tensors or _names(self.tensor) > names:  # type: ignore[attr-defined]
            return VIEW
        return OBJECT if getrefcount(self.tensor) > objects + places else FREE

    def leave(self) -> None:
        """Leave the object to its holders, with memory of its own that has the same values."""
        # GT's new object takes over the memory, and the old object gets a copy: programs know the memory
        # by its id, which must stay with GT, while whoever holds the old object must see no replay
        old = self.tensor
        self.tensor = make(old._ref.meta, old._ref)
        rebind(old, call(_CLONE, (self.tensor,)))


_memories: WeakValueDictionary[int, NamedMemory] = WeakValueDictionary()  # by identity of its Ref


def _ref(tensor: RemoteTensor) -> Ref:
    ref = tensor._ref
    return ref.target if isinstance(ref, Alias) else ref


def _names(tensor: RemoteTensor) -> int:
    ref = tensor._ref
    if type(ref) is Alias:
        ref = ref.target
    return getrefcount(ref)


@functools.cache
def _alone() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Counts of a tensor that nobody else has: Python's and C++'s references, and names of its memory; then as a .grad."""
    names = _names(SimpleNamespace(_ref=object()))  # type: ignore[arg-type]
    # Measured, not written down: the number of references that an idle tensor has differs between versions of Python and torch
    memory = NamedMemory(torch.zeros(1, device="cpu"))  # type: ignore[arg-type]
    free = getrefcount(memory.tensor), memory.tensor._use_count(), names  # type: ignore[attr-defined]
    parameter = torch.zeros(1, device="cpu").requires_grad_()
    parameter.grad = memory.tensor
    return free, (getrefcount(memory.tensor), memory.tensor._use_count(), names)  # type: ignore[attr-defined]


def memory_of(gradient: RemoteTensor | None) -> NamedMemory | None:
    """The memory of a gradient or state, the same object for all programs; None for no gradient."""
    if gradient is None:
        return None
    memory = _memories.get(id(_ref(gradient)))
    if memory is None:
        memory = _memories[id(_ref(gradient))] = NamedMemory(gradient)
    return memory


@dataclass(slots=True)
class LeafGradient:
    """The gradient of a leaf in one program. had: it had one before. read, left: those that are read and left."""

    leaf: RemoteTensor
    had: bool
    read: NamedMemory | None
    left: NamedMemory | None
    kept: bool = False  # whether somebody holds the one that a replay writes anew; mismatch() finds out
    untouched: bool = False  # whether the call leaves the one that it found, and no op uses it

    def mismatch(self) -> str:
        """The reason why the gradient that the leaf has now prevents a replay, or ""."""
        # Cases by (read, left): (None, m) a backward pass after zero_grad(); (m, m) one that adds to m in
        # place; (m, n) the sum of m and more in a new tensor; (m, None) a step that ends with zero_grad()
        grad, read, left = self.leaf.grad, self.read, self.left
        if (grad is not None) != self.had:
            then, now = ("a gradient", "none") if self.had else ("no gradient", "one")
            return f"a parameter of shape {list(self.leaf.shape)} had {then} when the step was recorded, and has {now} now"

        if self.untouched:
            return ""

        # The leaf may have a gradient of another program or of eager ops: fill() then copies it into the memory that is read
        filled = read is not None and grad is not read.tensor
        here = left is not None and grad is left.tensor
        grad = None  # no reference that would be counted

        # The replay writes this memory anew. Its object can be left to a holder with a copy, but a view of it cannot be moved
        if left is not None and left is not read:
            holder = left.holder(here)
            if holder == VIEW:
                return self._viewed()
            self.kept = holder == OBJECT

        # fill() writes to the memory that is read. Where the replay adds in place, the leaf's own object moves there as well
        if filled and (read.holder(False) == VIEW or (left is read and self._other().holder(True) == VIEW)):  # type: ignore[union-attr]
            return self._viewed()
        return ""

    def _viewed(self) -> str:
        what = f"the gradient of a parameter of shape {list(self.leaf.shape)}"
        return f"{VIEWED} {what}, whose memory a replay writes: keep a clone() of it"

    def _other(self) -> NamedMemory:
        """The memory of the gradient that the leaf has now."""
        found = self.leaf.grad
        return _memories.get(id(_ref(found))) or NamedMemory(found)  # type: ignore[arg-type]

    def fill(self) -> bool:
        """Before a replay, after mismatch(): give it the gradient that it reads.

        Returns whether the leaf gets another object after it.
        """
        if self.untouched:
            return False
        grad, read, left = self.leaf.grad, self.read, self.left
        if self.kept and left is not None:
            left.leave()
            self.kept = False

        # The leaf has another gradient object than the one that the program reads: copy its values in
        if read is not None and grad is not read.tensor:
            grad = None  # no reference that would be counted
            if read.holder(False) == OBJECT:
                read.leave()
            call(_COPY, (read.tensor, self.leaf.grad))
            # Torch would add in place, and whoever holds the gradient
            # would see the sum: its object moves to the memory of the sum
            if left is read and (other := self._other()).holder(True) == OBJECT:
                _adopt(read, other)
            return left is None or self.leaf.grad is not left.tensor
        return grad is not (None if left is None else left.tensor)

    def set(self) -> None:
        """After a replay: give the leaf the gradient that it leaves."""
        self.leaf.grad = None if self.left is None else self.left.tensor


class LeafGradients:
    """The gradients of all leaves in one program.

    Where each is as a replay leaves it, or none is there and none was, a few passes over all of them are enough. Else each
    row says for itself what it needs.
    """

    def __init__(self, rows: list[LeafGradient]) -> None:
        self._untouched = [row.leaf for row in rows if row.untouched]
        self.rows = rows
        rows = [row for row in rows if not row.untouched]
        self._leaves = [row.leaf for row in rows]
        self._left = [row.left or _NO_MEMORY for row in rows]
        self._sets = [(row.leaf, row.left) for row in rows if row.left is not None]
        self._made = [row.left for row in rows if row.left is not None and row.left is not row.read]
        # A leaf has a gradient after a replay exactly if it had one before. Where that
        # is already the object which the replay leaves, nothing is to be filled or set
        self._keeps = all(row.had is (row.left is not None) and row.read in (None, row.left) for row in rows)
        # The step begins after zero_grad(): no leaf has a gradient, and the replay sets all of them
        self._begins = not any(row.had or row.read is not None for row in rows)
        self._unset = self._together = False  # which of the two mismatch() has found
        self._changed: list[LeafGradient] = []

    def mismatch(self) -> str:
        """The reason why the gradients that leaves have now prevent a replay, or ""."""
        self._unset = self._begins and self._are(repeat(None))
        there = not self._unset and self._keeps and self._are(map(_TENSOR, self._left))
        alike = (self._unset or there) and _nobody_holds(self._made, there)
        self._together = alike and all(leaf.grad is not None for leaf in self._untouched)
        return "" if self._together else mismatch(self.rows)

    def _are(self, tensors: Iterable) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return all(map(is_, map(_GRAD, self._leaves), tensors))

    def fill(self) -> None:
        """Before a replay, after mismatch(): give leaves the gradients that it reads."""
        self._changed = [] if self._together else [row for row in self.rows if row.fill()]

    def set(self) -> None:
        """After a replay: give leaves the gradients that it leaves."""
        if self._together and self._unset:
            for leaf, memory in self._sets:
                leaf.grad = memory.tensor
        for row in self._changed:
            row.set()
        self._changed = []


_GRAD, _REF, _TENSOR = attrgetter("grad"), attrgetter("_ref"), attrgetter("tensor")
_NO_MEMORY = SimpleNamespace(tensor=None)


def _nobody_holds(memories: Sequence[NamedMemory | SimpleNamespace], parameter: bool) -> bool:
    """True if nobody beside GT and one parameter's .grad, if it is one, has any of these. False: ask each."""
    if not memories:
        return True
    kinds, counts = _most_references(memories)
    return kinds == {Ref} and all(most <= alone for most, alone in zip(counts, _alone_together()[parameter], strict=True))


def _most_references(memories: Sequence[NamedMemory | SimpleNamespace]) -> tuple[set[type], tuple[int, int, int]]:
    """Classes of their references; and the most of Python's and C++'s references to one tensor, and of names of its memory."""
    tensors = list(map(_TENSOR, memories))
    refs = list(map(_REF, tensors))
    used = max(map(torch.Tensor._use_count, tensors))  # type: ignore[attr-defined]
    return {*map(type, refs)}, (max(map(getrefcount, tensors)), used, max(map(getrefcount, refs)))


@functools.cache
def _alone_together() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Counts by _most_references of a tensor that nobody else has; then as a .grad."""
    memory = NamedMemory(torch.zeros(1, device="cpu"))  # type: ignore[arg-type]
    memory.tensor._ref = object()  # type: ignore[assignment]
    free = _most_references([memory])[1]
    parameter = torch.zeros(1, device="cpu").requires_grad_()
    parameter.grad = memory.tensor
    return free, _most_references([memory])[1]


def _adopt(memory: NamedMemory, other: NamedMemory) -> None:
    """Have the object of another gradient name this memory: a replay adds to it in place, which its holders see."""
    tensor = other.tensor
    other.tensor = make(tensor._ref.meta, tensor._ref)
    rebind(tensor, memory.tensor)
    memory.tensor = tensor


def find_memory(tensor: RemoteTensor) -> NamedMemory | None:
    """The memory that this object names, if programs write it."""
    memory = named_memory(tensor)
    return memory if memory is not None and memory.tensor is tensor else None


def named_memory(tensor: RemoteTensor) -> NamedMemory | None:
    """The same of this object or another one of its tensor, as g.detach() of g."""
    return _memories.get(id(_ref(tensor)))


@dataclass(slots=True)
class MadeState:
    """State that a call leaves in a new tensor, and its places in Python."""

    memory: NamedMemory
    items: list[StateItem]
    requires_grad: bool

    def mismatch(self) -> str:
        """The reason why the state that is there now prevents a replay, or ""."""
        memory, path = self.memory, self.items[0].path
        try:
            if any(item.now() is not memory.tensor for item in self.items):
                return f"{path} is another tensor than before"
        except (LookupError, AttributeError, ValueError, TypeError):
            return f"{path} is gone"
        if memory.tensor.requires_grad is not self.requires_grad:
            return f"{path} has other requires_grad than before"
        if memory.holder(False, len(self.items)) == VIEW:
            return f"{VIEWED} {path}, whose memory a replay writes: keep a clone() of it"
        return ""

    def leave(self) -> None:
        """Before a replay: leave the object to who holds it, and have its places hold another."""
        if self.memory.holder(False, len(self.items)) == OBJECT:
            self.memory.leave()
            for item in self.items:
                item.set(self.memory.tensor)


class ReboundState:
    """A tensor that needs no gradient and gets new memory in each call, by `p.data = ...`: its object stays as it is."""

    def __init__(self, path: str, tensor: RemoteTensor) -> None:
        self._path, self._tensor, self._kind = path, tensor, tensor_identity(tensor)[1:]
        self._memory = make(tensor._ref.meta, _ref(tensor))  # that one program writes
        _rebound[id(self._memory._ref)] = self

    def mismatch(self) -> str:
        """The reason why the tensor prevents a replay as it is now, or ""."""
        tensor, memory = self._tensor, self._memory
        if tensor._ref.meta != memory._ref.meta or tensor_identity(tensor)[1:] != self._kind:
            return f"{self._path} has other shape, strides, requires_grad or hooks than before"
        holders = _names(memory) - _alone()[False][2]  # beside this object
        if holders > self._is_in_place() or tensor._use_count() > _alone()[False][1]:  # type: ignore[attr-defined]
            return f"{VIEWED} {self._path}, whose memory a replay writes: keep a clone() of it"
        return ""

    def _is_in_place(self) -> bool:
        return _ref(self._tensor) is self._memory._ref

    def leave(self) -> None:
        """Before a replay: have the tensor name the program's memory, where a call without the program gave it another."""
        if not self._is_in_place():
            call(_COPY, (self._memory, self._tensor))
            rebind(self._tensor, self._memory)


_rebound: WeakValueDictionary[int, ReboundState] = WeakValueDictionary()  # by identity of its memory's Ref


def rebound(entry: StateSnapshot, first: int) -> dict[int, int]:
    """Tensors for ReboundState by their identity, each with its id before the call. first: see take_made."""
    ids = {}
    for tensor, (before, *kind) in entry.identities.values():
        now, *same = tensor_identity(tensor)
        if now != before and same == kind and not tensor.requires_grad and now >= first and memory_id(tensor) == now:
            ids[id(tensor)] = before
    return ids


def take_rebound(entry: StateSnapshot, leaving: StateSnapshot, first: int) -> list[ReboundState]:
    """Take from the snapshot after a call the tensors that got new memory in it. first: see take_made."""
    known = rebound(entry, first)
    taken = {path: tensor for path, (tensor, _) in leaving.identities.items() if id(tensor) in known}
    for path in taken:
        del leaving.identities[path]
    return [ReboundState(path, tensor) for path, tensor in taken.items()]


def take_made(leaving: StateSnapshot, first: int, rebound: Collection[int]) -> list[MadeState]:
    """Take from a snapshot the state that a call has made, or that another program makes.

    first: the lowest id of a tensor made in the call. rebound: identities of tensors that are other state.
    """
    items: dict[int, list[StateItem]] = {}
    leaves = {id(leaf) for _, leaf in leaving.leaves if leaf.requires_grad}.union(rebound)
    leaving.leaves.clear()  # references that would be counted
    others = []
    for item in leaving.items:
        tensor = item.value
        # Leaves of autograd are no such state: the guard compares their identity, and gradients() follows their .grad
        own = isinstance(tensor, RemoteTensor) and not isinstance(tensor, RemoteSparse) and id(tensor) not in leaves
        if own and item.settable() and (_ref(tensor).id >= first or find_memory(tensor)):
            items.setdefault(id(tensor), []).append(item)
        else:
            others.append(item)
    made = []
    for same in items.values():
        memory = memory_of(same[0].value)
        # Another object names this memory already: the guard compares the place as any other
        if memory.tensor is not same[0].value:  # type: ignore[union-attr]
            others += same
            continue
        made.append(MadeState(memory, same, same[0].value.requires_grad))  # type: ignore[arg-type]
        for item in same:
            leaving.identities.pop(item.path, None)
            item.value = None  # no reference that would be counted
    leaving.items = others
    return made


def made_paths(entry: StateSnapshot, leaving: StateSnapshot, first: int) -> frozenset[str]:
    """The places where a call has left a new tensor. One that was there, and got other memory by `.data`, is none."""
    before = {item.path: item.value for item in entry.items if isinstance(item.value, RemoteTensor)}
    tensors = ((item.path, item.value) for item in leaving.items if isinstance(item.value, RemoteTensor))
    return frozenset(path for path, tensor in tensors if _ref(tensor).id >= first and before.get(path) is not tensor)


def leave_entries(entry: StateSnapshot, paths: frozenset[str], rebound: frozenset[str]) -> str:
    """Before a recorded call: leave the state at these paths to who holds it, since programs carry it over in its memory.

    rebound: paths of tensors that a call gives new memory. They begin with memory of their own, which the program reads.
    Returns why the call can be no program, or "". The snapshot is of no use after it.
    """
    for tensor in [entry.identities[path][0] for path in rebound if path in entry.identities]:
        if _names(tensor) > _alone()[False][2] + (id(_ref(tensor)) in _rebound):
            return f"{VIEWED} a tensor that the function gives other memory by `.data`: keep a clone() of it"
        rebind(tensor, call(_CLONE, (tensor,)))
    entry.identities.clear()  # references that would be counted
    entry.leaves.clear()
    items: dict[int, list[StateItem]] = {}
    for item in entry.items:
        if item.path in paths and isinstance(item.value, RemoteTensor) and item.settable():
            items.setdefault(id(item.value), []).append(item)
    for same in items.values():
        memory = NamedMemory(same[0].value)
        holder = memory.holder(False, 2 * len(same))  # each place, and the snapshot
        if holder == VIEW:
            return f"{VIEWED} {same[0].path}, whose memory a replay writes: keep a clone() of it"
        if holder == OBJECT:
            memory.leave()
            for item in same:
                item.set(memory.tensor)
    return ""


def mismatch(rows: Iterable[LeafGradient | MadeState | ReboundState]) -> str:
    """The first reason of a row, or ""."""
    return next((why for row in rows if (why := row.mismatch())), "")


def grad_arguments(leaves: list) -> dict[int, list[torch.Tensor]]:
    """Place of an argument -> the tensors in it that require grad and are no remote parameters, where there are any."""
    held = {k: [t for t in _held(leaf) if t.requires_grad and not _is_parameter(t)] for k, leaf in enumerate(leaves)}
    return {k: tensors for k, tensors in held.items() if tensors}


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, RemoteTensor) and isinstance(tensor, torch.nn.Parameter)


def _held(leaf: Any) -> Iterator[torch.Tensor]:
    """The tensors of an argument: itself, or those in the attributes of an object, such as a dataclass of a batch."""
    # Breadth first with a limit: an object of the user may lead to the whole program
    queue, seen = deque([leaf]), 0
    while queue and seen < MAX_OBJECTS_PER_ARGUMENT:
        thing, seen = queue.popleft(), seen + 1
        if isinstance(thing, torch.Tensor):
            yield thing
        elif isinstance(thing, (list, tuple, deque)):
            queue.extend(thing)
        elif isinstance(thing, dict):
            queue.extend(thing.values())
        elif not is_scalar_like(thing) and not isinstance(thing, _NO_BATCHES):
            queue.extend(vars(thing).values() if hasattr(thing, "__dict__") else ())
            queue.extend(getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ()))


def leads_to(results: Any, tensors: Iterable[torch.Tensor]) -> bool:
    """True if a graph leads from results to one of these tensors, and no backward pass has freed it."""
    # A leaf ends the graph in its AccumulateGrad node, whose `variable` it is; any other tensor is known by its own node
    leaves = {id(tensor) for tensor in tensors}
    ends = {tensor.grad_fn for tensor in tensors} - {None}
    queue = [t.grad_fn for t in tree_leaves(results) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    seen: set = set()
    while queue:
        node = queue.pop()
        if node in ends or id(getattr(node, "variable", None)) in leaves:
            return True
        if node not in seen and not _freed(node):
            queue += [following for following, _ in node.next_functions if following is not None]
        seen.add(node)
    return False


def has_graph(results: Any) -> bool:
    """True if a backward pass can begin at a result: it has a graph, no part of which has been freed."""
    queue = [t.grad_fn for t in tree_leaves(results) if isinstance(t, RemoteTensor) and t.grad_fn is not None]
    seen: set = set(queue)
    for node in queue:
        if _freed(node, changed=False):  # torch says so at the backward pass
            return False
        following = {after for after, _ in node.next_functions} - {None} - seen
        seen |= following
        queue += following
    return bool(queue)


def optimized_ids(state: StateSnapshot) -> frozenset[int]:
    """Ids of the parameters of optimizers."""
    groups = [group["params"] for optimizer in state.optimizers for group in optimizer.param_groups]
    return frozenset([leaf._ref.id for leaves in groups for leaf in leaves if isinstance(leaf, RemoteTensor)])


def path_with_graph(state: StateSnapshot, first: int) -> str:
    """The first path of a tensor with this id or a higher one that is a result of autograd, or ""."""
    return next((path for path, tensor in state.tensors() if tensor._ref.id >= first and tensor.grad_fn is not None), "")


def _freed(node: torch.autograd.graph.Node, changed: bool = True) -> bool:
    """True if a backward pass can no longer use what this node has saved: it is freed, or has been changed since.

    changed: the answer for one that has been changed.
    """
    # Torch has no query for it; to read a saved tensor of a freed node raises RuntimeError
    try:
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                getattr(node, name)
    except RuntimeError as error:
        return changed or "inplace operation" not in str(error)
    return False


class DifferentiatedArguments:
    """The arguments of one function that require grad. A gradient has to reach the caller's tensor: no copy stands for it."""

    def __init__(self) -> None:
        self._last: dict[int, weakref.ref] = {}  # by place

    def obstacle(self, leaves: list) -> str:
        """The reason why no program can serve a call, as an argument is a new tensor at each call; or ""."""
        # Weak references: to keep the last call's batch would keep its memory
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, RemoteTensor) and leaf.requires_grad]
        last = self._last.copy()
        self._last |= {place: weakref.ref(leaves[place]) for place in places}  # calls without a gradient may come between
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, RemoteTensor) and leaf.requires_grad:
                return (
                    f"argument {place} is a CPU tensor that requires grad, which its gradient has to reach: "
                    "pass a remote leaf, the same one at each call"
                )
        for place in places:
            if not is_leaf(leaves[place]) or (place in last and last[place]() is not leaves[place]):
                return (
                    f"argument {place} requires grad and is a new tensor at each call, which its gradient has to reach: "
                    "call requires_grad_() in the function, or pass the same tensor and copy_() into it"
                )
        return ""
