"""The client's tables again, through a dispatcher and a worker process."""

from __future__ import annotations

import pytest
import torch

from tests.client.device.test_client_training import OPTIMIZERS, train
from tests.client.device.test_client_training import same as same_training
from tests.client.device.test_client_traps import APPROXIMATE, ROWS, plain, same
from tests.helpers.serving import settled

pytestmark = pytest.mark.usefixtures("plain_threads", "one")


@pytest.mark.parametrize("name", ROWS)
def test_remote_is_as_local(name: str) -> None:
    want, got = plain(ROWS[name]("cpu")), plain(ROWS[name]("remote"))
    same(got, want, name not in APPROXIMATE)


@pytest.mark.parametrize("name", ["sgd", "adamw_foreach", "adamw_fused"])
def test_gpt_is_torchs_to_the_bit(name: str) -> None:
    want = train("cpu", OPTIMIZERS["adamw" if name == "adamw_foreach" else name])
    same_training(train("remote", OPTIMIZERS[name]), want)


@pytest.mark.parametrize("how", ["reentrant", "plain"])
def test_checkpoint_recomputes_the_same_dropout_mask(how: str) -> None:
    want = train("remote", OPTIMIZERS["sgd"], steps=3, dropout=0.2)
    same_training(train("remote", OPTIMIZERS["sgd"], steps=3, dropout=0.2, how=how), want)


def test_the_cpu_counts_integers_as_gpus_do() -> None:
    x = torch.tensor([0, 3, 3, 1, 7, -1])
    found = torch.histc(x.int().to("remote"), 4, 0, 3)
    assert found.dtype is torch.int32 and found.tolist() == torch.histc(x.double(), 4, 0, 3).tolist()


def test_workers_forget_what_the_program_forgets() -> None:
    train("remote", OPTIMIZERS["adamw"], steps=2)
    assert sum(w["live_tensors"] for w in settled()["workers"]) <= 1
