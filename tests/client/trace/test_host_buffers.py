"""Host copies and fetched pieces: whatever the layout, what is cut apart is put together again."""

import numpy as np
import pytest

from gt.client import host_buffers
from gt.errors import ProtocolError
from gt.ir.layout import Layout, Mesh, R, Shard, boxes

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
        for offset, total, parts in host_buffers.frames(host_buffers.region(array, rows)):
            assembly.add(rank, offset, total, parts[0] if parts else None)
    assert assembly.complete
    assert assembly.data.tobytes() == array.tobytes()


def test_a_whole_copy_is_sent_without_copying_it():
    array = np.zeros((4, 4), np.float32)
    assert np.shares_memory(host_buffers.region(array, [[[1, 3], [0, 4]]]), array)


def test_a_piece_that_does_not_fit_is_refused():
    with pytest.raises(ProtocolError, match="not boxes of a tensor of shape"):
        host_buffers.region(np.zeros((2, 2)), [[[0, 3], [0, 2]]])
    with pytest.raises(ProtocolError, match="not boxes"):
        host_buffers.region(np.zeros((2, 2)), [7])
    assembly = host_buffers.Assembly((2,), 4, [[1, [[[0, 2]]]]])
    with pytest.raises(ProtocolError, match="Piece has 4 bytes at offset 6 of 8"):
        assembly.add(1, 6, 8, b"1234")
