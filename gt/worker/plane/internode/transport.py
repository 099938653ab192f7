"""Transfers of a GPU worker beyond the workers that share its device's memory: by NCCL, or staged through host memory.

The dispatcher says which pairs NCCL joins (World.nccl), so all members of a transfer choose alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from gt.worker.plane.base import Buffer, Channel, Combine, OnIssued, TeamForm, nothing
from gt.worker.plane.internode.communicators import InternodeNccl
from gt.worker.plane.internode.staging import StagedTransport

Pairs = frozenset[tuple[int, int]]


def joined(pairs: Pairs, workers: Sequence[int]) -> bool:
    """True if NCCL joins each two of these workers."""
    return all(pair in pairs for pair in combinations(sorted(workers), 2))


class InternodeTransport:
    """The transfers and collectives of plane.base.Plane on flat uint8 tensors.

    Its transfers end a recording: they wait on the host, so that a lost peer fails an instruction.
    """

    name = "net"
    recordable = False

    def __init__(self, staged: StagedTransport, nccl: InternodeNccl | None) -> None:
        self.staged, self.nccl = staged, nccl
        self.own = -1  # this worker's index
        self.pairs: Pairs = frozenset()  # that NCCL joins

    def carrier(self, workers: Sequence[int]) -> Any:
        """The transport between these workers."""
        return self.nccl if self.nccl is not None and joined(self.pairs, workers) else self.staged

    def send(self, channel: Channel, data: Buffer) -> None:
        self.carrier((self.own, channel["peer"])).send(channel, data)

    def recv(self, channel: Channel, into: Buffer) -> None:
        self.carrier((self.own, channel["peer"])).recv(channel, into)

    def all_reduce(self, team: TeamForm, data: Buffer, combine: Combine, on_issued: OnIssued = nothing) -> None:
        self.carrier(team["workers"]).all_reduce(team, data, combine, on_issued)

    def all_gather(self, team: TeamForm, data: Buffer, outs: Sequence[Buffer], on_issued: OnIssued = nothing) -> None:
        self.carrier(team["workers"]).all_gather(team, data, outs, on_issued)

    def reduce_scatter(
        self, team: TeamForm, sections: Sequence[Buffer], out: Buffer, combine: Combine, on_issued: OnIssued = nothing
    ) -> None:
        self.carrier(team["workers"]).reduce_scatter(team, sections, out, combine, on_issued)

    def all_to_all(self, team: TeamForm, sends: Sequence[Buffer], recvs: Sequence[Buffer], longest: int = 0) -> None:
        self.carrier(team["workers"]).all_to_all(team, sends, recvs, longest)
