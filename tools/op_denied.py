"""Ops of torch that workers do not carry out, by name: what each would do, and a call that shows it.

A name without overload stands for all overloads, `*` for any letters. tools/op_schemas.py writes them into the table as left
out, with the reason. What is left out for its kind (composite ops, sparse kernels) is found there, not here.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

_LIBRARY = (
    "it is one library's kernel, which no dense remote program calls: its packed or saved arguments are taken as they are"
)
_LAYOUT = "it makes or reads tensors that are not strided, whose parts no bounds check of strided tensors sees"
_QUANTIZED = "it makes or reads quantized tensors, whose scales and zero points are further memory"
_SAVED = "it takes what the forward op saved as it is, and indexes memory by it; gt.sdpa has attention"
_TRACING = "it is a mark for tracing or a test of torch's, and computes nothing"

# name or pattern -> (what it does, the call)
DENIED: dict[str, tuple[str, str]] = {
    # files, streams, the process
    "from_file": ("it maps a file of the worker's machine", 'from_file("/etc/passwd", False, 64, dtype=uint8) has its bytes'),
    "_print": ("it writes to the worker's standard output", '_print("\\x1b[2J")'),
    "_pin_memory": ("it locks pages of the worker's machine, which no limit counts", "_pin_memory(zeros(1 << 33))"),
    "record_stream": ("it takes a stream of the process by its number", "record_stream(x, stream)"),
    "_make_dep_token": (_TRACING, "_make_dep_token()"),
    "_assert_async": ("on a GPU a failed assertion ends the process for every session", "_assert_async(zeros(1))"),
    "_functional_assert_async": ("on a GPU a failed assertion ends the process for every session", "as _assert_async"),
    "_assert_scalar": (_TRACING, '_assert_scalar(0, "text")'),
    "_functional_assert_scalar": (_TRACING, "as _assert_scalar, with a token"),
    "_assert_tensor_metadata": (_TRACING, "_assert_tensor_metadata(x, [1 << 62])"),
    "*sym_constrain_range*": (_TRACING, "sym_constrain_range(1, min=2)"),
    "_foobar": (_TRACING, "_foobar(x)"),
    "_test_*": (_TRACING, "_test_warn_in_autograd(x) warns in the worker"),
    # storage, and sizes that nothing checks
    "set": ("it rebinds the storage of a tensor", "set(x, y, 0, [1 << 20], [1])"),
    "set_": ("it rebinds the storage of a tensor", "set_(x, y, 0, [1 << 20], [1])"),
    "resize": ("it makes memory that nobody has written a part of the tensor", "resize(x, [1 << 20])"),
    "resize_as": ("it makes memory that nobody has written a part of the tensor", "resize_as(x, large)"),
    "_resize_output*": ("it makes memory that nobody has written a part of the tensor", '_resize_output(x, [1 << 20], "cpu")'),
    "_reshape_alias": ("it checks neither sizes nor strides", "_reshape_alias(x, [1 << 16], [1]) of 16 bytes, then clone"),
    "_reshape_alias_copy": ("it checks neither sizes nor strides", "_reshape_alias_copy(x, [1 << 16], [1]) of 16 bytes"),
    "_lazy_clone": ("its result shares memory until one of them is written, which no schema says", "_lazy_clone(x)"),
    "_efficientzerotensor": (
        "its result has no memory: who reads it reads address 0",
        "_efficientzerotensor([16]), then fetch",
    ),
    "_new_zeros_with_same_feature_meta": (
        "it is forward differentiation's, and copies a storage's size",
        "a view of few elements",
    ),
    "_fw_primal*": ("it is forward differentiation's: a view, whatever its schema says", "_fw_primal(x, 0)"),
    "_make_dual*": ("it is forward differentiation's: it changes its operand's tangent", "_make_dual(x, y, 0)"),
    "_copy_from*": ("it is how torch copies to a device of another kind", "_copy_from_and_resize(x, y) resizes y"),
    "_cummax_helper": (
        "it writes as many results as its input has, whatever their sizes",
        "_cummax_helper(ones(1000), v[1], i[1], 0)",
    ),
    "_cummin_helper": (
        "it writes as many results as its input has, whatever their sizes",
        "_cummin_helper(ones(1000), v[1], i[1], 0)",
    ),
    "_convert_indices_from_*": ("it writes where its input's values say", "_convert_indices_from_coo_to_csr([1 << 40], 1)"),
    "_compute_linear_combination": (
        "it takes the sizes of its operands as they are",
        "_compute_linear_combination(x[1], y[2, 3, 4])",
    ),
    "_foreach_copy": ("it takes the lengths of its lists as they are", "_foreach_copy([], [x])"),
    "_stack": ("it takes its list as it is", "_stack([], 64) ends the process"),
    "_slow_conv2d_*": ("it takes the sizes of its operands as they are", "_slow_conv2d_backward(x[4, 4], ..., [1 << 62])"),
    # other layouts
    "*sparse*": (_LAYOUT, "sparse_coo_tensor(indices, values, [2])"),
    "_coalesce*": (_LAYOUT, "_coalesced(x, True)"),
    "*indices_copy": (_LAYOUT, "crow_indices_copy(x)"),
    "indices": (_LAYOUT, "indices(x)"),
    "_indices": (_LAYOUT, "_indices(x)"),
    "c*_indices": (_LAYOUT, "crow_indices(x)"),
    "row_indices": (_LAYOUT, "row_indices(x)"),
    "values*": (_LAYOUT, "values(x)"),
    "_values*": (_LAYOUT, "_values(x)"),
    "hspmm": (_LAYOUT, "hspmm(x, y)"),
    "sspaddmm": (_LAYOUT, "sspaddmm(x, y, z)"),
    "_spdiags": (_LAYOUT, "_spdiags(x, offsets, [2, 2])"),
    "_to_dense": (_LAYOUT, "_to_dense(x)"),
    "_validate_*": (_LAYOUT, "_validate_compressed_sparse_indices(True, crow, col, 1, 1, 1)"),
    "*nested*": (_LAYOUT, "_nested_view_from_buffer(x, sizes, strides, offsets) takes sizes from tensors, unchecked"),
    "_jagged_to_padded*": (_LAYOUT, "_jagged_to_padded_dense_forward(x, [offsets], [4]) takes offsets as they are"),
    "_padded_dense_to_jagged*": (_LAYOUT, "_padded_dense_to_jagged_forward(x, [offsets]) takes offsets as they are"),
    "to_padded_tensor": (_LAYOUT, "to_padded_tensor(x, 0.0)"),
    # quantized
    "quantize_per_*": (_QUANTIZED, "quantize_per_tensor(x, 0.1, 0, quint8)"),
    "dequantize*": (_QUANTIZED, "dequantize(x)"),
    "*quantized*": (_QUANTIZED, "_make_per_channel_quantized_tensor(x, scales[1], zeros[1], 0)"),
    "q_per_channel_*": (_QUANTIZED, "q_per_channel_scales(x)"),
    "int_repr": (_QUANTIZED, "int_repr(x)"),
    "_fused_moving_avg_obs_fq_helper_functional": (_QUANTIZED, "_fused_moving_avg_obs_fq_helper_functional(x, ..., ch_axis=9)"),
    # kernels of one library or for one packed format
    "*mkldnn*": (_LIBRARY, "mkldnn_rnn_layer(x, w, ...)"),
    "*cudnn*": (_LIBRARY, "_cudnn_rnn_backward(..., reserve=ones(1))"),
    "*miopen*": (_LIBRARY, "miopen_rnn_backward(..., reserve=ones(1))"),
    "*mps*": (_LIBRARY, "lstm_mps_backward(...)"),
    "*nnpack*": (_LIBRARY, "_nnpack_spatial_convolution(x, w, None, [1 << 40])"),
    "*triton*": (_LIBRARY, "_triton_scaled_dot_attention(q, k, v)"),
    "_cslt*": (_LIBRARY, "_cslt_sparse_mm(compressed[1], x)"),
    "*semi_structured*": (_LIBRARY, "_sparse_semi_structured_mm(x, meta[1], y)"),
    "_mixed_dtypes_linear": (_LIBRARY, "_mixed_dtypes_linear(x, w, scale)"),
    "*int4pack*": (_LIBRARY, "_weight_int4pack_mm_for_cpu(x, packed[1], 32, scales)"),
    "_weight_int8pack_mm": (_LIBRARY, "_weight_int8pack_mm(x, w, scales[1])"),
    "_dyn_quant_*": (_LIBRARY, "_dyn_quant_matmul_4bit(x, packed[1], 32, 1 << 20, 1 << 20)"),
    "_thnn_fused_*": (_LIBRARY, "_thnn_fused_lstm_cell_backward_impl(..., workspace[1], True)"),
    "*_overrideable": ("it is a stand-in for devices that register their own", "convolution_overrideable(...)"),
    # saved states of attention, and transformers as one op
    "*scaled_dot_product*": (_SAVED, "_scaled_dot_product_flash_attention_for_cpu_backward(..., logsumexp[1])"),
    "_flash_attention*": (_SAVED, "_flash_attention_backward(..., logsumexp[1])"),
    "_efficient_attention*": (_SAVED, "_efficient_attention_backward(..., logsumexp[1])"),
    "_fill_mem_eff_dropout_mask_": (_SAVED, "_fill_mem_eff_dropout_mask_(x, 0.5, 1, 2)"),
    "_transformer_encoder_layer_fwd": (_SAVED, "_transformer_encoder_layer_fwd(x, 1 << 40, 1, ...)"),
    "_native_multi_head_attention": (_SAVED, "_native_multi_head_attention(q, k, v, 1 << 40, 1, ...)"),
    "_transform_bias_rescale_qkv": (_SAVED, "_transform_bias_rescale_qkv(qkv[1], bias, 8)"),
}

# Ops of TorchScript's interpreter, which the dispatcher does not have: found as attributes of torch.ops.aten all the same
SCRIPT: dict[str, tuple[str, str]] = {
    "save": ("it writes a file of the worker's machine", 'save(x, "/home/user/.profile")'),
    "manual_seed": ("it seeds the generator that all sessions share", "manual_seed(0)"),
    "set_grad_enabled": ("it switches autograd for the thread that carries all sessions' ops out", "set_grad_enabled(True)"),
    "warn": ("it writes to the worker's standard error", 'warn("forged line", 2)'),
    "wait": ("it waits for a future of the process, for ever if there is none", "wait(future)"),
    "get_gradients": ("it reads gradients of a distributed autograd context by its number", "get_gradients(1)"),
}


def denied(op: str) -> str:
    """The reason why an op (`aten.set_.source_Tensor`) is left out by name, with the call; "" if it is not."""
    base, _, overload = op.removeprefix("aten.").rpartition(".")
    for pattern, (reason, call) in (*DENIED.items(), *SCRIPT.items()):
        if fnmatchcase(base, pattern) or fnmatchcase(f"{base}.{overload}", pattern):
            return f"{reason}: {call}"
    return ""
