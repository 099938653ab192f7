"""Blocks of arenas: used again once they are free, and never while a worker may still write there."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from gt.client import current_session
from gt.client.exchange import arenas
from gt.client.exchange.arenas import ARENA_BYTES, KEPT_BYTES, ClientArenas
from gt.wire.arena import BLOCK_BYTES, OwnArena, parse_place
from gt.wire.messages import CloseArenas, OfferArena
from tests.helpers.inline_session import inline  # noqa: F401 - a fixture

MIB = 1 << 20


@pytest.fixture
def pool():
    sent: list = []
    made = ClientArenas(sent.append)
    yield made, sent
    made.close()


def test_a_batch_at_a_time_uses_the_same_memory_again(pool):
    made, sent = pool
    places = []
    previous = made.take(5 * MIB)
    for _ in range(20):
        block = made.take(5 * MIB)
        made.free(previous)
        places.append(block.place)
        previous = block
    assert len(set(places)) == 2 and [type(message) for message in sent] == [OfferArena]
    made.free(previous)
    assert made.used == 0


def test_free_neighbours_join(pool):
    made, sent = pool
    blocks = [made.take(MIB) for _ in range(40)]
    assert len({block.place for block in blocks}) == 40
    assert all(block.offset % BLOCK_BYTES == 0 for block in blocks)
    for block in (*blocks[::2], *blocks[1::2]):
        made.free(block)
    assert made.take(ARENA_BYTES - BLOCK_BYTES).arena is blocks[0].arena and len(sent) == 1


def test_a_tensor_larger_than_an_arena_gets_its_own(pool):
    made, sent = pool
    block = made.take(ARENA_BYTES + 5)
    assert block.arena.nbytes > ARENA_BYTES and len(block.bytes(ARENA_BYTES + 5)) == ARENA_BYTES + 5
    assert sent[0].arena == parse_place(block.place)[0]


def test_what_is_kept_for_later_is_bounded(pool):
    made, sent = pool
    blocks = [made.take(ARENA_BYTES - BLOCK_BYTES) for _ in range(KEPT_BYTES // ARENA_BYTES + 3)]
    for block in blocks:
        made.free(block)
    assert sum(isinstance(message, CloseArenas) for message in sent) == 3


def test_memory_that_a_worker_may_still_write_is_never_used_again(pool):
    made, sent = pool
    abandoned, beside = made.take(MIB), made.take(MIB)
    made.abandon(abandoned)
    assert made.take(MIB).arena is not abandoned.arena and not any(isinstance(m, CloseArenas) for m in sent)
    made.free(beside)
    assert [m for m in sent if isinstance(m, CloseArenas)] == [CloseArenas([abandoned.arena.number])]


def test_without_memory_there_is_no_block_and_no_further_attempt(pool, monkeypatch):
    made, sent = pool
    tries = []

    def none(*args):
        tries.append(args)
        raise OSError("no descriptors")

    monkeypatch.setattr(arenas, "OwnArena", none)
    assert made.take(MIB) is None and made.take(MIB) is None and len(tries) == 1 and not sent and made.used == 0


def test_pages_are_allocated_as_blocks_are_taken(monkeypatch, pool):
    made, _ = pool
    ends = []
    populate = OwnArena.populate
    monkeypatch.setattr(OwnArena, "populate", lambda arena, end: (ends.append(end), populate(arena, end)))
    made.take(MIB)
    made.take(3 * MIB)
    assert max(ends) < 5 * MIB


def test_uploads_that_no_worker_has_read_are_bounded(pool):
    made, _ = pool
    blocks = [made.take(100 * MIB) for _ in range(3)]
    assert made.crowded(100 * MIB) and not made.crowded(400 * MIB) and made.crowded(MIB)
    made.reclaim()  # nothing has used them yet
    assert not made.crowded(100 * MIB)
    for block in blocks:
        made.free(block)
    assert not made.crowded(100 * MIB)


def test_an_upload_waits_for_room_but_not_in_a_recorded_call(inline):  # noqa: F811
    """A recorded call may be executed at its end: nothing that it has uploaded is read before."""
    waits: list[int] = []
    inline.crowded, inline.wait_room = lambda nbytes: True, waits.append
    torch.zeros(300, 300).to("remote")
    assert waits == [360_000]
    recorder = current_session.current()
    recorder.flush()
    recorder.tape = SimpleNamespace(
        source=lambda host: None,
        upload=lambda host: None,
        uploads=lambda code: code,
        take_batch=lambda code, frames, freed: (code, freed),
        most_held=0,
        thread=threading.get_ident(),
    )
    torch.zeros(300, 300).to("remote")
    assert waits == [360_000]
    recorder.flush()
    recorder.tape = None
