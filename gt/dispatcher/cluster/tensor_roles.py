"""Roles of tensors, for observers: weights, gradients or optimizer state.

The client reports roles while somebody observes. From them come the bytes of each role on each worker, and the layouts of the
parameters. They are computed a few times a minute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from gt.dispatcher.cluster.workers import Worker
from gt.dispatcher.state.tensors import Table, Tensor
from gt.errors import ProtocolError
from gt.ir.layout import Layout, boxes, volume
from gt.ir.spec import Spec
from gt.logs import plain
from gt.wire.messages import MAX_ROLE_CHARACTERS, MAX_ROLES
from gt.wire.records import GRADIENTS, OPTIMIZER, USES, WEIGHTS, LayoutRecord

KINDS = frozenset(USES[:3])
MAX_SHOWN_TENSORS, MAX_SHOWN_BOXES = 8192, 16384  # tensors and boxes in one LayoutRecord
MAX_SPLITS = 32768  # pieces that are computed at once: a tensor beyond them is left out
RENEWAL_SECONDS = 10.0  # a tensor may have moved
MIN_SECONDS = 0.4  # between two computations, however often a client tells


class RoleTable:
    """Roles of one session's tensors, by id."""

    def __init__(self) -> None:
        self._rows: list[list] = []  # [id, use, name as the client wrote it]
        self._bytes: dict[str, Counter[str]] = {}  # worker -> bytes by use
        self._gradients: dict[str, int] = {}  # worker -> bytes at the client's last report: each step may make others
        self._new = False  # told, and not computed yet
        self._layouts: LayoutRecord | None = None
        self._renewed = -MIN_SECONDS  # when that was computed, and when it is computed again
        self._due = 0.0
        self._left = 0  # pieces that may still be computed
        self._pieces: dict[tuple[Spec, Layout], list[tuple[int, int, list]]] = {}  # worker's index, bytes, boxes

    def tell(self, rows: list, now: float) -> None:
        """Take the roles that the client reports; ProtocolError for an unknown one."""
        if len(rows) > MAX_ROLES:
            raise ProtocolError(f"TensorRoles has {len(rows)} rows, want at most {MAX_ROLES}")
        if not _fit(rows):
            bad = next(row for row in rows if not _fit([row]))
            raise ProtocolError(f"TensorRoles.rows has {bad!r:.80}, want [id, one of {sorted(KINDS)}, name]")
        self._rows, self._new = rows, True
        self._due = max(now, self._renewed + MIN_SECONDS)

    def renew(self, table: Table, workers: list[Worker], session: int, now: float) -> None:
        """Compute bytes and layouts, if they are old."""
        if not self._rows or now < self._due:
            return
        self._renewed, self._due = now, now + RENEWAL_SECONDS

        # 1. Count tensors that are alike: a model has thousands of tensors, but few kinds of split, and each is computed
        # once. Views share their storage, whose bytes count once.
        alike: Counter[tuple[str, Spec, Layout]] = Counter()  # tensors of one use that are split in one way
        weights: list[tuple[str, Tensor]] = []
        seen: set[int] = set()
        for kind, name, tensor in self._placed(table):
            if id(tensor.storage) not in seen and tensor.layout is not None:
                seen.add(id(tensor.storage))
                alike[kind, tensor.spec, tensor.layout] += 1
                if kind == WEIGHTS:
                    weights.append((name, tensor))

        # 2. Bytes by worker and use.
        self._left = MAX_SPLITS
        by_worker: dict[str, Counter[str]] = {}
        for (kind, spec, layout), count in alike.items():
            for index, nbytes, _ in self._split(spec, layout):
                by_worker.setdefault(workers[index].name, Counter())[kind] += count * nbytes

        # 3. Gradients live for a part of each step, so they are shown as at the client's report, when they were alive.
        if self._new:
            self._gradients = {name: uses[GRADIENTS] for name, uses in by_worker.items()}
        self._new = False
        for worker_name, nbytes in self._gradients.items():
            by_worker.setdefault(worker_name, Counter())[GRADIENTS] = nbytes
        self._bytes = by_worker
        self._show(weights, workers, session)
        if len(self._pieces) > MAX_ROLES:
            self._pieces.clear()

    def _show(self, weights: list[tuple[str, Tensor]], workers: list[Worker], session: int) -> None:
        """Note the layouts of parameters, under another number if they are others."""
        # Example: tensors [["fc1.weight", 0], ["fc2.weight", 0]] with
        # splits [["f32[8,8]", "[S(1)]", "tp=2", 256, {"w0": boxes}]].
        shown: list[list] = []
        places: dict[tuple[Spec, Layout], int] = {}
        splits: list[list] = []
        left, before = MAX_SHOWN_BOXES, self._layouts
        for name, tensor in weights[:MAX_SHOWN_TENSORS]:
            assert tensor.layout is not None
            how = tensor.spec, tensor.layout
            if how not in places:
                pieces = self._split(*how)
                left -= sum(len(parts) for *_, parts in pieces)
                if left < 0:
                    break
                places[how] = len(splits)
                splits.append(_split_row(*how, workers, pieces))
            shown.append([plain(name) or f"%{tensor.id}", places[how]])

        # The number tells observers that something is new; equal layouts keep it, and are not sent again.
        more, number = len(weights) - len(shown), before.number + 1 if before is not None else 1
        if before is None or (before.tensors, before.splits, before.more) != (shown, splits, more):
            self._layouts = LayoutRecord(session, number, shown, splits, more)

    def uses(self, worker: str, live: int, away: int = 0) -> dict[str, int] | None:
        """Bytes on a worker by use, of so many bytes that are alive; None before the client has told.

        away: bytes that are offloaded, and so not alive: of optimizer state first, then of weights.
        """
        if not self._rows or not self._layouts:
            return None
        left, uses = live, {}
        by_use = Counter(self._bytes.get(worker, Counter()))
        for use in (OPTIMIZER, WEIGHTS):
            resting = min(away, by_use[use])
            by_use[use] -= resting
            away -= resting
        # Tensors may be gone since: the uses together are never more than what is alive. The rest has no known use.
        for use in (WEIGHTS, OPTIMIZER, GRADIENTS):
            uses[use] = min(left, by_use[use])
            left -= uses[use]
        return {**uses, USES[3]: left}

    @property
    def layouts(self) -> LayoutRecord | None:
        return self._layouts

    def _placed(self, table: Table) -> Iterator[tuple[str, str, Tensor]]:
        for i, kind, name in self._rows:
            tensor = table.rows.get(i)
            if tensor is not None and tensor.layout is not None:
                yield kind, name, tensor

    def _split(self, spec: Spec, layout: Layout) -> list[tuple[int, int, list]]:
        """A tensor's pieces. Layouts are few: each split is computed once."""
        pieces = self._pieces.get((spec, layout))
        if pieces is None:
            self._left -= len(layout.mesh.workers)
            if self._left < 0:
                return []
            pieces = []
            for rank, index in enumerate(layout.mesh.workers):
                parts = [box for box in boxes(layout, spec.shape, rank) if volume(box)]
                pieces.append((index, sum(map(volume, parts)) * spec.itemsize, [[list(span) for span in box] for box in parts]))
            self._pieces[spec, layout] = pieces
        return pieces


def _fit(rows: list) -> bool:
    """True if all rows are [id, role, name]. A few calls look at whole columns: a loop in Python takes five times as long."""
    if not {*map(type, rows)} <= {list} or not {*map(len, rows)} <= {3}:
        return False
    ids, kinds, names = ([row[place] for row in rows] for place in range(3))
    types = [{*map(type, column)} for column in (ids, kinds, names)]
    plain_types = all(found <= {want} for found, want in zip(types, (int, str, str), strict=True))
    return plain_types and KINDS.issuperset(kinds) and max(map(len, names), default=0) <= MAX_ROLE_CHARACTERS


def _split_row(spec: Spec, layout: Layout, workers: list[Worker], pieces: list[tuple[int, int, list]]) -> list[Any]:
    mesh = " ".join(f"{axis}={size}" for axis, size in layout.mesh.axes)
    return [spec.text(), str(layout), mesh, spec.nbytes, {workers[index].name: parts for index, _, parts in pieces}]
