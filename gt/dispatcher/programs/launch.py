"""A replay: one instruction to each worker that has a part in the program, and the journal's row for it.

The hot path of a captured step: while no layout has changed, the cost of a launch does not grow with ops and tensors.
"""

from __future__ import annotations

from gt.dispatcher.planning.host_copies import SessionHostCopies
from gt.dispatcher.planning.materializer import root_layout
from gt.dispatcher.planning.redistributor import Redistributor
from gt.dispatcher.programs.program import Program
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.failures import Launched
from gt.dispatcher.state.tensors import Storage
from gt.errors import ProtocolError
from gt.ir.layout import Layout, Partial, R


class ProgramLauncher:
    """Launches of one session's programs."""

    def __init__(self, context: SessionContext, redistributor: Redistributor, host_copies: SessionHostCopies) -> None:
        self._context, self._redistributor, self._host_copies = context, redistributor, host_copies
        self._emitter, self._cluster, self._table = context.emitter, context.cluster, context.table
        self._failures, self._journal = context.failures, context.journal

    def launch(self, program: Program, seed: int, counter: int) -> None:
        """Write the instructions of one replay. seed, counter: of its random numbers."""
        if program.compared != self._table.relaid and program.failed is None:
            self._restore_layouts(program)
        self._host_copies.before_launch(program.host_copies)
        with self._emitter.op(len(program.journal)):
            row = Launched(
                self._emitter.seq, program.journal[0].known, self._context.origin, program.reads, program.writes, program.makes,
                program.journal, program.count.launches + 1,
            )  # fmt: skip
            self._journal.add(row)
            program.count.launches += 1
            if self._failures.troubled and self.doomed(program, row.seq):
                return
            for worker, defines in program.code.items():
                for define in defines:
                    self._emitter.write(self._cluster.workers[worker], define, (seed, counter))
            self._host_copies.after_launch(program.host_copies)

    def _restore_layouts(self, program: Program) -> None:
        """Bring tensors to their recorded layouts. Once all have them, that holds until some tensor's layout changes."""
        if program.inputs.hold() and program.results.hold():
            program.compared = self._table.relaid
            return
        for tensor, layout in program.inputs.changed():
            if not tensor.storage.tensors:
                raise ProtocolError(f"Ops.code launches a program that reads %{tensor.id}, which is freed")
            self._redistributor.relayout(tensor.storage, root_layout(tensor, layout))
        for tensor, layout in program.results.changed():
            if tensor.storage.tensors:
                self._restore_result(tensor.storage, layout)

    def _restore_result(self, storage: Storage, layout: Layout) -> None:
        """Restore the layout of a result that was changed since: its terms were added up, or it moved."""
        # A result is overwritten by the replay, so its present value does not count. It moves to the layout without terms, and
        # is then declared to be terms: the replay writes these.
        terms = {axis: place for axis, place in enumerate(layout.placements) if isinstance(place, Partial)}
        self._redistributor.relayout(
            storage, Layout(layout.mesh, tuple(R if n in terms else p for n, p in enumerate(layout.placements)))
        )
        for tensor in storage.tensors.values() if terms else ():
            places = enumerate(tensor.layout.placements if tensor.layout else ())
            self._context.set_layout(tensor, Layout(layout.mesh, tuple(terms.get(n, place) for n, place in places)))

    def doomed(self, program: Program, seq: int) -> bool:
        """Taint the results of a replay that reads a failed tensor; True if it cannot be sent, for want of a worker."""
        # A lost worker or a failed input: results are worthless, so they are marked before the replay. Without either, results
        # that had failed are good again, since the replay makes them anew. A lost worker heals by no replay.
        mark = self._journal.set_cause
        cause = program.failed or next((read.failed for read in program.reads if read.failed is not None), None)
        for storage in program.makes:
            if cause is not None:
                mark(seq, storage, cause)
            elif storage.failed is not None and storage.failed.lost < 0:
                mark(seq, storage, None)  # made anew, from good tensors
                storage.unallocated = False
        if cause is not None:
            for storage in program.writes:
                self._journal.fail(seq, storage, cause)
        return cause is not None and cause.lost >= 0
