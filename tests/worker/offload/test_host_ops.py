"""Ops in host memory on a worker: of an engine whose device is the host, and of one with memory of its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gt.ir.template import T as Operand
from gt.worker.engine.torch import TorchEngine
from gt.worker.engine.torch.gpu.host_lane import GpuHostLane
from gt.worker.engine.torch.gpu.pinned_copies import PinnedCopy
from gt.worker.instructions import compute
from gt.worker.offload.host_ops import OpsInHostMemory
from gt.worker.offload.spaces import Spaces
from gt.worker.offload.tensors import Kept, OffloadedTensors
from tests.helpers.compiled_parts import Script, replay

PARAMETER, GRADIENT, STATE, RESULT = 1, 2, 3, 4


class OwnMemory(TorchEngine):
    """An engine whose tensors are copied to and from the host, as those of a GPU. They are on the CPU all the same."""

    def lane(self):
        if self._lane is None:
            self._lane = GpuHostLane(self.device, TorchEngine("cpu"))
        return self._lane

    def evicted(self, tensor):
        return PinnedCopy(tensor)


@pytest.fixture(params=[TorchEngine, OwnMemory])
def worker(request):
    engine = request.param("cpu")
    tensors = OffloadedTensors(Spaces(engine).evict)
    yield SimpleNamespace(engine=engine, tensors=tensors, host_ops=OpsInHostMemory(tensors, engine.lane()))
    if request.param is OwnMemory:
        engine.lane()._thread.shutdown()


def host_op(worker, op, tensors, args, writes=(), fresh=(), outs=()):
    payload = {"op": op, "args": args, "kwargs": {}, "tensors": tensors, "values": 0, "outs": [*outs], "writes": [*writes]}
    return compute.host_op(worker, {**payload, "random": None, "fresh": [*fresh]})


def hold(worker, *values, space="cpu", folder=""):
    """Parameter and gradient on the device, state at rest."""
    for i, value in zip((PARAMETER, GRADIENT, STATE), values):
        worker.tensors[i] = torch.full((4096,), value)
    worker.tensors.evict(STATE, space, folder)
    assert STATE not in worker.tensors


SAME, NEW = ["same", None, 0], ["new", [[4096], [1], 0, "float32"], -1]
T = [{"t": 0}, {"t": 1}]


@pytest.mark.parametrize("space", ["cpu", "nvme"])
def test_state_stays_and_the_parameter_comes_back(worker, tmp_path, space):
    hold(worker, 1.0, 2.0, 3.0, space=space, folder=str(tmp_path))
    nbytes = 4 * 4096
    before = worker.tensors.stats()
    grow = host_op(worker, "aten.add_.Tensor", 2, T, writes=[0], fresh=[1], outs=[SAME])
    move = host_op(worker, "aten.sub_.Tensor", 2, T, writes=[0], fresh=[0], outs=[SAME])
    again = host_op(worker, "aten.sub_.Tensor", 2, T, writes=[0], outs=[SAME])
    grow([STATE, GRADIENT], 0)
    move([PARAMETER, STATE], 0)
    again([PARAMETER, STATE], 0)  # its copy is of the value that it has
    after = worker.tensors.stats()
    assert worker.tensors[PARAMETER].eq(1.0 - 5.0 - 5.0).all()
    assert worker.tensors[GRADIENT].eq(2.0).all()
    assert after["offloaded"] == {space: nbytes} and after["restored_bytes"] == before["restored_bytes"]
    assert after["bytes_to_host"] - before["bytes_to_host"] == 2 * nbytes
    assert worker.tensors[STATE].eq(5.0).all()
    assert worker.tensors.stats()["restored_bytes"] == nbytes
    worker.tensors.drop([PARAMETER, GRADIENT, STATE])


def test_a_result_rests_and_comes_to_the_device_when_it_is_used(worker):
    hold(worker, 1.0, 2.0, 4.0)
    spec = ["new", [[4096], [1], 0, "float32"], -1]
    host_op(worker, "aten.sqrt.default", 1, T[:1], outs=[spec])([STATE, RESULT], 0)
    assert RESULT not in worker.tensors
    assert worker.tensors[RESULT].eq(2.0).all()


def test_state_that_a_use_brought_back_rests_again(worker):
    hold(worker, 1.0, 2.0, 3.0)
    assert worker.tensors[STATE].eq(3.0).all() and STATE in worker.tensors
    host_op(worker, "aten.add_.Tensor", 2, T, writes=[0], fresh=[1], outs=[SAME])([STATE, GRADIENT], 0)
    assert STATE not in worker.tensors and worker.tensors[STATE].eq(5.0).all()


def test_a_stale_copy_is_made_anew(worker):
    hold(worker, 1.0, 2.0, 3.0)
    move = host_op(worker, "aten.sub_.Tensor", 2, T, writes=[0], outs=[SAME])
    move([PARAMETER, STATE], 0)
    worker.tensors[PARAMETER].fill_(10.0)
    compute.stale(worker, {})([PARAMETER], 0)
    move([PARAMETER, STATE], 0)
    assert worker.tensors[PARAMETER].eq(7.0).all()


def test_a_parameter_of_a_failed_op_keeps_its_value(worker):
    hold(worker, 1.0, 2.0, 3.0)
    worker.tensors[GRADIENT] = torch.ones(7)
    bad = host_op(worker, "aten.add_.Tensor", 2, T, writes=[0], fresh=[0, 1], outs=[SAME])
    with pytest.raises(RuntimeError, match="size of tensor"):
        bad([PARAMETER, GRADIENT], 0)
        worker.tensors[PARAMETER]  # a lane tells it to who looks the parameter up
    assert worker.tensors[PARAMETER].eq(1.0).all()


@pytest.mark.parametrize("space", ["", "cpu"])
def test_an_id_that_is_given_to_another_tensor_names_that_one(worker, space):
    """A captured step that replaces its state ends so. The state before was a result of a host op, or was evicted."""
    hold(worker, 1.0, 2.0, 3.0)
    if not space:
        host_op(worker, "aten.add.Tensor", 2, T, fresh=[0, 1], outs=[NEW])([PARAMETER, GRADIENT, STATE], 0)
    worker.tensors[RESULT] = torch.full((4096,), 5.0)
    compute.alias(worker, {})([RESULT, STATE], 0)
    assert not worker.tensors.away
    host_op(worker, "aten.add_.Tensor", 2, T, writes=[0], fresh=[1], outs=[SAME])([STATE, GRADIENT], 0)
    assert worker.tensors[STATE].eq(5.0 + 2.0).all()
    worker.tensors.drop([STATE, RESULT, GRADIENT])


def test_what_is_freed_is_forgotten(worker):
    hold(worker, 1.0, 2.0, 3.0)
    host_op(worker, "aten.add_.Tensor", 2, T, writes=[0], fresh=[1], outs=[SAME])([STATE, GRADIENT], 0)
    worker.tensors.pop(GRADIENT)
    worker.tensors.drop([GRADIENT])
    assert not worker.tensors.host_copies
    worker.tensors.drop_range(0, 10)
    assert worker.tensors.stats()["offloaded"] == {}


def test_a_failed_op_on_state_is_told_to_who_looks_the_state_up(worker):
    """Also after a later op on the same state that would not fail by itself."""
    hold(worker, 1.0, 2.0, 3.0)
    if worker.engine.lane() is not None and not isinstance(worker.engine.lane(), GpuHostLane):
        pytest.skip("its ops fail where they are executed")
    worker.tensors[GRADIENT] = torch.ones(7)
    bad = host_op(worker, "aten.add_.Tensor", 2, T, writes=[0], fresh=[1], outs=[SAME])
    good = host_op(worker, "aten.neg_.default", 1, T[:1], writes=[0], outs=[SAME])
    with pytest.raises(RuntimeError, match="size of tensor"):
        bad([STATE, GRADIENT], 0)
        good([STATE], 0)
        worker.tensors[STATE]
    worker.tensors[STATE]
    worker.tensors.drop([STATE])


def test_a_view_of_a_parameter_has_the_new_value(worker):
    """Nothing waits where a view is looked up, so the op waits."""
    hold(worker, 1.0, 2.0, 3.0)
    view = worker.tensors[PARAMETER].view(64, 64)
    move = host_op(worker, "aten.sub_.Tensor", 2, T, writes=[0], fresh=[0], outs=[SAME])
    move([PARAMETER, STATE], 0)
    assert PARAMETER in worker.tensors and view.eq(1.0 - 3.0).all()
    worker.tensors.drop([PARAMETER, STATE])


def test_generated_code_gives_an_id_to_another_tensor():
    """The tensor that rested under this id ends, and so do results at rest that no host copy is beside."""
    first = torch.ones(4096)
    script = Script({GRADIENT: first, STATE: torch.ones(4096), RESULT: torch.ones(4096)})
    for _ in range(4):  # rows enough for a function
        script.op("aten.neg_.default", [Operand(0)], [GRADIENT])
    script.alias(GRADIENT, STATE)
    script.free(RESULT)
    bench = script.bench("eager", {GRADIENT: first})
    tensors = bench.executor.tensors
    for i in (STATE, RESULT):
        tensors.put_away(i, Kept(torch.zeros(4096), 4 * 4096))
    replay(bench)
    assert not tensors.away and tensors[STATE] is first


def test_host_copies_end_with_tensors_that_generated_code_frees():
    """A program's gradients: a copy that outlived them would keep their memory until the next step."""
    gradient = torch.ones(4096)
    script = Script({GRADIENT: gradient, STATE: torch.ones(4096)})
    for _ in range(4):  # rows enough for a function
        script.op("aten.neg_.default", [Operand(0)], [STATE])
    script.free(GRADIENT)
    bench = script.bench("eager", {GRADIENT: gradient, STATE: torch.ones(4096)})
    lane = bench.executor.worker.host_ops
    lane.run(torch.neg, [GRADIENT], [], [RESULT], (frozenset([0]), frozenset()))
    assert GRADIENT in bench.executor.tensors.host_copies
    replay(bench)
    assert not bench.executor.tensors.host_copies and GRADIENT not in bench.executor.tensors
