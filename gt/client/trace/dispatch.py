"""The hot path: one ATen call on remote tensors becomes one row of numbers in the recorder's buffer.

The arguments give a key: interned metas, constants, and types of scalars. A known key gives the template's number and the
metas of the outputs. Nothing here waits, except for ops whose output shape depends on values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._library import simple_registry

from gt.client.current_session import Current, check, current
from gt.client.device import meta as metas
from gt.client.device.remote_tensor import (
    LAZY,
    Alias,
    Ref,
    RemoteTensor,
    make,
    memory_id,
    new_tensor,
    new_view,
    rebind,
    view_of,
    wrapper_of,
)
from gt.client.groups.group_context import stack
from gt.client.trace.op_info import (
    ASK,
    CONST,
    FIRST,
    INTO,
    LIST,
    MANY,
    NUMBERS,
    TENSOR,
    TENSORS,
    TYPED,
    VALUE,
    VALUES,
    Entry,
    OpInfo,
    _infos,
    info_of,
)
from gt.client.trace.refusals import OVERLAP, WITH_A_SIZE, as_on_cpu, check_call, note_accepted
from gt.client.trace.shape_inference import infer
from gt.client.trace.uploads import upload_operands
from gt.errors import UnsupportedOp
from gt.ir.instr import GRAD, PARAM, SHARDED

if TYPE_CHECKING:
    from gt.client.trace.recorder import Recorder

# Mode of an entry -> the function that carries such a call out as several ops; modules register theirs
SEVERAL_OPS: dict[int, Callable[[OpInfo, Entry, tuple, dict], Any]] = {}
# Name of an op whose shapes depend on values -> a form with sizes, for a tape that may read them; None if it may not
WITH_KNOWN_SIZES: dict[str, Callable[..., Any]] = {}
_SCALARS = frozenset({bool, int, float})
_BY_VALUE = frozenset({TENSOR, VALUE})  # kinds of arguments whose numbers are sent with each call
_known, _node, _getframe = _infos.get, torch._C._current_autograd_node, sys._getframe
_inference = torch.is_inference_mode_enabled
between: set[int] = set()  # identities of the code of functions that torch calls in place of `dispatch`, and that call it


class HostOperand(Exception):
    """A CPU tensor is among the operands. The call is repeated with the tensor uploaded."""


def dispatch(func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
    """RemoteTensor.__torch_dispatch__. The commonest calls are recorded here; `call` does the same for any call."""
    info = _known(id(func)) or info_of(func)
    if info.handler is not None:
        return info.handler(info, args, kwargs or {})
    recorder = Current.recorder
    if recorder is None or not args or type(first := args[0]) is not RemoteTensor:
        return call(info, args, kwargs)
    # The signature of the call, as `call` makes it, and its operand or scalar besides the first. Example: `x *
    # 2.0` has the signature (meta of x, float), and 2.0 is a number of the row: `x * 3.0` is the same kind of call
    ref, other = first._ref, None
    if ref.pending and first.requires_grad:
        note_first_use(first, ref)
    if kwargs:
        return _with_keyword(recorder, info, args, kwargs)
    if len(args) == 2:
        second = args[1]
        if type(second) is RemoteTensor:
            operand = second._ref
            if operand.pending and second.requires_grad:
                note_first_use(second, operand)
            entry, other = info.cache.get((ref.meta, operand.meta)), operand.id
        elif info.second == CONST or (info.second == LIST and type(second) is list):
            entry = info.cache.get((ref.meta, second if info.second == CONST else tuple(second)))
        elif type(second) in _SCALARS and info.second in _BY_VALUE:
            entry, other = info.cache.get((ref.meta, type(second))), second
        else:
            return call(info, args)
    elif info.constant:
        rest = [tuple(value) if type(value) is list else value for value in args[1:]] if info.lists else args[1:]
        entry = info.cache.get((ref.meta, *rest))
    else:
        return call(info, args)
    # A new kind of call, or one whose result is more than a tensor: `call` finds out
    if entry is None or entry.mode > FIRST:
        return call(info, args)
    origins, frame = Current.origins, _getframe(1)
    scope = stack.scope() if (last := stack.recorded).changes else last
    # An origin is known by code and position in it, but for the backward pass, whose ops belong to the forward op's line
    numbers = scope.numbers.get(id(frame.f_code)) if scope.owner is origins and _node() is None else None
    origin = (numbers and numbers.get(frame.f_lasti)) or origins.of_frame(frame)
    recorder.ops += 1
    code = recorder.code
    if entry.mode == FIRST:
        code.extend((entry.number, origin, ref.id) if other is None else (entry.number, origin, ref.id, other))
        ref.pending = origin
        result = first
    else:
        number, live = recorder.new_id(), recorder.live_tensors
        live.made += entry.made
        if live.made > live.most and live.ended:
            recorder.free_ended(entry.made)
        code.extend((entry.number, origin, ref.id, number) if other is None else (entry.number, origin, ref.id, other, number))
        # A view is an inference tensor exactly if its base is, whatever the mode is now
        other_kind = entry.view and first.is_inference() is not _inference()
        result = new_view(first, *entry.wrapper) if other_kind else new_tensor(*entry.wrapper)
        result._ref = Ref(number, entry.metas[0], origin, live, ref.memory if entry.view else number)
    if len(code) > recorder.batch:
        recorder.end_batch()
    return result


def _with_keyword(recorder: Recorder, info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """As `call`, and faster for a known call of two remote tensors and a number by keyword, as `y.add_(x, alpha=2)`."""
    if len(args) == 2 and len(kwargs) == 1 and type(second := args[1]) is RemoteTensor:
        ((name, value),) = kwargs.items()
        one, two = args[0]._ref, second._ref
        if type(value) in _SCALARS and info.named[name] in _BY_VALUE:
            if two.pending and second.requires_grad:
                note_first_use(second, two)
            entry = info.cache.get((one.meta, two.meta, name, type(value)))
            if entry is not None and entry.mode <= FIRST:
                return _record(recorder, entry, args[0], (one.id, two.id, value), Current.origins.here())
    return call(info, args, kwargs)


def _record(recorder: Recorder, entry: Entry, first: Any, operands: Sequence, origin: int) -> RemoteTensor:
    """Record a call whose result is one new tensor or its first argument. operands: ids and scalars."""
    recorder.ops += 1
    code = recorder.code
    if entry.mode == FIRST:
        code.extend((entry.number, origin, *operands))
        first._ref.pending = origin
        result = first
    else:
        meta, number, live = entry.metas[0], recorder.new_id(), recorder.live_tensors
        live.made += entry.made
        if live.made > live.most and live.ended:
            recorder.free_ended(entry.made)
        code.extend((entry.number, origin, *operands, number))
        result = new_view(first, *entry.wrapper) if entry.view else new_tensor(*entry.wrapper)
        own = Ref(number, meta, origin, live)
        result._ref = view_of(first._ref, own) if entry.view else own
    if len(code) > recorder.batch:
        recorder.end_batch()
    return result


def fallback(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The backend kernel of every op: calls without a remote tensor (factories), and calls below the Python key."""
    return dispatch(func, (), args, kwargs)


def call(info: OpInfo, args: tuple, kwargs: dict | None = None, extra: tuple = (), origin: int = 0) -> Any:
    """Record a call. extra: scalars that the schema lacks (seed and counter); they are recorded last.

    origin: of the call, if it is known.
    """
    recorder = Current.recorder or current()
    key: list = []
    ids: list = []
    values: list = []
    put = key.append
    try:
        for kind, argument in zip(info.kinds, args):
            if type(argument) is RemoteTensor:
                ref = argument._ref
                put(ref.meta)
                ids.append(ref.id)
                if ref.pending and argument.requires_grad:
                    note_first_use(argument, ref)
            elif kind == CONST:
                put(argument)
            else:
                collect(kind, argument, key, ids, values)
        if kwargs:
            named = info.named
            for name, argument in kwargs.items():
                put(name)
                kind = named[name]
                if kind == CONST:
                    put(argument)
                else:
                    collect(kind, argument, key, ids, values)
    except HostOperand:
        return call(info, *upload_operands(info, args, kwargs or {}), extra, origin)

    # The first call of a kind runs shape inference and defines a template; others find its entry
    signature = tuple(key)
    entry = info.cache.get(signature) or new_entry(info, signature, args, kwargs or {})
    if extra:
        values.extend(extra)
    origin = origin or Current.origins.here()
    if entry.mode <= FIRST:
        return _record(recorder, entry, args[0] if args else None, ids + values, origin)

    # Ops that check their scalars by value: once for each combination of numbers, since torch's check takes long
    if entry.mode == NUMBERS:
        if (numbers := tuple(values)) not in entry.accepted:
            check_call(info, args, kwargs or {}, entry.metas, recorder.gpus)
            note_accepted(entry.accepted, numbers)
        return _record(recorder, entry.result, args[0] if args else None, ids + values, origin)
    recorder.ops += 1
    row = [entry.number, origin, *ids, *values]
    if entry.mode == MANY and entry.series is not None:
        return _record_series(recorder, entry, row, args[0] if args else None)
    return finish_call(info, entry, args, kwargs or {}, extra, row)


def _record_series(recorder: Recorder, entry: Entry, row: list, first: Any) -> Any:
    """Record a call whose result is a tuple or list of new tensors and None. row: the numbers before the output ids.

    first: the first argument, of which the results may be views.
    """
    live, new_id, origin, base = recorder.live_tensors, recorder.new_id, row[1], first if entry.view else None
    live.made += entry.made
    if live.made > live.most and live.ended:
        recorder.free_ended(entry.made)
    numbers = [new_id() for _ in entry.metas]
    code = recorder.code
    code.extend(row + numbers)
    outputs = []
    for number, meta in zip(numbers, entry.metas):
        wrapper = meta.wrapper or wrapper_of(meta)
        tensor = new_tensor(*wrapper) if base is None else new_view(base, *wrapper)
        own = Ref(number, meta, origin, live)
        tensor._ref = own if base is None else view_of(base._ref, own)
        outputs.append(tensor)
    if len(code) > recorder.batch:
        recorder.end_batch()
    series: Any = entry.series
    return series([None if slot is None else outputs[slot] for slot in entry.slots] if entry.slots else outputs)


def new_entry(info: OpInfo, signature: tuple, args: tuple, kwargs: dict) -> Entry:
    """Infer and keep the entry of a kind of call. Operands' storage offsets count for ops that make views."""
    cache = info.cache
    shared = signature
    if not info.makes_views:
        shared = tuple([part.without_offset() if type(part) is metas.Meta else part for part in signature])
    entry = cache.get(shared)
    if entry is None:
        entry = cache[shared] = infer(info, args, kwargs)
    cache[signature] = entry
    return entry


def collect(kind: int, argument: Any, key: list, ids: list, values: list) -> None:
    """Add an argument that is not a mere constant to the key, the operands and the scalars."""
    if type(argument) is RemoteTensor:
        ref = argument._ref
        key.append(ref.meta)
        ids.append(ref.id)
        if ref.pending and argument.requires_grad:
            note_first_use(argument, ref)
    elif argument is None:
        key.append(None)
    elif kind == LIST:
        key.append(tuple(argument) if isinstance(argument, (list, tuple)) else argument)
    elif kind in (VALUE, TENSOR) and isinstance(argument, (bool, int, float)):
        key.append(type(argument))
        values.append(argument)
    elif kind in (TENSORS, VALUES):
        key.append(len(argument))
        # The length is part of the key, since the template has a hole for each element
        element = TENSOR if kind == TENSORS else VALUE
        for x in argument:
            if type(x) is RemoteTensor:  # as above, without a call per tensor: an optimizer's lists have hundreds
                ref = x._ref
                key.append(ref.meta)
                ids.append(ref.id)
                if ref.pending and x.requires_grad:
                    note_first_use(x, ref)
            else:
                collect(element, x, key, ids, values)
    elif isinstance(argument, torch.Tensor):
        raise HostOperand
    elif kind == TYPED:
        key.append((type(argument), argument))
    else:
        key.append(argument)


def note_first_use(tensor: RemoteTensor, ref: Ref | Alias) -> None:
    """At the first use of a tensor that requires grad, tag its autograd node, or declare the tensor as a parameter."""
    try:
        node = tensor.grad_fn
    except RuntimeError:  # a view made under no_grad whose base has changed: torch refuses to answer, and nothing needs it
        return
    if node is not None:
        # A result of autograd: its node learns the line that made it, to which the backward pass's ops belong
        Current.origins.tag(node, ref.pending)
        ref.pending = 0
        return
    if tensor._is_view():  # of a parameter, made under no_grad: it claims to require grad and is no leaf
        return
    # A leaf: a parameter, declared once. Its home is the line of the first use that autograd sees
    if not ref.home:
        check(tensor)
        Current.recorder.code.extend((PARAM, ref.id))  # type: ignore[union-attr]
        ref.home = -1
        # A hook tells the dispatcher each gradient as soon as autograd has accumulated it
        if Current.zero or Current.offloads:
            _declare_sharded(tensor)
    if torch.is_grad_enabled():
        ref.home = Current.origins.here()
        ref.pending = 0


def _declare_sharded(parameter: RemoteTensor) -> None:
    """Declare a parameter as one that ZeRO shards, and each gradient as soon as autograd has accumulated it."""
    Current.recorder.code.extend((SHARDED, parameter._ref.id))  # type: ignore[union-attr]
    if parameter.is_leaf and parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(_note_gradient)


def _note_gradient(parameter: torch.Tensor) -> None:
    grad = parameter.grad
    if isinstance(grad, RemoteTensor) and isinstance(parameter, RemoteTensor):
        Current.recorder.code.extend((GRAD, parameter._ref.id, grad._ref.id))  # type: ignore[union-attr]


def declare_frozen(parameter: RemoteTensor) -> None:
    """Declare a module's parameter that requires no grad: it is no data of a batch, and ZeRO shards it."""
    if not parameter._ref.home:
        declare_buffer(parameter)
        if Current.zero:
            _declare_sharded(parameter)


def declare_buffer(buffer: RemoteTensor) -> None:
    """Declare a module's buffer: it gets a parameter's layout, whole on each worker, in a group that splits data."""
    if not buffer._ref.home:
        check(buffer)
        Current.recorder.code.extend((PARAM, buffer._ref.id))  # type: ignore[union-attr]
        buffer._ref.home = -1


def finish_call(info: OpInfo, entry: Entry, args: tuple, kwargs: dict, extra: tuple, row: list) -> Any:
    """Record a call whose result is not one new tensor or its first argument. row: the numbers before the output ids."""
    # Calls as several ops: chunks of a long list, out=, another default dtype
    several = SEVERAL_OPS.get(entry.mode)
    if several is not None:
        return several(info, entry, args, kwargs)
    recorder, origin = current(), row[1]
    if entry.mode == ASK and recorder.tape is not None:
        sized, tape = WITH_KNOWN_SIZES.get(info.name), recorder.own_tape()
        if sized is not None and tape is not None and (result := sized(tape, *args, **kwargs)) is not None:
            return result
        cure = WITH_A_SIZE.get(info.name.split(".")[1], "")
        what = f"the shape of {info.name}'s result depends on values, which a replay does not know{cure}"
        recorder.tape.refuse(what, origin)
    operands = tensors((args, kwargs)) if entry.written else ()
    if info.counts_writes:
        _count_writes([operands[i] for i in entry.written])
    numbers = [recorder.new_id() for _ in entry.metas]
    live = recorder.live_tensors
    live.made += entry.made
    if live.made > live.most and live.ended:
        recorder.free_ended(entry.made)
    recorder.code.extend(row + numbers)
    if entry.mode == ASK:
        recorder.flush()
        # The one wait of this module: a worker tells the shapes
        output_metas = [metas.of_spec(spec) for spec in recorder.session.describe(numbers)]
    else:
        output_metas = entry.metas
    live = recorder.live_tensors
    base = args[0] if entry.view else None
    outputs = [make(m, Ref(n, m, origin, live), base) for n, m in zip(numbers, output_metas, strict=True)]
    for view in outputs if base is not None else ():
        view_of(base._ref, view._ref)  # type: ignore[arg-type,union-attr]
    if len(recorder.code) > recorder.batch:
        recorder.end_batch()
    for i in entry.written:
        operands[i]._ref.pending = origin
    return _build(entry.result, outputs, operands)


def _count_writes(written: list[RemoteTensor]) -> None:
    """As torch's kernels of list ops do: increment the versions by which autograd sees writes."""
    for tensor in written:
        if tensor.is_inference():
            refuse_update(tensor)
    torch.autograd.graph.increment_version(written)


def refuse_update(tensor: RemoteTensor) -> None:
    """RuntimeError in torch's words if an inference tensor is changed outside of inference mode."""
    if not torch.is_inference_mode_enabled():
        raise RuntimeError(
            "Inplace update to inference tensor outside InferenceMode is not allowed.You can make a clone to get a normal "
            "tensor before doing inplace update."
        )


def _build(tree: Any, outputs: list, operands: Any) -> Any:
    """The value that torch expects back. tree: see Entry.result."""
    if tree == ():
        return None
    if type(tree) is list:
        return [_build(t, outputs, operands) for t in tree]
    if type(tree[0]) is not str:
        return tuple(_build(t, outputs, operands) for t in tree)
    source, value = tree
    return outputs[value] if source == "new" else operands[value] if source == "arg" else value


def tensors(tree: Any) -> list[RemoteTensor]:
    """Remote tensors of arguments, in the order of operands."""
    tensors: list[RemoteTensor] = []
    _gather((tree,), tensors)
    return tensors


def _gather(trees: Any, tensors: list[RemoteTensor]) -> None:
    for tree in trees:
        if type(tree) is RemoteTensor:
            tensors.append(tree)
        elif isinstance(tree, (list, tuple)):
            _gather(tree, tensors)
        elif isinstance(tree, dict):
            _gather(tree.values(), tensors)


def _without_out(info: OpInfo) -> Any:
    """The overload that returns the result instead of writing it to out=. It may take dtype and device besides."""
    wanted = {(argument.name, str(argument.real_type)) for argument in info.func._schema.arguments if not argument.is_out}
    packet = getattr(torch.ops.aten, info.name.split(".")[1])
    candidates = []
    for overload in (getattr(packet, name) for name in packet.overloads()):
        arguments = overload._schema.arguments
        # The nearest overload: it takes all arguments of this one but out=, and as few more as possible
        accepted = {(argument.name, str(argument.real_type)) for argument in arguments}
        if not any(argument.is_out for argument in arguments) and wanted <= accepted:
            candidates.append((len(accepted), overload))
    if not candidates:
        raise UnsupportedOp(
            f"{info.name} is not supported on remote with out=: call the op without out=, and copy_() its result"
        )
    return min(candidates, key=lambda pair: pair[0])[1]


# Ops whose CPU kernels, and no shape rules, refuse an out= that shares memory with an input
NO_OVERLAP = {"aten.complex.out", "aten.kthvalue.values", "aten.masked_select.out", "aten.take.out"}

# Ops whose CPU kernels, and no shape rules, refuse an out= of another dtype
SAME_DTYPE = {
    "aten.bitwise_not.out", "aten.complex.out", "aten.conj_physical.out", "aten.isin.Scalar_Tensor_out",
    "aten.isin.Tensor_Scalar_out", "aten.isin.Tensor_Tensor_out", "aten.take.out",
}  # fmt: skip


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors have one storage and their ranges of bytes in it meet, as torch's own check has it."""
    if not (a.numel() and b.numel()) or memory_id(a) != memory_id(b):
        return False
    ranges = []
    for tensor in (a, b):
        start = tensor.storage_offset()
        last = start + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
        # In bytes, since the two may be of different dtypes
        ranges.append((start * tensor.itemsize, (last + 1) * tensor.itemsize))
    return ranges[0][0] < ranges[1][1] and ranges[1][0] < ranges[0][1]


def _into(info: OpInfo, entry: Entry, args: tuple, kwargs: dict) -> Any:
    """Copy results into out= tensors. One of another shape gets it as by resize_: in its memory if that is large enough."""
    named = [kwargs[name] for name in info.outs]
    targets, rest = tensors(named), {name: a for name, a in kwargs.items() if name not in info.outs}
    # The result is copied into out= only at the end, which would give an overlap a value where the CPU refuses it
    if info.name in NO_OVERLAP and any(_overlap(a, b) for a in targets for b in tensors((args, rest))):
        raise RuntimeError(OVERLAP)
    op = _without_out(info)
    for name, value in (("dtype", targets[0].dtype if targets else None), ("device", LAZY)):
        if name in info_of(op).named and rest.get(name) is None:
            rest[name] = value
    results = tensors(op(*args, **rest))
    wanted = entry.metas or [metas.contiguous(tuple(m.shape), t.dtype) for m, t in zip(results, targets, strict=True)]
    for target, result, meta in zip(targets, results, wanted, strict=True):
        if info.name in SAME_DTYPE and target.dtype != result.dtype:
            error = RuntimeError(f"{info.name}: the result is of {result.dtype}, out= of {target.dtype}; want the same dtype")
            raise as_on_cpu(info, list(args), kwargs, error)
        if target.shape != meta.shape:
            torch.ops.aten.resize_.default(target, list(meta.shape))
            # As in torch, out= of another shape also gets the strides of a new result
            if target.stride() != meta.stride:
                offset = target.storage_offset()
                rebind(target, torch.ops.aten.as_strided.default(target, list(meta.shape), list(meta.stride), offset))
        torch.ops.aten.copy_.default(target, result)
    returned = named if info.func._schema.returns else []
    return tuple(returned) if len(returned) != 1 else returned[0]


SEVERAL_OPS[INTO] = _into


def empty(meta: metas.Meta) -> RemoteTensor:
    """An uninitialised tensor with this shape, stride and dtype."""
    func = torch.ops.aten.empty_strided.default
    return call(info_of(func), (list(meta.shape), list(meta.stride)), {"dtype": meta.dtype, "device": LAZY})


RemoteTensor.prints_edges = staticmethod(lambda: Current.recorder is not None and Current.recorder.tape is None)


def _dispatch_rule(op: Any, cls: type) -> Any:
    """torch looks for a rule of torch.library.register_torch_dispatch at each op of a subclass, in 0.3 us. Ours has none."""
    return None if cls is RemoteTensor else _torch_dispatch_rule(op, cls)


_torch_dispatch_rule = simple_registry.find_torch_dispatch_rule
simple_registry.find_torch_dispatch_rule = _dispatch_rule  # torch keeps the function that is here at the first such op
RemoteTensor.__torch_dispatch__ = staticmethod(dispatch)  # type: ignore[assignment]
