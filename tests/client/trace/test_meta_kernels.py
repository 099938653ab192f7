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


WAITING = """
from gt.wire.deferred_imports import is_deferred
assert is_deferred("sympy") and is_deferred("torch.fx.experimental.symbolic_shapes")
"""


def test_common_ops_are_inferred_without_dynamo_sympy_and_symbolic_shapes() -> None:
    run(INFERENCES + WAITING + "assert 'torch._dynamo' not in sys.modules")


def test_a_forward_and_a_backward_pass_need_none_of_them() -> None:
    run(
        """
import sys
import torch
import gt

gt.cpu_workers(1)
layers = torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 8), torch.nn.LayerNorm(8)
model = torch.nn.Sequential(*layers).to("remote")
x = torch.randn(2, 3, 8, 8, device="remote")
torch.nn.functional.cross_entropy(model(x), torch.zeros(2, dtype=torch.long, device="remote")).backward()
model[2].weight.grad.sum().item()
"""
        + WAITING
        + "assert 'torch._dynamo' not in sys.modules"
    )


def test_deferred_functions_of_symbolic_shapes_answer_as_the_real_ones() -> None:
    run(
        INFERENCES
        + WAITING
        + """
import itertools, warnings
from gt.client.trace.meta_kernels import _ANSWERS, _answering

from torch.fx.experimental import symbolic_shapes as real
deferred = {name: _answering(name, answer) for name, answer in _ANSWERS.items() if hasattr(real, name)}
warnings.simplefilter("ignore")  # one of the functions is deprecated
assert real.ShapeEnv and not is_deferred("sympy") and real.sym_eq.__module__ == real.__name__

def outcome(function, args):
    try:
        result = function(*args)
    except Exception as error:
        return type(error), str(error)
    return type(result), result

plain = [True, False, 0, 1, -1, 3, 2.5, "3", None, (), (1, 2), [1, 2], (1, 3), (True,), ((1,), 2), torch.Size([1, 2])]
pairs = [*itertools.product(plain, repeat=2)]
answered = 0
for name, function in deferred.items():
    calls = pairs if name in ("sym_and", "sym_or", "sym_eq") else [*zip(plain), (x,), (x.t(),)]
    for args in [] if "constrain_range" in name else calls:
        assert outcome(function, args) == outcome(getattr(real, name), args), (name, args)
        answered += _ANSWERS[name](*args) is not NotImplemented
assert len(deferred) > 10 and answered > 80, (deferred, answered)
"""
    )


def test_symbolic_sizes_execute_symbolic_shapes_and_are_traced() -> None:
    run(
        INFERENCES
        + WAITING
        + """
import sympy
from torch.fx.experimental.proxy_tensor import make_fx
import torch.distributed.tensor._decompositions as decompositions

graph = make_fx(lambda a: a.new_zeros(a.shape[0], 2 * a.shape[1]) + a[:, :1], tracing_mode="symbolic")(torch.ones(5, 3))
sizes = [node.meta["val"] for node in graph.graph.nodes if "sym_size" in node.name]
assert sizes and all(isinstance(size.node.expr, sympy.Basic) for size in sizes), sizes
assert graph(torch.ones(7, 4)).shape == (7, 8)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
assert decompositions.GuardOnDataDependentSymNode is GuardOnDataDependentSymNode
assert not is_deferred("sympy")
"""
    )


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
assert type(rules).__name__ == "DeferredModule" and not any(name.startswith(rules.__name__ + "._math") for name in sys.modules)
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
