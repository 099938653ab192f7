"""What goes into a recorded call and what it leaves: arguments, results, gradients, Python state, optimizers' step counts.

Knows what is found below the function (state_walk.py) and on the tape; nothing of programs or of when a call is replayed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gt.client.capture.recording import CallRecording, Difference
from gt.client.capture.state_walk import Item, Reach, exact, look, plain, same
from gt.client.device.remote_tensor import RemoteTensor, Shown
from gt.client.groups.group_context import stack
from gt.client.trace.dispatch import call
from gt.client.trace.op_info import info_of
from gt.client.trace.uploads import upload
from gt.errors import CaptureError

OUTSIDE = ", and Python does not run in a replay: do it outside the function"
aten = torch.ops.aten


@dataclass
class RecordedCall:
    """One call that was recorded, and what its comparison with the next needs."""

    tape: CallRecording
    key: tuple
    leaves: list  # the arguments as they came
    names: dict[int, Any]  # tensors that were there -> what they are
    inputs: dict[int, RemoteTensor]  # argument -> its tensor, which a replay fills
    settings: dict[str, tuple[dict, str, Any]]  # path -> group, key and value of what optimizers are told beside tensors


class Draws:
    """The state of the host's random numbers and what was drawn of them since."""

    def __init__(self) -> None:
        self._before = self._now()

    def _now(self) -> dict[str, Any]:
        name, keys, at, *rest = np.random.get_state()
        return {
            "Python's random": random.getstate(),
            "numpy.random": (name, bytes(keys), at, *rest),  # type: ignore[arg-type]
            "torch's CPU generator": bytes(torch.get_rng_state().numpy()),
        }

    def found(self) -> str:
        """Names of those that were drawn from, or ""."""
        return " and ".join(name for name, state in self._now().items() if state != self._before[name])


def key_of(leaf: Any) -> Any:
    """What of an argument selects a program: a tensor's look, any other value itself."""
    if isinstance(leaf, RemoteTensor):
        return (leaf._ref.meta, leaf.requires_grad)
    if isinstance(leaf, torch.Tensor):
        return ("host", leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad)
    return (type(leaf), exact(leaf)) if plain(leaf) else id(leaf)


def modes() -> tuple:
    device = Shown.device.type
    cast = torch.is_autocast_enabled(device) if device != "lazy" else False
    # A default device is a mode on this stack: to look at that costs a fiftieth of asking for the device
    default = torch.get_default_device() if torch._C._len_torch_function_stack() else None
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cast, torch.get_autocast_dtype(device) if cast else None,
        torch.get_default_dtype(), default, torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"), torch.is_anomaly_enabled(), torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(), stack.names[-1],
    )  # fmt: skip


def other(old: tuple, new: tuple) -> str:
    """In what the key of a call is not that of a program: (structure, each argument's key_of, modes)."""
    if old[0] != new[0]:
        return "arguments in another structure"
    for k in range(old[0].num_leaves):
        if old[1 + k] != new[1 + k]:
            return f"argument {k}, which was {_said(old[1 + k])} and is {_said(new[1 + k])}"
    return "another mode (grad, autocast, default dtype or device, signal group) or session"


def _said(key: Any) -> str:
    if not isinstance(key, tuple):
        return "an object"
    if key[0] == "host":
        return f"a CPU tensor {str(key[3]).removeprefix('torch.')}{list(key[1])}"
    if isinstance(key[0], type):
        return f"{key[1] if key[0] in (float, complex) else repr(key[1]):.40}"
    return f"a remote tensor {key[0].spec.text()}"


def given(leaves: list, last: RecordedCall | None) -> tuple[list, dict[int, RemoteTensor]]:
    """Arguments as the function gets them, and which of them a replay fills: all from the host, and those that vary."""
    taken, inputs = list(leaves), {}
    for k, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        if isinstance(leaf, RemoteTensor):
            if last is None or last.leaves[k] is leaf:
                continue
            if leaf.requires_grad:
                raise CaptureError(
                    f"argument {k} requires grad and is a new tensor at each call: pass the same one, and copy_() into it"
                )
            inputs[k] = taken[k] = call(info_of(aten.clone.default), (leaf,))
        else:
            if leaf.requires_grad:
                raise CaptureError(f"argument {k} is a CPU tensor that requires grad; move it to {Shown.device.type!r} first")
            inputs[k] = taken[k] = upload(leaf)
    return taken, inputs


def detached(result: Any) -> Any:
    return result.detach() if isinstance(result, torch.Tensor) and result.requires_grad and not result.is_leaf else result


# ---- what a call left behind


def side_effect(entry: Reach, leaving: Reach, made: int) -> Difference | None:
    """Python state that the call changed: a replay would not."""
    before = {item.path: item for item in entry.items}
    after = {item.path: item for item in leaving.items}
    states = {id(holder) for o in entry.optimizers for holder in (o.state, *o.state.values())}
    empty = {path for _, n, path in entry.sized if not n} & {path for _, n, path in leaving.sized if not n}
    for path in [*before, *after]:
        if path not in after or path not in before:
            return Difference("", _grown(path, after.get(path) or before[path], path in after, states))
        old, new = before[path], after[path]
        if isinstance(new.value, RemoteTensor):
            if new.value is not old.value and new.value._ref.id < made:
                return Difference(
                    "", f"the function assigns to {path} a tensor from before the call; copy_() into the old one instead"
                )
        elif not same(old.value, new.value) and not (path in empty and type(old.value) is type(new.value)):
            return Difference("", f"the function changes {path} from {_short(old.value)} to {_short(new.value)}{OUTSIDE}")
    for path, (_, then) in entry.stamps.items():
        if path not in leaving.stamps or leaving.stamps[path][1] != then:
            return Difference("", f"the function changes {path}{OUTSIDE}")
    for path, (tensor, then) in entry.looks.items():
        if look(tensor) != then:
            text = f"the function changes memory, requires_grad or hooks of {path}{OUTSIDE}; to set values, use copy_()"
            return Difference("", text)
    return None


def _grown(path: str, item: Item, added: bool, states: set[int]) -> str:
    """An entry that a call added or removed; states: identities of what optimizers keep their state in."""
    if id(item.holder) in states and added:
        return "the optimizer makes its state in this call; the next calls can become a program"
    inside, _, key = path.rpartition("[")
    if not inside or not path.endswith("]"):
        return f"the function {'sets' if added else 'deletes'} {path}{OUTSIDE}"
    if isinstance(item.holder, list):
        return f"the function {'appends to' if added else 'removes elements of'} `{inside}`{OUTSIDE}"
    return f"the function {'adds' if added else 'removes'} the entry [{key} of `{inside}`{OUTSIDE}"


def settings(entry: Reach) -> dict[str, tuple[dict, str, Any]]:
    """Values in the param_groups of optimizers: path -> group, key, value."""
    groups = [group for optimizer in entry.optimizers for group in optimizer.param_groups]
    holders = {id(group): group for group in groups}
    holders |= {id(value): group for group in groups for value in group.values() if isinstance(value, tuple)}  # betas
    return {
        item.path: (holders[id(item.holder)], item.key, item.value)
        for item in entry.items
        if id(item.holder) in holders and plain(item.value)
    }


_CYCLED = " (OneCycleLR and CyclicLR change it unless they get cycle_momentum=False)"


def cure(last: RecordedCall, now: RecordedCall) -> str:
    """What to do about settings of an optimizer that changed between two calls, or ""."""
    rates, others = "", ""
    for path, (group, key, new) in now.settings.items():
        old = last.settings.get(path, (group, key, new))[2]
        if same(old, new):
            continue
        told = f"; {path} was {_short(old)} and is {_short(new)}"
        if key != "lr":
            cycled = _CYCLED if key == "momentum" or "'betas'" in path else ""
            others = others or f"{told}: each value needs a program of its own{cycled}"
        elif not rates:
            fused = "" if "capturable" in group or "fused" not in group else " and fused=True"
            first = group.get("initial_lr", new)  # as a scheduler keeps it
            tensor = f"lr=torch.tensor({first if plain(first) else new!r}, device='remote'){fused}"
            rates = f"{told}: one program serves all learning rates if the optimizer gets {tensor}"
    return rates + others


def _short(value: Any) -> str:
    return f"{value!r:.40}" if plain(value) else type(value).__name__


def carried(now: RecordedCall, entry: Reach, leaving: Reach) -> tuple[list[tuple[int, int]], Difference | None]:
    """(read, made): names that hold another tensor after the call, which the next call reads."""
    read, made = now.tape.read(), now.tape.made()
    after = {path: tensor._ref.id for path, tensor in leaving.tensors()}
    pairs: dict[int, int] = {}
    for path, tensor in entry.tensors():
        old, new = tensor._ref.id, after.get(path)
        if old == new or old not in read or path.endswith(".grad"):
            continue
        if new is None or new not in made or pairs.get(old, new) != new:
            text = f"the function reads {path} and leaves a tensor there that it did not make alone; copy_() into the old one"
            return [], Difference("", text)
        pairs[old] = new
    return list(pairs.items()), None


def grads_of(entry: Reach, leaving: Reach, read: dict) -> list[tuple[RemoteTensor, bool, Any, Any]]:
    """leaf, whether it had a gradient, the one that was read, the one that is left; leaves come from both walks."""
    had = {id(leaf): entry.grads.get(path) for path, leaf in entry.leaves}
    found = []
    for _, leaf in leaving.leaves:
        start = had.get(id(leaf))
        found.append((leaf, start is not None, start if start is not None and start._ref.id in read else None, leaf.grad))
    return found


def make_capturable(optimizer: torch.optim.Optimizer) -> bool:
    """Have a step count that is Python's kept on the device, where torch can; whether anything changed."""
    changed = False
    for group in optimizer.param_groups:
        remote = [p for p in group["params"] if isinstance(p, RemoteTensor)]
        if not remote or group.get("capturable", True) or group.get("fused"):
            continue
        group["capturable"] = changed = True
        for p in remote:
            step = optimizer.state.get(p, {}).get("step")
            if isinstance(step, torch.Tensor) and not isinstance(step, RemoteTensor):
                optimizer.state[p]["step"] = step.to(p.device)
    return changed
