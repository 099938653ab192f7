"""The device itself: what importing does and does not do, its name, its looks, and the session's comings and goings."""

from __future__ import annotations

import contextlib
import copy
import subprocess
import sys
import traceback

import pytest
import torch
from torch import nn

import gt
from gt.client import current_session
from tests.helpers.inline_session import InlineSession, inline  # noqa: F401
from tests.helpers.limits import limit


def run(program: str) -> str:
    """A program in a process of its own; its standard output."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_dtype_that_workers_lack_is_an_error_of_that_tensor_alone(one) -> None:
    scales = torch.zeros(4, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    for make in (lambda: scales.to("remote"), lambda: torch.ones(4, device="remote").to(torch.float8_e4m3fnuz)):
        with pytest.raises(gt.UnsupportedOp, match=r"a remote tensor of torch.float8_\w+: want one of float64, .* its bytes"):
            make()
    assert torch.ones(2, device="remote").sum().item() == 2


def test_memory_is_pinned_nowhere_beside_cuda_either() -> None:
    """torch asks the registered device for pinned memory, wherever CUDA is."""
    program = """
import torch
torch.backends.cuda.is_built = torch.cuda.is_available = lambda: True
import gt
from gt.client.device import register
assert register.Shown.device is register.LAZY  # not registered yet
register.register()
batch = torch.ones(2).pin_memory()
print(batch.tolist(), batch.is_pinned())
"""
    assert run(program) == "[1.0, 1.0] False"


def test_importing_starts_nothing() -> None:
    program = """
import os, threading
before = len(os.listdir("/proc/self/fd"))
import torch
threads, files = threading.active_count(), set(os.listdir("/proc/self/fd"))
import gt
assert threading.active_count() == threads
assert not any(os.readlink(f"/proc/self/fd/{f}").startswith("socket") for f in set(os.listdir("/proc/self/fd")) - files
               if os.path.exists(f"/proc/self/fd/{f}"))
assert open(f"/proc/self/task/{os.getpid()}/children").read() == ""
import sys
assert "zmq" not in sys.modules and "gt.client.session" not in sys.modules
print(torch.device("remote:0"), gt.device)
"""
    assert run(program) == "remote:0 remote:0"


def test_our_own_processes_do_not_load_torch() -> None:
    program = """
import sys
sys.argv, sys.orig_argv = ["-m", "-p", "1"], ["python", "-m", "gt.server", "-p", "1"]
import gt, gt.wire.messages, gt.ir.template
print("torch" in sys.modules)
"""
    assert run(program) == "False"


def test_public_names_are_all_there() -> None:
    assert all(getattr(gt, name) is not None for name in gt.__all__)
    assert set(gt.__all__) <= set(dir(gt))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        gt.nothing


def test_without_the_name_the_device_is_lazy_and_works() -> None:
    program = """
import os, sys
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # it looks for a GPU by itself
import torch
torch.backends.cuda.is_built = lambda: True  # as where there is CUDA: nothing is registered on import
torch.cuda.is_available = lambda: True
import gt
torch.cuda.is_available = lambda: False
from tests.helpers.inline_session import InlineSession
from gt.client import current_session
current_session.connect(InlineSession())
try:
    torch.device("remote")
except RuntimeError:
    pass
else:
    raise AssertionError("the name is registered")
from torch import nn
model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)).to(gt.device)
x = torch.arange(4.0, device=gt.device)
for kind in (dict(), dict(fused=True), dict(capturable=True), dict(foreach=True)):
    optimizer = torch.optim.AdamW(model.parameters(), **kind)
    model(x).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
assert model[0].weight.device == x.device == gt.device and isinstance(model(x).item(), float)
assert torch.equal(gt.ones(3).cpu(), torch.ones(3)) and gt.tensor([1, 2]).tolist() == [1, 2]
print(gt.device.type)
"""
    assert run(program) == "lazy"


def test_factories_of_gt_are_remote(inline: InlineSession) -> None:  # noqa: F811
    import numpy as np

    made = [
        gt.tensor([1, 2]), gt.from_numpy(np.ones(3)), gt.zeros(2), gt.ones(2, 3), gt.full((2,), 5.0), gt.empty(2),
        gt.arange(3), gt.eye(2), gt.rand(2), gt.randn(2, 2), gt.randint(0, 5, (3,)), gt.zeros_like(torch.ones(2)),
        gt.ones_like(gt.zeros(2)), gt.cat([gt.ones(1), gt.zeros(1)]), gt.stack([gt.ones(1)]), gt.randn_like(gt.ones(2)),
    ]  # fmt: skip
    assert all(t.device == gt.device for t in made)
    assert made[1].dtype is torch.float64 and made[13].tolist() == [1.0, 0.0]
    gt.manual_seed(1)
    a = gt.randn(4)
    gt.manual_seed(1)
    assert torch.equal(a, gt.randn(4))
    with gt.no_grad():
        assert not (gt.ones(1).requires_grad_() * 2).requires_grad
    assert gt.nn is nn and gt.optim is torch.optim
    assert isinstance(gt.stats()["client"]["ops"], int) and gt.inspect(a)["shape"] == [4]
    fetches = gt.stats()["client"]["fetches"]
    for thing, said in ((torch.ones(1), "one on cpu"), (3, "int 3"), ("x", "str 'x'"), ([a], "list"), ({"a": a}, "dict")):
        with pytest.raises(TypeError, match=f"gt.inspect takes a remote tensor, got {said}$"):
            gt.inspect(thing)
    assert gt.stats()["client"]["fetches"] == fetches  # the text of a list of tensors would read them


def test_a_tensor_looks_like_torchs(inline: InlineSession) -> None:  # noqa: F811
    x = torch.ones(2, device="remote", requires_grad=True)
    assert repr(x) == "tensor([1., 1.], device='remote:0', requires_grad=True)"
    assert "grad_fn=<MulBackward0>" in str(x * 2)
    assert repr(nn.Parameter(x.detach())).startswith("Parameter containing:\ntensor([1., 1.], device='remote:0'")
    assert repr(torch.ones(2, dtype=torch.int32, device="remote")).endswith("dtype=torch.int32, device='remote:0')")
    assert x.device == torch.device("remote:0") and x.is_leaf and not x.is_cpu and not x.is_cuda
    assert f"{torch.tensor(2.5, device='remote'):.1f}" == "2.5"


def test_a_numpy_array_of_a_leaf_is_torchs_error(inline: InlineSession) -> None:  # noqa: F811
    with pytest.raises(RuntimeError, match="requires grad"):
        torch.ones(2, device="remote", requires_grad=True).numpy()


def test_the_default_device_may_be_remote(inline: InlineSession) -> None:  # noqa: F811
    with torch.device("remote"):
        layer = nn.Linear(2, 2)
        assert torch.zeros(1).device.type == layer.weight.device.type == "remote"


def test_the_first_tensor_starts_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[InlineSession] = []

    def start() -> None:
        started.append(InlineSession())
        current_session.connect(started[-1])

    monkeypatch.setattr(current_session, "auto_start", start)
    current_session.disconnect()
    assert torch.ones(2, device="remote").sum().item() == 2.0 and len(started) == 1
    current_session.disconnect()


def test_a_missing_config_is_one_sentence(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(gt.ConfigError, match=r"no/such\.yaml: cannot be read"):
        gt.connect("localhost:1", config="no/such.yaml")
    with pytest.raises(ValueError, match="want at least 1"):
        gt.cpu_workers(0)
    with pytest.raises(TypeError, match="the number of workers is '2', want a whole number"):
        gt.cpu_workers("2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"1000000 workers take more memory than this machine has, .*iB: want at most \d+"):
        gt.cpu_workers(1000000)
    for wrong in (2.0, "2", 0):  # gt.gpu_workers warns of nothing before
        with pytest.raises((TypeError, ValueError), match=r"the number of workers is (2\.0|'2'|0), want"):
            gt.gpu_workers(wrong)  # type: ignore[arg-type]
    assert caplog.messages == []


def test_a_cpu_operand_is_refused_without_a_word_of_gts_own_exceptions(one: None) -> None:
    x = torch.ones(2, 2, device="remote")
    for call in (lambda: x @ torch.ones(2, 2), lambda: torch.cat([x, torch.ones(2, 2)])):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device") as caught:
            call()
        assert "another exception occurred" not in "".join(traceback.format_exception(caught.value))


def test_libraries_are_told_that_values_cannot_be_read_once_one_was(one: None) -> None:
    seen = []

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.cuda.is_current_stream_capturing())
        if not seen[-1] and bool((x > 0).all()):
            return x + 1
        return x + 1

    assert [step(torch.ones(2)).sum().item() for _ in range(3)] == [4.0] * 3
    assert seen == [False, True, True]  # a list that grows is no program's
    with contextlib.suppress(RuntimeError):  # torch's answer again: without CUDA it has none
        assert not torch.cuda.is_current_stream_capturing()


def test_memory_of_a_tensor_that_has_ended_is_not_counted(one: None) -> None:
    current_session.current().session.on_idle = None  # nothing else hands over that it has ended
    before = torch.remote.memory_allocated()
    for count in (torch.remote.memory_allocated, lambda: sum(row.session for row in gt.memory_summary().workers)):
        x = torch.ones(1 << 16, device="remote")
        assert count() - before >= x.nbytes
        del x
        assert count() - before < 64


def test_the_devices_module_waits_and_counts(one: None) -> None:
    kept = [torch.ones(256, 4, device="remote") for _ in range(3)]
    want = sum(t.nbytes for t in kept)
    for module in (torch.remote, torch.accelerator):
        module.empty_cache()
        # it waits with a scalar, and workers may be told later that it is freed
        assert want <= module.memory_allocated() < want + 64 and want <= module.max_memory_allocated()
    states = torch.remote.get_rng_state_all()
    first = torch.rand(3, device="remote")
    torch.remote.set_rng_state_all(states)
    assert torch.equal(torch.rand(3, device="remote"), first)
    for wait in (torch.remote.synchronize, torch.accelerator.synchronize):
        nn.functional.embedding(torch.tensor([9], device="remote"), kept[0][:2])
        with pytest.raises(gt.OpFailed, match="embedding"):
            wait()
    run = gt.compile(lambda x: (torch.remote.synchronize(), x + 1)[1])  # as in a CUDA graph: nothing to wait for
    assert [run(torch.ones(1)).item() for _ in range(4)] == [2.0] * 4 and run._programs[0].replays


def test_ways_to_name_the_device_and_to_copy(inline: InlineSession) -> None:  # noqa: F811
    x, model = torch.ones(2).remote(), nn.Linear(2, 2).remote()
    assert x.is_remote and not torch.ones(2).is_remote and model.weight.is_remote
    same = x.to("remote:0"), x.to(torch.device("remote", 0)), x.to(0), torch.ones(2).to("remote")
    assert {t.device for t in same} == {x.device}
    assert x.type() == "torch.remote.FloatTensor" and x.type(torch.float16).dtype is torch.float16
    twin = copy.copy(model.weight)
    assert isinstance(twin, nn.Parameter) and twin.requires_grad and twin.is_leaf
    with torch.no_grad():
        twin.zero_()
    assert not model.weight.any() and copy.copy(x).is_remote
    for ask in (x._typed_storage, x.is_shared, x.share_memory_):
        with pytest.raises(gt.UnsupportedOp, match="no storage"):
            ask()


def test_a_model_that_was_left_on_the_cpu_is_named(inline: InlineSession) -> None:  # noqa: F811
    with pytest.raises(RuntimeError, match=r"a parameter of shape \[2\] on cpu; move its module with module\.to\('remote'\)$"):
        torch.nn.Linear(3, 2)(torch.ones(4, 3, device="remote"))
