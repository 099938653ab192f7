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


WITHOUT_RULES = """
import sys
import torch
from gt.client.trace.shape_inference import warm

warm()
rules = sys.modules["torch.distributed.tensor._ops"]
assert type(rules).__name__ == "_Rules" and not any(name.startswith(rules.__name__ + "._math") for name in sys.modules)
"""


def test_sharding_rules_of_dtensor_are_not_imported_before_a_mesh_is_made_and_then_all_of_them() -> None:
    run(
        WITHOUT_RULES
        + """
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
assert type(rules).__name__ == "module"
assert torch.ops.aten.mm.default in DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
x = torch.arange(16.0).view(4, 4)
shard = distribute_tensor(x, mesh, [Shard(0)])
assert torch.equal((shard @ shard + 1).full_tensor(), x @ x + 1)
dist.destroy_process_group()
"""
    )


def test_an_import_in_torch_distributed_executes_the_rules_first() -> None:
    run(WITHOUT_RULES + "import torch.distributed.tensor.parallel\nassert type(rules).__name__ == 'module' and rules._math_ops")


def test_an_attribute_of_the_rules_executes_them() -> None:
    run(WITHOUT_RULES + "assert rules._math_ops and type(rules).__name__ == 'module'")


def test_a_program_that_has_dtensor_keeps_its_rules() -> None:
    first = "import torch.distributed.tensor, sys\nbefore = sys.modules['torch.distributed.tensor._ops']\n"
    run(first + INFERENCES + "assert sys.modules['torch.distributed.tensor._ops'] is before and before._math_ops")
