"""Ops of another library: on the client's CPU, or on workers whose owner has named the library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gt
from gt.client.trace import library_ops
from gt.launch import local
from tests.client.trace import standin_library as standin
from tests.helpers.processes import of_the_server, started


@pytest.fixture
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library has been warned of yet."""
    monkeypatch.setattr(library_ops, "_warned", set())


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in has been warned of."""
    monkeypatch.setattr(library_ops, "_warned", {"standin"})


def remote(*values: float) -> torch.Tensor:
    return torch.tensor(values, device="remote")


def train(device: str) -> list[float]:
    """Losses of a model with an op of the library in its middle."""
    torch.manual_seed(0)
    first, second = torch.nn.Linear(4, 8).to(device), torch.nn.Linear(8, 1).to(device)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    x, losses = torch.randn(6, 4).to(device), []
    for _ in range(3):
        loss = second(standin.scaled(first(x), 2.0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# ---- on the client's CPU


def test_a_model_with_an_op_of_another_library_trains_as_on_the_cpu(one: None, plain_threads: None, unwarned: None):
    with pytest.warns(UserWarning, match=r"test_library_ops\.py:\d+: standin\.scaled.*CPU.*--library MODULE") as caught:
        losses = train("remote")
        standin.process(remote(1.0))
    assert len(caught) == 1 and losses == train("cpu")


def test_an_op_on_the_cpu_runs_in_this_process_and_its_result_is_remote(one: None, warned: None):
    result = standin.process(remote(1.0, 2.0))
    assert result.tolist() == [os.getpid()] * 2 and result.device.type == "remote"


def test_a_written_argument_is_copied_back_and_a_list_is_read(one: None, warned: None):
    x = remote(1.0, 2.0, 3.0)
    view = x[1:]
    standin.bump_(view, [remote(1.0, 1.0), remote(10.0, 10.0)])
    assert x.tolist() == [1.0, 13.0, 14.0]


def test_a_number_is_returned_as_it_is_and_a_device_means_the_result_s(one: None, warned: None):
    x = remote(1.0, 5.0, 3.0)
    assert standin.largest(x) == 5.0
    assert torch.ops.standin.shifted(x, torch.device("cpu")).device.type == "cpu"
    assert torch.ops.standin.shifted(x, x.device).device.type == "remote"


def test_strides_of_a_result_are_kept(one: None, warned: None):
    x = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    assert standin.scaled(x.to("remote"), 2.0).stride() == standin.scaled(x, 2.0).stride()


def test_an_op_without_a_kernel_for_the_cpu_is_refused_with_advice(one: None, warned: None):
    with pytest.raises(gt.UnsupportedOp, match=r"standin\.nowhere\.default has no kernel for the CPU.*--library"):
        torch.ops.standin.nowhere(remote(1.0))


def test_a_shape_error_of_the_library_is_its_own(one: None, warned: None):
    with pytest.raises(IndexError, match="mask"):
        standin.keep(remote(1.0, 2.0), remote(1.0, 2.0, 3.0), 0.5)


# ---- on workers


@pytest.fixture(scope="module")
def library_server() -> Iterator[Any]:
    """A server with two workers that have imported the stand-in."""
    before = set(started())
    running = local.start(2, libraries=["tests.client.trace.standin_library"])
    of_the_server.update(set(started()) - before)
    yield running
    running.stop()


@pytest.fixture
def with_library(library_server: Any) -> Iterator[None]:
    """A session there. A warning is an error, so that an op on this process's CPU would show."""
    gt.connect(library_server.address, token=library_server.token)
    yield
    gt.shutdown()


def test_workers_execute_the_ops_of_libraries_that_their_owner_named(with_library: None, plain_threads: None, unwarned: None):
    assert train("remote") == train("cpu")
    assert standin.process(remote(1.0)).item() != os.getpid()
    x = remote(1.0, 2.0, 3.0)
    standin.bump_(x, [remote(1.0, 1.0, 1.0)])
    assert x.tolist() == [2.0, 3.0, 4.0]


def test_a_shape_that_depends_on_values_is_asked_for(with_library: None, unwarned: None):
    boxes = torch.arange(8.0).view(4, 2)
    kept = standin.keep(boxes.to("remote"), remote(0.1, 0.9, 0.2, 0.8), 0.5)
    assert kept.shape == (2, 2) and kept.tolist() == [[2.0, 3.0], [6.0, 7.0]]


def test_an_op_without_a_rule_for_shapes_is_asked_for_its_shape(with_library: None, unwarned: None):
    assert [half.tolist() for half in standin.halves(remote(1.0, 2.0, 3.0))] == [[1.0], [2.0, 3.0]]


def test_an_op_that_workers_cannot_execute_runs_on_the_cpu(with_library: None, unwarned: None):
    with pytest.warns(UserWarning, match="ops between tensors alone"):
        assert standin.largest(remote(1.0, 4.0)) == 4.0


def test_operands_that_are_split_are_gathered_for_it(library_server: Any, unwarned: None, tmp_path: Path, with_library: None):
    path = tmp_path / "dp.yaml"
    path.write_text("data: {workers: [0, 1]}\n")
    gt.connect(library_server.address, config=str(path), token=library_server.token)
    with gt.signal.context("data"):
        x = torch.arange(8.0).view(4, 2).to("remote") * 1
        assert gt.inspect(x)["pieces"][0]["shape"] == [2, 2]
        assert standin.scaled(x, 2.0).tolist() == (torch.arange(8.0).view(4, 2) * 2).tolist()
        assert standin.halves(x)[1].sum().item() == 22.0


@pytest.mark.parametrize(("libraries", "want"), [(["torch"], ["torch"]), (None, ["a", "b.c"]), ([], [])])
def test_a_program_names_the_libraries_of_its_own_workers(
    monkeypatch: pytest.MonkeyPatch, libraries: list[str] | None, want: list[str]
):
    class Asked(Exception):
        pass

    def start(*args: Any, libraries: list[str], **rest: Any) -> None:
        assert libraries == want
        raise Asked

    monkeypatch.setenv("GT_LIBRARIES", "a,b.c")
    monkeypatch.setattr(local, "start", start)
    with pytest.raises(Asked):
        gt.cpu_workers(1, libraries=libraries)


def test_workers_whose_library_is_missing_do_not_start():
    with pytest.raises(gt.GTError, match=r"'gt_no_such_library' .*cannot be imported"):
        gt.cpu_workers(1, libraries=["gt_no_such_library"])


class Tagged(torch.Tensor):
    """A user's subclass, for which a library's op has a rule."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Tagged:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raise AssertionError("the rule comes first")


def test_a_users_rules_for_a_subclass_of_his_own_hold() -> None:
    """GT's tensors skip torch's look-up of such rules; others must not."""
    with torch.library._scoped_library("gt_test_rules", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        rule = lambda mode, func, types, args, kwargs: torch.tensor(7)  # noqa: E731
        torch.library.register_torch_dispatch("gt_test_rules::twice", Tagged, rule, lib=library)
        assert torch.ops.gt_test_rules.twice(Tagged(torch.ones(2))) == 7
