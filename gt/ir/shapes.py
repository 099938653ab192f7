"""Shape checks for ops whose kernels trust their arguments' shapes; random calls found these ops.

torch's functions check shapes before they call such a kernel, but a client may call it directly. Run once for each definition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from gt.ir import arguments, recurrent
from gt.ir.schema import OWN, TABLE, Schema
from gt.ir.spec import Spec
from gt.ir.template import Arg, T, Template

Shape = tuple[int, ...]
HALF = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class OpArguments:
    """An op's arguments by name, with tensors as shapes and missing ones as None."""

    given: Mapping[str, Arg]
    specs: Sequence[Spec]

    def __getitem__(self, name: str) -> Any:
        return self._shown(self.given.get(name))

    def _shown(self, arg: Arg) -> Any:
        if isinstance(arg, T):
            return self.specs[arg.index].shape
        return [self._shown(part) for part in arg] if isinstance(arg, (list, tuple)) else arg

    def dtype(self, name: str) -> str:
        """The dtype of a tensor; TypeError if it is missing."""
        arg = self.given[name]
        if not isinstance(arg, T):
            raise TypeError(f"{name} is no tensor")
        return self.specs[arg.index].dtype

    def same(self, *names: str) -> bool:
        """True if the present ones of these tensors have one shape."""
        return len({shape for name in names if (shape := self[name]) is not None}) <= 1

    def one_dtype(self) -> bool:
        return len({spec.dtype for spec in self.specs}) <= 1

    def each(self, shape: Shape, *names: str) -> bool:
        """True if the present ones of these tensors have this shape."""
        return all(self[name] in (None, shape) for name in names)


Rule = tuple[str, Callable[[OpArguments], bool]]  # a condition, in words and as a test


def check_template(template: Template) -> None:
    """ValueError names the rule that a client's template breaks; for the client itself, before it sends the template."""
    space, base, _ = template.op.split(".")
    if base in RULES and space in OWN:
        named = dict(template.kwargs)
        check(arguments.match(TABLE.find(template.op), template.args, named), template.args, named, template.ins)


def check(schema: Schema, args: Sequence[Arg], kwargs: Mapping[str, Arg], specs: Sequence[Spec]) -> None:
    """ValueError names the rule that the arguments of a call break."""
    # By base name, as overloads of an op share their kernel; ops of libraries may have equal names and other shapes.
    space, base, _ = schema.op.split(".")
    rule = RULES.get(base) if space in OWN else None
    if rule is None:
        return
    named = {argument.name: arg for argument, arg in zip(schema.positional, args)}
    text, holds = rule
    # A rule may index shapes as it likes: arguments with fewer dims, or None for a missing tensor, break the rule too.
    try:
        good = holds(OpArguments({**named, **kwargs}, specs))
    except (IndexError, TypeError, ValueError):  # fewer dims than the rule reads
        good = False
    if not good:
        raise ValueError(f"{schema.op} of {', '.join(spec.text() for spec in specs[:8])} is refused: {text}")


def _pooled(dims: int) -> Callable[[OpArguments], bool]:
    """Gradient and input of a pooling over the last dims have one batch shape, and no empty dims are pooled."""

    def holds(call: OpArguments) -> bool:
        # The gradient is the first argument, under several names. Without a batch dim, x has one dim more than are pooled.
        grad, x = call[next(iter(call.given))], call["self"]
        batch = len(x) - dims
        return (
            len(grad) == len(x) and batch in (1, 2) and grad[:batch] == x[:batch] and (prod(x[batch:]) > 0 or prod(grad) == 0)
        )

    return holds


def _indexed(dims: int) -> Callable[[OpArguments], bool]:
    def holds(call: OpArguments) -> bool:
        return _pooled(dims)(call) and call["indices"] == call["grad_output"]

    return holds


def _indexed_by_sizes(dims: int) -> Callable[[OpArguments], bool]:
    """Kernels read a number of each dim from the sizes, however many there are."""
    indexed = _indexed(dims)
    return lambda call: indexed(call) and len(call["output_size"]) == dims


def _statistics(call: OpArguments) -> bool:
    """Statistics and weights have an element for each channel. Saved statistics of evaluation may be empty."""
    x = call["input"]
    # Statistics that training saved are of each channel; evaluation saves empty ones.
    channels, saved = (x[1],), ("save_mean", "save_var", "save_invstd")
    training = next((call.given[name] for name in ("training", "train", "update") if name in call.given), True)
    saved_fit = all(call[name] in (None, channels) or (call[name] == (0,) and not training) for name in saved)
    # Evaluation reads the running statistics, so there they must be given.
    known = (
        training
        or not {"running_mean", "running_var"} & set(call.given)
        or None not in (call["running_mean"], call["running_var"])
    )
    if not training and "running_mean" not in call.given:
        return False
    grads = all(call[name] in (None, x) for name in ("grad_out", "grad_output"))
    return saved_fit and known and grads and call.each(channels, "weight", "bias", "running_mean", "running_var")


def _known_statistics(call: OpArguments) -> bool:
    """As _statistics, for an op that reads or writes running statistics: both are given."""
    return _statistics(call) and None not in (call["running_mean"], call["running_var"])


def _updated(call: OpArguments) -> bool:
    return _statistics(call) and (call["running_mean"] is None) == (call["running_var"] is None)


def _solved(call: OpArguments) -> bool:
    """Right-hand sides are [..., N, K], factors [..., N, N]."""
    right, factor = call["self"], call["A"]
    return call.one_dtype() and len(right) >= 2 and right[:-1] == factor[:-1] and factor[-1] == factor[-2]


def _chunked(call: OpArguments) -> bool:
    dim = call["dim"]
    return call["num_chunks"] >= 1 and all(0 <= dim < len(shape) and prod(shape) > 0 for shape in call["tensors"])


def _weighed(call: OpArguments) -> bool:
    """Weight norm of v over all dims but the first or the last, with a norm for each index of that dim.

    Norms of half precision are float32.
    """
    # Backward and forward have the same rule, with other names.
    names = ("grad_w", "saved_v", "saved_g", "saved_norms") if "saved_v" in call.given else ("", "v", "g", "")
    grad, v, g, norms = (call[name] for name in names)
    dim = call["dim"] or 0
    sizes = {prod(shape) for shape in (g, norms) if shape is not None}
    dtypes = [spec.dtype for spec in call.specs]
    wide = dtypes.pop() if norms is not None else dtypes[0]
    alike = set(dtypes) == {dtypes[0]} and wide in (dtypes[0], "float32" if dtypes[0] in HALF else dtypes[0])
    return alike and prod(v) > 0 and grad in (None, v) and dim in (0, len(v) - 1) and sizes == {v[dim]}


def _distances(call: OpArguments) -> bool:
    grad, a, b, distances = (call[name] for name in ("grad", "x1", "x2", "cdist"))
    return grad == distances and len(distances) >= 2 and distances[-2:] == (a[-2], b[-2]) and a[-1] == b[-1]


def _pairs(call: OpArguments) -> bool:
    # One distance for each pair of n rows.
    n = call["self"][0]
    return len(call["self"]) == 2 and call.each((n * (n - 1) // 2,), "grad", "pdist")


def _transformed(call: OpArguments) -> bool:
    """Dims of a Fourier transform are in range, each once. A real result has about twice the length."""
    x, dims = call["self"], call["dim"]
    # Of a real input, half of the last dim determines the rest: a complex dim of n // 2 + 1 is a real one of n.
    own = [dim % len(x) for dim in dims if -len(x) <= dim < len(x)]
    size = call["last_dim_size"]
    whole = size is None or (own and size >= 1 and x[own[-1]] == size // 2 + 1)
    return len(set(own)) == len(dims) and call["normalization"] in (0, 1, 2) and bool(whole)


def _normalized(call: OpArguments) -> bool:
    x, dims = call["input"], len(call["normalized_shape"])
    statistics = [call[name] for name in ("mean", "rstd") if name in call.given]
    rows = x[: len(x) - dims]
    full = tuple(call["normalized_shape"])
    return (
        x[len(x) - dims :] == full
        and call["grad_out"] in (None, x)
        and call.each(full, "weight", "bias")
        and all(prod(shape) == prod(rows) for shape in statistics)
    )


def _padded(dims: int) -> Callable[[OpArguments], bool]:
    def holds(call: OpArguments) -> bool:
        # torch lists the padding from the last dim on: (left, right, top, bottom, ...).
        grad, x, pad = call["grad_output"], call["self"], call["padding"]
        wide = [n + pad[2 * k] + pad[2 * k + 1] for k, n in enumerate(reversed(x[len(x) - dims :]))]
        return len(pad) == 2 * dims and len(x) in (dims + 1, dims + 2) and grad == x[: len(x) - dims] + tuple(reversed(wide))

    return holds


def _pads(dims: int) -> Callable[[OpArguments], bool]:
    return lambda call: len(call["padding"]) == 2 * dims


def _convolved_3d(call: OpArguments) -> bool:
    """torch before 2.12 reads three numbers of each list, however many there are."""
    return all(len(call[name]) == 3 for name in ("kernel_size", "stride", "padding"))


def _sampled(call: OpArguments) -> bool:
    x, grid = call["input"], call["grid"]
    return grid[0] == x[0] and grid[-1] == len(x) - 2 and call["grad_output"] == (*x[:2], *grid[1:-1])


def _aligned(call: OpArguments) -> bool:
    """The backward of a CTC loss reads the forward's alphas [N, T, 2 S + 1]."""
    log_probs, alpha, targets = call["log_probs"], call["log_alpha"], call["targets"]
    if len(targets) not in (1, 2) or (len(targets) == 2 and targets[0] != log_probs[1]):
        return False
    batch = (log_probs[1],)

    # Lengths are lists, which are compared with the sizes here, or tensors, of which only the shape is known.
    lengths = [call["input_lengths"], call["target_lengths"]]
    each = all(shape == batch if isinstance(shape, tuple) else len(shape) == batch[0] for shape in lengths)
    longest = max(call["target_lengths"], default=0) if isinstance(call["target_lengths"], list) else 0
    if any(
        isinstance(part, list) and not all(0 <= n <= most for n in part)
        for part, most in zip(lengths, (log_probs[0], targets[-1]))
    ):
        return False
    return (
        each and call.each(batch, "grad", "neg_log_likelihood") and len(alpha) == 3 and alpha[:2] == (batch[0], log_probs[0])
        and alpha[2] >= 2 * longest + 1 and 0 <= call["blank"] < log_probs[2]
    )  # fmt: skip


def _factored(call: OpArguments) -> bool:
    lu = call["LU_data"]
    return len(lu) >= 2 and call["LU_pivots"] == (*lu[:-2], min(lu[-2:]))


def _segmented(call: OpArguments) -> bool:
    """Lengths or offsets exist for each row before the axis. The reduced tensor has a value for each segment."""
    data, axis = call["data"], call["axis"] or 0
    lengths, offsets = call["lengths"], call["offsets"]
    # n segments have n lengths, or n + 1 offsets.
    for shape, more in ((lengths, 0), (offsets, 1)):
        if shape is not None:
            reduced = (*data[:axis], shape[-1] - more, *data[axis + 1 :])
            if not 0 <= axis < len(data) or shape[:-1] != data[:axis] or not call.each(reduced, "grad", "output"):
                return False
    return lengths is not None or offsets is not None


def _alike(call: OpArguments) -> bool:
    """Lists of an optimizer have a tensor of each parameter's shape, or are empty. Steps have one element."""
    parameters = call["self"]
    lists = [(name, call[name]) for name, arg in call.given.items() if isinstance(arg, (list, tuple))]
    return all(
        not shapes or (len(shapes) == len(parameters) and (name == "state_steps" or shapes == parameters))
        for name, shapes in lists
    ) and all(prod(shape) == 1 for shape in call["state_steps"] or ())


def _observed(call: OpArguments) -> bool:
    """Ranges, scales and zero points have an element for each channel, or one. The switches have one."""
    x, axis = call["self"], call["ch_axis"]
    by_channel = bool(call["per_row_fake_quant"])
    buffers = [call[name] for name in ("running_min", "running_max", "scale", "zero_point")]
    sized = all(shape == (x[axis],) if by_channel else prod(shape) == 1 for shape in buffers)
    switches = all(prod(call[name]) == 1 for name in ("observer_on", "fake_quant_on"))
    return axis < len(x) and (axis >= 0 or not by_channel) and prod(x) > 0 and switches and sized


def _attended(call: OpArguments) -> bool:
    """Queries are [..., L, E], keys [..., S, E], values [..., S, V]."""
    q, k, v = call["query"], call["key"], call["value"]
    return min(len(q), len(k), len(v)) > 1 and q[-1] == k[-1] and k[-2] == v[-2]


def _attended_backward(call: OpArguments) -> bool:
    """Gradient and output are [..., L, V], logsumexp float32 [..., L]: kernels read them by the sizes of the query."""
    q, grad, out = call["query"], call["grad"], call["out"]
    if not _attended(call) or len(out) < len(q) or out[-2:] != (q[-2], call["value"][-1]):
        return False
    # The batch dims of the query may be broadcast to those of the output, from the last on.
    batch = zip(reversed(q[:-2]), reversed(out[:-2]))
    whole = all(size == full or (size == 1 and full > 0) for size, full in batch)
    dtypes = call.dtype("grad") == call.dtype("out") and call.dtype("logsumexp") == "float32"
    return whole and dtypes and grad == out and call["logsumexp"] == out[:-1]


def _recurrent(call: OpArguments) -> bool:
    """Layers of a recurrent network, or their backward with gradients of the results' shapes."""
    if call["mode"] not in recurrent.GATES or not call.one_dtype():
        return False
    x, states = call["input"], call["hx"]
    names = ("mode", "has_biases", "num_layers", "train", "bidirectional", "batch_sizes")
    if not recurrent.fits(x, states, call["params"], recurrent.Stack(*(call[name] for name in names))):
        return False
    out = (*x[:-1], states[0][-1] * (1 + call["bidirectional"]))
    if len(call["requires_grad"]) != 1 + len(states) + len(call["params"]):
        return False
    return call.each(out, "grad", "out") and call.each(states[0], "grad_hy") and call.each(states[-1], "grad_cy")


# Base name of an op -> its rule, the words of which end the error "... is refused: ".
RULES: dict[str, Rule] = {
    **dict.fromkeys(("rnn", "rnn_backward"), ("want one dtype, and operands of the shapes that the layers have", _recurrent)),
    **dict.fromkeys(("sdpa", "sdpa_biased"), ("want query [..., L, E], key [..., S, E] and value [..., S, V]", _attended)),
    **dict.fromkeys(
        ("sdpa_backward", "sdpa_biased_backward"),
        (
            "want query [..., L, E], key [..., S, E], value [..., S, V], grad, out [..., L, V] and "
            "logsumexp [..., L] in float32",
            _attended_backward,
        ),
    ),
    "_adaptive_avg_pool2d_backward": ("gradient and input want one batch and as many channels", _pooled(2)),
    "_adaptive_avg_pool3d_backward": ("gradient and input want one batch and as many channels", _pooled(3)),
    **{
        name: ("gradient, indices and input want one batch and as many channels", _indexed(dims))
        for dims, names in (
            (2, ("adaptive_max_pool2d_backward", "max_pool2d_with_indices_backward")),
            (3, ("adaptive_max_pool3d_backward", "max_pool3d_with_indices_backward")),
        )
        for name in names
    },
    **{
        f"fractional_max_pool{dims}d_backward": (
            f"gradient, indices and input want one batch and as many channels, and the output {dims} sizes",
            _indexed_by_sizes(dims),
        )
        for dims in (2, 3)
    },
    **dict.fromkeys(
        ("native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
         "_native_batch_norm_legit_no_training", "_batch_norm_with_update", "_batch_norm_with_update_functional",
         "batch_norm_backward"),
        ("weights and statistics want an element for each channel of the input", _statistics),
    ),
    "_batch_norm_no_update": ("weights and running statistics want an element for each channel", _known_statistics),
    "batch_norm_update_stats": ("both running statistics want an element for each channel of the input", _updated),
    "_cholesky_solve_helper": ("want right sides [..., N, K] and factors [..., N, N] of one batch and dtype", _solved),
    "_chunk_cat": ("want tensors with elements and with that dim, and at least one chunk", _chunked),
    **dict.fromkeys(
        ("_weight_norm_interface", "_weight_norm_interface_backward"),
        ("want a norm for each index of the first or last dim, and one dtype but for norms of half precision", _weighed),
    ),
    **dict.fromkeys(
        ("native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward"),
        ("gradient, input, weights and statistics want shapes of one norm", _normalized),
    ),
    "_cdist_backward": ("want gradient and distances [P, R] of [P, M] and [R, M]", _distances),
    "_pdist_backward": ("want gradient and distances of each pair of rows", _pairs),
    **dict.fromkeys(("_fft_c2c", "_fft_c2r", "_fft_r2c"), ("want dims of the tensor, each once", _transformed)),
    **dict.fromkeys(
        ("_softmax_backward_data", "_log_softmax_backward_data"),
        ("want gradient and output of one shape", lambda call: call.same("grad_output", "output")),
    ),
    **{f"{kind}_pad{n}d_backward": ("the gradient wants the padded shape of the input", _padded(n))
       for kind in ("reflection", "replication") for n in (1, 2, 3)},
    **{f"{kind}_pad{n}d": ("padding wants two numbers for each dim", _pads(n))
       for kind in ("reflection", "replication") for n in (1, 2, 3)},
    "slow_conv3d_forward": ("kernel_size, stride and padding want three numbers each", _convolved_3d),
    **dict.fromkeys(
        ("grid_sampler_2d_backward", "grid_sampler_3d_backward"), ("want the input's batch and the grid's sizes", _sampled)
    ),
    "_fused_moving_avg_obs_fq_helper": ("its buffers want an element for each channel, or one", _observed),
    "_ctc_loss_backward": ("want what the loss kept of the same batch", _aligned),
    **dict.fromkeys(
        ("segment_reduce", "_segment_reduce_backward"), ("want lengths or offsets of the rows before the axis", _segmented)
    ),
    "lu_unpack": ("pivots want the batch and the shorter side of the matrices", _factored),
    "nll_loss2d_backward": (
        "the gradient wants the target's shape, or none where it is reduced",
        lambda call: call["grad_output"] == {0: call["target"], 1: (), 2: ()}.get(call["reduction"]),
    ),
    **dict.fromkeys(
        ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_", "_fused_adam", "_fused_adamw", "_fused_sgd",
         "_fused_adagrad"),
        ("its lists want tensors of the parameters' shapes", _alike),
    ),
}  # fmt: skip
