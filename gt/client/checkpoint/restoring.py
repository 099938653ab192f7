"""Puts a loaded state into the objects of a program: modules, optimizers and tensors, all compared before any is changed."""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from gt.client import current_session
from gt.client.checkpoint.state_tree import has_state
from gt.client.device.remote_tensor import RemoteTensor, Shown, is_leaf
from gt.client.groups import loss_scale
from gt.errors import CheckpointError, GTError

MAX_SHOWN = 8  # differences in an error
PART_BYTES = 32 << 20  # bytes of a module's tensors that are read at once, unless
MAX_PARTS = 64  # parts have less than this share
_MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta"})
_MOMENTS_OF: dict[type, frozenset[str]] = {  # names that other optimizers may give to state of any shape
    torch.optim.Adagrad: frozenset({"sum"}),
    torch.optim.Adamax: frozenset({"exp_inf"}),
    torch.optim.ASGD: frozenset({"ax"}),
    torch.optim.RMSprop: frozenset({"grad_avg"}),
    torch.optim.Rprop: frozenset({"prev", "step_size"}),
}
_KEPT = {  # torch's optimizers whose options others have too: the state of each parameter, and that of an option
    "Adam": ({"step", "exp_avg", "exp_avg_sq"}, {"max_exp_avg_sq"}),
    "AdamW": ({"step", "exp_avg", "exp_avg_sq"}, {"max_exp_avg_sq"}),
    "Adamax": ({"step", "exp_avg", "exp_inf"}, set()),
    "NAdam": ({"step", "exp_avg", "exp_avg_sq", "mu_product"}, set()),
    "RAdam": ({"step", "exp_avg", "exp_avg_sq"}, {"max_exp_avg_sq"}),  # whose state is an Adam's
}
_KEPT_BY_ANY = frozenset().union(*(needed | more for needed, more in _KEPT.values()))


class Change(NamedTuple):
    """One object's change. undo: takes it back; None for values that were compared, whose change has no reason to fail."""

    name: str
    do: Callable[[], object]
    undo: Callable[[], object] | None = None


Unread = Callable[[torch.Tensor], torch.Tensor]


class _Comparison(list[str]):
    """Differences between a state and the objects that it is for.

    strict: a name that only one of both has is a difference. unread: a loaded tensor anew, which takes memory while it is
    copied; the one of the state is not read for it. undone: takes back what load hooks changed in the objects, if the load is
    refused. cause: the error of the first hook that failed.
    """

    def __init__(self, strict: bool, unread: Unread) -> None:
        super().__init__()
        self._strict, self.unread = strict, unread
        self.undone = contextlib.ExitStack()
        self.cause: Exception | None = None

    def lacks(self, text: str) -> None:
        if self._strict:
            self.append(text)


def restore(into: Any, state: Any, where: Path, unread: Unread, strict: bool = True) -> None:
    """Give the objects in `into` the values at the same places of `state`. CheckpointError lists all differences.

    unread, strict: see _Comparison.
    """
    problems = _Comparison(strict, unread)
    with problems.undone:
        changes = _compared(into, state, where, problems)
        with torch.no_grad():
            # Those that may be refused come first, and can be undone
            _apply(sorted(changes, key=lambda change: change.undo is None), where)
        problems.undone.pop_all()


def _compared(into: Any, state: Any, where: Path, problems: _Comparison) -> list[Change]:
    """The changes that are to be made, if there is no difference."""
    try:
        changes = list(_changes(into, state, "", problems))
    except GTError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError) as error:  # a state of other types than its object makes
        raise CheckpointError(f"{where} does not fit: {type(error).__name__} {error!s:.200}") from error
    if problems:
        left = len(problems) - MAX_SHOWN
        more = f"; and {left} more differences" if left > 0 else ""
        raise CheckpointError(f"{where} does not fit: {'; '.join(problems[:MAX_SHOWN])}{more}") from problems.cause
    return changes


def trains(into: Any) -> bool:
    """True if an optimizer is among the objects that are loaded."""
    parts = into.values() if isinstance(into, Mapping) else into if isinstance(into, (list, tuple)) else ()
    return isinstance(into, torch.optim.Optimizer) or any(map(trains, parts))


def _apply(changes: list[Change], where: Path) -> None:
    """Make all changes, or none: those that an object may refuse first."""
    undone: list[Callable[[], object]] = []
    try:
        for change in changes:
            if change.undo is not None:
                # Before the change is made: one that fails half way is taken back, too
                undone.append(change.undo)
            change.do()
    except BaseException as error:
        for undo in reversed(undone):
            undo()
        if not isinstance(error, Exception) or isinstance(error, GTError):
            raise
        name = change.name or "the object"
        raise CheckpointError(
            f"{where} does not fit: {name} refuses its state: {type(error).__name__} {error!s:.200}"
        ) from error


def _object_change(thing: Any, state: Any, name: str) -> Change:
    """The change of a schedule or another object with a state_dict, whose own code decides if it takes a state."""
    # Copied, since state_dict() may return the containers that load_state_dict() then changes
    before = _containers(thing.state_dict())
    return Change(name, lambda: thing.load_state_dict(state), lambda: thing.load_state_dict(before))


def _containers(state: Any) -> Any:
    """A copy of the dicts and lists of a state; its tensors and numbers as they are."""
    if type(state) is dict:
        return {key: _containers(value) for key, value in state.items()}
    return [_containers(value) for value in state] if type(state) is list else state


def _changes(into: Any, state: Any, name: str, problems: _Comparison) -> Iterator[Change]:
    """The changes that are to be made; differences are appended to `problems`."""
    if isinstance(into, torch.nn.Module):
        yield from _module_changes(into, state, name, problems)
    elif isinstance(into, torch.optim.Optimizer):
        yield from _optimizer_changes(into, state, name, problems)
    elif has_state(into):
        yield _object_change(into, state, name)
    elif isinstance(into, torch.Generator):
        yield Change(name, partial(into.set_state, state), partial(into.set_state, into.get_state()))
    elif isinstance(into, torch.Tensor):
        yield from _tensor_changes(into, state, name, problems)
    elif isinstance(into, Mapping):
        for key, part in into.items():
            if not isinstance(state, Mapping) or key not in state:
                if _holds_tensors(part):
                    problems.lacks(f"{_join(name, key)} is not in the checkpoint")
            else:
                yield from _changes(part, state[key], _join(name, key), problems)
    elif isinstance(into, (list, tuple)):
        if not isinstance(state, (list, tuple)) or len(state) != len(into):
            problems.append(f"{name or 'the state'} is {_show(state)}, want {len(into)} items")
            return
        for n, part in enumerate(into):
            yield from _changes(part, state[n], _join(name, n), problems)


def _tensor_changes(into: torch.Tensor, state: Any, name: str, problems: _Comparison) -> Iterator[Change]:
    if not isinstance(state, torch.Tensor) or state.shape != into.shape:
        problems.append(f"{name or 'the state'} is {_show(state)}, want {_show(into)}")
    elif into.device.type == "meta":
        problems.append(f"{name or 'the state'} is a tensor on the meta device, which only a module's load can replace")
    elif refusal := _unwritable(into):
        problems.append(f"{name or 'the state'} {refusal}")
    else:
        yield Change(name, lambda: _end_gradients([into]))
        yield Change(name, lambda: into.copy_(problems.unread(state)))


def _unwritable(into: torch.Tensor) -> str:
    """The reason why a tensor's values cannot be written in place, or ""."""
    if into.layout is not torch.strided or into.is_nested:
        return f"is a nested tensor or has layout {into.layout}, and is not written in place: want a dense tensor"
    if any(size > 1 and not stride for size, stride in zip(into.shape, into.stride(), strict=True)):
        return "is expanded: several of its elements are one in memory; load into its clone()"
    if into.is_inference() and not torch.is_inference_mode_enabled():
        return "was made in inference mode, and is not written outside of it: load within torch.inference_mode()"
    return ""


def _holds_tensors(part: Any) -> bool:
    return has_state(part) or isinstance(part, (torch.Tensor, torch.Generator, Mapping, list, tuple))


def _join(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _show(thing: Any) -> str:
    if isinstance(thing, torch.Tensor):
        return f"{str(thing.dtype)[6:]}{list(thing.shape)}"
    return f"a {type(thing).__name__}"


def _module_changes(module: torch.nn.Module, state: Any, name: str, problems: _Comparison) -> Iterator[Change]:
    held, own = _held(module)
    if not isinstance(state, Mapping):
        problems.append(f"{name or 'the state'} is {_show(state)}, want the state of a {type(module).__name__}")
        return
    lazy = [key for key, value in own.items() if torch.nn.parameter.is_lazy(value)]
    if lazy:
        problems.append(f"{_join(name, lazy[0])} is a lazy module's, and has no shape yet: call the module once first")
        return
    given = dict(state)
    for key, value in own.items():  # a name of a tied weight that the file has by its other name
        if key not in given:
            twin = next((k for k, v in own.items() if v is value and k in given), None)
            if twin is not None:
                given[key] = given[twin]
    metadata = getattr(state, "_metadata", None)
    if not _is_metadata(metadata):  # torch's own load would stop at it, half way through the module
        problems.append(f"{name or 'the state'} has versions of modules that are no numbers")
    hooked = _is_users(module, _load_hooks) or not _fits(given, own, held)
    if hooked:
        try:
            given = _through_hooks(module, given, metadata, name, problems)
        except GTError:
            raise
        except Exception as error:
            problems.append(f"{name or 'the state'} is refused by a load hook: {type(error).__name__} {error!s:.200}")
            problems.cause = problems.cause or error
            return
        held, own = _held(module)  # anew: a hook may have given the module other tensors
    _compare(given, own, held, name, problems)
    left = [key for key, buffer in module.named_buffers() if buffer.device.type == "meta" and key not in own]
    if left:
        problems.append(
            f"{_join(name, left[0])} is a buffer on the meta device that no checkpoint has: "
            f"use module.to_empty(device={Shown.device.type!r}) and initialise it first"
        )
    meta = {key for key, value in own.items() if value.device.type == "meta" and key in given}
    yield from _extra_changes(module, given, name)
    # A user's own code for it sees the whole state: it may fill what a state lacks
    here = given if _is_users(module, _load_code) else {key: value for key, value in given.items() if key not in meta}
    # Existing tensors are written in place, which optimizers and captured steps
    # refer to. Tensors on the meta device have no memory, and are replaced
    yield Change(name, lambda: _end_gradients([value for key, value in own.items() if key in given and key not in meta]))
    # First: some modules of torch add a tensor that their part of a state lacks, and would copy it to the meta device
    yield Change(name, lambda: _replace(module, given, own, meta))
    yield Change(name, lambda: _copy_into(module, here, metadata, problems.unread, hooked))


def _held(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The module's state, and its tensors."""
    held = module.state_dict(keep_vars=True)
    # A module's code takes its extra state, a tensor of any shape too
    return held, {key: value for key, value in held.items() if isinstance(value, torch.Tensor) and not _is_extra(key)}


def _compare(
    given: Mapping[str, Any], own: Mapping[str, Any], held: Mapping[str, Any], name: str, problems: _Comparison
) -> None:
    """Note the differences between a module's tensors and those of a state. held: all that is in the module's state."""
    for key, value in own.items():
        if key not in given:
            problems.lacks(f"{_join(name, key)} is not in the checkpoint")
        elif not isinstance(given[key], torch.Tensor) or given[key].shape != value.shape:
            problems.append(f"{_join(name, key)} is {_show(given[key])}, want {_show(value)}")
        elif given[key].device.type == "meta":  # by a hook, from a tensor of the module
            problems.append(f"{_join(name, key)} is on the meta device after the load hooks, and has no values")
        elif value.device.type != "meta" and (refusal := _unwritable(value)):
            problems.append(f"{_join(name, key)} {refusal}")
    for key, value in held.items():
        if _is_extra(key) and isinstance(value, torch.Tensor) and key not in given:
            problems.lacks(f"{_join(name, key)} is not in the checkpoint")
    for key in given:
        if key not in held:
            problems.lacks(f"{_join(name, key)} is in the checkpoint, and not in the module")


def _fits(given: Mapping[str, Any], own: Mapping[str, Any], held: Mapping[str, Any]) -> bool:
    """True if names and shapes are the module's, before its hooks have seen them."""
    shapes = {key: value.shape for key, value in given.items() if isinstance(value, torch.Tensor)}
    return given.keys() <= held.keys() and all(shapes.get(key) == value.shape for key, value in own.items())


def _through_hooks(
    module: torch.nn.Module, given: dict[str, Any], metadata: Any, name: str, problems: _Comparison
) -> dict[str, Any]:
    """A state after the hooks that modules have for older states, which rename tensors or give them other shapes.

    As in torch a hook sees the names of its module only. Each runs once: the values are then copied without hooks.
    """
    if any(part._load_state_dict_pre_hooks for part in module.modules()):
        problems.undone.callback(_remembered(module))
    if _is_users(module, _load_hooks):
        # A hook may compute in place, and the remote tensors that gt.load returns stay as they are
        given = {key: problems.unread(value) if isinstance(value, torch.Tensor) else value for key, value in given.items()}
    versions = metadata if _is_metadata(metadata) and metadata else {}
    missing: list[str] = []
    unexpected: list[str] = []
    errors: list[str] = []

    def walk(part: torch.nn.Module, rows: dict[str, Any], prefix: str) -> dict[str, Any]:
        for hook in part._load_state_dict_pre_hooks.values():
            hook(rows, prefix, versions.get(prefix[:-1], {}), True, missing, unexpected, errors)
        shown = {key: value for key, value in rows.items() if key.startswith(prefix)}
        for child, below in part._modules.items():
            if below is not None:
                inner = f"{prefix}{child}."
                seen = {key: shown.pop(key) for key in list(shown) if key.startswith(inner)}
                shown.update(walk(below, seen, inner))
        return shown

    named: dict[str, Any] = OrderedDict((key, value) for key, value in given.items() if isinstance(key, str))
    if metadata is not None:
        named._metadata = metadata  # type: ignore[attr-defined]  # as torch shows it
    shown = {**{key: value for key, value in given.items() if key not in named}, **walk(module, named, "")}
    problems.extend(f"{name or 'the state'} is refused by a load hook: {text!s:.200}" for text in errors)
    for key in dict.fromkeys([*missing, *unexpected]):
        problems.lacks(f"{_join(name, key)} is missing or unexpected, says a load hook")
    return shown


def _remembered(module: torch.nn.Module) -> Callable[[], None]:
    """A function that gives modules the attributes, and tensors the shapes, that they have now."""
    boxes: list[tuple[Any, Any]] = []
    for part in module.modules():
        names = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
        inner = [vars(part)[name] for name in names if isinstance(vars(part).get(name), (dict, set))]
        boxes += [(box, box.copy()) for box in (vars(part), *inner)]
    tensors = [(tensor, tensor.detach()) for tensor in itertools.chain(module.parameters(), module.buffers())]

    def put_back() -> None:
        for box, before in boxes:
            box.clear()
            box.update(before)
        for tensor, old in tensors:
            if tensor.shape != old.shape or tensor.dtype != old.dtype:  # by resize_ or .data
                tensor.data = old

    return put_back


@contextlib.contextmanager
def _without_hooks(module: torch.nn.Module) -> Iterator[None]:
    """Load hooks that have seen the state do not see it again: a second call could change it again."""
    kept = [(hooks, hooks.copy()) for part in module.modules() if (hooks := part._load_state_dict_pre_hooks)]
    try:
        for hooks, _ in kept:
            hooks.clear()
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)


def _is_metadata(metadata: Any) -> bool:
    """True for versions of modules by their names, as torch's state dicts have them, or for none."""
    if metadata is None:
        return True
    rows = metadata.values() if isinstance(metadata, Mapping) else (None,)
    return all(isinstance(row, Mapping) and isinstance(row.get("version"), (int, float, NoneType)) for row in rows)


def _extra_changes(module: torch.nn.Module, given: Mapping[str, Any], name: str) -> Iterator[Change]:
    """The changes of extra states, which modules' own code takes; they are set once more with the tensors."""
    for path, part in module.named_modules():
        key = f"{path}.{_EXTRA_STATE_KEY_SUFFIX}" if path else _EXTRA_STATE_KEY_SUFFIX
        if key in given and type(part).set_extra_state is not torch.nn.Module.set_extra_state:
            before, after = part.get_extra_state(), given[key]
            do, undo = (partial(part.set_extra_state, value) for value in (after, before))
            yield Change(_join(name, key), do, undo)


def _is_extra(key: str) -> bool:
    """True for the name of a module's extra state."""
    return key.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def _end_gradients(tensors: list[torch.Tensor]) -> None:
    """End the gradients of tensors that are about to be overwritten, if a worker was lost: a checkpoint lacks them.

    The tensors themselves get new memory as they are overwritten.
    """
    recorder = current_session.Current.recorder
    if recorder is not None and getattr(recorder.session, "losses", False):
        for tensor in tensors:
            if isinstance(tensor, RemoteTensor) and is_leaf(tensor):
                tensor.grad = None


def _copy_into(module: torch.nn.Module, given: dict, metadata: Any, unread: Unread, hooked: bool) -> None:
    """Copy into values that exist, some at a time: only so many are read at once. hooked: load hooks have seen the state."""
    with _without_hooks(module) if hooked else contextlib.nullcontext():
        for part in [given] if _is_users(module, _load_code) else _parts(given):
            here = {key: unread(value) if isinstance(value, torch.Tensor) else value for key, value in part.items()}
            module.load_state_dict(here if metadata is None else _WithMetadata(here, metadata), strict=False)


def _load_hooks(part: torch.nn.Module) -> list[Any]:
    return [getattr(hook, "hook", hook) for hook in part._load_state_dict_pre_hooks.values()]


def _load_code(part: torch.nn.Module) -> list[Any]:
    return [type(part)._load_from_state_dict, *_load_hooks(part), *part._load_state_dict_post_hooks.values()]


def _is_users(module: torch.nn.Module, code: Callable[[torch.nn.Module], list[Any]]) -> bool:
    """True if not all of modules' code is torch's, which looks at its own names only: other code sees the whole state."""
    called = itertools.chain.from_iterable(map(code, module.modules()))
    return not all(str(getattr(each, "__module__", "")).partition(".")[0] == "torch" for each in called)


def _parts(given: dict) -> Iterator[dict]:
    """A state dict in parts of PART_BYTES, or a share of it; the names of one submodule are in one part."""
    sizes = {key: value.nbytes if isinstance(value, torch.Tensor) else 0 for key, value in given.items()}
    most = max(PART_BYTES, sum(sizes.values()) // MAX_PARTS)
    # All names of one submodule together: its load hooks see them as a whole
    owners: dict[str, list[str]] = {}
    for key in given:
        owners.setdefault(key.rpartition(".")[0] if isinstance(key, str) else "", []).append(key)
    part: dict = {}
    nbytes = 0
    for keys in owners.values():
        more = sum(sizes[key] for key in keys)
        if part and nbytes + more > most:
            yield part
            part, nbytes = {}, 0
        part.update({key: given[key] for key in keys})
        nbytes += more
    yield part


def _replace(module: torch.nn.Module, given: dict, own: dict[str, Any], meta: set[str]) -> None:
    """Put values in place of tensors on the meta device, which stay shared where they were."""
    # By identity of the old tensor: tied weights get one new tensor
    made: dict[int, torch.Tensor] = {}
    for key in sorted(meta):
        old, value = own[key], given[key]
        if id(old) not in made:
            new = (value if value.device.type == Shown.device.type else value.to(Shown.device)).to(old.dtype).detach()
            if isinstance(old, torch.nn.Parameter):
                new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
            made[id(old)] = new
        path, _, last = key.rpartition(".")
        setattr(module.get_submodule(path), last, made[id(old)])


class _WithMetadata(dict):
    """A state dict with torch's versions of modules."""

    def __init__(self, rows: dict, metadata: Any) -> None:
        super().__init__(rows)
        self._metadata = metadata

    def copy(self) -> _WithMetadata:
        return _WithMetadata(dict(self), self._metadata)


def _optimizer_changes(optimizer: torch.optim.Optimizer, state: Any, name: str, problems: _Comparison) -> Iterator[Change]:
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not isinstance(groups, list) or "state" not in state or not all(isinstance(group, Mapping) for group in groups):
        problems.append(f"{name or 'the state'} is {_show(state)}, want the state of a {type(optimizer).__name__}")
        return
    have = [len(group["params"]) for group in optimizer.param_groups]
    # Parameters in a state are numbers in the order of groups: number and order have to be the optimizer's
    saved_sizes = [len(group.get("params", ())) for group in groups]
    if saved_sizes != have:
        problems.append(f"{name or 'the state'} has groups of {saved_sizes} parameters, want {have}")
        return
    saved = [number for group in groups for number in group["params"]]
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = state["state"]
    if not isinstance(states, Mapping) or not all(isinstance(states.get(number, {}), Mapping) for number in saved):
        problems.append(f"{name or 'the state'} has a state of parameters that is no dict of dicts")
        return
    foreign = next((text for number in saved if (text := _foreign(optimizer, state["state"].get(number)))), "")
    if foreign:
        problems.append(f"{name or 'the state'} {foreign}")
        return
    moments = _MOMENTS.union(*(names for kind, names in _MOMENTS_OF.items() if isinstance(optimizer, kind)))
    for number, parameter in zip(saved, own, strict=True):
        for key, value in (state["state"].get(number) or {}).items():
            # Moments are as their parameter; other state may have any shape
            moment = isinstance(value, torch.Tensor) and key in moments
            if moment and value.shape != parameter.shape:
                problems.append(f"{_join(name, f'state.{number}.{key}')} is {_show(value)}, its parameter {_show(parameter)}")
    before = {"state": optimizer.state, "param_groups": optimizer.param_groups}  # a load replaces both
    scale = loss_scale.copied()  # and changes this

    def undo() -> None:
        optimizer.__dict__.update(before)
        loss_scale.restore(scale)

    yield Change(name, lambda: _load_optimizer(optimizer, state), undo)


def _foreign(optimizer: torch.optim.Optimizer, kept: Mapping | None) -> str:
    """The difference of a parameter's state from that of this kind of optimizer, whose next step could not read it, or ""."""
    kind = type(optimizer)
    if not kept or kind is not getattr(torch.optim, kind.__name__, None) or kind.__name__ not in _KEPT:
        return ""
    needed, more = _KEPT[kind.__name__]
    known = _KEPT_BY_ANY.intersection(kept)
    if needed <= known <= needed | more:
        return ""
    want = ", ".join(sorted(needed))
    return f"has the state {', '.join(sorted(map(str, kept)))}, want {want} of {kind.__name__}: another optimizer saved it"


def _load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping) -> None:
    """Load a state. One of another kind of optimizer is refused: torch would fail at the next step."""
    refused: LookupError | None = None
    options = set(getattr(optimizer, "defaults", ()))  # before: a load adds torch's own to them, and not to the groups
    try:
        optimizer.load_state_dict(state)  # it adds options that older versions of torch did not have
        groups = optimizer.param_groups
    except LookupError as error:
        groups, refused = state["param_groups"], error
    # A group that lacks an option was saved by another kind of optimizer. The options say so better than a KeyError
    missing = sorted({option for group in groups for option in options.difference(group)})
    if missing:
        raise ValueError(
            f"it has no {', '.join(missing)}, options of {type(optimizer).__name__}: another optimizer saved it"
        ) from refused
    if refused is not None:
        raise refused
