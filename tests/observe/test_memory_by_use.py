"""Weights, gradients and optimizer state of programs of many kinds, as observers see them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

import gt
from gt.client import current_session
from gt.client.groups.role_reports import roles
from gt.dispatcher.cluster.tensor_roles import RoleTable
from gt.observe.live_view import LiveView
from gt.observe.record_stream import RecordStream
from gt.wire.records import LayoutRecord
from tests.helpers.serving import serving

SIZE = 16 * 16  # elements of each weight


def told() -> Counter[str]:
    """Tensors of this session by use."""
    recorder = current_session.Current.recorder
    assert recorder is not None
    return Counter(kind for _, kind, _ in roles(recorder.first))


def layer() -> nn.Linear:
    return nn.Linear(16, 16, bias=False).to("remote")


def test_frozen_weights_and_copies_are_weights(session: Callable) -> None:
    session()
    frozen, model = layer().requires_grad_(False), layer()
    average = copy.deepcopy(model).requires_grad_(False)
    swa = torch.optim.swa_utils.AveragedModel(model)
    model(frozen(torch.ones(2, 16, device="remote"))).sum().backward()
    assert frozen.weight.grad is None and average.weight.grad is None and swa.module.weight is not None
    assert told() == {"weights": 4, "gradients": 1}


def test_accumulated_gradients_are_counted_once(session: Callable) -> None:
    session()
    model = layer()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(2, 16, device="remote")).sum().backward()
    optimizer.step()
    assert told() == {"weights": 1, "gradients": 1, "optimizer": 2}
    optimizer.zero_grad()
    assert told() == {"weights": 1, "optimizer": 2}


def test_gradients_need_no_optimizer(session: Callable) -> None:
    session()
    w = torch.ones(16, 16, device="remote", requires_grad=True)
    (w * 2).sum().backward()
    assert told() == {"weights": 1, "gradients": 1}


def test_offloaded_state_is_not_on_the_device() -> None:
    table = RoleTable()
    table._rows, table._layouts = [(1, "weights", "")], LayoutRecord(0, 1, [], [], 0)
    table._bytes = {"w0": Counter(weights=100, optimizer=200, gradients=50)}
    assert table.uses("w0", 400) == {"weights": 100, "optimizer": 200, "gradients": 50, "activations": 50}
    assert table.uses("w0", 190, away=200) == {"weights": 100, "optimizer": 0, "gradients": 50, "activations": 40}
    assert table.uses("w0", 90, away=300) == {"weights": 0, "optimizer": 0, "gradients": 50, "activations": 40}


def test_observers_see_the_bytes_of_an_accumulating_program() -> None:
    with serving(1) as server:
        gt.connect(server.address, config="")
        with RecordStream(server.address) as stream:
            view = LiveView()
            view.update(stream.next())
            frozen, model = layer().requires_grad_(False), layer()
            average, optimizer = copy.deepcopy(model).requires_grad_(False), torch.optim.AdamW(model.parameters())
            memory = None
            for _ in range(40):
                model(frozen(torch.ones(2, 16, device="remote"))).sum().backward()
                optimizer.step()
                average.weight.data.lerp_(model.weight.data, 0.1)
                model.weight.sum().item()
                (session,) = view.update(stream.next())["sessions"]
                memory = session["memory"]
                if memory is not None and memory["optimizer"] >= 2 * 4 * SIZE and memory["weights"] == 3 * 4 * SIZE:
                    break
            assert memory is not None
            assert (memory["weights"], memory["gradients"]) == (3 * 4 * SIZE, 4 * SIZE)
            assert 2 * 4 * SIZE <= memory["optimizer"] <= 2 * 4 * SIZE + 8 and memory["activations"] < 2 * 4 * SIZE
        gt.shutdown()
