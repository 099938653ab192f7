"""Memory that a call's arguments, results and state share: which of it the call writes, and what its results are views of.

A program fills copies of arguments. So it returns to the caller what it writes into them, and serves no call whose arguments
share memory that it writes.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import getitem, is_
from typing import Any

import torch
from torch.utils._pytree import SUPPORTED_NODES, TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from gt.client.capture.recording import CallRecording
from gt.client.capture.state_walk import TENSOR_FIELDS, StateSnapshot
from gt.client.device.remote_tensor import RemoteTensor, is_leaf, memory_id, tensor_identity
from gt.client.trace.dispatch import call
from gt.client.trace.op_info import info_of
from gt.client.values.fingerprints import comparable, is_scalar_like
from gt.ir.check import UPLOAD

aten = torch.ops.aten
_COPY, _CLONE = info_of(aten.copy_.default), info_of(aten.clone.default)

_ALIGNED_BYTES = 16  # of the largest element
# Types of arguments that are leaves of a tree, of most calls
_LEAF_TYPES = frozenset({RemoteTensor, torch.Tensor, int, float, bool, str, type(None)})
_HOST_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_flat_trees: dict[tuple, TreeSpec] = {}  # by number of positional arguments, and names of others
MAX_FLAT_TREES = 1024  # then the table starts again
MAX_GAPS_BYTES = 4 << 20  # between the elements of a copy


CONJUGATES = "aten._conj.default"
FLIPS = frozenset({CONJUGATES, "aten._neg_view.default"})


@dataclass(frozen=True)
class CallMemory:
    """The memory of one recorded call, named by the id of the tensor that has it.

    of: memory of tensors that are views.
    written: all memory that the call writes.
    arguments: places of the arguments that it writes.
    state: written memory that Python state names.
    rebound: places of arguments that get other memory, another shape, requires_grad=False, hooks, or a .grad by assignment.
    required: places of arguments that get requires_grad=True, and nothing else.
    flips: ops that views are apart from their memory by, which they apply when they are read: conjugation, negation.
    fresh: memory that ops of the call make, anew in each replay.
    """

    of: dict[int, int]
    written: frozenset[int]
    arguments: frozenset[int]
    state: frozenset[int]
    rebound: frozenset[int]
    required: frozenset[int]
    flips: dict[int, frozenset[str]]
    fresh: frozenset[int]

    def owner(self, tensor: RemoteTensor) -> int:
        """The memory of a tensor of the call."""
        number = tensor._ref.id
        return self.of.get(number, number)


def identities(arguments: list) -> dict[int, tuple]:
    """The tensor_identity of each remote argument, and of a .grad that autograd does not give it, by its place."""
    remote = {k: leaf for k, leaf in enumerate(arguments) if isinstance(leaf, RemoteTensor)}
    return {k: (*tensor_identity(leaf), None if leaf.requires_grad else _grad(leaf)) for k, leaf in remote.items()}


def _grad(tensor: RemoteTensor) -> int | None:
    grad = tensor.grad if is_leaf(tensor) else None
    return grad._ref.id if isinstance(grad, RemoteTensor) else None


def call_memory(tape: CallRecording, entry: StateSnapshot, arguments: list, before: dict[int, tuple]) -> CallMemory:
    """The memory of a finished recording. arguments: those that the function got.

    entry, before: Python state and the arguments' identities before the call.
    """
    # Memory by the id of the tensor that owns it. The ids known before the call: state, then arguments
    named = {tensor._ref.id: memory_id(tensor) for _, tensor in entry.tensors()}
    given = {place: memory_id(leaf) for place, leaf in enumerate(arguments) if isinstance(leaf, RemoteTensor)}
    of = named | {arguments[place]._ref.id: number for place, number in given.items()}

    # Arguments that the call rebinds. `required` are those whose identity differs in requires_grad=True alone
    changed = {place: now for place, now in identities(arguments).items() if now != before[place]}
    required = frozenset(place for place, now in changed.items() if now == (before[place][0], True, *before[place][2:]))

    # Follow the ops in order: what each writes, and whose memory its views are. A view's base has its entry by then
    written: set[int] = set()
    fresh: set[int] = set()
    flips: dict[int, frozenset[str]] = {}
    for op in tape.ops:
        template = op.template
        written.update(of.get(op.ins[place], op.ins[place]) for place in template.writes)
        made = [out for out in template.outs if out.kind in ("new", "view")]
        for number, out in zip(op.outs, made, strict=True):
            if out.kind == "new" and template.op != UPLOAD:
                fresh.add(number)
            elif out.kind == "view":
                base = op.ins[out.of]
                if template.op == "aten.view_as_real.default" and CONJUGATES in flips.get(base, ()):
                    continue  # parts of a conjugate are new memory on workers
                of[number] = of.get(base, base)
                flips[number] = flips.get(base, frozenset()) ^ FLIPS.intersection((template.op,))
    places = frozenset(place for place, number in given.items() if number in written)
    state = frozenset(written.intersection(named.values()))
    return CallMemory(of, frozenset(written), places, state, frozenset(changed) - required, required, flips, frozenset(fresh))


def sharing_arguments(leaves: list, memory: CallMemory) -> set[int]:
    """Remote arguments that share memory with others or with state, where the call writes it: copies cannot stand for them."""
    if not (memory.state or memory.arguments or memory.rebound):
        return set()
    of = {place: memory_id(leaf) for place, leaf in enumerate(leaves) if isinstance(leaf, RemoteTensor)}
    # An argument that the call writes may be copied, since the copy is written back.
    # Two that share memory may not: their copies would not see each other's writes
    changed = memory.state
    if memory.arguments:
        counts = Counter(of.values())
        changed = changed | {of[place] for place in memory.arguments if place in of and counts[of[place]] > 1}
    return {place for place, number in of.items() if number in changed or place in memory.rebound}


def written_inputs(inputs: dict[int, RemoteTensor], memory: CallMemory) -> tuple[int, ...]:
    """The arguments of which the call has changed the copy."""
    return tuple(k for k in inputs if k in memory.arguments)


def write_back(leaves: list, inputs: dict[int, RemoteTensor], written: Iterable[int], required: Iterable[int]) -> None:
    """Give the caller's tensors the values that the call wrote into their copies, and requires_grad with a gradient.

    Waits where one of them is on the CPU.
    """
    for place in written:
        if isinstance(leaves[place], RemoteTensor):
            call(_COPY, (leaves[place], inputs[place]))
        else:
            _write_to_host(leaves[place], inputs[place])
    for place in required:
        if place in inputs and isinstance(leaves[place], RemoteTensor):
            grad = inputs[place].grad
            leaves[place].requires_grad_().grad = None if grad is None else call(_CLONE, (grad,))


def write_uploaded_back(leaves: list, prepared: list) -> None:
    """Give the caller's CPU tensors the values that a call which was not recorded wrote into their uploaded copies."""
    for leaf, got in zip(leaves, prepared, strict=True):
        if isinstance(got, RemoteTensor) and not isinstance(leaf, RemoteTensor) and got._version:
            _write_to_host(leaf, got)


def _write_to_host(host: torch.Tensor, copy: RemoteTensor) -> None:
    with torch.inference_mode(host.is_inference()), torch.no_grad():
        host.copy_(copy)


def same_on_host(leaves: list) -> dict[int, int]:
    """Place of a CPU argument -> the first place of one with the same elements of the same memory.

    One upload serves both, since the function may write to one of them. Arguments that share a part of their memory are
    uploaded apart.
    """
    hosts = [k for k, leaf in enumerate(leaves) if type(leaf) in _HOST_TYPES]
    if len(hosts) > 1:
        hosts = [k for k in hosts if _on_host(leaves[k])]
    if len(hosts) < 2:
        return {}
    first: dict[tuple, int] = {}
    found = {place: first.setdefault(_elements(leaves[place]), place) for place in hosts}
    return {place: earlier for place, earlier in found.items() if earlier != place}


def _on_host(leaf: torch.Tensor) -> bool:
    """True for an argument of _HOST_TYPES that is uploaded, and has memory."""
    return leaf.device.type == "cpu" and leaf.layout is torch.strided and not leaf.requires_grad and leaf.numel() > 0


def _elements(leaf: torch.Tensor) -> tuple:
    return leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride(), leaf.is_conj(), leaf.is_neg()


def attribute_names(tensor: torch.Tensor) -> Iterable[str]:
    """Names of what the program has given a tensor, as x.scale = 0.5."""
    own = tensor.__dict__
    return sorted(own.keys() - TENSOR_FIELDS) if len(own) > isinstance(tensor, RemoteTensor) else ()


def attribute_values(tensor: torch.Tensor) -> Iterable[tuple[str, Any]]:
    """Those names, each with its value, or with the identity of an object."""
    for name in attribute_names(tensor):
        value = tensor.__dict__[name]
        yield name, comparable(value) if is_scalar_like(value) else id(value)


def _is_parameter(tensor: torch.Tensor) -> bool:
    return "_is_param" in tensor.__dict__


def containers_of(args: tuple, kwargs: dict) -> frozenset[int]:
    """Identities of the lists and dictionaries among arguments."""
    if all(map(_is_leaf, map(type, (*args, *kwargs.values())))):
        return frozenset()
    return frozenset(map(id, mutable_containers((args, kwargs))))


def copy_attributes(copy: torch.Tensor, tensor: torch.Tensor) -> None:
    """Give a tensor that stands for another one what Python code sees of that: its attributes, and that it is a Parameter."""
    own = tensor.__dict__
    if len(own) > isinstance(tensor, RemoteTensor):
        copy.__dict__.update({name: value for name, value in own.items() if name != "_ref"})


def copy_of(leaf: RemoteTensor) -> RemoteTensor:
    """A copy of an argument with its strides, by which the function may decide.

    It is dense if elements share memory, and if they are a small part of much memory.
    """
    copy: RemoteTensor = call(_CLONE, (leaf,))
    if copy.stride() == leaf.stride() or 0 in leaf.stride():
        return copy
    span = 1 + sum((size - 1) * step for size, step in zip(leaf.shape, leaf.stride(), strict=True))
    if (span - leaf.numel()) * leaf.dtype.itemsize > MAX_GAPS_BYTES:
        return copy
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).copy_(copy)


def key_of(leaf: Any) -> Any:
    """The part of an argument that selects a program: a tensor's metadata, any other value itself.

    A storage offset does not count: a program fills a copy of an argument, or knows the very tensor that it reads in place.
    """
    if isinstance(leaf, RemoteTensor):
        meta = leaf._ref.meta
        own: Iterable[Any] = (_is_parameter(leaf), *attribute_values(leaf)) if len(leaf.__dict__) > 1 else ()
        return (meta.without_offset() if meta.offset else meta, leaf.requires_grad, *own)
    if isinstance(leaf, torch.Tensor):
        given = attribute_values(leaf) if leaf.__dict__ else ()
        return ("host", leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad, *given)
    if _is_size(leaf):
        return (torch.Size, tuple(leaf))
    # Any other object counts by identity alone: its content is compared by the program's guard
    return (type(leaf), comparable(leaf)) if is_scalar_like(leaf) else id(leaf)


def same_on_remote(leaves: list) -> dict[int, int]:
    """Place of a remote argument -> the first place of that very tensor, as in model(input_ids=x, labels=x).

    One copy serves both, so that the function finds them to be one object, as multi-head attention asks of its query and key.
    """
    if len(leaves) < 2 or len(set(map(id, leaves))) == len(leaves):
        return {}
    first: dict[int, int] = {}
    remote = [k for k, leaf in enumerate(leaves) if isinstance(leaf, RemoteTensor)]
    found = {place: first.setdefault(id(leaves[place]), place) for place in remote}
    return {place: earlier for place, earlier in found.items() if earlier != place}


def keys_of(leaves: list) -> list:
    """The key_of of each argument. One with the memory of an earlier one names it, and if it is that very tensor."""
    keys = list(map(key_of, leaves))
    for place, earlier in same_on_remote(leaves).items():
        keys[place] = (*keys[place], ("shared memory", earlier, True))
    for place, earlier in same_on_host(leaves).items():
        keys[place] = (*keys[place], ("shared memory", earlier, leaves[place] is leaves[earlier]))
    return keys


def _is_size(thing: Any) -> bool:
    """True for a tensor's shape, of which torch's functions of trees would make a plain tuple."""
    return type(thing) is torch.Size


def flatten_call(args: tuple, kwargs: dict) -> tuple[list, TreeSpec]:
    """Flatten as tree_flatten((args, kwargs)) does, faster where no argument has parts."""
    leaves = [*args, *kwargs.values()]
    if not _LEAF_TYPES.issuperset(map(type, leaves)) and not all(map(_is_leaf, map(type, leaves))):
        return tree_flatten((args, kwargs), is_leaf=_is_size)
    names = (len(args), *kwargs)
    tree = _flat_trees.get(names)
    if tree is None:
        if len(_flat_trees) >= MAX_FLAT_TREES:
            _flat_trees.clear()
        tree = _flat_trees[names] = tree_flatten((tuple(args), dict(kwargs)), is_leaf=_is_size)[1]
    return leaves, tree


def _is_leaf(kind: type) -> bool:
    """True for a class whose objects have no parts in torch's trees: it is not registered, and no kind of tuple."""
    return kind in _LEAF_TYPES or kind is torch.Size or (kind not in SUPPORTED_NODES and not issubclass(kind, tuple))


class Containers:
    """The lists, dictionaries and objects of registered classes among a call's arguments, and those that the function gets.

    given, leaves: the caller's arguments, and their leaves; prepared: the leaves of those that the function gets, args and
    kwargs.
    """

    def __init__(self, given: tuple, tree: TreeSpec, leaves: list, prepared: list) -> None:
        self.args, self.kwargs = got = tree_unflatten(prepared, tree)
        self._pairs: list[tuple[Any, Any]] = []
        self.paths: dict[int, tuple] = {}  # keys that lead to a list or dictionary, by identity of the function's
        self._given = {id(new): old for old, new in zip(leaves, prepared, strict=True)}
        self._objects: list[tuple[Any, Any, dict[str, Any]]] = []  # of registered classes: given, got, got's attributes
        self._walk(given, got, ())

    def _walk(self, given: Any, got: Any, path: tuple | None) -> None:
        """path: keys that lead to a container; None within an object of a registered class, whose attributes have no keys."""
        if given is got or id(got) in self._given:
            return
        if not isinstance(given, (list, dict, tuple, deque)):
            self._given[id(got)] = given
            self._objects.append((given, got, attributes := _attributes(got)))
            for name, value in attributes.items():
                self._walk(getattr(given, name, value), value, None)
            return
        self._given[id(got)] = given
        if path is None:
            self._pairs += [] if isinstance(given, tuple) else [(given, got)]
        elif not isinstance(given, tuple):
            self._pairs.append((given, got))
            self.paths[id(got)] = path
        for key in given if isinstance(given, dict) else range(len(given)):
            self._walk(given[key], got[key], None if path is None else (*path, key))

    def originals(self, results: Any) -> Any:
        """Results with the caller's lists and dictionaries in place of the function's."""
        if not any(id(thing) in self.paths for thing in mutable_containers(results)):
            return results
        return tree_map(
            lambda thing: self._given[id(thing)] if id(thing) in self.paths else thing,
            results,
            is_leaf=one_of(self.paths),
        )

    def give_back(self) -> bool:
        """Give the caller's containers the entries that the function's have now. Returns whether any changed."""
        changed = False
        for given, got, before in self._objects:
            after = _attributes(got)
            for name in [*before, *(after.keys() - before.keys())]:
                if name not in after:
                    changed = True
                    object.__delattr__(given, name)
                elif name not in before or after[name] is not before[name]:
                    changed = True
                    object.__setattr__(given, name, self._given.get(id(after[name]), after[name]))
        for given, got in self._pairs:
            # A leaf or container that the function got in place of the caller's becomes the caller's again
            if isinstance(given, dict):
                entries: Any = {key: self._given.get(id(value), value) for key, value in got.items()}
                same = list(entries) == list(given) and all(map(is_, entries.values(), given.values()))
            else:
                entries = [self._given.get(id(value), value) for value in got]
                same = len(entries) == len(given) and all(map(is_, entries, given))
            if same:
                continue

            # The container stays the same object, to which the caller has references
            changed = True
            given.clear()
            (given.update if isinstance(given, dict) else given.extend)(entries)
        return changed


def _attributes(thing: Any) -> dict[str, Any]:
    """The attributes of an object that it has itself, in a dictionary or in slots."""
    slots = [vars(cls).get("__slots__", ()) for cls in type(thing).__mro__]
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    own = {name: getattr(thing, name) for name in names if not name.startswith("__") and hasattr(thing, name)}
    return own | getattr(thing, "__dict__", {})


@dataclass(slots=True)
class ContainerArgument:
    """A result that is a list or dictionary among the arguments, and the keys that lead to it from (args, kwargs)."""

    path: tuple

    def of(self, given: tuple) -> Any:
        """The caller's container."""
        return functools.reduce(getitem, self.path, given)


def one_of(objects: Iterable[int]) -> Callable[[Any], bool]:
    """A predicate for torch's functions of trees: whether an object is one of those with these identities, or a shape.

    tree_map and tree_flatten keep it in a reference cycle, where an object that it refers to would outlive the call.
    """
    identities = frozenset(objects)
    return lambda thing: id(thing) in identities or _is_size(thing)


def mutable_containers(results: Any) -> list:
    """The lists, dictionaries and deques among the results."""
    containers: list = []

    def note(thing: Any) -> bool:
        if isinstance(thing, (list, dict, deque)):
            containers.append(thing)
        return False

    tree_leaves(results, is_leaf=note)
    return containers
