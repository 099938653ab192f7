"""Saves into files that a client lends, as the dispatcher sees them: each part is written once."""

from __future__ import annotations

import pytest

from gt.dispatcher.events import PeerLost, Tick
from gt.ir.instr import FREE
from gt.wire.arena import place as place_of
from gt.wire.arena import upload_index
from gt.wire.messages import (
    ArenaOpened,
    CloseArenas,
    Data,
    Failed,
    Fetch,
    Notice,
    OfferFile,
    OpError,
    Ops,
    Piece,
    Reject,
    Report,
    Run,
    Store,
    UploadProgress,
    UploadRequest,
    UseBlock,
)
from tests.dispatcher.state.test_arenas import MM, NBYTES, SHAPE, ZEROS, Bench

FILE = 7
SIZE = 100 + NBYTES


class Files(Bench):
    """A bench whose client has an arena, a tensor %2 split over both workers, and a file that both may write."""

    def __init__(self, *opened: bool, write: bool = True) -> None:
        super().__init__()
        self.share(True, True)
        self.upload()
        self.all_done()
        self.give(b"c", OfferFile(FILE, 1, 9, SIZE, write, "model.safetensors"))
        offers = [self.ever(b"w%d" % n, OfferFile)[-1] for n in range(2)]
        self.key, self.offer = offers[0].arena, offers[0]
        for n, answer in enumerate(opened):
            self.give(b"w%d" % n, ArenaOpened(self.key, answer))

    def store(self, request: int, tensor: int = 2, offset: int = 100, later: bool = False) -> list[UseBlock]:
        self.give(b"c", Store(request, [[tensor, place_of(FILE, offset)]], later))
        return [m for n in range(2) for m in self.to(b"w%d" % n, UseBlock)]

    def written(self, blocks: list[UseBlock]) -> None:
        for n, block in enumerate(blocks):
            self.give(b"w%d" % n, Piece(block.key, NBYTES // 2, NBYTES // 2))


@pytest.mark.parametrize("later", [False, True])
def test_each_worker_writes_its_part_and_the_answer_follows_the_last(later):
    bench = Files(True, True)
    assert (bench.offer.fd, bench.offer.nbytes, bench.offer.write) == (9, SIZE, True)
    blocks = bench.store(5, later=later)
    assert [block.boxes for block in blocks] == [[[[0, 512], [0, 512]]], [[[512, 1024], [0, 512]]]]
    assert all((b.arena, b.offset, b.shape, b.write, b.later) == (bench.key, 100, [*SHAPE], True, later) for b in blocks)
    bench.written(blocks[:1])
    bench.all_done()
    assert not bench.ever(b"c", Report)
    bench.give(b"w1", Piece(blocks[1].key, NBYTES // 2, NBYTES // 2))
    assert bench.to(b"c", Report) == [Report(5, {"shared": True})]


def test_no_answer_before_earlier_work_is_known_to_be_good():
    bench = Files(True, True)
    bench.written(bench.store(5))
    assert not bench.ever(b"c", Report)
    bench.all_done()
    assert bench.to(b"c", Report)


def test_copies_of_equal_parts_are_written_by_workers_in_turn():
    bench = Files(True, True)
    bench.ops([ZEROS, 1, 3, MM, 1, 2, 3, 4])  # %3 is whole on both
    first = bench.store(5, 3)
    second = bench.store(6, 3)
    assert len(first) == len(second) == 1
    assert {bool(bench.ever(b"w%d" % n, UseBlock)) for n in range(2)} == {True}
    assert sorted(b.key for b in bench.ever(b"w0", UseBlock)[1:] + bench.ever(b"w1", UseBlock)[1:]) == [
        first[0].key,
        second[0].key,
    ]


@pytest.mark.parametrize("answers", [(True, False), (False, False)])
def test_without_workers_that_share_the_file_nothing_is_written(answers):
    bench = Files(*answers)
    bench.give(b"c", Store(4, [], False, FILE))
    assert bench.to(b"c", Report) == [Report(4, {"shared": False})]
    assert not bench.store(5) and bench.to(b"c", Report) == [Report(5, {"shared": False})]


def test_a_save_waits_until_workers_have_told_whether_they_share_the_file():
    bench = Files()
    assert not bench.store(5)
    for n in range(2):
        bench.give(b"w%d" % n, ArenaOpened(bench.key, True))
    assert len(bench.ever(b"w0", UseBlock)) == 2 and len(bench.ever(b"w1", UseBlock)) == 2


def test_a_write_that_fails_is_told_with_its_tensor():
    bench = Files(True, True)
    blocks = bench.store(5)
    run = bench.ever(b"w0", Run)[-1]
    bench.give(b"w0", OpError(run.base + run.code[1], "op", "no space left on device"))
    (failed,) = bench.to(b"c", Failed)
    assert failed.request == 5 and failed.error["kind"] == "CheckpointError"
    assert failed.error["message"] == "worker w0 cannot write %2: no space left on device"
    bench.written(blocks)
    bench.all_done()
    assert not bench.ever(b"c", Report)


def test_a_lost_worker_ends_the_save():
    bench = Files(True, True)
    bench.store(5)
    bench.feed(PeerLost(b"w1", "gone", bench.core.now))
    assert [m.request for m in bench.ever(b"c", Failed)] == [5]


@pytest.mark.parametrize(
    "row",
    [
        [2, place_of(FILE, 101)],
        [2, place_of(1, 4096)],
        [2, -1],
        [2, place_of(9, 0)],
        [99, place_of(FILE, 0)],
        [2],
        "x",
        [2, "1"],
    ],
)
def test_places_outside_of_files_are_refused(row):
    bench = Files(True, True)
    bench.give(b"c", Store(5, [row]))
    assert any(isinstance(m, (Failed, Reject)) for p, m in bench.sent if p == b"c")
    assert not bench.core.sessions


def test_a_file_to_be_written_is_not_read_and_one_to_be_read_is_not_written():
    bench = Files(True, True, write=False)
    bench.give(b"c", Store(5, [[2, place_of(FILE, 100)]]))
    assert not bench.core.sessions
    for index in (upload_index(place_of(FILE, 100)),):
        bench = Files(True, True)
        bench.give(b"c", Ops(bench.batch, [], [], [16, 1, index, 30]))
        assert not bench.core.sessions
    bench = Files(True, True)
    bench.give(b"c", Fetch(5, 2, place_of(FILE, 100)))
    assert not bench.core.sessions


@pytest.mark.parametrize("change", [{"owner": 3}, {"owner": 7}, {"arena": 1}, {"arena": 0}, {"fd": -1}, {"nbytes": 0}])
def test_an_offer_without_an_open_arena_is_refused(change):
    bench = Bench()
    bench.share(True, True)
    fields = {"arena": FILE, "owner": 1, "fd": 9, "nbytes": SIZE, "write": True}
    bench.give(b"c", OfferFile(**{**fields, **change}))
    assert not bench.core.sessions


def test_tensors_are_read_from_a_file_by_those_who_share_it():
    bench = Files(True, True, write=False)
    bench.ops([16, 1, upload_index(place_of(FILE, 100)), 30, ZEROS, 1, 31, MM, 1, 30, 31, 32])
    blocks = [bench.to(b"w%d" % n, UseBlock)[0] for n in range(2)]
    assert [(b.arena, b.offset, b.write) for b in blocks] == [(bench.key, 100, False)] * 2
    assert not bench.ever(b"c", UploadRequest)
    bench.give(b"c", CloseArenas([FILE]))
    assert bench.to(b"w0", CloseArenas) == [CloseArenas([bench.key])]
    read(bench, blocks)
    bench.all_done()


# ---- file systems that do not answer


def read(bench: Bench, blocks: list[UseBlock]) -> None:
    for n, block in enumerate(blocks):
        bench.give(b"w%d" % n, UploadProgress(block.key, NBYTES // 2))


def reading() -> tuple[Bench, list[UseBlock]]:
    """A bench whose workers read halves of %30 from the file, for an op, and what each was told to read."""
    bench = Files(True, True, write=False)
    bench.told.clear()
    bench.ops([16, 1, upload_index(place_of(FILE, 100)), 30, ZEROS, 1, 31, MM, 1, 30, 31, 32])
    return bench, [bench.ever(b"w%d" % n, UseBlock)[0] for n in range(2)]


def test_no_instruction_is_sent_before_the_file_that_it_needs_is_read():
    bench, blocks = reading()
    bench.give(b"c", Fetch(5, 32))
    read(bench, blocks[:1])
    assert not bench.ever(b"w0", Run) and not bench.ever(b"w1", Run)
    bench.give(b"w1", UploadProgress(blocks[1].key, NBYTES // 2))
    assert bench.ever(b"w0", Run) and bench.ever(b"w1", Run)
    bench.all_done()
    assert bench.core.sessions[b"c"].fetches.open, "the fetch, which waited too"


def test_other_sessions_go_on_while_a_file_is_read():
    bench, _ = reading()
    bench.client(b"d")
    bench.ops([ZEROS, 1, 1], b"d")
    bench.give(b"d", Fetch(5, 1))
    assert bench.ever(b"w0", Run) or bench.ever(b"w1", Run)


def test_a_lost_worker_ends_the_reads_of_the_others_whose_instructions_are_sent_with_the_loss():
    """Sent later, they would meet its successor, which has none of them."""
    bench, blocks = reading()
    bench.feed(PeerLost(b"w1", "it was killed", 0.0))
    assert [m for m in bench.to(b"w0", Data)] == [Data(blocks[0].key, 0, -1)]
    order = [type(m) for p, m in bench.sent if p == b"w0" and isinstance(m, (Data, Run))]
    assert order[0] is Data and Run in order


def notices(bench: Bench, until: float) -> list[tuple[str, int]]:
    """The time of each thing that the client is told, to 10 s, and what it is."""
    rows = []
    for now in range(1, int(until)):
        bench.feed(Tick(float(now)))
        rows += [(m.text, now) for m in bench.to(b"c", Notice)]
        rows += [(m.error["message"], now) for m in bench.to(b"c", Failed)]
    return rows


@pytest.mark.parametrize("what", ["open", "read", "write"])
def test_a_file_that_does_not_answer_is_named_and_ends_the_questions_of_its_session(what):
    if what == "read":
        bench, _ = reading()
        bench.give(b"c", Fetch(5, 32))
    else:
        bench = Files() if what == "open" else Files(True, True)
        bench.store(5)
        bench.all_done()
    rows = notices(bench, 320)
    assert [now // 10 for _, now in rows] == [1, 3, 6, 12, 30]
    assert all("got no answer of the file system of 'model.safetensors' for" in text for text, _ in rows), rows
    assert rows[-1][0].startswith("no worker of this program has made progress for 300 s")
    assert b"c" in bench.core.sessions


def test_ops_wait_while_workers_write_tensors_from_their_memory_and_follow_whatever_ends_that():
    bench = Files(True, True)
    blocks = bench.store(5)
    bench.told.clear()
    bench.ops([ZEROS, 1, 40])
    bench.ops([FREE, 1, 9])
    session = bench.core.sessions[b"c"]
    assert len(session.inbox) == 2
    bench.written(blocks)
    bench.all_done()
    assert not session.inbox and bench.ever(b"c", Report)
    bench.store(6)
    bench.ops([ZEROS, 1, 41])
    assert session.inbox
    notices(bench, 320)
    assert not session.inbox and not session.fetches.holding


def test_ops_do_not_wait_for_a_save_of_copies():
    bench = Files(True, True)
    bench.store(5, later=True)
    bench.ops([ZEROS, 1, 40])
    assert not bench.core.sessions[b"c"].inbox


def test_the_name_of_a_file_is_bounded_and_not_told_to_workers():
    bench = Files(True, True)
    assert bench.offer.name == ""
    bench.give(b"c", OfferFile(FILE + 1, 1, 9, SIZE, True, "x" * 256))
    assert not bench.core.sessions


def test_a_save_that_an_interrupt_has_dropped_is_told():
    """Else its program would wait for it for ever."""
    bench = Files(True, True)
    bench.store(5)
    session = bench.core.sessions[b"c"]
    (request,) = session.fetches.open.values()
    bench.give(b"w0", OpError(min(request.named), "interrupted", "", {}, [min(request.named)]))
    (failed,) = bench.to(b"c", Failed)
    assert failed.request == 5 and "%2 was not saved, since an interrupt" in failed.error["message"]
    assert not session.fetches.open
