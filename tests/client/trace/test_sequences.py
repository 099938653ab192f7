"""Ops that take lengths on the CPU: packed sequences, recurrent layers over them, and CTC loss."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence, unpack_sequence

import gt

pytestmark = pytest.mark.usefixtures("plain_threads", "one")
LENGTHS: dict[str, Any] = {
    "a list": [5, 3, 2],
    "a tensor": torch.tensor([5, 3, 2]),
    "equal": [4, 4, 4],
    "int32": torch.tensor([5, 5, 1], dtype=torch.int32),
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_packing_has_the_bits_of_the_cpu(lengths: Any, batch_first: bool) -> None:
    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(3, 5, 4).transpose(0, 1 - batch_first).to(device).requires_grad_()
        packed = pack_padded_sequence(x, lengths, batch_first)
        padded, sizes = pad_packed_sequence(packed, batch_first, padding_value=-1.0, total_length=6)
        (padded * packed.data.sum()).sum().backward()
        assert packed.batch_sizes.device.type == sizes.device.type == "cpu"
        return [packed.data, packed.batch_sizes, padded, sizes, x.grad, *unpack_sequence(packed)]

    for got, want in zip(run("remote"), run("cpu"), strict=True):
        assert torch.equal(got.detach().cpu(), want.detach()) and got.stride() == want.stride()


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_take_unsorted_sequences(layer: type, batch_first: bool) -> None:
    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = layer(4, 6, 2, batch_first=batch_first, bidirectional=True).to(device)
        x = torch.randn(4, 5, 4).transpose(0, 1 - batch_first).to(device)
        packed = pack_padded_sequence(x, torch.tensor([2, 5, 1, 4]), batch_first, enforce_sorted=False)
        out, state = model(packed)
        padded, sizes = pad_packed_sequence(out, batch_first)
        state = torch.cat([state[0], state[1]]) if layer is nn.LSTM else state
        (padded.square().sum() + state.sum()).backward()
        assert sizes.tolist() == [2, 5, 1, 4]
        return [padded, state, *(p.grad for p in model.parameters())]

    torch.testing.assert_close([t.detach().cpu() for t in run("remote")], [t.detach() for t in run("cpu")])


def test_mistakes_have_torchs_words() -> None:
    x = torch.randn(3, 5, 4)
    for lengths in ([5, 3], [2, 3, 5], [5, 3, 0]):
        with pytest.raises(RuntimeError) as here:
            pack_padded_sequence(x, lengths, True)
        with pytest.raises(RuntimeError) as remote:
            pack_padded_sequence(x.to("remote"), lengths, True)
        assert str(here.value) == str(remote.value)
    with pytest.raises(RuntimeError, match="Cannot pack empty tensors"):
        pack_padded_sequence(torch.zeros(0, 3, 4, device="remote"), [1, 1, 1])


def test_lengths_may_be_on_remote() -> None:
    x, layer = torch.randn(3, 5, 4), torch.nn.GRU(4, 2, batch_first=True)
    there = copy.deepcopy(layer).to("remote")

    def run(layer: torch.nn.Module, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(layer(packed)[0], batch_first=True)[0]

    captured = gt.compile(lambda x, lengths: run(there, x, lengths))  # CPU tensors among its arguments are remote in it
    for n in range(5):
        lengths = torch.tensor([5, 1 + n, 2])
        expected = run(layer, x, lengths)
        for result in (run(there, x.to("remote"), lengths.to("remote")), captured(x, lengths)):
            torch.testing.assert_close(result.cpu(), expected)


def test_packs_of_sequences_move() -> None:
    packed = pack_sequence([torch.arange(3.0), torch.arange(2.0)]).to("remote")
    assert packed.data.device.type == "remote" and packed.batch_sizes.tolist() == [2, 2, 1]
    assert pad_packed_sequence(packed)[0].tolist() == [[0, 0], [1, 1], [2, 0]]


def test_a_captured_step_packs() -> None:
    torch.manual_seed(0)
    model = nn.GRU(4, 6, batch_first=True).to("remote")
    lengths = [5, 3, 2]

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = model(pack_padded_sequence(x, lengths, batch_first=True))[0].data.square().mean()
        loss.backward()
        return loss

    x = torch.randn(3, 5, 4)
    losses = [step(x).item() for _ in range(4)]
    assert step.explain().startswith("test_a_captured_step_packs.<locals>.step: 1 program") and len(set(losses)) == 1
    lengths[1] = 4
    eager = model(pack_padded_sequence(x.to("remote"), lengths, batch_first=True))[0].data.square().mean()
    assert step(x).item() == eager.item() != losses[0]


PLACES = ("list", "cpu", "remote", "mixed")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("joined", [False, True], ids=["padded", "joined"])
def test_ctc_loss_takes_lengths_from_anywhere(place: str, joined: bool) -> None:
    def run(device: str, kind: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        logits = torch.randn(8, 3, 5).to(device).requires_grad_()
        inputs, targets = torch.tensor([8, 6, 7]), torch.tensor([3, 2, 3])
        labels = torch.randint(1, 5, (8,) if joined else (3, 3)).to(device)
        if kind == "list":
            inputs, targets = inputs.tolist(), targets.tolist()
        elif kind != "cpu":
            inputs, targets = inputs.to(device), targets if kind == "mixed" else targets.to(device)
        loss = F.ctc_loss(logits.log_softmax(-1), labels, inputs, targets, zero_infinity=True, reduction="none")
        loss.sum().backward()
        return [loss.detach().cpu(), logits.grad.cpu()]

    for got, want in zip(run("remote", place), run("cpu", "cpu"), strict=True):
        assert torch.equal(got, want)


def test_ctc_loss_of_one_sequence() -> None:
    logits, labels = torch.randn(8, 5).log_softmax(-1), torch.tensor([1, 2, 1])
    lengths = torch.tensor(8), torch.tensor(3)
    got = F.ctc_loss(logits.to("remote"), labels.to("remote"), *lengths)
    assert torch.equal(got.cpu(), F.ctc_loss(logits, labels, *lengths))


def test_a_captured_step_has_a_ctc_loss() -> None:
    model, labels = nn.Linear(4, 5).to("remote"), torch.randint(1, 5, (3, 3), device="remote")

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = F.ctc_loss(model(x).log_softmax(-1), labels, [8, 6, 7], [3, 2, 3])
        loss = loss + F.ctc_loss(model(x).log_softmax(-1), labels, torch.tensor([8, 6, 7]), torch.tensor([3, 2, 3]))
        loss.backward()
        return loss

    x = torch.randn(8, 3, 4)
    losses = {step(x).item() for _ in range(4)}
    assert len(losses) == 1 and ": 1 program" in step.explain()
