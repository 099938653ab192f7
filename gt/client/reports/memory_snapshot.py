"""A snapshot of workers' memory in the format of torch's memory viewer (pytorch.org/memory_viz, torch.cuda._memory_viz).

That format is a pickle. This is the only file that writes one, and nothing in GT reads any.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

from gt.client.reports.memory import WorkerMemory, held
from gt.logs import private_file

ALIGNMENT_BYTES = 512  # bytes: of a CUDA allocator's blocks
GIBIBYTE = 1 << 30


def memory_snapshot(path: str | Path) -> None:
    """Write where this program's tensors are, for torch's memory viewer. Waits for all ops.

    path: of the file, to open at pytorch.org/memory_viz or with torch.cuda._memory_viz. Each worker is a device there, and a
    block is the memory of one tensor with its line, group and use. Workers' allocators may lay tensors out otherwise.
    """
    segments = [_segment(n, worker) for n, worker in enumerate(held())]
    snapshot = {
        "segments": segments,
        "device_traces": [_allocations(segment) for segment in segments],
        "allocator_settings": {},
    }
    with os.fdopen(private_file(path), "wb") as out:
        pickle.dump(snapshot, out, protocol=4)


def _segment(number: int, worker: WorkerMemory) -> dict[str, Any]:
    """A worker's tensors one after the other, as one segment of memory."""
    address = (number + 1) * GIBIBYTE * 1024
    blocks, at = [], address
    for row in worker.rows:
        nbytes = -(-max(row.nbytes, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        label = ", ".join(filter(None, (row.use, row.name, row.what, row.group)))
        frames = [{"name": label, "filename": row.file or "<no line>", "line": row.line}]
        blocks.append(
            {"address": at, "size": nbytes, "requested_size": row.nbytes, "state": "active_allocated", "frames": frames}
        )
        at += nbytes
    total = at - address
    return {
        "device": number,
        "address": address,
        "total_size": total,
        "allocated_size": total,
        "active_size": total,
        "requested_size": sum(row.nbytes for row in worker.rows),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [{"name": f"worker {worker.name} ({worker.device})", "filename": "<worker>", "line": 0}],
        "blocks": blocks,
    }


def _allocations(segment: dict[str, Any]) -> list[dict[str, Any]]:
    """The allocations in order, which the viewer's main page draws over time."""
    entries = [("segment_alloc", segment["address"], segment["total_size"], segment["frames"])]
    entries += [("alloc", block["address"], block["size"], block["frames"]) for block in segment["blocks"]]
    return [
        {"action": action, "addr": address, "size": nbytes, "stream": 0, "time_us": n, "frames": frames}
        for n, (action, address, nbytes, frames) in enumerate(entries)
        if nbytes
    ]
