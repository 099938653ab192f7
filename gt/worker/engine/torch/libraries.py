"""Ops of other libraries: a worker's owner names modules, and the ops that these register with torch join the table.

This happens when the process starts. No message makes a worker import a module, or changes its table afterwards.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Sequence

import torch

from gt.errors import ConfigError
from gt.ir.schema import OWN, TABLE, library_schemas
from gt.wire.deferred_imports import UNUSED, execute_deferred
from gt.worker.engine.torch.overloads import row

log = logging.getLogger("gt.worker")
# Namespaces of torch's own modules, which a library may be the first to import
TORCH = OWN | {
    "prims", "rngprims", "debugprims", "higher_order", "inductor", "_inductor_test", "export", "quantized", "_quantized",
    "quantized_decomposed", "c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor",
    "fsdp", "streams", "profiler", "mkldnn", "mkldnn_prepacked", "mkl", "onednn", "sparse", "prepacked", "static_runtime",
    "cuda", "onnx", "onnx_symbolic", "aoti_torch", "aotinductor", "triton", "bw_hook", "_test", "_TorchScriptTesting",
    "torch_attn",
}  # fmt: skip


def load(libraries: Sequence[str], device: str) -> list[str]:
    """Import libraries and add their ops to this process's table. Lines of the ops that the device has kernels for.

    ConfigError for a module that cannot be imported, or that registers no op.
    """
    lines: dict[str, str] = {}
    if libraries:  # whose ops may use any module of torch
        execute_deferred(*UNUSED)
    for library in libraries:
        before = _names()
        try:
            importlib.import_module(library)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise ConfigError(f"the library {library!r} (GT_LIBRARIES or --library) cannot be imported: {why}") from error
        own = f"{library.split('.')[0]}::"
        # Ops that are new since the import, or of the library's own namespace: something else may have imported it before.
        registered = [name for name in _names() if name not in before or name.startswith(own)]
        found = {name: text for name in registered if (text := _line(name, device))}
        if not found:
            raise ConfigError(f"the library {library!r} registers no op with torch that a worker on the {device} can execute")
        log.info("library %s adds %d ops", library, len(found))
        lines.update(found)
    try:
        library_schemas([*lines.values()])  # as the dispatcher will
    except ValueError as error:
        raise ConfigError(f"the libraries {', '.join(libraries)}: {error}") from None
    TABLE.add(lines.values(), "libraries")
    return [*lines.values()]


def _names() -> set[str]:
    return set(torch._C._dispatch_get_all_op_names())


def _line(name: str, device: str) -> str:
    """The table's line of a registered op; "" for one that workers cannot execute, and which the client's CPU does."""
    space, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    # A row of reasons against an op: torch's own (the table has them), no kernel, results that are no tensors, out arguments,
    # views that the dispatcher could not follow.
    if space in TORCH or not _has_kernel(name, device):
        return ""
    op = getattr(getattr(getattr(torch.ops, space), base), overload or "default")
    values = [*op._schema.arguments, *op._schema.returns]
    if any(str(value.real_type) not in ("Tensor", "List[Tensor]") for value in op._schema.returns):
        return ""
    if any(argument.is_out for argument in op._schema.arguments) or _views(values):
        return ""
    if torch.Tag.nondeterministic_seeded in op.tags:  # it draws from the generator that all sessions share
        return ""
    try:
        return row(f"{space}.{base}.{overload or 'default'}", op._schema, [tag.name for tag in op.tags])
    except ValueError:  # an argument that cannot be sent
        return ""


def _views(values: Iterable[object]) -> bool:
    """True if a result shares memory with an argument that is not written."""
    return any(value.alias_info is not None and not value.alias_info.is_write for value in values)  # type: ignore[attr-defined]


def _has_kernel(name: str, device: str) -> bool:
    keys = ("CompositeExplicitAutograd", "CUDA" if device == "cuda" else "CPU")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)
