"""Uploads: host tensors become remote ones, by themselves or as the CPU operands that torch allows beside an accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gt.client import current_session
from gt.client.current_session import Current
from gt.client.device import meta as metas
from gt.client.device.meta import Meta
from gt.client.device.remote_tensor import Ref, RemoteTensor, Shown, make
from gt.client.trace.op_info import TENSORS, OpInfo
from gt.client.trace.recorder import Recorder
from gt.client.values.foldable_ops import FLOATS, MAX_FLOAT_BYTES
from gt.client.values.uploaded_values import DTYPES, MAX_BYTES
from gt.ir.template import Out, Template

if TYPE_CHECKING:  # which imports zmq
    from gt.client.exchange.kept_uploads import FileTensor

MAX_INLINE_BYTES = 256 << 10  # uploaded in the batch of ops; larger data stays on the client until a worker requests it
_uploads: dict[Meta, int] = {}
current_session.on_clear.append(_uploads.clear)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# In-place pointwise ops, to which a 0-dim CPU tensor is passed as a number: their result has the target's dtype anyway
_TAKES_NUMBER = frozenset(f"aten.{op}_.Tensor" for op in ("add", "sub", "mul", "div", "remainder", "floor_divide"))


def upload(host: torch.Tensor, origin: int = 0) -> RemoteTensor:
    """Upload a host tensor: a remote tensor with the same values, row-major. Does not wait. origin: if it is known."""
    recorder = current_session.current()
    tape = recorder.own_tape()
    if tape is not None and (filled := tape.upload(host)) is not None:
        return filled
    meta = metas.contiguous(tuple(host.shape), host.dtype)
    template = _template(recorder, meta)
    data = values(host)
    number, origin = recorder.new_id(), origin or Current.origins.here()
    row = [template, origin, -1, number]

    # Values of small tensors are kept here too: a program that reads them back, or indexes by them, need not wait
    is_float = host.dtype in FLOATS
    noted = (is_float or host.dtype in DTYPES) and data.nbytes <= (MAX_FLOAT_BYTES if is_float else MAX_BYTES)
    if data.nbytes <= MAX_INLINE_BYTES:
        recorder.emit_with_frame(row, data.tobytes(), 2, data.copy() if noted else None, is_float)
    else:
        if noted:
            recorder.note_upload(number, data.copy(), is_float)
        if recorder.tape is None and recorder.session.crowded(data.nbytes):  # a recorded call may be executed at its end
            recorder.flush_ops()
            recorder.session.wait_room(data.nbytes)
        # The bytes stay here until a worker asks. The row says where: a place in an arena that workers read, or -1
        row[2] = recorder.session.keep(number, data)
        recorder.emit_large_upload(row)
    recorder.ops += 1
    return make(meta, Ref(number, meta, origin, recorder.live_tensors))


def _template(recorder: Recorder, meta: Meta) -> int:
    template = _uploads.get(meta)
    if template is None:
        number = recorder.define(Template("gt.upload.default", (), (), (), 1, (Out("new", meta.spec),)))
        template = _uploads[meta] = number
    return template


def upload_from_file(shape: tuple[int, ...], dtype: torch.dtype, source: FileTensor) -> RemoteTensor:
    """A remote tensor with the values of a tensor in a file, which workers read once an op uses it. Does not wait."""
    recorder = current_session.current()
    meta = metas.contiguous(shape, dtype)
    template = _template(recorder, meta)
    number, origin = recorder.new_id(), Current.origins.here()
    row = [template, origin, recorder.session.keep_in_file(number, source), number]
    recorder.emit_large_upload(row)
    recorder.ops += 1
    return make(meta, Ref(number, meta, origin, recorder.live_tensors))


def values(host: torch.Tensor) -> np.ndarray:
    """A host tensor's values as an array of the same shape, with an integer dtype where NumPy lacks torch's."""
    # Such a bit says that values are to be conjugated or negated when they are read, which NumPy does not know
    if host.is_conj() or host.is_neg():
        host = host.resolve_conj().resolve_neg()
    try:
        return host.detach().numpy() if host.requires_grad else host.numpy()
    except TypeError:  # bfloat16, float8
        return host.detach().contiguous().view(_INTEGERS[host.element_size()]).numpy()


def upload_operands(info: OpInfo, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Upload the CPU operands that torch allows beside an accelerator: 0-dim tensors and indices.

    RuntimeError in torch's words for any other host tensor.
    """

    def convert(kind: int, argument: Any, index: bool) -> Any:
        if isinstance(argument, (list, tuple)) and kind == TENSORS:
            return [convert(0, x, index) for x in argument]
        if not isinstance(argument, torch.Tensor) or isinstance(argument, RemoteTensor):
            return argument
        if argument.device.type != "cpu" or not (argument.dim() == 0 or index):
            raise mixed_devices(info, argument) from None
        # A CPU scalar is read here, with no upload. A recorded call notes it, since it may have another value at the next one
        if argument.dim() == 0 and info.name in _TAKES_NUMBER and not argument.is_complex():
            tape = current_session.current().own_tape()
            if tape is not None:
                tape.source(argument)
            return argument.item()
        return upload(argument)

    converted = [convert(kind, a, name == "indices") for kind, name, a in zip(info.kinds, info.names, args, strict=False)]
    named = {k: convert(info.named[k], a, k == "indices") for k, a in kwargs.items()}
    if any(isinstance(a, torch.Tensor) and not isinstance(a, RemoteTensor) for a in [*converted, *named.values()]):
        raise mixed_devices(info, converted[0]) from None
    return tuple(converted), named


def mixed_devices(info: OpInfo, host: torch.Tensor) -> RuntimeError:
    """The error for a host tensor among the operands of a remote op."""
    remote, here = Shown.device, host.device
    what = f"a {here} tensor of shape {list(host.shape)}; move it with .to({remote.type!r})"
    if isinstance(host, torch.nn.Parameter):
        what = f"a parameter of shape {list(host.shape)} on {here}; move its module with module.to({remote.type!r})"
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {remote} and {here}! "
        f"{info.name} got {what}"
    )
