"""NCCL's variables from a host's links, and what its log says that it took."""

from __future__ import annotations

import os
from typing import Any

import pytest

from gt.worker.plane.internode import nccl_settings
from gt.worker.plane.internode.nccl_settings import MESH, NcclLog, parse, settings

MANAGEMENT = ["10.0.0.1", 24, "eth0", 1000, True]
CABLES = [["192.168.100.1", 24, "enp1s0f0", 100_000, False], ["192.168.101.1", 24, "enp1s0f1", 100_000, False]]


def port(device: str, net: str, state: str = "4: ACTIVE") -> dict[str, Any]:
    return {"device": device, "net": [net], "state": state}


RDMA = [port("rocep1s0f0", "enp1s0f0"), port("rocep1s0f1", "enp1s0f1")]


def test_a_switch_has_one_device_for_all_hosts() -> None:
    assert settings(["10.0.0.1", "10.0.0.1"], [MANAGEMENT, *CABLES], []) == {"NCCL_SOCKET_IFNAME": "=eth0"}
    found = settings(["192.168.100.1"], [MANAGEMENT, *CABLES], RDMA)
    assert found == {"NCCL_SOCKET_IFNAME": "=enp1s0f0", "NCCL_IB_HCA": "=rocep1s0f0"}


def test_a_mesh_of_cables_routes_by_subnet_and_meets_on_the_management_network() -> None:
    found = settings([row[0] for row in CABLES], [MANAGEMENT, *CABLES], RDMA)
    assert found == {
        "NCCL_SOCKET_IFNAME": "=eth0", "NCCL_IB_HCA": "=rocep1s0f0,rocep1s0f1", "NCCL_IB_SUBNET_PREFIX_LEN": "24", **MESH,
    }  # fmt: skip
    assert "NCCL_SOCKET_IFNAME" not in settings([row[0] for row in CABLES], CABLES, RDMA)


@pytest.mark.parametrize("rdma", [[], RDMA[:1], [RDMA[0], port("rocep1s0f1", "enp1s0f1", "1: DOWN")]])
def test_rdma_is_left_to_nccl_where_a_link_has_none(rdma: Any) -> None:
    assert settings([row[0] for row in CABLES], [MANAGEMENT, *CABLES], rdma) == {"NCCL_SOCKET_IFNAME": "=eth0"}


def test_relayed_and_unknown_ways_set_nothing() -> None:
    assert settings([], [MANAGEMENT], RDMA) == settings(["10.9.9.9"], [MANAGEMENT], RDMA) == {}


def test_the_users_values_win(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {k: v for k, v in os.environ.items() if not k.startswith("NCCL_")}
    monkeypatch.setattr("os.environ", {**before, "NCCL_IB_HCA": "mlx5_9"})
    nccl_settings.apply({"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_IB_HCA": "=rocep1s0f0", **MESH})
    assert (os.environ["NCCL_IB_HCA"], os.environ["NCCL_SOCKET_IFNAME"], os.environ["NCCL_CROSS_NIC"]) == (
        "mlx5_9",
        "=eth0",
        "1",
    )
    monkeypatch.setattr("os.environ", {**before, "NCCL_NET_PLUGIN": "/opt/libnccl-net-mesh.so"})
    nccl_settings.apply({"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_IB_HCA": "=rocep1s0f0", **MESH})
    assert [name for name in os.environ if name.startswith("NCCL_")] == ["NCCL_NET_PLUGIN", "NCCL_SOCKET_IFNAME"]


LOG = """h0:12:12 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to =eth0
h0:12:12 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>
h0:12:12 [0] NCCL INFO cudaDriverVersion 13000
h0:12:12 [0] NCCL INFO NCCL version 2.28.9+cuda13.0
h0:12:99 [0] NCCL INFO NET/Plugin: Loaded net plugin Mesh (v9)
h0:12:99 [0] NCCL INFO NCCL_IB_HCA set to =rocep1s0f0
h0:12:99 [0] NCCL INFO Using network Socket
h0:12:99 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
h0:12:99 [0] NCCL INFO Channel 01/0 : 0[0] -> 2[1] via P2P/CUMEM
"""


def test_the_log_says_what_nccl_took() -> None:
    assert parse(LOG) == {
        "version": "2.28.9+cuda13.0", "bootstrap": "eth0:10.0.0.1<0>", "network": "Socket", "plugin": "Mesh (v9)",
        "ways": ["NET/Socket", "P2P"], "taken": {"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_IB_HCA": "=rocep1s0f0"},
    }  # fmt: skip
    assert parse("NET/Plugin: Could not find: /opt/x.so.") == {"plugin": "NET/Plugin: Could not find: /opt/x.so."}
    assert parse("") == {}


def test_the_log_is_read_while_nccl_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {k: v for k, v in os.environ.items() if not k.startswith("NCCL_")}
    monkeypatch.setattr("os.environ", dict(before))
    log = NcclLog()
    assert log.facts() == {} and os.environ["NCCL_DEBUG"] == "INFO"
    with open(os.environ["NCCL_DEBUG_FILE"], "w") as file:
        file.write(LOG)
    assert log.facts()["network"] == "Socket"
    log.close()
    assert log.facts() == {}
    monkeypatch.setattr("os.environ", {**before, "NCCL_DEBUG": "WARN"})
    assert NcclLog().facts() == {} and "NCCL_DEBUG_FILE" not in os.environ
