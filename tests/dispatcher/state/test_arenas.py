"""Uploads and fetches by shared memory, as the dispatcher sees them: who is asked for what, and when memory is free again."""

from __future__ import annotations

import pytest

from gt.dispatcher.core import Core
from gt.dispatcher.events import PeerLost
from gt.ir.instr import FIRST
from gt.wire.arena import HEADER_BYTES, PAGE_BYTES, place, upload_index
from gt.wire.link import hello
from gt.wire.messages import (
    ArenaOpened,
    CloseArenas,
    Data,
    Done,
    Failed,
    Fetch,
    OfferArena,
    Ops,
    Piece,
    Release,
    Run,
    UploadChunk,
    UploadProgress,
    UploadRequest,
    UseBlock,
    Value,
)
from tests.helpers.core_bench import TWO, CorePeers
from tests.helpers.hostile import T0, T1, row, spec

SPLIT = "d: {workers: [0, 1]}\n"
SHAPE, NBYTES = (1024, 512), 1024 * 512 * 4
ORIGIN = [1, "t.py", 3, "d", False, -1]
UPLOAD, ZEROS, MM = range(FIRST, FIRST + 3)
TEMPLATES = [
    [UPLOAD, row("gt.upload.default", [], [], [spec(*SHAPE)], 1)],
    [ZEROS, row("aten.zeros.default", [[512, 512]], [], [spec(512, 512)])],
    [MM, row("aten.mm.default", [T0, T1], [spec(*SHAPE), spec(512, 512)], [spec(*SHAPE)])],
]
OFFER = OfferArena(1, 4321, 5, 2 * PAGE_BYTES, "ab" * 16, "here")
BLOCK = place(1, HEADER_BYTES)


class Bench(CorePeers):
    """Two workers, of which each is in the home that the test says, and one client."""

    def __init__(self, config: str = SPLIT, homes: tuple[str, str] = ("here", "here")) -> None:
        super().__init__(Core())
        self.told: list = []  # everything that was sent
        for n, home in enumerate(homes):
            link = [f"10.0.0.{n + 1}", 24, "eth0", 1000, False]
            info = {"name": f"w{n}", "heap_bytes": 1 << 30, "home": home, "port": 7000 + n, "links": [link]}
            self.give(b"w%d" % n, hello("worker", info=info))
        self.client(b"c", config)
        self.batch = 0

    def feed(self, event) -> list:
        super().feed(event)
        self.told += self.sent
        return self.sent

    def ever(self, peer: bytes, kind: type) -> list:
        return [m for p, m in self.told if p == peer and isinstance(m, kind)]

    def client(self, peer: bytes, config: str = SPLIT) -> None:
        self.give(peer, hello("client", config=config, config_path="t.yaml", switches={"workers": 2}))

    def ops(self, code: list, peer: bytes = b"c") -> None:
        first = self.batch == 0 or peer != b"c"
        batch = self.batch if peer == b"c" else 0
        self.give(peer, Ops(batch, TEMPLATES if first else [], [ORIGIN] if first else [], code))
        self.batch += peer == b"c"

    def share(self, *answers: bool) -> int:
        """Offer an arena; the dispatcher's number of it."""
        self.give(b"c", OFFER)
        keys = [self.to(b"w%d" % n, OfferArena)[0].arena for n in range(2)]
        for n, opened in enumerate(answers):
            self.give(b"w%d" % n, ArenaOpened(keys[n], opened))
        assert len(set(keys)) == 1
        return keys[0]

    def upload(self, number: int = 1) -> None:
        self.ops([UPLOAD, 1, upload_index(BLOCK), number, ZEROS, 1, 9, MM, 1, number, 9, number + 1])

    def all_done(self) -> None:
        for n, worker in enumerate(self.core.cluster.workers):
            self.give(b"w%d" % n, Done(worker.runs))


def test_each_worker_reads_its_part_and_the_client_is_told_when_all_have():
    bench = Bench()
    key = bench.share(True, True)
    bench.upload()
    blocks = [bench.to(b"w%d" % n, UseBlock)[0] for n in range(2)]
    assert [block.boxes for block in blocks] == [[[[0, 512], [0, 512]]], [[[512, 1024], [0, 512]]]]
    assert all((b.arena, b.offset, b.shape, b.itemsize, b.write) == (key, HEADER_BYTES, [*SHAPE], 4, False) for b in blocks)
    assert bench.to(b"w0", Run) and bench.to(b"w1", Run), "nothing waits for the client"
    assert not bench.to(b"c", UploadRequest) and not bench.to(b"c", Release)
    bench.give(b"w1", UploadProgress(blocks[1].key, NBYTES // 2))
    assert not bench.to(b"c", Release)
    bench.give(b"w0", UploadProgress(blocks[0].key, NBYTES // 2))
    assert bench.to(b"c", Release) == [Release([1])]


def test_instructions_wait_until_workers_have_told_whether_they_share_an_arena():
    bench = Bench()
    key = bench.share()
    bench.upload()
    assert not bench.to(b"w0", Run) and not bench.to(b"c", UploadRequest)
    bench.give(b"w0", ArenaOpened(key, True))
    assert not bench.to(b"w0", Run)
    bench.give(b"w1", ArenaOpened(key, True))
    assert bench.ever(b"w0", UseBlock) and bench.ever(b"w1", UseBlock)
    assert bench.to(b"w0", Run) and bench.to(b"w1", Run)


def receive(bench: Bench, workers: int) -> None:
    """The client answers UploadRequests by messages, and the workers take them in: the parts of this number of workers."""
    requests = bench.ever(b"c", UploadRequest)
    assert len(requests) == workers
    for request in requests:
        rows = sum(stop - start for (start, stop), _ in request.boxes)
        total = rows * SHAPE[1] * 4
        half = total // 2
        for offset in (0, half):
            bench.give(b"c", UploadChunk(request.key, offset, total), (bytes(half),))
            for peer, data in [(p, m) for p, m in bench.sent if isinstance(m, Data)]:
                bench.give(peer, UploadProgress(data.key, offset + half))


@pytest.mark.parametrize("answers", [(True, False), (False, True), (False, False)])
def test_a_worker_without_the_proof_gets_messages(answers):
    bench = Bench()
    bench.share()
    bench.upload()
    key = next(iter(bench.core.sessions[b"c"].arenas.by_key))
    for n, opened in enumerate(answers):
        bench.give(b"w%d" % n, ArenaOpened(key, opened))
    blocks = [block for n in range(2) for block in bench.ever(b"w%d" % n, UseBlock)]
    assert len(blocks) == sum(answers)
    receive(bench, 2 - sum(answers))
    assert not bench.core.sessions[b"c"].outbox.held and bench.ever(b"w0", Run) and bench.ever(b"w1", Run)
    for block in blocks:
        assert not bench.ever(b"c", Release)
        bench.give(b"w%d" % answers.index(True), UploadProgress(block.key, NBYTES // 2))
    assert bench.ever(b"c", Release) == [Release([1])]


def test_a_worker_elsewhere_is_not_even_asked():
    bench = Bench(homes=("here", "there"))
    bench.give(b"c", OFFER)
    assert bench.to(b"w0", OfferArena) and not bench.to(b"w1", OfferArena)
    bench.give(b"w0", ArenaOpened(bench.to(b"w0", OfferArena)[0].arena, True))
    bench.upload()
    assert bench.ever(b"w0", UseBlock) and not bench.ever(b"w1", UseBlock)
    receive(bench, 1)


def test_a_lost_worker_is_waited_for_no_more():
    bench = Bench()
    key = bench.share()
    bench.upload()
    bench.give(b"w0", ArenaOpened(key, True))
    bench.feed(PeerLost(b"w1", "it was killed", 0.0))
    assert bench.to(b"w0", Run)
    (block,) = bench.ever(b"w0", UseBlock)
    bench.give(b"w0", UploadProgress(block.key, NBYTES // 2))
    assert bench.to(b"c", Release)
    bench.give(b"w2", hello("worker", info={"name": "w1", "heap_bytes": 1 << 30, "home": "here"}))
    assert [offer.arena for offer in bench.to(b"w2", OfferArena)] == [key], "its successor may share the arena"


def test_a_worker_that_is_lost_before_it_has_read_frees_the_block():
    bench = Bench()
    bench.share(True, True)
    bench.upload()
    blocks = [bench.to(b"w%d" % n, UseBlock)[0] for n in range(2)]
    bench.give(b"w0", UploadProgress(blocks[0].key, NBYTES // 2))
    bench.feed(PeerLost(b"w1", "it was killed", 0.0))
    assert bench.to(b"c", Release) == [Release([1])]


def test_a_fetched_value_is_written_into_the_clients_block():
    bench = Bench()
    key = bench.share(True, True)
    bench.upload()
    bench.give(b"c", Fetch(7, 2, BLOCK))
    blocks = [bench.to(b"w%d" % n, UseBlock)[0] for n in range(2)]
    assert all(block.write and block.arena == key for block in blocks)
    bench.all_done()
    bench.give(b"w0", Piece(blocks[0].key, NBYTES // 2, NBYTES // 2))
    assert not bench.to(b"c", Value) and not bench.to(b"c", Piece)
    bench.give(b"w1", Piece(blocks[1].key, NBYTES // 2, NBYTES // 2))
    assert bench.to(b"c", Value) == [Value(7, [*SHAPE], "float32", [])]


def test_a_fetch_into_an_arena_that_was_closed_meanwhile_is_answered_in_messages():
    bench = Bench()
    bench.share(True, True)
    bench.upload()
    bench.give(b"c", CloseArenas([1]))
    assert bench.to(b"w0", CloseArenas) and bench.to(b"w1", CloseArenas)
    bench.give(b"c", Fetch(7, 2, BLOCK))
    assert not bench.to(b"w0", UseBlock) and bench.to(b"w0", Run)


def test_workers_close_the_arenas_of_a_client_that_is_gone():
    bench = Bench()
    key = bench.share(True, True)
    bench.upload()
    bench.feed(PeerLost(b"c", "it was killed", 0.0))
    order = [type(m) for p, m in bench.sent if p == b"w0" and isinstance(m, (Run, CloseArenas))]
    assert bench.to(b"w0", CloseArenas) == [CloseArenas([key])] and order.index(CloseArenas) == len(order) - 1


# ---- hostile clients and workers


def refusal(bench: Bench, peer: bytes, message) -> str:
    """The error that a peer gets; everybody else goes on, and no worker is told of memory."""
    bench.give(peer, message)
    assert peer in bench.closed
    assert not any(isinstance(m, (UseBlock, OfferArena)) for _, m in bench.sent)
    said = [m.error["message"] for p, m in bench.sent if p == peer and isinstance(m, Failed)]
    return said[0] if said else next(m.reason for p, m in bench.sent if p == peer and hasattr(m, "reason"))


@pytest.mark.parametrize(
    "offset", [0, HEADER_BYTES - 1, HEADER_BYTES + 64, 2 * PAGE_BYTES - NBYTES + HEADER_BYTES, (1 << 40) - HEADER_BYTES]
)
@pytest.mark.parametrize("what", ["upload", "fetch"])
def test_a_block_outside_of_its_arena_ends_the_session_that_names_it(what, offset):
    bench = Bench()
    bench.share(True, True)
    if what == "fetch":
        bench.upload()
        message = Fetch(7, 2, place(1, offset))
    else:
        message = Ops(0, TEMPLATES, [ORIGIN], [UPLOAD, 1, upload_index(place(1, offset)), 1])
    assert "is not within" in refusal(bench, b"c", message)


@pytest.mark.parametrize("index", [upload_index(place(2, HEADER_BYTES)), -(1 << 63)])
def test_an_arena_that_was_never_offered_is_refused(index):
    bench = Bench()
    bench.share(True, True)
    said = refusal(bench, b"c", Ops(0, TEMPLATES, [ORIGIN], [UPLOAD, 1, index, 1]))
    assert "no arena is open" in said or "is not a place" in said


def test_no_session_reaches_an_arena_of_another():
    bench = Bench()
    bench.share(True, True)
    bench.client(b"d")
    message = Ops(0, TEMPLATES, [ORIGIN], [UPLOAD, 1, upload_index(BLOCK), 1])
    assert "no arena is open" in refusal(bench, b"d", message)
    bench.upload()
    assert bench.to(b"w0", UseBlock), "its owner goes on"


@pytest.mark.parametrize(
    "change",
    [
        {"arena": 0},
        {"arena": 1 << 20},
        {"pid": 0},
        {"pid": 1 << 31},
        {"fd": -1},
        {"nbytes": HEADER_BYTES},
        {"nbytes": 1 << 50},
        {"nonce": "ab"},
        {"nonce": "AB" * 16},
        {"nonce": "../" * 10 + "ab"},
        {"home": "x" * 256},
    ],
)
def test_an_offer_that_is_none_ends_its_session(change):
    fields = {name: getattr(OFFER, name) for name in ("arena", "pid", "fd", "nbytes", "nonce", "home")}
    assert "OfferArena" in refusal(Bench(), b"c", OfferArena(**{**fields, **change}))


def test_arenas_are_counted_and_numbered_once():
    bench = Bench()
    bench.share(True, True)
    assert "is in use" in refusal(bench, b"c", OFFER)
    bench = Bench(TWO)
    assert "want an open arena of this session" in refusal(bench, b"c", CloseArenas([3]))
    bench = Bench(TWO)
    assert "want an open arena of this session" in refusal(bench, b"c", CloseArenas([["x"]]))


@pytest.mark.parametrize("upto", [0, 1, NBYTES, -1])
def test_a_worker_that_answers_falsely_for_a_block_is_parted_from(upto):
    bench = Bench()
    bench.share(True, True)
    bench.upload()
    block = bench.to(b"w0", UseBlock)[0]
    bench.give(b"w0", UploadProgress(block.key, upto))
    assert b"w0" in bench.closed and b"c" in bench.core.sessions


def test_a_worker_answers_for_arenas_that_it_was_asked_for_only_once():
    bench = Bench()
    key = bench.share(True, True)
    bench.give(b"w0", ArenaOpened(key + 1000, True))  # of a session that is gone: means nothing
    assert not bench.closed
    bench.give(b"w0", ArenaOpened(key, True))
    assert b"w0" in bench.closed


def test_what_a_client_asks_meanwhile_is_answered_once_workers_have_told():
    bench = Bench()
    key = bench.share()
    bench.upload()
    bench.give(b"c", Fetch(7, 2, BLOCK))
    for n in range(2):
        bench.give(b"w%d" % n, ArenaOpened(key, True))
    assert [block.write for n in range(2) for block in bench.ever(b"w%d" % n, UseBlock)] == [False, True, False, True]


def test_a_fetch_into_a_new_arena_waits_until_workers_have_told():
    bench = Bench()
    bench.share(True, True)
    bench.upload()
    bench.give(b"c", OfferArena(2, 4321, 6, 2 * PAGE_BYTES, "cd" * 16, "here"))
    (second,) = bench.to(b"w0", OfferArena)
    bench.give(b"c", Fetch(7, 2, place(2, HEADER_BYTES)))
    assert len(bench.ever(b"w0", UseBlock)) == 1
    bench.give(b"w0", ArenaOpened(second.arena, True))
    bench.feed(PeerLost(b"w1", "it was killed", 0.0))
    assert bench.ever(b"c", Failed), "a part of the value is lost, and whoever waits for it is told"
    bench = Bench()
    bench.share(True, True)
    bench.upload()
    bench.give(b"c", OfferArena(2, 4321, 6, 2 * PAGE_BYTES, "cd" * 16, "here"))
    (second,) = bench.to(b"w0", OfferArena)
    bench.give(b"c", Fetch(7, 2, place(2, HEADER_BYTES)))
    bench.give(b"w0", ArenaOpened(second.arena, True))
    bench.give(b"w1", ArenaOpened(second.arena, False))
    assert len(bench.ever(b"w0", UseBlock)) == 1, "it is sent in messages"
    bench.all_done()
    assert bench.ever(b"c", Value)
