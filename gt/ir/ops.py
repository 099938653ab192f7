"""The closed set of ops, one row where the planner or an engine has to know more than ATen's schema says.

Any other `aten.*` overload is accepted by name; DENIED ones touch files or the process and are not.
"""

from __future__ import annotations

# Drawn from (seed, op counter, global element index): two trailing scalar operands, see ir.template.
RANDOM = frozenset(
    {
        "aten.uniform_.default",
        "aten.normal_.default",
        "aten.bernoulli_.float",
        "aten.bernoulli_.Tensor",
        "aten.bernoulli.default",
        "aten.random_.default",
        "aten.random_.to",
        "aten.random_.from",
        "aten.exponential_.default",
        "aten.log_normal_.default",
        "aten.cauchy_.default",
        "aten.geometric_.default",
        "aten.native_dropout.default",
        "aten.multinomial.default",
        "aten.randperm.default",
        "aten.normal.Tensor_Tensor",
        "aten.normal.Tensor_float",
        "aten.normal.float_Tensor",
        "aten.poisson.default",
        "gt.sdpa.default",
        "gt.sdpa_backward.default",
    }
)

# GT's own ops: name -> what it is
GT_OPS = {
    # () -> new; values: [frame index, or -1 for a host copy that the dispatcher asks for]
    "gt.upload.default": "bytes of a host tensor, row-major",
    # (q, k, v, attn_mask or None, dropout_p, is_causal, scale or None, enable_gqa; seed, counter) -> out, logsumexp.
    # logsumexp is f32 [batch..., heads, L] (zeros where the worker's kernel has none).
    "gt.sdpa.default": "scaled dot product attention, the worker picks the kernel",
    # (grad, q, k, v, attn_mask or None, out, logsumexp, dropout_p, is_causal, scale, enable_gqa; seed, counter) ->
    # grad_q, grad_k, grad_v
    "gt.sdpa_backward.default": "its backward",
    # (x) -> new: x on the mesh of the group's destination
    "gt.move.default": "a transfer to another mesh, at once",
}

DENIED = frozenset({"aten.from_file", "aten._print", "aten.__test__"})


def known(op: str) -> bool:
    """Whether the name is of the closed set (an engine may still lack it: UnsupportedOp)."""
    space, _, rest = op.partition(".")
    if space == "gt":
        return op in GT_OPS
    base = op.rpartition(".")[0]
    return space == "aten" and rest.count(".") == 1 and rest.replace(".", "").isidentifier() and base not in DENIED
