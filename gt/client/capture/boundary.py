"""The boundary of a recorded call: its arguments, results, gradients, Python side effects and optimizer settings.

Knows snapshots of Python state (state_walk.py) and the recording; nothing of programs, or of when a call is replayed.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_leaves, tree_map

from gt.client import current_session
from gt.client.capture.aliasing import (
    CallMemory,
    ContainerArgument,
    Containers,
    attribute_names,
    copy_attributes,
    copy_of,
    mutable_containers,
    one_of,
    same_on_host,
    same_on_remote,
    sharing_arguments,
)
from gt.client.capture.gradients import (
    LeafGradient,
    find_memory,
    grad_arguments,
    has_graph,
    leads_to,
    made_paths,
    memory_of,
    rebound,
)
from gt.client.capture.host_draws import HostDraws
from gt.client.capture.recording import KEEPS_GRAPH, CallRecording, Difference
from gt.client.capture.state_walk import NODE_HOOKS, StateItem, StateSnapshot, snapshot
from gt.client.capture.user_code import module_of
from gt.client.capture.watches.node_hooks import comparable_hooks
from gt.client.device.remote_tensor import RemoteTensor, Shown, is_leaf, tensor_identity
from gt.client.groups.group_context import stack
from gt.client.trace.uploads import upload
from gt.client.values.fingerprints import is_named, is_scalar_like, unchanged
from gt.client.values.settings import matmul_precision, settings

INSIDE = ", and a program's have none: call backward() in the function"
OUTSIDE = ", and Python does not run in a replay: do it outside the function"
TORCH_GENERATOR = "torch's CPU generator"
KEPT_NEW = "that it has made and keeps: have it change one that is there, or return a copy"
HELD_BEFORE = "that state held before the call, and holds no more: return a copy"
ANOTHER = (
    ": pass the same one, or its tensors; of a dataclass GT sees the fields after torch.utils._pytree.register_dataclass(Class)"
)
MADE = "that it has made, and that no replay can make: return a tuple, list, dictionary, or an object that only results have"
_COMPARED = (torch.Tensor, np.ndarray)
aten = torch.ops.aten


@dataclass
class RecordedCall:
    """One recorded call, with everything that its comparison with the next call needs."""

    tape: CallRecording
    key: tuple
    leaves: list  # the arguments as the caller passed them
    names: dict[int, Any]  # id of a tensor from before the call -> its path in Python
    inputs: dict[int, RemoteTensor]  # argument -> its tensor, which a replay fills
    settings: dict[str, tuple[dict, str, Any]]  # path -> param_group, key and value of an optimizer's settings
    draws: HostDraws | None  # random numbers drawn on the CPU, where earlier calls drew some
    memory: CallMemory
    whole: dict[int, Any] = field(default_factory=dict)  # containers that it returns as they are, see returned_objects
    apart: bool = False  # whether arguments that it moves to the device are copies, see MovedArguments
    made: frozenset[str] = frozenset()  # places where it has left new state
    rebound: frozenset[str] = frozenset()  # paths of tensors that it gave new memory
    kind: tuple = ()  # of the state before it: see StateSnapshot.kind

    def compare_states(self, entry: StateSnapshot, leaving: StateSnapshot) -> None:
        """Note what the call has made and counted, between the state before it and the one after it."""
        self.kind = entry.kind()
        self.made, self.tape.counts = made_paths(entry, leaving, self.tape.first), counts(entry, leaving)
        replaced = rebound(entry, self.tape.first)
        self.rebound = frozenset(path for path, (tensor, _) in entry.identities.items() if id(tensor) in replaced)

    def kept(self) -> RecordedCall | None:
        """This call, which is over, for the comparison with the next one; None if it is not compared with that.

        Its arguments end with the caller's last reference, and their copies now.
        """
        self.inputs, self.whole = {}, {}
        self.leaves = [_weak(leaf) for leaf in self.leaves]
        return self if self.draws is None or self.draws.fills_inputs else None

    def ended(self) -> bool:
        """True if an argument that is neither a tensor nor a number has ended: another may have its identity."""
        objects = (leaf for k, leaf in zip(self.key[1:], self.leaves, strict=False) if not isinstance(k, tuple))
        return any(type(leaf) is weakref.ref and leaf() is None for leaf in objects)

    def had(self, k: int, leaf: torch.Tensor) -> bool:
        """True if this very tensor was the call's argument k. The call is over."""
        return self.leaves[k]() is leaf


def _weak(leaf: Any) -> Any:
    """A weak reference to an argument; the argument itself if it is a number or the like, or takes none."""
    if is_scalar_like(leaf) or isinstance(leaf, weakref.ref):
        return leaf
    try:
        return weakref.ref(leaf)
    except TypeError:
        return leaf


class HostRngState:
    """The state of the host's random number generators when this object was made."""

    def __init__(self) -> None:
        self._before = self._now()

    def _now(self) -> dict[str, Any]:
        name, keys, position, *rest = np.random.get_state()
        return {
            "Python's random": random.getstate(),
            "numpy.random": (name, bytes(keys), position, *rest),  # type: ignore[arg-type]
            TORCH_GENERATOR: bytes(torch.get_rng_state().numpy()),
        }

    def changed(self) -> str:
        """Names of the generators that have been used since, or ""."""
        return " and ".join(name for name, state in self._now().items() if state != self._before[name])


def modes() -> tuple:
    """Torch's global state that decides which ops a call records, and the signal group."""
    device = Shown.device.type
    cast = torch.is_autocast_enabled(device) if device != "lazy" else False
    # A default device is a mode on this stack, whose length costs a fiftieth of asking for the device
    default = torch.get_default_device() if torch._C._len_torch_function_stack() else None
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cast, torch.get_autocast_dtype(device) if cast else None,
        torch.get_default_dtype(), default, torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"),
        torch.is_anomaly_enabled(), matmul_precision(), torch.are_deterministic_algorithms_enabled(), settings(),
        (stack.scope() if stack.recorded.changes else stack.recorded).group, observer(),
    )  # fmt: skip


def observer() -> str:
    """The caller's code that gets each op or saved tensor, which a replay would not call; or ""."""
    if torch._C._len_torch_dispatch_stack():
        return "a TorchDispatchMode is active, which gets each op"
    modes_of_calls = torch.overrides._get_current_function_mode_stack() if torch._C._len_torch_function_stack() else ()
    if modes_of_calls and any(type(mode) is not DeviceContext for mode in modes_of_calls):
        return "a TorchFunctionMode is active, which gets each call of torch"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "saved_tensors_hooks are active, which get each tensor that backward() needs"
    return ""


def why_key_differs(old: tuple, new: tuple) -> str:
    """Say in which part a call's key differs from a program's. Keys are (structure, each argument's key_of, *modes)."""
    if old[0] != new[0]:
        return "arguments in another structure"
    for place in range(old[0].num_leaves):
        if old[1 + place] != new[1 + place]:
            if not isinstance(new[1 + place], tuple) and not isinstance(old[1 + place], tuple):
                return f"argument {place}, which is another object{ANOTHER}"
            return f"argument {place}, {_difference(old[1 + place], new[1 + place])}"
    if old == new:  # the call before had an object at the same address, which has ended
        return f"an argument, which is another object{ANOTHER}"
    return "another mode (grad, autocast, default dtype or device, signal group), setting or session"


def _difference(old: Any, new: Any) -> str:
    before, after = _describe(old), _describe(new)
    if before != after:
        numbers = all(isinstance(key, tuple) and key[0] in (int, float) for key in (old, new))
        cure = f": to compute with it in one program for all values, pass torch.tensor({after})" if numbers else ""
        return f"which was {before} and is {after}{cure}"
    last, now = _details(old), _details(new)
    names = [name for name in now if last[name] != now[name]]
    parts = [f"whose {name} was {last[name]} and is {now[name]}" for name in names]
    advice = ": pass a clone(memory_format=torch.contiguous_format) of it" if names == ["stride"] else ""
    return f"{after} {', '.join(parts)}{advice}"


def _details(key: Any) -> dict[str, Any]:
    """The parts of a tensor's key that its description lacks."""
    if key[0] == "host":
        return {"stride": list(key[2]), "requires_grad": key[4], "attributes": key[5:]}
    return {"stride": list(key[0].stride), "requires_grad": key[1], "attributes": key[2:]}


def _describe(key: Any) -> str:
    if not isinstance(key, tuple):
        return "an object"
    if key[0] == "host":
        return f"a CPU tensor {str(key[3]).removeprefix('torch.')}{list(key[1])}"
    if isinstance(key[0], type):
        return f"{key[1] if key[0] in (float, complex) else repr(key[1]):.40}"
    return f"a remote tensor {key[0].spec.text()}"


def leaf_arguments(leaves: list) -> dict[str, RemoteTensor]:
    """The arguments that may have a gradient."""
    return {f"argument {k}": t for k, t in enumerate(leaves) if isinstance(t, RemoteTensor) and t.requires_grad and is_leaf(t)}


def names_of(entry: StateSnapshot, prepared: list, drawn: list[RemoteTensor]) -> dict[int, str]:
    """Id of a tensor from before the call -> its path in Python, its place among arguments or among drawn tensors."""
    # Reversed, so that the first path of a tensor that has several wins. An argument's place wins over its path in state
    names = {tensor._ref.id: path for path, tensor in reversed(list(entry.tensors()))}
    names.update({t._ref.id: f"argument {k}" for k, t in enumerate(prepared) if isinstance(t, RemoteTensor)})
    names.update({t._ref.id: f"drawn tensor {k}" for k, t in enumerate(drawn)})
    return names


def prepare_inputs(leaves: list, last: RecordedCall | None) -> tuple[list, dict[int, RemoteTensor]]:
    """Upload or copy the arguments that a replay fills: those of the host, and remote ones that vary between calls.

    Returns the arguments that the function gets, and argument -> tensor of the filled ones. A CPU tensor that requires grad
    stays the caller's, which its gradient has to reach.
    """
    prepared, inputs = list(leaves), dict[int, RemoteTensor]()
    sharing = sharing_arguments(leaves, last.memory) if last is not None else ()
    same, repeated = same_on_host(leaves), same_on_remote(leaves)
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        if isinstance(leaf, RemoteTensor):
            # The first recording reads every remote argument in place. In the second, an
            # argument that is another tensor than in the first one varies: it gets a copy,
            # which a replay can fill. One that is the same tensor is read in place by replays
            if last is None or last.had(place, leaf) or place in sharing:
                continue
            if leaf.requires_grad or (is_leaf(leaf) and leaf.grad is not None):  # which a copy would lack
                continue
            copy = inputs.get(repeated.get(place, place))
            inputs[place] = prepared[place] = copy if copy is not None else copy_of(leaf)
        elif place in same:
            earlier = prepared[same[place]]
            with torch.inference_mode(False), torch.no_grad():
                inputs[place] = prepared[place] = earlier if leaf is leaves[same[place]] else earlier.detach()
        elif not leaf.requires_grad:
            with torch.inference_mode(False):  # an inference tensor has no count of the writes to it
                inputs[place] = prepared[place] = upload(leaf)
    for place, copy in inputs.items():
        copy_attributes(copy, leaves[place])
    return prepared, inputs


def detached(results: Any, tape: CallRecording | None = None, whole: Mapping[int, Any] = MappingProxyType({})) -> Any:
    """Results without autograd history; leaves of the graph and other values as they are. The tape notes a lost one.

    whole: containers that stay the same objects, by identity.
    """

    def detach(result: Any) -> Any:
        if not (isinstance(result, torch.Tensor) and result.requires_grad) or is_leaf(result):
            return result
        if tape is not None:
            tape.detaches = True
        plain = result.detach()
        for name in attribute_names(result):
            setattr(plain, name, result.__dict__[name])
        return plain

    return tree_map(detach, results, is_leaf=one_of(whole))


def recorded_results(results: Any, tape: CallRecording, whole: Mapping[int, Any], leaves: list, first: bool) -> Any:
    """The results of a recorded call, detached. They keep their graph where the caller may have to use it.

    leaves: the arguments, to which a graph may lead; first: whether the call can be no program.
    """
    for result in tree_leaves(results, is_leaf=one_of(whole)):
        if isinstance(result, RemoteTensor) and result._ref.id >= tape.first and (names := list(attribute_names(result))):
            tape.refuse_program(f"the function gives a result the attribute {names[0]!r}: return its value beside the result")
    without_graph, given = detached(results, tape, whole), grad_arguments(leaves)
    tape.recorder.flush()
    tape.keeps_graph = tape.detaches and has_graph(results) and not tape.trains()
    if tape.keeps_graph:  # the next calls have a program for each pass
        tape.prevents.append(Difference("", KEEPS_GRAPH))
        return results
    for k, tensors in given.items():
        # Without the graph, a backward pass of the caller would not reach its argument. Python then runs at each call
        if tape.detaches and leads_to(results, tensors):
            tape.refuse_program(f"results have a graph that leads to argument {k}{INSIDE}")
            return results
    return results if first and given else without_graph


def returned_objects(
    results: Any, entry: StateSnapshot, roots: dict[str, Any], containers: Containers, tape: CallRecording
) -> dict[int, Any]:
    """Objects among the results that the caller gave, or that Python state holds: a replay returns these very objects.

    Returns identity -> ContainerArgument, or a list or dictionary of state. The tape refuses a program for an object that the
    call has made.
    """
    found = {id(thing): thing for thing in mutable_containers(results)}
    others = [x for x in tree_leaves(results) if not (is_scalar_like(x) or isinstance(x, _COMPARED) or is_named(x))]
    whole: dict[int, Any] = {key: ContainerArgument(containers.paths[key]) for key in found if key in containers.paths}
    # The common case needs no second walk of Python state
    if len(whole) == len(found) and not others:
        return whole
    before, now = _objects(entry, roots), _objects(snapshot(roots, entry.followed, entry.unread), roots)
    # State that is there after the call is returned as it is, and the loop below refuses what the call made or let go
    for key in [key for key in found if key in now and key not in whole]:
        whole[key] = found[key]
    for key, thing in found.items():
        if (key in before) is not (key in now) and key not in containers.paths:
            tape.refuse_program(f"the function returns a {type(thing).__name__} {KEPT_NEW if key in now else HELD_BEFORE}")
    for thing in others:
        if id(thing) not in before or id(thing) not in now:
            tape.refuse_program(f"the function returns an object of {type(thing).__name__} {MADE}")
    return whole


def _objects(state: StateSnapshot, roots: dict[str, Any]) -> set[int]:
    """Identities of the objects of a snapshot. Those that last are alive as long as the snapshot and the roots."""
    known = {id(thing) for thing, _, _ in state.lengths} | {id(thing) for _, thing, _ in state.kinds}
    known |= {id(thing) for thing, _ in state.fingerprints.values()} | {id(item.value) for item in state.items}
    return known | set(map(id, (*roots.values(), *roots["arguments"])))


# ---- after the call


def changed_on_cpu(entry: StateSnapshot, leaving: StateSnapshot) -> list[torch.Tensor]:
    """The small CPU tensors of Python state that the call has changed in place."""
    return [
        thing
        for path, (thing, then) in entry.fingerprints.items()
        if type(thing) in (torch.Tensor, torch.nn.Parameter)
        and thing.is_contiguous()
        and len(then) == 3
        and not thing.is_inference()
        and path in leaving.fingerprints
        and leaving.fingerprints[path][1] != then
    ]


def side_effect(entry: StateSnapshot, leaving: StateSnapshot, first: int, draws: HostDraws | None) -> Difference | None:
    """The first change of Python state in the call, which a replay would not make; None if there is none.

    first: the lowest id of a tensor made in the call. draws: the tape of what a replay draws and changes on the CPU.
    """
    state = draws.state if draws else ()
    if draws and state and draws.obstacle:
        return Difference("", draws.obstacle)
    before = {item.path: item for item in entry.items}
    after = {item.path: item for item in leaving.items}
    states = {id(holder) for o in entry.optimizers for holder in (o.state, *o.state.values())}
    # Containers that are empty before and after the call: a new empty one in its place, as of `self.hooks = {}`, is no change
    empty = {path for _, n, path in entry.lengths if not n} & {path for _, n, path in leaving.lengths if not n}

    # Values: a path that appears or vanishes, then one whose value differs
    for path in [*before, *after]:
        if path not in after or path not in before:
            return Difference("", _explain_entry(path, after.get(path) or before[path], path in after, states, before))
        old, new = before[path], after[path]
        if path in entry.counters and path in leaving.counters:
            continue  # a replay counts on: see counts()
        if isinstance(new.value, RemoteTensor):
            # A tensor that the call has made may be left here: loop_carried and take_made see to it.
            # To swap references to tensors from before the call is a side effect, which no replay has
            if new.value is not old.value and new.value._ref.id < first:
                return Difference(
                    "", f"the function assigns to {path} a tensor from before the call; copy_() into the old one instead"
                )
        elif not unchanged(old.value, new.value) and not (path in empty and type(old.value) is type(new.value)):
            return Difference("", _explain_change(path, old, new))

    # Objects that change in place: arrays, sets, generators
    for path, (thing, then) in entry.fingerprints.items():
        if any(thing is tensor for tensor in state):
            continue  # a replay changes it too: see HostDraws
        if path not in leaving.fingerprints or leaving.fingerprints[path][1] != then:
            return Difference("", f"the function changes {path}{OUTSIDE}")

    # Tensors that are the same object, with other memory, requires_grad or hooks
    replaced = rebound(entry, first)
    for path, (tensor, then) in entry.identities.items():
        if tensor_identity(tensor) != then and id(tensor) not in replaced:
            text = f"the function changes memory, requires_grad or hooks of {path}{OUTSIDE}; to set values, use copy_()"
            return Difference("", text)
    made = range(entry.serial, leaving.serial)
    if comparable_hooks(leaving.node_hooks, made) != comparable_hooks(entry.node_hooks, made):
        return Difference("", f"the function changes {NODE_HOOKS} from before the call{OUTSIDE}")
    return None


def counts(entry: StateSnapshot, leaving: StateSnapshot) -> dict[str, int]:
    """Path of a counter -> the number that the call has added to it."""
    both = entry.counters.keys() & leaving.counters.keys()
    return {path: leaving.counters[path].value - entry.counters[path].value for path in sorted(both)}


def _explain_change(path: str, old: StateItem, new: StateItem) -> str:
    """Describe a value that a call has changed."""
    return f"the function changes {path} from {_short(old.value)} to {_short(new.value)}{OUTSIDE}"


def _explain_entry(path: str, item: StateItem, added: bool, states: set[int], before: dict[str, StateItem]) -> str:
    """Describe an entry that a call added or removed. states: identities of the containers of optimizers' state.

    before: values before the call, by path.
    """
    owner = before.get(path.rpartition(".")[0])
    optimizers = owner is not None and isinstance(owner.value, torch.optim.Optimizer)
    if added and (optimizers or id(item.holder) in states):
        return "the optimizer makes its state in this call; the next calls can become a program"
    inside, _, key = path.rpartition("[")
    if not inside or not path.endswith("]"):
        return f"the function {'sets' if added else 'deletes'} {path}{OUTSIDE}"
    if isinstance(item.holder, list):
        return f"the function {'appends to' if added else 'removes elements of'} `{inside}`{OUTSIDE}"
    return f"the function {'adds' if added else 'removes'} the entry [{key} of `{inside}`{OUTSIDE}"


def optimizer_settings(entry: StateSnapshot) -> dict[str, tuple[dict, str, Any]]:
    """Values in the param_groups of optimizers: path -> group, key and value."""
    groups = [group for optimizer in entry.optimizers for group in optimizer.param_groups]
    holders = {id(group): group for group in groups}
    # A tuple in a group, such as Adam's betas, is a holder of its own on the walk: its items belong to the group too
    holders |= {id(value): group for group in groups for value in group.values() if isinstance(value, tuple)}  # betas
    return {
        item.path: (holders[id(item.holder)], item.key, item.value)
        for item in entry.items
        if id(item.holder) in holders and is_scalar_like(item.value)
    }


_IF_CYCLED = (
    " (OneCycleLR and CyclicLR change it unless they get cycle_momentum=False; one program serves all values of torch's SGD, "
    "Adam and AdamW without fused and foreach)"
)


def hint(last: RecordedCall, now: RecordedCall) -> str:
    """Advice on settings of an optimizer that changed between two calls, or ""."""
    rates, others = "", ""
    for path, (group, key, new) in now.settings.items():
        old = last.settings.get(path, (group, key, new))[2]
        if unchanged(old, new):
            continue
        change = f"; {path} was {_short(old)} and is {_short(new)}"
        if key != "lr":
            cycled = _IF_CYCLED if key == "momentum" or "'betas'" in path else ""
            others = others or f"{change}: each value needs a program of its own{cycled}"
        elif not rates:
            fused = "" if "capturable" in group or "fused" not in group else " and fused=True"
            first = group.get("initial_lr", new)  # as a scheduler keeps it
            tensor = f"lr=torch.tensor({first if is_scalar_like(first) else new!r}, device='remote'){fused}"
            rates = f"{change}: one program serves all learning rates if the optimizer gets {tensor}"
    return rates + others


def _short(value: Any) -> str:
    return f"{value!r:.40}" if is_scalar_like(value) else type(value).__name__


def loop_carried(
    now: RecordedCall, entry: StateSnapshot, leaving: StateSnapshot, results: Any
) -> tuple[list[tuple[int, int]], Difference | None]:
    """Pairs (id read, id made) of paths that hold another tensor after the call, which the next call reads.

    Such a path is a loop-carried value: the made tensor takes the place of the read one. With a Difference there are none.
    """
    # Example: `self.average = 0.9 * self.average + x` reads %5 at the path self.average and leaves
    # %40 there, which gives the pair (5, 40). Each replay reads the last one's %40 as its %5
    reads, makers, replaced = now.tape.reads(), now.tape.makers(), rebound(entry, now.tape.first)
    after = {path: tensor._ref.id for path, tensor in leaving.tensors()}
    # A result that was state would be the same tensor after each replay, and not the state of the call before
    before = {path: replaced.get(id(tensor), tensor._ref.id) for path, tensor in entry.tensors()}
    gone = {number for path, number in before.items() if number != after.get(path)}
    returned = [leaf for leaf in tree_leaves(results) if isinstance(leaf, RemoteTensor)]
    if any(leaf._ref.id in gone or now.memory.owner(leaf) in replaced.values() for leaf in returned):
        return [], Difference("", f"the function returns a tensor {HELD_BEFORE}")
    pairs: dict[int, int] = {}
    for path, tensor in entry.tensors():
        old, new = replaced.get(id(tensor), tensor._ref.id), after.get(path)
        # Gradients are carried by LeafGradient, which also knows when there is none
        if old == new or old not in reads or path.endswith(".grad"):
            continue
        # Two paths of one tensor have to lead to one new tensor: an id that is read can be replaced by one other only
        if new is None or new not in makers or pairs.get(old, new) != new:
            text = f"the function reads {path} and leaves a tensor there that it did not make alone; copy_() into the old one"
            return [], Difference("", text)
        pairs[old] = new
    return list(pairs.items()), None


def gradients(entry: StateSnapshot, leaving: StateSnapshot, reads: dict, first: int) -> list[LeafGradient]:
    """The gradients that a program reads and leaves. first: the lowest id of a tensor made in the call."""
    before = {id(leaf): entry.grads.get(path) for path, leaf in entry.leaves}
    rows = []
    for _, leaf in leaving.leaves:
        if not leaf.requires_grad and (id(leaf) not in before or find_memory(leaf)):
            continue  # state that the step makes, as a parameter of an average
        # No op reads a gradient that zero_grad() has dropped: a replay does not need its values
        start = before.get(id(leaf))
        read = start if start is not None and start._ref.id in reads else None
        left = leaf.grad
        # One of another step: each replay finds the newest, and leaves that
        if read is None and left is start and left is not None and left._ref.id < first:
            rows.append(LeafGradient(leaf, True, None, None, untouched=True))
        else:
            rows.append(LeafGradient(leaf, start is not None, memory_of(read), memory_of(left)))
    return rows


# Names with which user code reads a value or prints, and modules of torch that read values
_READERS = frozenset({"item", "tolist", "numpy", "print"})
_READING_MODULES = ("torch.distributions", "torch.amp.grad_scaler", "torch.optim.lr_scheduler")


def seems_to_read(entry: StateSnapshot) -> bool:
    """True if a function's code names a way to read a value: its Python will probably have to run at each call."""
    if any(isinstance(group.get("lr"), torch.Tensor) for optimizer in entry.optimizers for group in optimizer.param_groups):
        return False  # only a capturable optimizer leaves the rate where it is
    if entry.names & _READERS or "distributions" in entry.names:
        return True
    return _reaches(entry, _READING_MODULES)


def _reaches(entry: StateSnapshot, modules: tuple[str, ...] | str) -> bool:
    """True if an object or class that a function reaches is of one of torch's modules."""
    kinds = (item.value if isinstance(item.value, type) else type(item.value) for item in entry.items)
    return any(module_of(kind).startswith(modules) for kind in kinds)


def make_capturable(optimizer: torch.optim.Optimizer, begun: bool) -> bool:
    """Keep step counts on the device, where the optimizer can, and not in Python. Returns whether anything changed.

    begun: a call has been recorded, so that it is known whether the program makes sparse gradients.
    """
    changed = False
    for index, group in enumerate(optimizer.param_groups):
        remote = [parameter for parameter in group["params"] if isinstance(parameter, RemoteTensor)]
        # A step count in Python would be another number at each call, and so prevent every program of the optimizer's step
        if begun and _may_fuse(optimizer, group):
            group["fused"] = changed = True
            optimizer._need_device_dtype_check_for_fused = False  # type: ignore[attr-defined]
        elif remote and not group.get("capturable", True) and not group.get("fused"):
            group["capturable"] = changed = True
            _save_as_given(optimizer, index)
        else:
            continue
        for parameter in remote:
            # The step count, and what is computed from it: NAdam's mu_product
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.device.type == "cpu" and not value.dim():
                    state[key] = value.to(parameter.device)
    return changed


_made_capturable: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[int]] = weakref.WeakKeyDictionary()  # its groups


def _save_as_given(optimizer: torch.optim.Optimizer, index: int) -> None:
    """Have state_dict() say of a group that it is not capturable: parameters on a CPU take no steps with one that is."""
    if optimizer not in _made_capturable:
        _made_capturable[optimizer] = set()
        optimizer.register_state_dict_post_hook(_as_given)
    _made_capturable[optimizer].add(index)


def _as_given(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    groups = state["param_groups"]
    for index in _made_capturable.get(optimizer, ()):
        if index < len(groups) and "capturable" in groups[index]:
            groups[index]["capturable"] = False


def counts_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """True if its steps are counted on the device, as in state that a captured step has left in a checkpoint."""
    return any(isinstance(state.get("step"), RemoteTensor) for state in optimizer.state.values())


def _may_fuse(optimizer: torch.optim.Optimizer, group: dict) -> bool:
    """True for Adagrad, which counts on the device only where it is fused, if its user left that to torch."""
    if type(optimizer) is not torch.optim.Adagrad or group["fused"] is not None or group["foreach"] is not None:
        return False
    if group["differentiable"] or current_session.Current.offloads or current_session.current().made_sparse:
        return False
    return bool(group["params"]) and all(isinstance(p, RemoteTensor) and p.is_floating_point() for p in group["params"])
