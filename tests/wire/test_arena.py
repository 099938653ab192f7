"""Arenas: a worker opens only memory that is proved to be its client's, and refuses anything else without a trace."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gt.errors import ProtocolError
from gt.wire.arena import (
    HEADER_BYTES,
    NAME,
    PAGE_BYTES,
    OwnArena,
    PeerArena,
    PeerFile,
    check_boxes,
    owner_proof,
    parse_place,
    place,
    tensor,
    upload_index,
)
from gt.wire.liveness import home
from gt.wire.messages import OfferArena, OfferFile

SESSION = 3
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.fixture
def arena():
    own = OwnArena(1, PAGE_BYTES, SESSION)
    yield own
    own.close()


def told(arena: OwnArena) -> OfferArena:
    """An arena's offer as the dispatcher sends it to workers."""
    offer = arena.offer()
    return replace(offer, nonce=owner_proof(offer.nonce, SESSION))


def descriptors() -> set[str]:
    """Open descriptors of this process. Those of tests before this one may be collected at any moment."""
    return set(os.listdir("/proc/self/fd"))


def test_what_one_side_writes_the_other_reads(arena):
    peer = PeerArena(told(arena))
    arena.bytes[HEADER_BYTES : HEADER_BYTES + 4] = [1, 2, 3, 4]
    assert peer.bytes[HEADER_BYTES : HEADER_BYTES + 4].tolist() == [1, 2, 3, 4]
    peer.populate(HEADER_BYTES, arena.nbytes)
    peer.bytes[-1] = 7
    assert arena.bytes[-1] == 7 and len(peer.bytes) == arena.nbytes


def mappings(arena: OwnArena) -> Callable[[], int]:
    """Counts this process's mappings of one arena, after its end too: those of tests before this one are not of interest."""
    file = os.fstat(arena.offer().fd)
    assert file.st_nlink == 0  # it has no name

    def count() -> int:
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        return sum(line[4] == str(file.st_ino) and line[5] == f"/memfd:{NAME}" for line in lines if len(line) > 5)

    return count


def test_it_has_no_name_and_lives_as_long_as_somebody_maps_it():
    own = OwnArena(1, 10, SESSION)
    mapped = mappings(own)
    own.bytes[-1] = 9
    peer = PeerArena(told(own))
    assert mapped() == 2
    own.close()
    assert peer.bytes[-1] == 9 and mapped() == 1
    del peer
    assert mapped() == 0


def test_a_closed_arena_is_unmapped_though_somebody_holds_it_and_not_before_the_last_array():
    own = OwnArena(1, 10, SESSION)
    mapped, part = mappings(own), own.bytes[-2:]
    part[:] = 5
    own.close()
    assert part.tolist() == [5, 5] and mapped() == 1
    del part
    assert mapped() == 0 and own.number == 1


def test_a_worker_that_knows_an_arenas_proof_cannot_offer_it_for_a_session_of_its_own(arena):
    """Any worker that says to be on this host is sent the proof, and its owner may have a client too."""
    seen = told(arena)
    PeerArena(seen)
    for session in (SESSION, SESSION + 1):  # the dispatcher makes another proof of whatever a client states
        with pytest.raises(OSError, match="proof"):
            PeerArena(replace(seen, nonce=owner_proof(seen.nonce, session)))


def allocated(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_a_worker_allocates_no_pages_but_those_of_its_block():
    """A client may offer far more than it has allocated, and name a block at the end of it."""
    offer = memory(NAME, nbytes=256 * PAGE_BYTES)
    peer = PeerArena(offer)
    peer.populate(200 * PAGE_BYTES - 100, 201 * PAGE_BYTES)
    assert allocated(offer.fd) <= 3 * PAGE_BYTES
    assert not peer.bytes[200 * PAGE_BYTES :][:9].any()
    os.close(offer.fd)


def test_no_memory_for_a_block_is_an_error_and_no_signal(arena):
    class Full:
        def madvise(self, *args: int) -> None:
            raise OSError(errno.ENOMEM, "no memory")

    peer = PeerArena(told(arena))
    peer._map = Full()
    with pytest.raises(MemoryError, match="no memory for bytes 4096 to 8192 of an arena"):
        peer.populate(HEADER_BYTES, 2 * HEADER_BYTES)


def memory(name: str, mode: int = 0o600, seals: int = SEALS, nbytes: int = PAGE_BYTES, flags: int = 0) -> OfferArena:
    """Memory that a process has made by itself, offered as an arena with its right nonce."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.fchmod(fd, mode)
    os.ftruncate(fd, nbytes)
    if not flags:  # memory of huge pages cannot be written to so
        os.pwrite(fd, bytes(range(16)), 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return OfferArena(1, os.getpid(), fd, nbytes, bytes(range(16)).hex(), home())


@pytest.mark.parametrize(
    "change, says",
    [
        ({"nonce": "0" * 32}, "proof"),
        ({"nonce": "é" * 32}, "proof"),
        ({"nbytes": PAGE_BYTES // 2}, "its owner says"),
        ({"nbytes": 1 << 50}, "its owner says"),
        ({"home": "another host"}, "another host"),
        ({"home": ""}, "owner is in"),
        ({"pid": 1 << 30}, "No such file"),
        ({"fd": 1 << 30}, "No such file"),
    ],
)
def test_another_offer_than_its_owners_is_refused(change, says):
    offer = memory(NAME)
    PeerArena(offer)
    before = descriptors()
    with pytest.raises(OSError, match=says):
        PeerArena(replace(offer, **change))
    assert descriptors() <= before
    os.close(offer.fd)


@pytest.mark.parametrize(
    "offer, says",
    [
        (lambda: memory("gt-heap"), "is not gt-arena"),
        (lambda: memory("gt-arenax"), "is not gt-arena"),
        (lambda: memory(NAME, mode=0o640), "mode 640"),
        (lambda: memory(NAME, seals=fcntl.F_SEAL_GROW), "not sealed"),
        (lambda: memory(NAME, seals=fcntl.F_SEAL_SHRINK), "not sealed"),
        (lambda: memory(NAME, flags=os.MFD_HUGETLB), "huge pages"),
    ],
)
def test_memory_of_another_kind_is_refused(offer, says):
    made = offer()
    with pytest.raises(OSError, match=says):
        PeerArena(made)
    os.close(made.fd)


def test_a_file_a_pipe_and_a_terminal_are_not_even_opened(tmp_path):
    named = tmp_path / f"memfd:{NAME} "  # its path ends as an arena's does
    named.write_bytes(bytes(range(16)) + bytes(PAGE_BYTES - 16))
    os.mkfifo(tmp_path / "fifo")
    ends = os.open(named, os.O_RDWR), os.open(tmp_path / "fifo", os.O_RDWR), os.open("/dev/null", os.O_RDWR)
    for fd in ends:
        with pytest.raises(OSError, match="is not gt-arena"):
            PeerArena(OfferArena(1, os.getpid(), fd, PAGE_BYTES, bytes(range(16)).hex(), home()))
        os.close(fd)


def test_a_file_system_is_asked_for_nothing_by_an_offer_of_its_file(tmp_path, monkeypatch):
    """It may be the client's own, which never answers: the worker's I/O thread would wait for ever."""
    asked: list[int] = []
    stated = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: asked.append(fd) or stated(fd))
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="is not gt-arena"):
        PeerArena(OfferArena(1, os.getpid(), file.fileno(), PAGE_BYTES, "0" * 32, home()))
    assert len(asked) == 1  # of the process's folder in /proc


def test_a_process_of_another_user_is_not_looked_into(arena, monkeypatch):
    """A worker of root could: it would read files for whoever has the server's token."""
    offer, other = told(arena), os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    monkeypatch.setattr(os, "readlink", lambda *args, **kwargs: pytest.fail("a descriptor was looked at"))
    with pytest.raises(OSError, match=f"process {os.getpid()} is of user {other - 1}, want own user {other}"):
        PeerArena(offer)


def test_its_owner_cannot_take_memory_away_from_who_has_mapped_it(arena):
    fd = arena.offer().fd
    for size in (0, arena.nbytes - PAGE_BYTES, arena.nbytes + PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)


def test_no_memory_is_an_error_and_leaves_no_descriptor(monkeypatch):
    class Full(mmap.mmap):
        def madvise(self, *args):
            raise OSError("full")

    def full(*args):
        raise OSError("no memory")

    monkeypatch.setattr(mmap, "mmap", Full)
    monkeypatch.setattr(os, "posix_fallocate", full)
    before = descriptors()
    with pytest.raises(OSError, match="no memory"):
        OwnArena(1, 10, SESSION)
    assert descriptors() <= before


def test_a_place_is_one_number():
    assert parse_place(place(3, 8192)) == (3, 8192)
    assert upload_index(upload_index(place(3, 8192))) == place(3, 8192) and upload_index(place(1, 0)) < -1


@pytest.mark.parametrize(
    "offset, shape, itemsize",
    [
        (0, (4,), 4),
        (HEADER_BYTES, (1 << 40,), 8),
        (PAGE_BYTES - 12, (4,), 4),
        (HEADER_BYTES, (-1,), 4),
        (HEADER_BYTES, (4,), 3),
    ],
)
def test_a_tensor_outside_of_an_arena_is_an_error(offset, shape, itemsize):
    with pytest.raises(ProtocolError, match="is not within"):
        tensor(np.zeros(PAGE_BYTES, np.uint8), offset, shape, itemsize)


def test_boxes_are_checked():
    assert check_boxes([[[0, 2], [1, 3]]], (2, 4))
    for rows in ([], [[[0, 3], [0, 4]]], [[[0, 2]]], [[[-1, 2], [0, 4]]], [[["a", 2], [0, 4]]], [5]):
        with pytest.raises(ProtocolError, match="are not boxes"):
            check_boxes(rows, (2, 4))


# ---- files


def lent(path, write=False, nbytes=None, how=os.O_RDWR):
    fd = os.open(path, how)
    return OfferFile(2, 1, fd, os.fstat(fd).st_size if nbytes is None else nbytes, write)


def test_a_file_is_the_owners_open_one_whatever_its_name_leads_to(arena, tmp_path):
    (tmp_path / "a").write_bytes(b"first")
    offer = lent(tmp_path / "a", True)
    (tmp_path / "a").unlink()
    (tmp_path / "a").symlink_to("/etc/passwd")
    peer = PeerFile(told(arena), offer)
    os.pwrite(peer.fd, b"other", 0)
    assert os.pread(offer.fd, 5, 0) == b"other"
    with pytest.raises(OSError):
        os.pread(peer.fd, 1, 0)  # lent to be written only
    peer.close()
    reader = PeerFile(told(arena), OfferFile(2, 1, offer.fd, 5, False))
    assert os.pread(reader.fd, 5, 0) == b"other"
    with pytest.raises(OSError):
        os.pwrite(reader.fd, b"x", 0)
    reader.close()
    os.close(offer.fd)


def test_what_is_no_file_of_the_offered_size_is_refused(arena, tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    os.mkfifo(tmp_path / "pipe")
    offers = [
        lent(tmp_path / "a", nbytes=6), lent(tmp_path / "a", nbytes=4), lent(tmp_path / "pipe"), lent("/dev/null"),
        lent("/dev/zero"), lent(tmp_path, how=os.O_RDONLY), lent("/proc/self/status", nbytes=10, how=os.O_RDONLY),
    ]  # fmt: skip
    sockets = os.pipe()
    before = descriptors()
    for offer in (*offers, OfferFile(2, 1, sockets[0], 1, False), OfferFile(2, 1, 99999, 1, False)):
        with pytest.raises(OSError):
            PeerFile(told(arena), offer)
    assert descriptors() <= before
    for fd in (*sockets, *(offer.fd for offer in offers)):
        os.close(fd)


@pytest.mark.parametrize("change", [{"nonce": "0" * 32}, {"pid": 1}, {"home": "elsewhere"}, {"home": ""}, {"fd": 0}])
def test_without_proof_of_its_process_no_file_is_opened(arena, tmp_path, change):
    (tmp_path / "a").write_bytes(b"secret")
    offer = lent(tmp_path / "a")
    before = descriptors()
    with pytest.raises(OSError):
        PeerFile(replace(told(arena), **change), offer)
    assert descriptors() <= before
    os.close(offer.fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_not_written(arena, tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    os.chown(tmp_path / "a", 12345, 12345)
    offer = lent(tmp_path / "a", True)
    with pytest.raises(OSError, match="belongs to user 12345"):
        PeerFile(told(arena), offer)
    PeerFile(told(arena), replace(offer, write=False)).close()
    os.close(offer.fd)
