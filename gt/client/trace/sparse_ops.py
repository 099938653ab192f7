"""Ops on sparse remote tensors, as ops on their indices and values, one row each. They are below autograd.

COO and CSR hold gradients of embeddings and matrices of graphs. Other ops on them are refused with advice. `coalesce` of a COO
tensor waits: how many entries are left depends on values.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from gt.client import current_session
from gt.client.current_session import Current
from gt.client.device.remote_tensor import LAZY, RemoteTensor
from gt.client.device.sparse_tensor import RemoteSparse, coo, csr
from gt.client.trace.dispatch import call
from gt.client.trace.op_info import OpInfo, info_of
from gt.client.trace.shape_inference import is_remote
from gt.errors import UnsupportedOp

aten = torch.ops.aten
ADVICE = "use x.to_dense(), or compute it on x.cpu()"


def dispatch(cls: type, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
    """RemoteSparse.__torch_dispatch__."""
    handler = SPARSE.get(str(func))
    if handler is not None:
        return handler(*args, **kwargs or {})
    info = info_of(func)
    handler = _on_values(info)
    if handler is not None:
        return handler(*args, **kwargs or {})
    result = info.func.decompose(*args, **kwargs or {}) if info.composite else NotImplemented
    if result is NotImplemented:
        raise UnsupportedOp(f"{info.name} has no sparse form on remote: {ADVICE}")
    return result


# ---- making


def _refuse_capture() -> None:
    """A recording cannot leave a sparse tensor, such as the gradient of an embedding."""
    tape = current_session.current().tape
    if tape is not None:
        tape.refuse("it makes a sparse tensor: make it outside, or use sparse=False", Current.origins.here())


def _coo_of_parts(sparse_dim: int, dense_dim: int, size: Any, indices: Any, values: Any, **options: Any) -> torch.Tensor:
    _refuse_capture()
    return coo(indices, values, size, bool(options.get("is_coalesced")))


def _empty_coo(sparse_dim: int, dense_dim: int, size: Any, **options: Any) -> torch.Tensor:
    indices = torch.zeros(sparse_dim, 0, dtype=torch.int64, device=LAZY)
    values = torch.zeros(0, *size[sparse_dim:], dtype=options.get("dtype"), device=LAZY)
    return coo(indices, values, size, True)


def _empty(size: Any, **options: Any) -> torch.Tensor:
    """A factory at the sparse key of the device, as cpu_sparse.to("remote") calls it."""
    return _empty_coo(len(size), 0, list(size), dtype=options.get("dtype"))


def _csr_of_parts(crow: Any, columns: Any, values: Any, size: Any, **options: Any) -> torch.Tensor:
    _refuse_capture()
    if options.get("layout") not in (None, torch.sparse_csr) or values.dim() != 1:
        raise UnsupportedOp(f"a {options.get('layout')} tensor of {values.dim()}-dim values: want COO, or CSR of numbers")
    return csr(crow, columns, values, size)


def _from_dense(x: torch.Tensor, sparse_dim: int | None = None, **options: Any) -> torch.Tensor:
    """x.to_sparse(): waits, because the number of entries depends on values."""
    if isinstance(x, RemoteSparse):
        return _as_coo(x)
    layout, count = options.get("layout"), x.dim() if sparse_dim is None else sparse_dim
    if layout not in (None, torch.sparse_coo, torch.sparse_csr):
        raise UnsupportedOp(f"to_sparse with layout={layout}: remote has sparse_coo and sparse_csr")
    nonzero = x != 0
    if count < x.dim():
        # Hybrid: an entry is a whole block of the dense dims, kept if any of its elements is not zero
        nonzero = nonzero.flatten(count).any(-1)
    indices = nonzero.nonzero().t().contiguous()
    made = coo(indices, x[tuple(indices)], x.shape, True)
    return _as_csr(made) if layout is torch.sparse_csr else made


def _as_coo(x: RemoteSparse) -> RemoteSparse:
    return coo(torch.stack(_places(x)), x.parts[-1], x.shape, True) if x.compressed else x


def _as_csr(x: torch.Tensor, dense_dim: int | None = None) -> torch.Tensor:
    if not isinstance(x, RemoteSparse):
        return _as_csr(_from_dense(x))
    if x.compressed:
        return x
    x = _coalesce(x)
    rows, columns = x.parts[0]
    # Rows are sorted after coalesce, so row r of CSR begins where r would
    # be inserted. Example: rows [0, 0, 2] of 3 have the bounds [0, 2, 2, 3]
    edges = torch.arange(x.shape[0] + 1, device=LAZY)
    return csr(torch.searchsorted(rows.contiguous(), edges), columns, x.parts[1], x.shape)


# ---- parts


def _places(x: RemoteSparse) -> tuple[torch.Tensor, ...]:
    """Row of indices for each sparse dim."""
    if not x.compressed:
        return tuple(x.parts[0])
    crow, columns = x.parts[0].long(), x.parts[1].long()
    rows = torch.arange(x.shape[0], device=LAZY)
    return torch.repeat_interleave(rows, crow.diff(), output_size=columns.shape[0]), columns


def _sparse_dims(x: RemoteSparse) -> int:
    return 2 if x.compressed else x.parts[0].shape[0]


def _flat(x: RemoteSparse) -> torch.Tensor:
    """Position of each entry in the sparse dims, row-major."""
    place, sizes = None, x.shape[: _sparse_dims(x)]
    for index, size in zip(_places(x), sizes, strict=True):
        place = index if place is None else place * size + index
    assert place is not None
    return place


def _with_values(x: RemoteSparse, values: torch.Tensor) -> RemoteSparse:
    if x.compressed:
        return csr(x.parts[0], x.parts[1], values, x.shape)
    return coo(x.parts[0], values, x.shape, x.merged)


def _part(place: int) -> Callable:
    def part(x: RemoteSparse) -> torch.Tensor:
        return x.parts[place].detach()

    return part


def _set(x: RemoteSparse, value: RemoteSparse) -> RemoteSparse:
    x.parts, x.merged = value.parts, value.merged
    return x


def _set_merged(x: RemoteSparse, merged: bool) -> RemoteSparse:
    x.merged = merged
    return x


# ---- conversion


def _to_dense(x: RemoteSparse, dtype: torch.dtype | None = None, masked_grad: Any = None) -> torch.Tensor:
    return _into_dense(torch.zeros(x.shape, dtype=dtype or x.dtype, device=LAZY), x)


def _into_dense(dense: torch.Tensor, x: RemoteSparse, alpha: Any = 1) -> torch.Tensor:
    """dense += alpha * x, in place."""
    dims, values = _sparse_dims(x), x.parts[-1].to(dense.dtype)
    rest = tuple(x.shape[dims:])
    # Sparse dims are joined in one, by which index_add_ adds the entries: view() needs dense rows
    target = dense if dense.is_contiguous() else dense.contiguous()
    target.view(prod(x.shape[:dims]), *rest).index_add_(0, _flat(x), values, alpha=alpha)
    return dense if target is dense else dense.copy_(target)


def _coalesce(x: RemoteSparse) -> RemoteSparse:
    if x.merged or x.compressed:
        return x
    dims, values = _sparse_dims(x), x.parts[1]
    # Entries of one place have one position: `group` numbers the distinct ones, and index_add_ sums their values
    flat, group = torch.unique(_flat(x), return_inverse=True)
    merged = torch.zeros(flat.shape[0], *values.shape[1:], dtype=values.dtype, device=LAZY).index_add_(0, group, values)
    rows = []
    # Back from positions to indices, the last dim first
    for size in reversed(x.shape[:dims]):
        rows.append(flat % size)
        flat = torch.div(flat, size, rounding_mode="floor")
    return coo(torch.stack(rows[::-1]), merged, x.shape, True)


def _to_copy(x: RemoteSparse, **options: Any) -> torch.Tensor:
    dtype, device, layout = (options.get(name) for name in ("dtype", "device", "layout"))
    if layout not in (None, x.layout):
        raise UnsupportedOp(f"{x.layout} to {layout} on remote: {ADVICE}")
    if not is_remote(device):
        hosts = [part.to(device) for part in x.parts[:-1]] + [x.parts[-1].to(device, dtype or x.dtype)]
        if x.compressed:
            return torch.sparse_csr_tensor(*hosts, size=x.shape, check_invariants=False)
        return torch.sparse_coo_tensor(*hosts, size=x.shape, is_coalesced=x.merged, check_invariants=False)
    return _with_values(x, x.parts[-1].to(dtype or x.dtype, copy=True))


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if isinstance(target, RemoteSparse) and isinstance(source, RemoteSparse):
        return _set(target, _with_values(source, source.parts[-1].to(target.dtype, copy=True)))
    if isinstance(target, RemoteSparse) and source.layout is torch.sparse_coo:
        indices, values = source._indices().to(LAZY), source._values().to(LAZY, target.dtype)
        return _set(target, coo(indices, values, source.shape, source.is_coalesced()))
    if not isinstance(target, RemoteTensor) and isinstance(source, RemoteSparse):
        return target.copy_(_to_copy(source, device=target.device))
    raise UnsupportedOp(f"copy_ of a {source.layout} tensor into a {target.layout} one on remote: {ADVICE}")


# ---- arithmetic


def _add(x: torch.Tensor, y: torch.Tensor, *, alpha: Any = 1) -> torch.Tensor:
    if not isinstance(x, RemoteSparse):
        return _into_dense(x.to(torch.promote_types(x.dtype, y.dtype), copy=True), y, alpha)  # type: ignore[arg-type]
    if not isinstance(y, RemoteSparse):
        return _into_dense(y * alpha if alpha != 1 else y.clone(), x)
    # Both lists of entries, one behind the other: entries of one place are summed when the sum is coalesced
    x, y = _as_coo(x), _as_coo(y)
    values = y.parts[1] * alpha if alpha != 1 else y.parts[1]
    return coo(torch.cat([x.parts[0], y.parts[0]], 1), torch.cat([x.parts[1], values]), x.shape)


def _add_(x: torch.Tensor, y: torch.Tensor, *, alpha: Any = 1) -> torch.Tensor:
    if isinstance(x, RemoteSparse):
        return _set(x, _add(x, y, alpha=alpha))  # type: ignore[arg-type]
    if not torch.can_cast(torch.promote_types(x.dtype, y.dtype), x.dtype):
        raise RuntimeError(f"Can't convert result type {y.dtype} to output {x.dtype} in add operation")
    return _into_dense(x, y, alpha)  # type: ignore[arg-type]


def _sub(x: torch.Tensor, y: torch.Tensor, *, alpha: Any = 1) -> torch.Tensor:
    return _add(x, y, alpha=-alpha)


def _scale(op: Callable) -> Callable:
    """Product or quotient with a number, or product with a tensor at the entries' places."""

    def scaled(x: Any, y: Any) -> torch.Tensor:
        if op is torch.div and isinstance(y, torch.Tensor) and y.dim():
            got = f"got shape {list(y.shape)} for divisor"
            raise RuntimeError(f"Sparse division requires a scalar or zero-dim dense tensor divisor ({got})")
        if not isinstance(x, RemoteSparse) and op is torch.mul:
            x, y = y, x
        if isinstance(y, torch.Tensor) and y.dim():
            x = _coalesce(x)
            dense = (_to_dense(y) if isinstance(y, RemoteSparse) else y).expand(x.shape)
            y = dense[_places(x)]
        return _with_values(x, op(x.parts[-1], y))

    return scaled


def _mask(dense: torch.Tensor, mask: RemoteSparse) -> torch.Tensor:
    """dense.sparse_mask(mask): its elements at the entries of the mask."""
    return _with_values(mask, (_to_dense(dense) if isinstance(dense, RemoteSparse) else dense)[_places(mask)])


def _mm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if isinstance(x, RemoteSparse) and isinstance(y, RemoteSparse):
        raise UnsupportedOp("the product of two sparse tensors on remote: use y.to_dense(), or compute it on the CPU")
    if not isinstance(x, RemoteSparse):
        # Dense times sparse: by (x y)^T = y^T x^T
        return _mm(_transpose(y, 0, 1), x.t()).t()  # type: ignore[arg-type]
    if x.dim() != 2 or y.dim() != 2 or x.shape[1] != y.shape[0]:
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({_by(x)} and {_by(y)})")
    rows, columns = _places(x)
    out = torch.zeros(x.shape[0], y.shape[1], dtype=y.dtype, device=LAZY)
    # Each entry (r, c, v) adds v * y[c] to row r of the product. This takes memory for entries times columns of y
    return out.index_add_(0, rows, x.parts[-1].unsqueeze(1) * y.index_select(0, columns))


def _by(x: torch.Tensor) -> str:
    return "x".join(map(str, x.shape))


def _mv(x: RemoteSparse, y: torch.Tensor) -> torch.Tensor:
    return _mm(x, y.unsqueeze(1)).squeeze(1)


def _addmm(bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    product = _mm(x, y) if alpha == 1 else _mm(x, y) * alpha
    return product if beta == 0 else bias * beta + product


def _transpose(x: RemoteSparse, first: int, second: int) -> torch.Tensor:
    if x.dim() != 2 or _sparse_dims(x) != 2:
        raise UnsupportedOp(f"transpose of a sparse tensor of {x.dim()} dims on remote: {ADVICE}")
    if first % 2 == second % 2:
        return x
    rows, columns = _places(x)
    return coo(torch.stack([columns, rows]), x.parts[-1], (x.shape[1], x.shape[0]))


def _sum(x: RemoteSparse, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return x.parts[-1].sum(dtype=dtype)


def _norm(x: RemoteSparse, p: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> torch.Tensor:
    if dim or keepdim:
        raise UnsupportedOp(f"a norm of a sparse tensor over dims on remote: {ADVICE}")
    return torch.linalg.vector_norm(_coalesce(x).parts[-1], 2 if p is None else p, dtype=dtype)


def _zero_(x: RemoteSparse) -> RemoteSparse:
    return _set(x, x * 0) if x.compressed else _set(x, _empty_coo(_sparse_dims(x), 0, x.shape, dtype=x.dtype))  # type: ignore


def _clone(x: RemoteSparse, memory_format: Any = None) -> RemoteSparse:
    return _with_values(x, x.parts[-1].clone())


def _same(x: RemoteSparse) -> RemoteSparse:
    return _with_values(x, x.parts[-1])


# Ops of each value that keep zero. Entries of one place are summed before those that are not linear.
_LINEAR = frozenset({"neg", "conj_physical", "positive"})
_KEEPS_ZERO = _LINEAR | {"abs", "sign", "sqrt", "square", "relu", "sin", "tanh", "pow", "isnan", "nan_to_num", "floor", "ceil"}


def _on_values(info: OpInfo) -> Callable | None:
    base = info.name.split(".")[1]
    op, in_place = base.removesuffix("_"), base.endswith("_")
    if op not in _KEEPS_ZERO or info.outs:
        return None

    def run(x: RemoteSparse, *args: Any) -> RemoteSparse:
        x, given = x if op in _LINEAR else _coalesce(x), x
        made = _with_values(x, getattr(torch, op)(x.parts[-1], *args))
        return _set(given, made) if in_place else made

    return run


SPARSE: dict[str, Callable] = {
    "prim.layout.default": lambda x: torch.sparse_csr if x.compressed else torch.sparse_coo,
    "prim.device.default": lambda x: LAZY,
    "aten._indices.default": _part(0),
    "aten.indices.default": _part(0),
    "aten._values.default": _part(-1),
    "aten.values.default": _part(-1),
    "aten.crow_indices.default": _part(0),
    "aten.col_indices.default": _part(1),
    "aten._nnz.default": lambda x: x.parts[-1].shape[0],
    "aten.is_coalesced.default": lambda x: x.merged,
    "aten._coalesced_.default": _set_merged,
    "aten.sparse_dim.default": _sparse_dims,
    "aten._dimI.default": _sparse_dims,
    "aten.dense_dim.default": lambda x: x.dim() - _sparse_dims(x),
    "aten._dimV.default": lambda x: x.dim() - _sparse_dims(x),
    "aten.detach.default": _same,
    "aten.detach_.default": lambda x: x,
    "aten.alias.default": _same,
    "aten.clone.default": _clone,
    "aten.zero_.default": _zero_,
    "aten.zeros_like.default": lambda x, **options: _zero_(_same(x)),
    "aten._coalesce.default": _coalesce,
    "aten.coalesce.default": _coalesce,
    "aten._to_dense.default": _to_dense,
    "aten._to_sparse.default": _from_dense,
    "aten._to_sparse.sparse_dim": _from_dense,
    "aten._to_sparse_csr.default": _as_csr,
    "aten._to_copy.default": _to_copy,
    "aten.copy_.default": _copy,
    "aten.sparse_mask.default": _mask,
    "aten.add.Tensor": _add,
    "aten.add_.Tensor": _add_,
    "aten.sub.Tensor": _sub,
    "aten.sub_.Tensor": lambda x, y, alpha=1: _add_(x, y, alpha=-alpha),
    "aten.mul.Tensor": _scale(torch.mul),
    "aten.mul.Scalar": _scale(torch.mul),
    "aten.mul_.Tensor": lambda x, y: _set(x, _scale(torch.mul)(x, y)),
    "aten.mul_.Scalar": lambda x, y: _set(x, _scale(torch.mul)(x, y)),
    "aten.div.Tensor": _scale(torch.div),
    "aten.div.Scalar": _scale(torch.div),
    "aten.div_.Tensor": lambda x, y: _set(x, _scale(torch.div)(x, y)),
    "aten.div_.Scalar": lambda x, y: _set(x, _scale(torch.div)(x, y)),
    "aten.mm.default": _mm,
    "aten.mv.default": _mv,
    "aten.addmm.default": _addmm,
    "aten._sparse_addmm.default": _addmm,
    "aten.t.default": lambda x: _transpose(x, 0, 1),
    "aten.transpose.int": _transpose,
    "aten.sum.default": _sum,
    "aten.norm.Scalar": _norm,
    "aten.norm.ScalarOpt_dim": _norm,
    "aten.linalg_vector_norm.default": _norm,
}


def _embedding_bag(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """Backward of an embedding bag: with sparse=True other ops of torch make a sparse gradient."""
    grad, indices, offsets, offset2bag, bag_size, _, count, scale, mode, sparse, weights, *padding = args
    if not sparse:
        return call(info, args, kwargs)
    return aten._embedding_bag_sparse_backward.default(
        grad, indices, offsets, offset2bag, bag_size, count, scale, mode, weights, *padding, **kwargs
    )


# Ops of dense tensors that make sparse ones
HANDLERS: dict[str, Callable[[OpInfo, tuple, dict], Any]] = {
    "aten._sparse_coo_tensor_with_dims_and_tensors.default": lambda info, args, kwargs: _coo_of_parts(*args, **kwargs),
    "aten._sparse_coo_tensor_unsafe.default": lambda info, args, kwargs: _coo_of_parts(0, 0, args[2], *args[:2], **kwargs),
    "aten._sparse_coo_tensor_with_dims.default": lambda info, args, kwargs: _empty_coo(*args, **kwargs),
    "aten._sparse_compressed_tensor_unsafe.default": lambda info, args, kwargs: _csr_of_parts(*args, **kwargs),
    "aten._sparse_csr_tensor_unsafe.default": lambda info, args, kwargs: _csr_of_parts(*args, **kwargs),
    "aten.sparse_compressed_tensor.comp_plain_value_size": lambda info, args, kwargs: _csr_of_parts(*args, **kwargs),
    "aten._validate_compressed_sparse_indices.default": lambda info, args, kwargs: None,  # workers check indices in use
    "aten._to_sparse.default": lambda info, args, kwargs: _from_dense(*args, **kwargs),
    "aten._to_sparse.sparse_dim": lambda info, args, kwargs: _from_dense(*args, **kwargs),
    "aten._to_sparse_csr.default": lambda info, args, kwargs: _as_csr(*args, **kwargs),
    "aten._embedding_bag_backward.default": _embedding_bag,
}


def factories(key: str) -> torch.library.Library:
    """Kernels of the sparse factories at a backend's key, which no tensor leads to us. They live as long as the result."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, key)
    library.impl("_sparse_coo_tensor_with_dims", _empty_coo, key)
    return library


RemoteSparse.__torch_dispatch__ = classmethod(dispatch)  # type: ignore[assignment]
