"""Ops that are not simply recorded, one row each: their handlers, by name or by a property of the op."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import _symbolic_trace

from gt.client import current_session
from gt.client.current_session import Current, current
from gt.client.device.random import draw
from gt.client.device.remote_tensor import LAZY, Alias, RemoteTensor, make, rebind
from gt.client.trace import host_ops, library_ops, op_info, refusals, sparse_ops
from gt.client.trace.composites import batch_norm, fused_steps, known_sizes, recurrent
from gt.client.trace.composites.attention import attention, encoder_layer, multi_head
from gt.client.trace.composites.linear import linear
from gt.client.trace.composites.rms_norm import rms_norm
from gt.client.trace.dispatch import between, call, refuse_update
from gt.client.trace.op_info import Condition, Handler, OpInfo, info_of
from gt.client.trace.shape_inference import is_remote
from gt.errors import UnsupportedOp

aten = torch.ops.aten


_ENGINE = torch.autograd.graph._engine_run_backward.__code__  # runs autograd's engine
_Accumulation = torch._C._functions.AccumulateGrad


def alias(info: OpInfo, args: tuple, kwargs: dict) -> RemoteTensor:
    """detach: another Python object for the same view. Nothing is sent."""
    # The engine itself detaches a gradient that nobody else has before it becomes `.grad`: no second object is needed.
    # A hook of that node would be a frame between.
    caller = sys._getframe(2)
    if id(caller.f_code) in between and caller.f_back is not None:
        caller = caller.f_back
    if caller.f_code is _ENGINE and type(torch._C._current_autograd_node()) is _Accumulation:
        return args[0]
    # The memory has two names now: an upload must no longer replace it (host_ops.copy)
    Current.fresh = None
    return make(args[0]._ref.meta, Alias(args[0]), args[0])


def as_strided(info: OpInfo, args: tuple, kwargs: dict) -> RemoteTensor:
    """A view that is the tensor as it is, with which torch.empty_like of a meta tensor ends: nothing is sent."""
    meta = args[0]._ref.meta
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    if len(args) > 2 and (tuple(args[1]), tuple(args[2])) == (meta.shape, meta.stride) and offset in (None, meta.offset):
        return alias(info, args, kwargs)
    return call(info, args, kwargs)


def itself(info: OpInfo, args: tuple, kwargs: dict) -> RemoteTensor:
    return args[0]


def decompose(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """A composite op that is dispatched whole, as in inference mode."""
    if info.name in COMPOSITES:
        return COMPOSITES[info.name](*args, **kwargs)
    if kwargs.get("layout") not in (None, torch.strided, torch.sparse_coo, torch.sparse_csr):
        raise UnsupportedOp(f"{info.name} makes a {kwargs['layout']} tensor; remote has COO, CSR and dense ones")
    with _views_tracked(info) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
        result = info.func.decompose(*args, **kwargs)
    return call(info, args, kwargs) if result is NotImplemented else result


# Composite ops of which GT has its own form
COMPOSITES: dict[str, Callable[..., Any]] = {
    "aten.scaled_dot_product_attention.default": attention,
    **{f"aten.{name}": kernel for name, kernel in recurrent.KERNELS.items()},
}


def _views_tracked(info: OpInfo) -> Any:
    """In inference mode torch dispatches a composite op to Python whole, below the key that relates a view to its base.

    A few composite ops have a kernel of their own at that key.
    """
    if torch._C._dispatch_has_kernel_for_dispatch_key(info.func.name(), "ADInplaceOrView"):
        return contextlib.nullcontext()
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.ADInplaceOrView)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def random(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """A random op: workers get a seed and a counter instead of the generator."""
    generator = None
    if args and isinstance(args[-1], torch.Generator):  # it is the last one, and optional
        *rest, generator = args
        args = tuple(rest)
    generator = kwargs.pop("generator", generator)
    kwargs.pop("pin_memory", None)
    if not is_remote(kwargs.get("device")):
        return host_ops.from_shapes(info, args, kwargs)
    # Ranges are checked once for each combination of numbers, as in dispatch.call
    if info.name in _WITH_RANGES and not kwargs and type(args[0]) is RemoteTensor:
        numbers = (args[0]._ref.meta, *args[1:])
        if numbers not in (accepted := _accepted.setdefault(info.name, set())):
            refusals.check_call(info, args, kwargs, [], current().gpus)
            refusals.note_accepted(accepted, numbers)
    return call(info, args, kwargs, draw(generator))


def view_in_place(info: OpInfo, args: tuple, kwargs: dict) -> RemoteTensor:
    """In-place views such as t_ and squeeze_: the view op, whose result the same object then names."""
    if args[0].is_inference() and info.name != "aten.detach_.default":
        refuse_update(args[0])
    wanted = [str(argument.real_type) for argument in info.func._schema.arguments]
    packet = getattr(aten, info.name.split(".")[1].rstrip("_"))
    overloads = [getattr(packet, name) for name in packet.overloads()]
    # The overload of the view op with the same arguments: `t_` has `t`, `squeeze_.dim` has `squeeze.dim`
    func = next(f for f in overloads if [str(argument.real_type) for argument in f._schema.arguments] == wanted)
    rebind(args[0], call(info_of(func), args, kwargs))
    return args[0]


def instead(func: Any) -> Callable:
    """Another op with the same arguments."""

    def handler(info: OpInfo, args: tuple, kwargs: dict) -> Any:
        return call(info_of(func), args, kwargs)

    return handler


def random_like(fill: Callable[..., Any]) -> Callable:
    """rand_like and similar: new memory like the first argument's, filled in place."""

    def handler(info: OpInfo, args: tuple, kwargs: dict) -> Any:
        options = {k: v for k, v in kwargs.items() if k in ("dtype", "layout", "device", "memory_format")}
        rest = {k: v for k, v in kwargs.items() if k == "generator"}
        return fill(aten.empty_like.default(args[0], **options), *args[1:], **rest)

    return handler


def factory(overload: Any) -> Callable:
    """A factory with out=: torch's own call of it, whose empty tensor then names the result, or one that writes into `out`."""

    def handler(info: OpInfo, args: tuple, kwargs: dict) -> Any:
        out, factory_info = kwargs["out"], info_of(overload)
        # An empty tensor that torch made for this call is not used by anybody else: it names the result, and nothing is copied
        own = host_ops.is_new(out)
        seeds = draw(kwargs.get("generator")) if factory_info.random else ()
        result = call(factory_info, args, {"dtype": out.dtype, "device": LAZY}, seeds)
        if own:
            rebind(out, result)
            return out
        if out.numel() != result.numel() or result.dim() > 1:
            out.resize_(result.shape)
        return out.copy_(result.view(out.shape))

    return handler


def permutation(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """randperm, of a dtype that has all of its numbers."""
    refusals.check_order(args[0], kwargs["out"].dtype, current().gpus)
    return factory(aten.randperm.default)(info, args, kwargs)


def arange(start: Any, end: Any, step: Any, *, dtype: torch.dtype | None = None, layout: Any = None, **rest: Any) -> Any:
    """torch.arange as one op. torch's own kernel makes an empty tensor first, to which it then gives other memory."""
    if layout not in (None, torch.strided):
        raise UnsupportedOp(f"arange makes a dense tensor on remote, not {layout}")
    whole = all(isinstance(bound, int) for bound in (start, end, step))
    options = {"dtype": dtype or (torch.int64 if whole else torch.get_default_dtype()), "device": LAZY}
    return call(info_of(aten.arange.start_step), (start, end, step), options)


def as_one_op(overload: Any) -> Callable[..., Any]:
    """A factory that a worker executes whole. torch's own kernel looks for one of the device, or resizes a view."""

    def kernel(*args: Any, dtype: torch.dtype | None = None, layout: Any = None, **rest: Any) -> Any:
        if layout not in (None, torch.strided):
            raise UnsupportedOp(f"{overload} makes a dense tensor on remote, not {layout}")
        return call(info_of(overload), args, {"dtype": dtype or torch.get_default_dtype(), "device": LAZY})

    return kernel


_WHOLE_FACTORIES = (
    aten.kaiser_window.default, aten.kaiser_window.periodic, aten.kaiser_window.beta, aten.range.default, aten.range.step,
    aten.fft_fftfreq.default, aten.fft_rfftfreq.default,
)  # fmt: skip
# Kernels of factories, by torch's name of the overload
FACTORIES: dict[str, Callable[..., Any]] = {
    **{overload.name().removeprefix("aten::"): as_one_op(overload) for overload in _WHOLE_FACTORIES},
    "arange": lambda end, **options: arange(0, end, 1, **options),
    "arange.start": lambda start, end, **options: arange(start, end, 1, **options),
    "arange.start_step": lambda start, end, step=1, **options: arange(start, end, step, **options),
}


def tangent_of_zeros(info: OpInfo, args: tuple, kwargs: dict) -> torch.Tensor:
    """_new_zeros_with_same_feature_meta: forward differentiation's tangent for a primal of other strides than the given one.

    UnsupportedOp while torch.fx traces, as torch.func.linearize does: it would keep these zeros as a constant.
    """
    if _symbolic_trace._is_fx_tracing_flag:
        raise UnsupportedOp("torch.func.linearize does not trace remote tensors: use torch.func.jvp(func, primals, tangents)")
    tangent, primal, *more = args
    batch = tuple(tangent.shape[: (more or [kwargs.get("self_num_batch_dims", 0)])[0]])
    # Elements from the first to the last of a primal. A batch of tangents has one such range for each
    extent = 1 + sum((size - 1) * step for size, step in zip(primal.shape, primal.stride())) if primal.numel() else 1
    steps = [extent * math.prod(batch[n + 1 :]) for n in range(len(batch))]
    return torch.empty_strided((*batch, *primal.shape), (*steps, *primal.stride()), dtype=primal.dtype, device=LAZY).zero_()


def rrelu(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """rrelu_with_noise: slopes are drawn into `noise`, where autograd reads them; the slope is 1 where x is positive."""
    defaults = {"lower": 0.125, "upper": 1 / 3, "training": False, "generator": None}
    x, noise, *rest = args
    options = {**defaults, **dict(zip(defaults, rest)), **kwargs}
    if options["training"]:
        slopes = aten.empty_like.default(x).uniform_(options["lower"], options["upper"], generator=options["generator"])
        noise.copy_(torch.where(x <= 0, slopes, torch.ones((), dtype=x.dtype, device=LAZY)))
        result = x * noise
    else:
        result = aten.leaky_relu.default(x, (options["lower"] + options["upper"]) / 2)
    return x.copy_(result) if info.writes[0] == "self" else result


def observe_and_quantize(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """Fake quantisation with a moving average of the range. By channel, empty buffers get an element for each channel.

    RuntimeError for buffers of another size.
    """
    named = dict(zip(info.names, args), **kwargs)
    x, axis, by_channel = named["self"], named["ch_axis"], named.get("per_row_fake_quant", False)
    buffers = {name: named[name] for name in ("running_min", "running_max", "scale", "zero_point")}
    if by_channel and not -1 < axis < x.dim():
        raise RuntimeError(f"fake quantisation by channel: ch_axis is {axis}, want 0 to {x.dim() - 1}")
    if by_channel and not named["running_min"].numel():  # as the CPU's kernel sizes and fills them
        for buffer, value in zip(buffers.values(), (math.inf, -math.inf, 1.0, 0)):
            buffer.resize_(x.shape[axis]).fill_(value)
    want = x.shape[axis] if by_channel else 1
    for name, buffer in buffers.items():
        if buffer.numel() != want:
            raise RuntimeError(f"fake quantisation: {name} has {buffer.numel()} elements, want {want}")
    return call(info, args, kwargs)


def refuse(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    raise UnsupportedOp(f"{info.name} is not supported on remote: compute it on the CPU and move the result with .to('remote')")


def no(info: OpInfo, args: tuple, kwargs: dict) -> bool:
    return False


def ignore(info: OpInfo, args: tuple, kwargs: dict) -> None:
    return None


# Random ops that refuse some numbers: ranges, deviations, probabilities
_WITH_RANGES = frozenset({
    "aten.random_.from", "aten.random_.to", "aten.random_.default", "aten.uniform_.default", "aten.normal_.default",
    "aten.bernoulli_.float", "aten.exponential_.default", "aten.geometric_.default", "aten.log_normal_.default",
    "aten.cauchy_.default", "aten.normal.Tensor_float", "aten.native_dropout.default",
})  # fmt: skip
_accepted: dict[str, set[tuple]] = {}  # by op: metas and numbers that were checked
current_session.on_clear.append(_accepted.clear)
ENDS = ("Scalar_Tensor", "Tensor_Scalar", "Tensor_Tensor")  # overloads
SAMPLED = ("_standard_gamma", "_sample_dirichlet", "binomial")

_ROWS: dict[str, Handler | None] = {
    "aten.detach.default": alias,
    "aten.alias.default": alias,
    "aten.as_strided.default": as_strided,
    "aten.lift.default": itself,
    "aten.linear.default": linear,
    "aten.batch_norm.default": batch_norm.handler,
    "aten.native_batch_norm_backward.default": batch_norm.backward,
    "aten._fused_rms_norm.default": rms_norm,
    "aten.lift_fresh.default": itself,
    "aten.copy_.default": host_ops.copy,
    "aten.fill_.Tensor": host_ops.fill,
    "aten._to_copy.default": host_ops.to_copy,
    "aten._local_scalar_dense.default": host_ops.local_scalar,
    "aten.equal.default": host_ops.equal,
    **dict.fromkeys(("aten._assert_async.default", "aten._assert_async.msg"), host_ops.assert_async),
    "aten.allclose.default": host_ops.allclose,
    "aten._linalg_check_errors.default": host_ops.check_factorization,
    "aten.linalg_cholesky_ex.default": host_ops.checked("linalg.cholesky_ex"),
    "aten.linalg_inv_ex.default": host_ops.checked("linalg.inv_ex"),
    "aten._linalg_solve_ex.default": host_ops.checked("torch.linalg.solve_ex"),
    "aten.linalg_lu_factor_ex.default": host_ops.checked("torch.linalg.lu_factor_ex"),
    **dict.fromkeys(
        (
            "aten._linalg_svd.default", "aten._linalg_eigh.default", "aten.linalg_eig.default", "aten._linalg_eigvals.default",
            "aten.linalg_pinv.atol_rtol_tensor",
        ),
        host_ops.converging,
    ),
    "aten._neg_view.default": instead(aten.neg.default),  # no remote tensor has a negative bit: the view is a copy
    "aten.empty.memory_format": host_ops.new_empty,
    "aten.empty_strided.default": host_ops.new_empty,
    "aten.resize_.default": host_ops.resize,
    "aten.resize_as_.default": host_ops.resize,
    "aten._pack_padded_sequence.default": host_ops.pack,
    "aten._transformer_encoder_layer_fwd.default": encoder_layer,
    "aten._native_multi_head_attention.default": multi_head,
    "aten._nested_tensor_from_mask_left_aligned.default": no,  # nn.TransformerEncoder then leaves padding where it is
    "aten.ctc_loss.Tensor": lambda info, args, kwargs: host_ops.ctc_loss(*args, **kwargs),
    "aten.one_hot.default": lambda info, args, kwargs: host_ops.one_hot(*args, **kwargs),
    "aten._fused_moving_avg_obs_fq_helper.default": observe_and_quantize,
    "aten.is_pinned.default": no,
    "aten.record_stream.default": ignore,
    "aten._new_zeros_with_same_feature_meta.default": tangent_of_zeros,
    "aten._efficientzerotensor.default": instead(aten.zeros.default),  # has no memory that could be sent
    "aten.rand_like.default": random_like(lambda x, **k: x.uniform_(**k)),
    "aten.rand_like.generator": random_like(lambda x, **k: x.uniform_(**k)),
    "aten.randn_like.default": random_like(lambda x, **k: x.normal_(**k)),
    "aten.randn_like.generator": random_like(lambda x, **k: x.normal_(**k)),
    "aten.randint_like.default": random_like(lambda x, high, **k: x.random_(0, high, **k)),
    "aten.randint_like.low_dtype": random_like(lambda x, low, high, **k: x.random_(low, high, **k)),
    "aten.bernoulli.p": random_like(lambda x, p, **k: x.bernoulli_(p, **k)),
    "aten.rrelu_with_noise.default": rrelu,
    "aten.rrelu_with_noise_.default": rrelu,
    **dict.fromkeys((f"aten.{name}.default" for name in SAMPLED), library_ops.sample),
    "aten.arange.start_out": factory(aten.arange.start_step),
    "aten.linspace.out": factory(aten.linspace.default),
    "aten.logspace.out": factory(aten.logspace.default),
    "aten._nested_view_from_jagged.default": refusals.nested,
    **{f"aten.{name}.{kinds}": host_ops.ends for name in ("linspace", "logspace") for kinds in ENDS},
    "aten.eye.out": factory(aten.eye.default),
    "aten.eye.m_out": factory(aten.eye.m),
    "aten.randperm.out": permutation,
    "aten.randperm.generator_out": permutation,
    **fused_steps.HANDLERS,
}


# Composite on a device without kernels for them. Workers have such kernels, and a decomposition has other bits
WHOLE = (aten.silu_backward.default, aten.mish_backward.default)
# Factories below torch.tensor(values, device=...), which hides Python's kernels but not the stack of dispatch modes
BELOW_TENSOR = (aten.empty.memory_format, aten.empty_strided.default)


def _returns_no_tensor(info: OpInfo) -> bool:
    returns = info.func._schema.returns
    return bool(returns) and not any("Tensor" in str(value.type) for value in returns)


# Ops without a row above: the first condition that holds decides
_CONDITIONS: list[tuple[Condition, Handler]] = [
    (lambda info: info.composite, decompose),
    (library_ops.foreign, library_ops.run),
    (_returns_no_tensor, host_ops.from_shapes),
    (lambda info: info.name.startswith("aten.set_."), host_ops.set_),
    (lambda info: torch.Tag.inplace_view in info.func.tags, view_in_place),
    (lambda info: info.random, random),
    (lambda info: info.name.startswith("aten._to_sparse"), refuse),  # BSR, CSC
    (lambda info: torch.Tag.nondeterministic_seeded in info.func.tags, refuse),
    (lambda info: "device" in info.named, host_ops.placed),
]


def register() -> None:
    """Register these handlers; once, before the first op."""
    known_sizes.register()
    op_info.register({**dict.fromkeys(map(str, WHOLE)), **_ROWS, **sparse_ops.HANDLERS, **known_sizes.HANDLERS}, _CONDITIONS)
