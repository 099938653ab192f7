"""Host copies and fetched pieces: whatever the layout, what is cut apart is put together again."""

import random

import numpy as np
import pytest

from gt.client.exchange import host_buffers
from gt.errors import ProtocolError
from gt.ir.layout import Layout, Mesh, R, Shard, boxes
from tests.worker.test_files import drawn_layout

MESH = Mesh((("a", 2), ("b", 2)), (0, 1, 2, 3))


@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", "f8", "c16"])
@pytest.mark.parametrize(
    ("shape", "placements"),
    [((), (R, R)), ((5,), (Shard(0), R)), ((6, 8), (Shard(0), Shard(1))), ((6, 8), (Shard(1, 2), R)), ((3, 0), (R, R))],
)
def test_cut_and_put_together(shape, placements, dtype, monkeypatch):
    monkeypatch.setattr(host_buffers, "CHUNK", 32)
    layout = Layout(MESH, placements)
    array = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    pieces = [(rank, [list(map(list, box)) for box in boxes(layout, shape, rank)]) for rank in range(4)]
    assembly = host_buffers.Assembly(shape, array.itemsize, pieces)
    for rank, rows in reversed(pieces):
        for offset, total, parts in host_buffers.region_frames(array, rows)[1]:
            assembly.add(rank, offset, total, parts[0] if parts else None)
    assert assembly.complete
    assert assembly.data.tobytes() == array.tobytes()


@pytest.mark.parametrize("seed", range(5))
def test_pieces_of_any_layout_go_from_one_file_into_another(seed, tmp_path, monkeypatch):
    """A frame of them is in memory at a time."""
    rng = random.Random(seed)
    for _ in range(60):
        monkeypatch.setattr(host_buffers, "CHUNK", rng.choice([7, 32, 1 << 20]))
        shape = tuple(rng.randint(int(rng.random() < 0.9), 6) for _ in range(rng.randint(0, 4)))
        size = rng.choice([1, 2, 4, 8, 16])
        data = rng.randbytes(size * int(np.prod(shape)))
        layout = drawn_layout(rng, shape)
        cut = {str(rows): rows for rank in range(len(layout.mesh.workers)) if (rows := boxes(layout, shape, rank))}
        pieces = [(rank, [list(map(list, box)) for box in rows]) for rank, rows in enumerate(cut.values())]
        (tmp_path / "from").write_bytes(b"head" + data)
        (tmp_path / "to").write_bytes(bytes(9 + len(data)))
        with (tmp_path / "from").open("rb") as source, (tmp_path / "to").open("r+b") as target:
            assembly = host_buffers.FileAssembly(target.fileno(), 5, len(data), shape, size, pieces)
            for rank, rows in pieces:
                nbytes, frames = host_buffers.file_frames(source.fileno(), 4, shape, size, rows)
                for offset, total, parts in frames:
                    assert total == nbytes
                    assembly.add(rank, offset, total, parts[0] if parts else None)
            assert assembly.complete
        assert (tmp_path / "to").read_bytes() == bytes(5) + data + bytes(4), (shape, layout)


def test_a_file_that_ends_too_early_or_takes_no_more(tmp_path):
    (tmp_path / "f").write_bytes(bytes(100))
    with (tmp_path / "f").open("rb") as file:
        _, frames = host_buffers.file_frames(file.fileno(), 0, (30,), 4, [[[0, 30]]])
        with pytest.raises(OSError, match="ends at byte 100: it was cut after it was opened"):
            next(frames)
        assembly = host_buffers.FileAssembly(file.fileno(), 0, 8, (2,), 4, [[1, [[[0, 2]]]]])
        with pytest.raises(OSError, match="Bad file descriptor"):  # it is open for reading
            assembly.add(1, 0, 8, bytes(8))
        with pytest.raises(ProtocolError, match="Piece has 4 bytes at offset 4 of 8, want byte 0 of 8"):
            assembly.add(1, 4, 8, bytes(4))
        with pytest.raises(ProtocolError, match="want a value of 8 bytes"):
            host_buffers.FileAssembly(file.fileno(), 0, 8, (3,), 4, [])


def test_a_whole_copy_is_sent_without_copying_it():
    array = np.zeros((4, 4), np.float32)
    ((_, _, (frame,)),) = host_buffers.region_frames(array, [[[1, 3], [0, 4]]])[1]
    assert np.shares_memory(np.frombuffer(frame, np.uint8), array)


def test_a_piece_that_does_not_fit_is_refused():
    with pytest.raises(ProtocolError, match="not boxes of a tensor of shape"):
        host_buffers.region_frames(np.zeros((2, 2)), [[[0, 3], [0, 2]]])
    with pytest.raises(ProtocolError, match="not boxes"):
        host_buffers.region_frames(np.zeros((2, 2)), [7])
    assembly = host_buffers.Assembly((2,), 4, [[1, [[[0, 2]]]]])
    with pytest.raises(ProtocolError, match="Piece has 4 bytes at offset 6 of 8"):
        assembly.add(1, 6, 8, b"1234")
