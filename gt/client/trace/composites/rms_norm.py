"""nn.RMSNorm as one op forward and one backward on GPU workers, which have torch's kernel for it.

torch splits the norm into 6 and 18 ops on a device without such a kernel. On CPU workers that form stands. There backward adds
each of its terms to a gradient that has other parts, such as a residual's, and one op would have other last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gt.client import current_session
from gt.client.current_session import Current
from gt.client.trace.dispatch import call, fallback
from gt.client.trace.op_info import OpInfo
from gt.client.trace.recorder import Recorder

OVERLOAD = torch.ops.aten._fused_rms_norm.default


def rms_norm(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """The handler of the op, which inference mode dispatches whole in any session."""
    whole = Current.recorder is not None and Current.recorder.gpus
    return call(info, args, kwargs) if whole else OVERLOAD.decompose(*args, **kwargs)


def prepare() -> None:
    current_session.on_connect.append(begin)


def begin(recorder: Recorder) -> Callable[[], None]:
    """With a kernel of its own on this device, autograd has one node for the norm, until the session ends."""
    if not recorder.gpus:
        return lambda: None
    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm", partial(fallback, OVERLOAD), "Lazy")
    return library._destroy
