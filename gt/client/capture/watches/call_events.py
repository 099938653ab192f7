"""Events of one thread's calls: code that runs for the first time, and calls of C code that have effects.

From Python 3.12 on, sys.monitoring tells of them, and an event can be ended for one place in the code. Before, a profiler does.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import BuiltinFunctionType, CodeType, FrameType, MethodDescriptorType
from typing import Any, Protocol

from gt.client.capture.user_code import is_library
from gt.client.capture.watches.output_watch import EFFECTS, OutputWatch, questions
from gt.client.device.remote_tensor import RemoteTensor
from gt.client.trace.dispatch import between, dispatch

_monitoring: Any = getattr(sys, "monitoring", None)  # of Python 3.12 and later
_TOOLS = (4, 3)  # numbers of sys.monitoring's tools that belong to no kind of tool


class CallEvents(Protocol):
    """Watches the calling thread between `begin` and `end`."""

    def begin(self) -> None: ...
    def end(self) -> None: ...


def call_events(note_code: Callable[[FrameType, CodeType], None], output: OutputWatch) -> CallEvents | None:
    """Events of this thread, not begun yet; None while the program has a profiler, which it keeps.

    note_code: called once for each code that runs. output: told of calls that have effects.
    """
    if _monitoring is not None and (tool := _free_tool()):
        return MonitoredCalls(tool, note_code, output)
    return ProfiledCalls(note_code, output) if sys.getprofile() is None else None


def _free_tool() -> int:
    return next((tool for tool in _TOOLS if _monitoring.get_tool(tool) is None), 0)


class MonitoredCalls:
    """Events of sys.monitoring. Most end at once: those of code when it has run, and those of calls in libraries.

    A call by a library's own code is no output of the user's. The standard library's is, if the user calls it.
    """

    def __init__(self, tool: int, note_code: Callable[[FrameType, CodeType], None], output: OutputWatch) -> None:
        self._tool, self._note_code, self._output = tool, note_code, output
        self._thread = threading.get_ident()
        self._seen: dict[int, CodeType] = {}  # by identity, each kept alive so that identities stay unique
        self._of_libraries: set[int] = set()
        self._questions = questions()

    def begin(self) -> None:
        tools = _monitoring
        tools.use_tool_id(self._tool, "gt")
        for event, callback in self._callbacks().items():
            tools.register_callback(self._tool, event, callback)
        tools.restart_events()  # also those that an earlier watch has ended
        tools.set_events(self._tool, sum(self._callbacks()))

    def end(self) -> None:
        tools = _monitoring
        tools.set_events(self._tool, 0)
        for event in self._callbacks():
            tools.register_callback(self._tool, event, None)
        tools.free_tool_id(self._tool)

    def _callbacks(self) -> dict[int, Callable[..., Any]]:
        events = _monitoring.events
        return {events.PY_START: self._starts, events.PY_RESUME: self._starts, events.CALL: self._calls}

    def _starts(self, code: CodeType, offset: int) -> Any:
        if threading.get_ident() != self._thread:
            return None
        if code in self._questions:
            self._output.note_call(sys._getframe(1).f_back, self._questions[code])
            return None
        if id(code) not in self._seen:
            frame = sys._getframe(1)
            self._seen[id(code)] = code
            self._note_code(frame, code)
            name = str(frame.f_globals.get("__name__"))
            if is_library(name) and name.partition(".")[0] not in sys.stdlib_module_names:
                self._of_libraries.add(id(code))
        return _monitoring.DISABLE

    def _calls(self, code: CodeType, offset: int, function: Any, first: Any) -> Any:
        if threading.get_ident() != self._thread:
            return None
        if id(code) in self._of_libraries:
            return _monitoring.DISABLE
        kind, what = type(function), None
        if kind is BuiltinFunctionType:
            what = EFFECTS.get(function) or self._output.writers.get(type(function.__self__))
        elif kind is MethodDescriptorType:
            what = self._output.writers.get(type(first))
        if what is not None:
            self._output.note_call(sys._getframe(1), what)
        return None


class ProfiledCalls:
    """Events of a profiler, which an op's recording runs without: nine in ten of the events of a step are in GT's own code.

    Python 3.12 and later change the code of functions whenever a profiler comes or goes, so there it stays.
    """

    def __init__(self, note_code: Callable[[FrameType, CodeType], None], output: OutputWatch) -> None:
        self._note = _noting(note_code, output)
        self._switches = sys.version_info < (3, 12)

    def begin(self) -> None:
        if self._switches:
            RemoteTensor.__torch_dispatch__ = staticmethod(_unwatched(self._note))  # type: ignore[assignment]
        sys.setprofile(self._note)

    def end(self) -> None:
        if sys.getprofile() is self._note:
            sys.setprofile(None)
        if self._switches:
            RemoteTensor.__torch_dispatch__ = staticmethod(dispatch)  # type: ignore[assignment]


def _noting(note_code: Callable[[FrameType, CodeType], None], output: OutputWatch) -> Callable[[FrameType, str, Any], None]:
    """The profiler. It is called several hundred times for each op, so all that it needs is a variable of its own."""
    effects, writers, note_call, asking = EFFECTS, output.writers, output.note_call, questions()
    seen: dict[int, CodeType] = {}  # by identity, each kept alive so that identities stay unique

    def note(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            if function in effects or (writers and type(function.__self__) in writers):
                note_call(frame, effects.get(function) or writers[type(function.__self__)])
        elif event == "call" and id(code := frame.f_code) not in seen:
            if code in asking:  # a library may call it before the user's code does
                note_call(frame.f_back, asking[code])
            else:
                seen[id(code)] = code
                note_code(frame, code)

    return note


def _unwatched(profiler: Any) -> Callable[..., Any]:
    """RemoteTensor.__torch_dispatch__ without this profiler.

    Ops of other libraries keep it, since their kernels may be the user's. Other threads have no profiler.
    """
    get, put = sys.getprofile, sys.setprofile

    def unwatched(func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if get() is not profiler or func.namespace != "aten":
            return dispatch(func, types, args, kwargs)
        put(None)
        try:
            return dispatch(func, types, args, kwargs)
        finally:
            put(profiler)

    between.add(id(unwatched.__code__))  # a constant of this function's code
    return unwatched
