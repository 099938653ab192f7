"""Placement of a model whose code cannot be changed: `apply` by names of modules, `balance` by cost.

It only enters signal groups around modules' forwards and counts flops on meta tensors; it knows nothing about workers.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gt.client.device.remote_tensor import RemoteTensor
from gt.client.groups.group_context import MAX_SHOWN_CHARACTERS, context
from gt.client.trace.dispatch import declare_buffer
from gt.config.match import assign, unmatched
from gt.config.schema import MAX_FUSED_PARTS, RULE_KEYS, Rule, fault_of_name
from gt.errors import ConfigError

Context = Callable[[str, int], Any]  # gt.signal.context, or a substitute of it in tests
Group = str | Sequence[str]  # its name, a suffix, or one group for each run of the modules
_PLACED = "_gt_placement"  # attribute of a placed module


def apply(
    model: nn.Module,
    rules: Mapping[str, Group | Mapping[str, Any]] | Iterable[Rule],
    context: Context = context,
) -> dict[str, Rule]:
    """Run the forward of every module whose name matches a pattern in that pattern's signal group.

    rules: {pattern: group}, {pattern: {"group": ..., "parts": ...}}, or a config's rules. A weight that fuses q, k and v has
    3 parts. The most specific pattern wins (gt.config.match). A group may be a suffix such as `_colpar`: it means that
    group of the stage around the module. With a list of groups the modules are divided into as many runs. A second
    call replaces the first. Returns name of a module -> its rule. ConfigError if a pattern matches no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"gt.signal.apply takes a torch.nn.Module, got {type(model).__name__}")
    listed = read(rules)
    names = [name for name, _ in model.named_modules()]
    missed = unmatched(listed, names)
    if missed:
        pattern = missed[0].pattern
        known = f"none of the {len(names) - 1} modules, such as {names[1:4]}"
        if len(names) == 1:
            known = f"no module: {type(model).__name__} has none in it, want the pattern '', which is the model itself"
        raise ConfigError(f"pattern {pattern!r} matches {known}")
    placed = assign(listed, names)
    for name, module in model.named_modules():
        unplace(module)
        if name in placed:
            module.__dict__[_PLACED] = Placement(module, placed[name], context)
    return placed


def read(rules: Mapping[str, Group | Mapping[str, Any]] | Iterable[Rule]) -> list[Rule]:
    """Rules of a user in the form of a config's rules; ConfigError for any other form."""
    if not isinstance(rules, Mapping):
        known = list(rules) if isinstance(rules, Iterable) else [rules]
        if not all(isinstance(rule, Rule) for rule in known):
            raise ConfigError(f"the rules are {rules!r:.80}, want a dict from patterns to groups, as {{'encoder.*': 'stage0'}}")
        return known
    listed = []
    for pattern, value in rules.items():
        whole: Mapping[str, Any] = value if isinstance(value, Mapping) else {"group": value}
        group, parts = whole.get("group"), whole.get("parts", 1)
        names = [group] if isinstance(group, str) else group if isinstance(group, (list, tuple)) else []
        for name in names:
            if isinstance(name, str) and (fault := fault_of_name(name)):
                raise ConfigError(f"rule for {pattern!r}: the group {name[:MAX_SHOWN_CHARACTERS]!a} {fault}")
        if type(parts) is not int or not 1 <= parts <= MAX_FUSED_PARTS:
            raise ConfigError(f"rule for {pattern!r}: parts is {parts!r:.40}, want {RULE_KEYS['parts']}")
        if isinstance(group, str) and set(whole) <= {"group", "parts"}:
            listed.append(Rule(pattern, group, parts))
        elif isinstance(group, (list, tuple)) and group and all(isinstance(g, str) for g in group):
            listed.append(Rule(pattern, "", parts, stages=tuple(group)))
        else:
            want = "want a group's name, a list of them, or {'group': ..., 'parts': ...}"
            raise ConfigError(f"rule for {pattern!r} is {value!r}, {want}")
    return listed


def governing(model: nn.Module) -> dict[str, Rule | None]:
    """Parameter -> rule of its module, or of the nearest module around that. {} if no module is placed."""
    by_parameter: dict[str, Rule | None] = {}
    inner: dict[str, Rule | None] = {}
    for name, module in model.named_modules():
        placement = module.__dict__.get(_PLACED)
        # named_modules() goes from outside in: the module around has its rule by now
        inner[name] = placement.rule if placement is not None else inner.get(name.rpartition(".")[0])
        for own, _ in module.named_parameters(name, recurse=False):
            by_parameter[own] = inner[name]
    return by_parameter if any(rule is not None for rule in inner.values()) else {}


class Placement:
    """The two hooks that keep a module's forward in its group; unlike a wrapper, they are deep-copied with it."""

    def __init__(self, module: nn.Module, rule: Rule, context: Context) -> None:
        self.rule, self.context = rule, context
        self.entered: list[Any] = []  # a module may call itself
        self.buffers = [(inner, name) for inner in module.modules() for name in inner._buffers]
        self.hooks = [
            module.register_forward_pre_hook(self.enter),
            module.register_forward_hook(self.leave, always_call=True),  # also when forward raises
        ]

    def enter(self, module: nn.Module, args: Any) -> None:
        if self.buffers:
            _declare_buffers([inner._buffers.get(name) for inner, name in self.buffers])
        context = self.context(self.rule.group, self.rule.parts)
        self.entered.append(context)  # first: Ctrl-C from now on ends in `leave`
        context.__enter__()

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.entered:  # none where Ctrl-C came before
            self.entered.pop().__exit__(None, None, None)


def _declare_buffers(buffers: Iterable[torch.Tensor | None]) -> None:
    """Declare remote buffers as the model's state, which is no data of a batch."""
    for buffer in buffers:
        if isinstance(buffer, RemoteTensor):
            declare_buffer(buffer)


def unplace(module: nn.Module) -> None:
    """Undo apply on one module."""
    placement = module.__dict__.pop(_PLACED, None)
    if placement is not None:
        for hook in placement.hooks:
            hook.remove()


# ---- cutting a list of modules into stages


def balance(modules: Iterable[nn.Module], stages: int, example: Any) -> list[tuple[int, int]]:
    """Divide modules, called one after the other, into `stages` contiguous runs whose largest cost is minimal.

    example: the first module's input, a tensor or a tuple of tensors, of which only shapes and dtypes matter. Returns one
    (start, stop) per stage. ValueError for fewer modules than stages.
    """
    listed = list(modules)
    if not 1 <= stages <= len(listed):
        raise ValueError(f"{len(listed)} modules cannot be divided into {stages} stages: want 1 to {len(listed)} stages")
    return partition(costs(listed, example), stages)


def costs(modules: Sequence[nn.Module], example: Any) -> list[int]:
    """Flops of each module's forward on meta tensors; a module's input is the output of the module before it."""
    value: Any = tuple(meta(t) for t in example) if isinstance(example, (tuple, list)) else meta(example)
    flops = []
    for module in modules:
        twin = to_meta(module)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            value = twin(*value) if isinstance(value, (tuple, list)) else twin(value)
        # a module without matmuls costs the elements of its output, or such stages would seem free
        flops.append(max(int(counter.get_total_flops()), elements(value)))
    return flops


def meta(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value


def elements(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    return sum(elements(item) for item in value) if isinstance(value, (tuple, list)) else 0


def to_meta(module: nn.Module) -> nn.Module:
    """A copy of the module on the meta device; no data is read or copied."""
    # deepcopy takes a copy that is in its memo already: parameters are replaced, everything else is copied, ties are kept
    memo: dict[int, Any] = {}
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        twin = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        memo[id(tensor)] = nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
    return copy.deepcopy(module, memo)


def partition(weights: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """The contiguous partition with the smallest largest sum, O(parts * n * n); every part has at least one item."""
    # Dynamic programming over prefixes. Example: weights (3, 1, 2) in 2 parts. With one part best is {1:
    # 3, 2: 4, 3: 6}; with two, best[3] = min(max(3, 6 - 3), max(4, 6 - 4)) = 3, cut behind the first item
    total = [0, *itertools.accumulate(weights)]
    count = len(weights)
    best = {stop: (total[stop], [stop]) for stop in range(1, count + 1)}  # items -> largest sum, ends of the parts
    for part in range(2, parts + 1):
        best = {
            stop: min((max(best[cut][0], total[stop] - total[cut]), [*best[cut][1], stop]) for cut in range(part - 1, stop))
            for stop in range(part, count + 1)
        }
    return list(itertools.pairwise([0, *best[count][1]]))
