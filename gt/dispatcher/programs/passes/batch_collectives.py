"""The pass that has workers do adjacent collectives of one team and kind as one: it puts a `together` before them.

The latency of an exchange is then paid once, as with Horovod's fusion buffer (Sergeev and Del Balso, 2018). Unlike there, and
as in NCCL's grouped calls, nothing is copied into one buffer. Only small gathers are batched: the first reader waits for all
of them. All members of a team have the same batches, or none. This pass is the last, so no other puts a row into a batch.

Example, two small sums of one team:

    before:  g1 = mm ...; all_reduce g0; all_reduce g1; ...
    after:   g1 = mm ...; together 2; all_reduce g0; all_reduce g1; ...
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod

from gt.dispatcher.programs.passes.bucket_reductions import REDUCTIONS
from gt.dispatcher.programs.passes.context import MakeDefinition, PassContext
from gt.dispatcher.programs.recording import Instruction, Recording
from gt.ir.instr import COLLECTIVES
from gt.ir.spec import DTYPES

MAX_GATHER_BYTES = 256 << 10  # largest gathered tensor in a batch; a larger one is gathered by itself

_Key = tuple[str, tuple[int, ...], str]  # kind, workers, action of a schedule


def batch_collectives(recording: Recording, context: PassContext) -> Recording:
    """The recording with a `together` before each run of collectives that may be done as one."""
    # All members of a team need runs of the same lengths in the same order. Otherwise one would begin two collectives as one
    # while another begins only the first, and both would wait for ever.
    runs = {worker: _runs(rows) for worker, rows in recording.code.items()}
    lengths = [count for counts in runs.values() for of_team in counts.values() for count in of_team]
    alike = all(runs[w][key] == runs[peer][key] for w in runs for key in runs[w] for peer in key[1] if peer in runs)
    if not alike or max(lengths, default=0) < 2:
        return recording
    for worker, rows in recording.code.items():
        single = sum(row.kind in COLLECTIVES for row in rows)
        saved = sum(count - 1 for counts in runs[worker].values() for count in counts)
        if saved:
            context.batched[worker] = [single, single - saved]
    return replace(recording, code={w: list(_marked(rows, context.define)) for w, rows in recording.code.items()})


def _key(row: Instruction) -> _Key | None:
    # Sums of any size: their buckets are made to be one. A gather is read by the next op, which then waits for the whole batch.
    payload = row.define.payload
    if row.kind == "all_gather":
        small = prod(payload["shape"]) * DTYPES[payload["dtype"]][0] <= MAX_GATHER_BYTES
    else:
        small = row.kind in REDUCTIONS
    return (row.kind, tuple(payload["team"]["workers"]), row.action) if small else None


def _runs(rows: Sequence[Instruction]) -> dict[_Key, list[int]]:
    """Lengths of the runs of each key, in order."""
    lengths: dict[_Key, list[int]] = defaultdict(list)
    for key, group in groupby(rows, key=_key):
        if key is not None:
            lengths[key].append(len(list(group)))
    return lengths


def _marked(rows: Sequence[Instruction], define: MakeDefinition) -> Iterator[Instruction]:
    for key, group in groupby(rows, key=_key):
        run = list(group)
        if key is not None and len(run) > 1:
            yield Instruction(run[0].seq, define("together", {"count": len(run)}), [], run[0].action)
        yield from run
