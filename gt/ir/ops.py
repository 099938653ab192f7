"""GT's own ops, and the lists of random ops and of unsaid views. ATen's schemas are in schema.py."""

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
        "gt.sdpa_biased.default",
        "gt.sdpa_biased_backward.default",
    }
)

# Beginnings of ops whose results share the memory of their first operand although their schemas do not say so.
UNSAID_VIEWS = ("aten._unsafe_view.", "aten.unsafe_")

# GT's own ops: name -> (schema, description)
GT_OPS = {
    # values: [frame index, or -1 for a host copy that the dispatcher asks for]
    "gt.upload.default": ("() -> (Tensor)", "bytes of a host tensor, row-major"),
    # and seed, counter. The second result, logsumexp, is f32 [batch..., heads, L] (zeros where the worker's kernel has none).
    "gt.sdpa.default": (
        "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, bool is_causal, float? scale, "
        "bool enable_gqa) -> (Tensor, Tensor)",
        "scaled dot product attention, the worker picks the kernel",
    ),
    # and seed, counter; gives the gradients of query, key, value
    "gt.sdpa_backward.default": (
        "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor out, Tensor logsumexp, "
        "float dropout_p, bool is_causal, float? scale, bool enable_gqa) -> (Tensor, Tensor, Tensor)",
        "its backward",
    ),
    # The same with a mask of floats that requires a gradient, such as learned relative positions: kernels differ
    "gt.sdpa_biased.default": (
        "(Tensor query, Tensor key, Tensor value, Tensor attn_mask, float dropout_p, bool is_causal, float? scale, "
        "bool enable_gqa) -> (Tensor, Tensor)",
        "attention with a bias that is learned",
    ),
    # gives the gradients of query, key, value and attn_mask
    "gt.sdpa_biased_backward.default": (
        "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor attn_mask, Tensor out, Tensor logsumexp, "
        "float dropout_p, bool is_causal, float? scale, bool enable_gqa) -> (Tensor, Tensor, Tensor, Tensor)",
        "its backward",
    ),
    # Layers of nn.RNN, nn.GRU or nn.LSTM without dropout between them; shapes in ir.recurrent. batch_sizes: of packed rows,
    # else empty. requires_grad: of input, hx and params in one list. keeps: a backward may follow. The third result is the
    # cell state of an LSTM, and else empty
    "gt.rnn.default": (
        "(Tensor input, Tensor[] hx, Tensor[] params, str mode, bool has_biases, int num_layers, bool train, "
        "bool bidirectional, int[] batch_sizes, bool[] requires_grad, bool keeps) -> (Tensor, Tensor, Tensor)",
        "layers of a recurrent network, the worker picks the kernel",
    ),
    # gives the gradients of those operands that require one, in their order
    "gt.rnn_backward.default": (
        "(Tensor? grad, Tensor? grad_hy, Tensor? grad_cy, Tensor input, Tensor[] hx, Tensor[] params, Tensor out, str mode, "
        "bool has_biases, int num_layers, bool train, bool bidirectional, int[] batch_sizes, bool[] requires_grad) "
        "-> (Tensor[])",
        "its backward",
    ),
    # the operand on the mesh of the group's destination
    "gt.move.default": ("(Tensor self) -> (Tensor)", "a transfer to another mesh, at once"),
    # a copy for the planner. On workers the result has the operand's memory, so the operand may not be written from here on
    "gt.lend.default": ("(Tensor self) -> (Tensor)", "the result of a program, not copied until the program runs again"),
}
