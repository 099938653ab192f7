"""gt.log: names and numbers of any program are taken or refused, the same whether somebody observes or nobody."""

from __future__ import annotations

import math

import pytest
import torch

import gt
from gt.observe.live_view import LiveView
from gt.observe.record_stream import RecordStream
from tests.helpers.serving import serving


def test_odd_names_and_numbers_are_shown_to_observers() -> None:
    values = {
        "\x1b[31m": 1,
        "\ud800": math.nan,
        "long" * 16: -(10**400),
        "\u202eloss": True,
        "loss": torch.tensor(0.5, requires_grad=True),
    }
    with serving(1) as server:
        gt.connect(server.address, name=False, config="")
        with RecordStream(server.address) as stream:
            view = LiveView()
            view.update(stream.next())
            while not (session := view.update(stream.next())["sessions"][0])["values"]:
                gt.log(**values)
                torch.ones(2, device=gt.device).sum().item()
        gt.shutdown()
    assert session["values"] == {"\\x1b[31m": 1.0, "\\ud800": "nan", "long" * 16: "-inf", "\\u202eloss": 1.0, "loss": 0.5}


@pytest.mark.parametrize("value", [torch.tensor(1 + 2j), torch.ones(2), None, "0.5"])
def test_what_is_no_number_is_refused_though_nobody_observes(value) -> None:
    with pytest.raises(TypeError, match=r"gt\.log\(loss=\.\.\.\) takes a number"):
        gt.log(loss=value)


@pytest.mark.parametrize("name", ["", "n" * 65])
def test_names_have_a_length(name: str) -> None:
    with pytest.raises(ValueError, match="names of 1 to 64 characters"):
        gt.log(**{name: 1})
