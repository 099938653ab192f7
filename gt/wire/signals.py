"""Delay of Ctrl-C and SIGTERM during short critical sections. Knows nothing else."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # module signal wraps the same functions in enums, which costs ten times as much
import threading
from typing import Any

_get, _set = _signal.getsignal, _signal.signal
_NUMBERS = (int(_signal.SIGINT), int(_signal.SIGTERM))


class uninterrupted:
    """`with uninterrupted():` the program's handlers run at the end of the block. Other threads than the main one run none.

    No signal is lost: all handlers run and are put back, whatever one of them raises meanwhile.
    """

    __slots__ = ("_before", "_ended", "_seen")

    def __enter__(self) -> None:
        self._before: list[tuple[int, Any]] = []
        self._seen: list[tuple[int, Any]] = []
        self._ended = False
        if threading.get_ident() != threading.main_thread().ident:
            return
        try:
            for number in _NUMBERS:
                before = _get(number)
                # Another block has put its own handler there: it is around this one, or it could not put the program's back.
                if getattr(before, "__func__", None) is uninterrupted._note:
                    if not before.__self__._ended:
                        return  # an outer block delays them
                    before = before.__self__._handler(number)
                if callable(before):
                    self._before.append((number, before))
                    _set(number, self._note)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self._ended = True
        try:
            self._restore()
        finally:
            if self._seen:
                self._deliver()

    def _note(self, number: int, frame: Any) -> None:
        if self._ended:  # the handler could not be put back: another one raised
            self._handler(number)(number, frame)
        else:
            self._seen.append((number, frame))

    def _handler(self, number: int) -> Any:
        return next(before for mine, before in self._before if mine == number)

    def _restore(self) -> None:
        raised: BaseException | None = None
        for number, before in self._before:
            try:
                _set(number, before)
            except BaseException as error:  # raised by a handler, which the system calls before it sets another
                raised = error
        # `_set` runs handlers of pending signals first, which may raise (KeyboardInterrupt), and then has set nothing.
        if raised is not None:
            for number, before in self._before:
                _set(number, before)
            raise raised

    def _deliver(self) -> None:
        # The first handler may raise. The others run all the same, and the first error is the context of theirs.
        number, frame = self._seen.pop(0)
        try:
            self._handler(number)(number, frame)
        finally:
            if self._seen:
                self._deliver()
