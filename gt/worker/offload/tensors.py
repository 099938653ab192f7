"""A worker's tensors by id. Evicted ones rest in host memory or in a file, and come back when they are looked up.

The dispatcher says when a tensor is evicted, and when it is wanted soon. Nothing else has to know: a look-up of an evicted
tensor waits for it. Knows neither devices nor file systems.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from gt.ir.instr import BASE_BITS
from gt.worker.engine.base import HostCopy


class Resting(Protocol):
    """One evicted tensor."""

    nbytes: int

    def prefetch(self) -> None:
        """Begin to bring it back."""

    def tensor(self) -> Any:
        """The tensor, once it is back. May raise and be asked again."""

    def close(self) -> None:
        """It is not wanted any more, here or back on the device."""

    def host(self) -> Any:
        """The tensor in host memory (gt.worker.engine.base.LaneOperand)."""

    def used(self, changed: bool) -> None:
        """An op in host memory uses it."""


class Kept:
    """A tensor whose device is the host: it rests where it is, and is its own host copy."""

    def __init__(self, tensor: Any, nbytes: int) -> None:
        self._tensor, self.nbytes = tensor, nbytes

    def prefetch(self) -> None:
        pass

    def tensor(self) -> Any:
        return self._tensor

    def close(self) -> None:
        pass

    def host(self) -> Any:
        return self._tensor

    def used(self, changed: bool) -> None:
        pass

    def begin(self, tensor: Any) -> None:
        """As a host copy: it is its tensor."""

    def send(self, tensor: Any) -> None:
        """As a host copy: it is its tensor."""


Evict = Callable[[Any, str, str], Resting | None]  # (tensor, space, folder); None for one that has to stay


class OffloadedTensors(dict[int, Any]):
    """Tensors on the worker's device by id, and those that rest elsewhere."""

    def __init__(self, evict: Evict) -> None:
        self._evict = evict
        self.away: dict[int, tuple[Resting, str]] = {}  # id -> the tensor that rests elsewhere, and its space
        self._spaces: dict[int, tuple[str, str]] = {}  # space and folder of tensors that were evicted once
        self._to_host = self._to_device = self._restored = 0  # bytes so far; restored: of those to the device, evicted ones
        self.host_copies: dict[int, tuple[Any, HostCopy]] = {}  # id -> the tensor on the device, and its host copy

    def __missing__(self, tensor_id: int) -> Any:
        resting, _ = self.away[tensor_id]  # KeyError for an id that no tensor has
        # `tensor` may raise for want of memory. The entry in `away` stays until then, so that a retry finds it.
        tensor = self[tensor_id] = resting.tensor()
        del self.away[tensor_id]
        if tensor_id in self._spaces:
            self._restored += resting.nbytes
            self._to_device += resting.nbytes
        resting.close()
        return tensor

    def evict(self, tensor_id: int, space: str, folder: str) -> None:
        """Let a tensor rest in a space. One that is away, or shares its memory, stays as it is."""
        tensor = self.get(tensor_id)
        resting = self._evict(tensor, space, folder) if tensor is not None else None
        if resting is not None:
            self.put_away(tensor_id, resting, space)
            # Remembered beyond this eviction: a host op lets the tensor rest in the same space again.
            self._spaces[tensor_id] = space, folder
            self._to_host += resting.nbytes

    def put_away(self, tensor_id: int, resting: Resting, space: str = "") -> None:
        """Let a tensor rest as this. space: "" for one that is not counted."""
        if space:
            self.host_copies.pop(tensor_id, None)
        before = self.away.get(tensor_id)
        self.away[tensor_id] = resting, space
        self.pop(tensor_id, None)
        if before is not None and before[0] is not resting:  # of another tensor, which had this id
            before[0].close()

    def resting(self, tensor_id: int) -> Resting | None:
        """A tensor as it rests, None for one on the device. One that a use has brought back rests again."""
        # An ordinary op looked it up, and so brought it to the device, since it was evicted.
        if tensor_id in self and tensor_id in self._spaces:
            self.evict(tensor_id, *self._spaces[tensor_id])
        if tensor_id in self:
            self.renamed(tensor_id)
        return self.away[tensor_id][0] if tensor_id in self.away else None

    def renamed(self, tensor_id: int) -> None:
        """An id names another tensor on the device from now on: the one that rests elsewhere under this id has ended."""
        row = self.away.pop(tensor_id, None)
        if row is not None:
            row[0].close()

    def count_to_host(self, nbytes: int) -> None:
        self._to_host += nbytes

    def count_to_device(self, nbytes: int) -> None:
        self._to_device += nbytes

    def bring(self, ids: Iterable[int]) -> None:
        """Bring back those of these that rest elsewhere: for work that does not look its tensors up."""
        for i in ids if self.away else ():
            if i in self.away:
                self[i]

    def prefetch(self, i: int) -> None:
        if i in self.away:
            self.away[i][0].prefetch()

    def free(self, ids: Sequence[int]) -> None:
        """Forget these tensors. Ids that no tensor has are ignored."""
        for i in ids:
            self.pop(i, None)
        self.drop(ids)

    def drop(self, ids: Iterable[int]) -> None:
        """These have been freed: forget where they rest, and their host copies."""
        # Programs without offload free thousands of ids a step: they skip the loop.
        for i in ids if self.away or self._spaces or self.host_copies else ():
            self._spaces.pop(i, None)
            self.host_copies.pop(i, None)
            row = self.away.pop(i, None)
            if row is not None:
                row[0].close()

    def drop_range(self, first: int, last: int) -> None:
        self.drop([i for i in {*self.away, *self._spaces, *self.host_copies} if first <= i < last])

    def host_bytes(self, session: int) -> int:
        """Bytes of a session's tensors that rest in host memory."""
        # A list first: any thread may ask while the executing one changes the table. The session is in an id's upper bits.
        return sum(row.nbytes for i, (row, space) in list(self.away.items()) if space == "cpu" and i >> BASE_BITS == session)

    def stats(self) -> dict[str, Any]:
        """Bytes that rest in each space, bytes that have come back so far, and all between host and device."""
        by_space: Counter[str] = Counter()
        for resting, space in list(self.away.values()):
            if space:
                by_space[space] += resting.nbytes
        bytes_moved = {"bytes_to_host": self._to_host, "bytes_to_device": self._to_device}
        return {"offloaded": dict(by_space), "restored_bytes": self._restored, **bytes_moved}
