"""Shape inference starts without torch._dynamo, and leaves torch as it is for a program that compiles."""

from __future__ import annotations

import subprocess
import sys

from tests.helpers.limits import limit

INFERENCES = """
import sys
import torch
from gt.client.trace.shape_inference import warm

warm()
x, index = torch.empty(4, 4, device="meta"), torch.empty(4, dtype=torch.long, device="meta")
F = torch.nn.functional
for result in (
    x * x, x + 1, x / 2, x @ x, x.sum(0), x.softmax(-1), F.gelu(x), F.layer_norm(x, (4,)), x[index], x.to(torch.half),
    F.cross_entropy(x, index), torch.where(x > 0, x, 1.0), x.pow(2), x.mean(), x.clamp(min=0), F.silu(x), x.exp(),
):
    assert result.device.type == "meta"
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=limit(60))
    assert done.returncode == 0, done.stderr


def test_common_ops_are_inferred_without_the_import_of_dynamo() -> None:
    run(INFERENCES + "assert 'torch._dynamo' not in sys.modules")


def test_once_dynamo_is_imported_it_is_torchs_own_wrapper_that_runs() -> None:
    run(
        INFERENCES
        + """
from gt.client.trace import meta_kernels

code = torch._compile._disable_dynamo(lambda: None).__code__
wrapper = next(f for f in meta_kernels._functions() if f.__code__ is code and f.__name__ == "mul")
excluded = dict(zip(code.co_freevars, wrapper.__closure__))["fn"].cell_contents
before = vars(excluded)["__dynamo_disable"]
assert before.__module__ == "gt.client.trace.meta_kernels"
import torch._dynamo
assert (x * x).shape == (4, 4)
after = vars(excluded)["__dynamo_disable"]
assert after is not before and after.__module__.startswith("torch._dynamo"), after.__module__
"""
    )
