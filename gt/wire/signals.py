"""Delay of Ctrl-C and SIGTERM during short critical sections. Knows nothing else."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # module signal wraps the same functions in enums, which costs ten times as much
import threading
from typing import Any

_get, _set = _signal.getsignal, _signal.signal
_NUMBERS = (int(_signal.SIGINT), int(_signal.SIGTERM))


class uninterrupted:
    """`with uninterrupted():` the program's handlers run at the end of the block. Other threads than the main one run none."""

    __slots__ = ("_before", "_seen")

    def __enter__(self) -> None:
        self._before: list[tuple[int, Any]] = []
        self._seen: list[tuple[int, Any]] = []
        if threading.get_ident() != threading.main_thread().ident:
            return
        try:
            for number in _NUMBERS:
                before = _get(number)
                if getattr(before, "__func__", None) is uninterrupted._note:
                    return  # an outer block delays them
                if callable(before):
                    self._before.append((number, before))
                    _set(number, self._note)
        except BaseException:
            self._restore()
            raise

    def __exit__(self, *_: object) -> None:
        self._restore()
        for number, frame in self._seen:
            handler = next(before for mine, before in self._before if mine == number)
            handler(number, frame)

    def _note(self, number: int, frame: Any) -> None:
        self._seen.append((number, frame))

    def _restore(self) -> None:
        for number, before in self._before:
            _set(number, before)
