"""Memory of the program's tensors on workers: by use, and by the line that made them. Knows no file format."""

from __future__ import annotations

import gc
from collections import defaultdict
from dataclasses import dataclass, field

import torch

from gt.client import current_session
from gt.client.device import torch_remote
from gt.client.groups import tensor_roles
from gt.client.reports import html
from gt.ir.text import size

USES = ("weights", "gradients", "optimizer", "activations")
LINES = 10  # lines for one worker in a summary


@dataclass(frozen=True, slots=True)
class Held:
    """Memory that tensors share. use: one of USES; name: of a weight; what: "" for a tensor of the program."""

    nbytes: int
    file: str
    line: int
    group: str
    what: str
    use: str
    name: str

    @property
    def where(self) -> str:
        """The line that made it, for people."""
        place = f"{self.file}:{self.line}" if self.file else "no line"
        return ", ".join(filter(None, (f"{place} {self.group}".strip(), self.what, self.name)))


@dataclass(slots=True)
class WorkerMemory:
    """A worker's memory, in bytes. limit: 0 for none; rows: largest first; more: of tensors that have no row."""

    name: str
    device: str
    session: int
    others: int
    taken: int
    limit: int
    peak: int
    rows: list[Held] = field(default_factory=list)

    @property
    def more(self) -> int:
        return max(self.session - sum(row.nbytes for row in self.rows), 0)

    def by_use(self) -> dict[str, int]:
        totals = dict.fromkeys(USES, 0)
        for row in self.rows:
            totals[row.use] += row.nbytes
        return totals


def held() -> list[WorkerMemory]:
    """The memory of every worker, by index. Waits for all ops."""
    recorder = current_session.current()
    recorder.flush()  # with what has ended
    torch_remote.synchronize()
    roles, number = _roles(), str(recorder.session.number)
    workers = []
    for row in recorder.session.stats(holders=True)["workers"]:
        mine = row["session_bytes"].get(number, 0)
        worker = WorkerMemory(
            row["name"],
            row["device"],
            mine,
            row["live_bytes"] - mine,
            row["memory_used"],
            row["memory_limit"],
            row["peak_bytes"],
        )
        for ids, nbytes, file, line, group, what in row["holders"]:
            use, name = next((roles[i] for i in ids if i in roles), ("activations", ""))
            worker.rows.append(Held(nbytes, file, line, group, what, use, name))
        workers.append(worker)
    return workers


def _roles() -> dict[int, tuple[str, str]]:
    """Use and name of tensors by id: those of modules and optimizers that are alive."""
    names, roles = tensor_roles.names(), {}
    for i, kind, name in tensor_roles.weights(names):
        roles[i] = kind, name
    for o in [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]:
        for i, kind, name in tensor_roles.rows(o, names):
            roles[i] = kind, name
    for i, kind, name in tensor_roles.gradients(names):
        roles.setdefault(i, (kind, name))
    return roles


class MemorySummary(str):
    """The text of gt.memory_summary(). `workers`: its figures, which a notebook shows as bars too."""

    workers: list[WorkerMemory]

    def _repr_html_(self) -> str:
        rows = [(worker.name, worker.by_use()) for worker in self.workers]
        return html.titled("memory of tensors by use", html.bars(rows), html.text_block(self))


def memory_summary() -> MemorySummary:
    """Memory of this program's tensors on each worker, as text: by use, and by the line that made them. Waits for all ops.

    Uses are weights, gradients, optimizer state and activations; these are all other tensors. print() it.
    """
    workers = held()
    summary = MemorySummary("\n".join(line for worker in workers for line in _lines(worker)))
    summary.workers = workers
    return summary


def _lines(worker: WorkerMemory) -> list[str]:
    about = [f"{size(worker.others)} in those of others"] if worker.others else []
    about += [f"{size(worker.taken)} are taken"] if worker.taken else []
    about += [f"the limit is {size(worker.limit)}"] if worker.limit else []
    about += [f"the peak was {size(worker.peak)}"] if worker.peak else []
    lines = [", ".join([f"{worker.name} ({worker.device}): {size(worker.session)} in tensors of this program", *about])]
    lines += [f"  {use:12} {size(nbytes):>10}" for use, nbytes in worker.by_use().items() if nbytes]
    by_line: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row in worker.rows:
        total = by_line[f"{row.where} ({row.use})"]
        total[0], total[1] = total[0] + row.nbytes, total[1] + 1
    most = sorted(by_line.items(), key=lambda item: -item[1][0])
    lines += [f"  {size(nbytes):>10} in {count} of {where}" for where, (nbytes, count) in most[:LINES]]
    rest = sum(nbytes for _, (nbytes, _) in most[LINES:]) + worker.more
    return lines + ([f"  {size(rest):>10} in others"] if rest else [])
