"""The choice between an optimizer's step on the host and one on the device in streamed parts."""

from __future__ import annotations

import pytest

from gt.dispatcher.planning.host_step import HostRates, choose


@pytest.mark.parametrize("step", ["host", "device"])
def test_the_config_decides(step):
    choice = choose(step, False, [HostRates(1.0, 1.0, True)])
    assert choice.on_host == (step == "host") and f"step is {step}" in choice.reason


def test_workers_without_a_link_compute_where_they_are():
    assert choose("auto", False, [None, None]).on_host


@pytest.mark.parametrize(
    "ratio, params_away, on_host", [(3.4, False, False), (3.6, False, True), (2.2, True, False), (2.4, True, True)]
)
def test_the_faster_side_is_chosen(ratio, params_away, on_host):
    """28 bytes in host memory against 8 over the link, or 12 where parameters stream too."""
    choice = choose("auto", params_away, [HostRates(25e9, ratio * 25e9, True)])
    assert choice.on_host == on_host and "measured 25.0 GB/s" in str(choice)


def test_the_slowest_worker_decides():
    fast, slow = HostRates(10e9, 100e9, True), HostRates(10e9, 20e9, True)
    assert choose("auto", False, [fast, fast]).on_host
    assert not choose("auto", False, [fast, slow]).on_host
    assert "nominal" in choose("auto", False, [fast, HostRates()]).reason
