"""Records of a pipeline that does not run, for pages and views: many workers, many actions, and any names."""

from __future__ import annotations

import itertools
import math
import threading
from types import TracebackType

from gt.dispatcher import schedule
from gt.dispatcher.schedule.measure import measured
from gt.errors import DispatcherLost
from gt.wire.records import (
    ErrorRecord,
    HostRecord,
    LayoutRecord,
    LinkRecord,
    LogRecord,
    QueueRecord,
    Record,
    ScheduleRecord,
    ServerRecord,
    SessionRecord,
    WorkerRecord,
)

LIVES = itertools.count(1)


class SyntheticStream:
    """In place of a RecordStream: moments that a test releases, one after another. name: of everything that has a name."""

    def __init__(self, stages: int = 8, micro_batches: int = 32, name: str = "{}", layouts: int = 40) -> None:
        self.stages, self.micro_batches, self.name, self.layouts = stages, micro_batches, name, layouts
        self.interval, self.address = 1.0, "127.0.0.1:1"
        self.log, self._moment, self._line, self._ended = False, 0, 0, ""
        self.life = f"life {next(LIVES)}"  # of a server: each stream has its own
        self._ready = threading.Semaphore(0)

    def __enter__(self) -> SyntheticStream:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def close(self) -> None:
        return None

    def release(self, moments: int = 1) -> None:
        for _ in range(moments):
            self._ready.release()

    def fail(self, reason: str) -> None:
        self._ended = reason
        self._ready.release()

    def stop(self) -> None:
        self.fail("the observer has ended")

    def next(self) -> list[Record]:
        self._ready.acquire()
        if self._ended:
            raise DispatcherLost(self._ended)
        self._moment += 1
        return self.records(self._moment)

    def records(self, moment: int) -> list[Record]:
        named, workers = self.name.format, [self.name.format(f"w{n}") for n in range(self.stages)]
        where = [0, named("aten.mm.default"), named("/home/ada/train.py"), 31, named("stage0"), named("op")]
        values = {named("loss"): 5 / (1 + moment / 20) + math.sin(moment) / 20, named("lr"): 0.003}
        listed: list[Record] = [ServerRecord(float(moment), "shared", 1.0, 1, 10, 10, 0.001, self.life)]
        for n, worker in enumerate(workers):
            live = (64 << 20) + int((32 << 20) * math.sin(moment / 3 + n) ** 2)
            uses = {"weights": 20 << 20, "optimizer": 30 << 20, "gradients": 4 << 20, "activations": live - (54 << 20)}
            memory = {"sessions": {"0": live}, "uses": {"0": uses}, "arena": 1 << 20, "process": 2 * live}
            state = "busy" if moment % 2 else "idle"
            about = (named("a-host"), 100 + n, "torch", "cpu", "shm", state, "", [0], 0.0, float(moment))
            listed.append(WorkerRecord(worker, *about, moment * 100, moment * 0.7, moment * 0.8, 40, live, memory, 0, where))
            for m, other in enumerate(workers):
                if m != n:
                    listed.append(LinkRecord(worker, other, moment * (1 << 18) * (1 + (n + m) % 3)))
        session = (workers, [named("stage0")], float(moment), moment * 900, 7, moment, moment, values, where)
        listed.append(SessionRecord(0, named("ada"), named("train.py"), named("h"), 9, *session, "workers", 1, 5, 6))
        listed.append(self._schedule(moment))
        listed += [QueueRecord(1, named("bob"), named("wait.py"), 2), HostRecord(named("a-host"), workers)]
        if moment == 1:
            listed.append(self._layouts())
            error = (named("aten.mm.default"), named("/home/ada/train.py"), 31, named("stage0"), named("it failed"))
            listed.append(ErrorRecord(1, 1.0, 0, workers[0], *error))
        if self.log:
            lines = [named(f"{moment}.{n} WORKER_SEND w{n % self.stages} op=aten.mm sharded @ train.py:31") for n in range(50)]
            self._line += len(lines)
            listed.append(LogRecord(self._line, 0, lines))
        return listed

    def _schedule(self, moment: int) -> ScheduleRecord:
        costs = schedule.uniform(self.stages)
        made = schedule.make(schedule.ScheduleRequest("1f1b", range(self.stages), self.micro_batches), costs)
        line = schedule.simulate(made.rows, costs)
        slower = 1 + 0.02 * math.sin(moment)
        actions = {
            self.name.format(f"w{n}"): [
                [str(action), 10 + start * 1e-3 * slower, 10 + end * 1e-3 * slower]
                for action, start, end in zip(row, line.start[n], line.end[n])
            ]
            for n, row in enumerate(made.rows)
        }
        bubble = [b / line.makespan for b in line.bubble]
        predicted = {"bubble": bubble, "idle": line.idle, "makespan": line.makespan}
        ran = measured(list(actions.values()))
        return ScheduleRecord(0, moment, "1f1b", predicted, ran, actions, str(made), costs.wire())

    def _layouts(self) -> LayoutRecord:
        named, half = self.name.format, {"w0": [[[0, 512], [0, 256]]], "w1": [[[0, 512], [256, 512]]]}
        split = {named(worker): boxes for worker, boxes in half.items()}
        copies = {named(f"w{n}"): [[[0, 512]]] for n in range(2)}
        splits = [["f32[512,512]", "[S(1)]", "tp=2", 1 << 20, split], ["f32[512]", "[R]", "tp=2", 2048, copies]]
        rows = [[named(f"blocks.{n}.{kind}"), k] for n in range(self.layouts) for k, kind in enumerate(("weight", "bias"))]
        return LayoutRecord(0, 1, rows, splits, 0)
