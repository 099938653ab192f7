"""One op, checkpoint or recording of many tensors without a place is planned in pieces, with other sessions between them."""

from __future__ import annotations

import pytest

from gt.dispatcher.events import PeerLost, Received, Send
from gt.dispatcher.fairness.background import Inline
from gt.dispatcher.fairness.time_slices import SLICE_SECONDS, Pace
from gt.wire.link import hello
from gt.wire.messages import Failed, Interrupt, Report, Run, Skip, UseBlock
from tests.helpers.limits import calls_of
from tests.stress import costs


class Watched(costs.Loop):
    """Keeps what workers are sent: numbers of instructions in each turn, and the instructions of each worker."""

    inline = False  # no threads: all is done in one turn
    lost = b""  # a worker that is lost before the call
    during = None  # called with the loop in the first pause

    def __post_init__(self) -> None:
        self.turns: list[int] = []
        self.code: dict[bytes, list] = {}
        self.blocks: list[UseBlock] = []
        self.asked: set[bytes] = set()  # workers that were told a block
        self.skips: list[bytes] = []  # workers that were told to skip
        super().__post_init__()
        self.core.pace._seconds = 0.0  # each look at the clock ends the turn
        if self.inline:
            self.core.pace.background = Inline()
            self.core.pace._seconds = 1e9

    def _timed(self, call) -> list:
        actions = super()._timed(call)
        runs = [(a.peer, a.message) for a in actions if isinstance(a, Send) and isinstance(a.message, Run)]
        self.blocks += [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, UseBlock)]
        self.asked.update(a.peer for a in actions if isinstance(a, Send) and isinstance(a.message, UseBlock))
        self.skips += [a.peer for a in actions if isinstance(a, Send) and isinstance(a.message, Skip)]
        self.turns.append(sum(len(run.code) for _, run in runs))
        for peer, run in runs:
            self.code.setdefault(peer, []).extend(run.code)
        during = type(self).during
        if during is not None and self.background._legs and any(self.turns):
            type(self).during = None
            actions += during(self)
        return actions

    def fresh(self) -> None:
        super().fresh()
        if self.lost:
            self.core.handle(PeerLost(self.lost, "killed"))
        self.turns.clear()
        self.code.clear()


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    monkeypatch.setattr(costs, "Loop", Watched)
    monkeypatch.setattr(Watched, "during", None)
    monkeypatch.setattr(Watched, "lost", b"")
    monkeypatch.setattr(Watched, "inline", False)
    return Watched


OPS = {
    "list": lambda: costs.listed("aten._foreach_neg.default", 40, workers=16),
    "optimizer": lambda: costs.listed("aten._foreach_addcmul_.Scalar", 100, 3, workers=16, steps=8),
    "cat": lambda: costs.listed("aten.cat.default", 40, workers=16),
    "store": lambda: costs.stored(40, workers=16),
}


@pytest.mark.parametrize("name", OPS)
def test_no_turn_has_all_of_it_and_the_instructions_are_as_many(watched, name):
    loop = OPS[name]()
    assert not loop.errors and max(loop.turns) < sum(loop.turns) / 4, (
        f"{max(loop.turns)} of {sum(loop.turns)} numbers"
    )
    watched.inline = True
    whole = OPS[name]()
    assert max(whole.turns) == sum(whole.turns)
    assert {peer: len(code) for peer, code in whole.code.items()} == {peer: len(code) for peer, code in loop.code.items()}
    assert len(whole.blocks) == len(loop.blocks)


@pytest.mark.parametrize("name", ["record", "seal"])
def test_a_recording_places_in_pieces(name):
    loop = costs.a_recording_of_what_is_nowhere(12) if name == "record" else costs.seal_of_what_is_nowhere(12)
    assert not loop.errors and max(loop.turns) < sum(loop.turns) / 4, (
        f"{max(loop.turns)} of {sum(loop.turns)} numbers"
    )


@pytest.mark.parametrize("name", ["list", "cat"])
def test_what_a_worker_had_before_a_pause_is_lost_with_it(watched, name):
    watched.during = lambda loop: loop.core.handle(PeerLost(b"w3", "killed"))
    loop = OPS[name]()
    assert watched.during is None
    rows = loop.core.sessions[b"c"].table.rows.values()
    placed = [t for t in rows if t.layout is not None and 3 in t.layout.mesh.workers]
    assert placed and all(t.storage.failed is not None and t.storage.failed.lost == 3 for t in placed)


def test_a_save_fails_once_if_a_worker_is_lost_in_a_pause(watched):
    watched.during = lambda loop: loop.core.handle(PeerLost(b"w0", "killed"))
    loop = OPS["store"]()
    failed = [m for m in loop.answers if isinstance(m, Failed)]
    assert watched.during is None and [m.request for m in failed] == [5] and "w0" in failed[0].error["message"]
    assert not loop.core.sessions[b"c"].fetches.open and not loop.core.sessions[b"c"].fetches.by_key


def test_a_save_ends_if_what_is_left_would_be_made_by_a_worker_without_the_file(watched):
    """The first worker comes back on another host, and tensors without a place are made on the first worker that is there."""
    back = hello("worker", info={"name": "w0", "heap_bytes": 1 << 40, "home": "elsewhere"})
    watched.lost = b"w0"
    watched.during = lambda loop: loop.core.handle(Received(b"new", back))
    loop = OPS["store"]()
    assert watched.during is None and not loop.errors and b"new" not in loop.asked
    assert [m for m in loop.answers if isinstance(m, Report)] == [Report(5, {"shared": False})]
    assert not loop.core.sessions[b"c"].fetches.open and not loop.core.sessions[b"c"].fetches.by_key


@pytest.mark.parametrize("name", ["list", "cat"])
def test_an_interrupt_in_a_pause_is_dealt_with_once_the_op_is_planned(watched, name):
    watched.during = lambda loop: loop.core.handle(Received(b"c", Interrupt(1 << 40)))
    loop = OPS[name]()
    assert watched.during is None and not loop.errors and sorted(loop.skips) == sorted(b"w%d" % n for n in range(16))


def test_a_session_that_ends_in_a_pause_leaves_nothing(watched):
    watched.during = lambda loop: loop.core.handle(PeerLost(b"c", "killed"))
    loop = OPS["list"]()
    assert not loop.core.sessions and not loop.background._legs
    loop.core.check()


def test_alike_pieces_are_bound_once():
    """The definitions of a long list op are made for one worker if all have pieces of the same sizes."""

    def calls(workers: int) -> int:
        return calls_of(lambda: costs.listed("aten._foreach_addcmul_.Scalar", 100, 3, workers=workers, steps=0))

    Watched.inline = True
    assert calls(32) < 2 * calls(4)


def test_half_of_a_turn_is_left_for_the_packing_of_what_is_written():
    now = [1.0]
    pace = Pace(lambda: now[0])
    pace.begin()
    assert not pace.half_spent and not Pace().half_spent
    now[0] += 0.6 * SLICE_SECONDS
    assert pace.half_spent and not pace.spent


def test_a_seal_pauses_after_half_a_turn(monkeypatch):
    """What it has written by then is packed within the same turn."""
    monkeypatch.setattr(Pace, "spent", False)
    loop = costs.seal_of_what_is_nowhere(12)
    assert not loop.errors and max(loop.turns) < sum(loop.turns) / 4
