"""User code that runs in a recorded call, and that the walk over Python state has not met.

Torch and other libraries call functions that only they know: kernels of registered ops, hooks of autograd nodes, methods that
they alone name. The state that such code uses has to be compared too, so it is a root of the walk from the next recording on.
"""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from gt.client import current_session
from gt.client.capture.recording import CallRecording, Difference
from gt.client.capture.user_code import is_library_code
from gt.client.capture.watches.call_events import CallEvents, call_events
from gt.client.capture.watches.output_watch import OutputWatch
from gt.wire.process_settings import program_froze

UNKNOWN = "runs in this call, and was not compared before it; the next calls can become a program"
HIDDEN = (
    "runs in each call, and GT finds no function of it to compare the values that it uses: "
    "have the function name what it calls, or do it outside the function"
)
MAX_FUNCTIONS = 64  # of one code, such as closures, that are walked


class CodeWatch:
    """The code that runs in recorded calls of one compiled function. As a context manager it notes what runs inside."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, types.CodeType]] | None = None  # modules, code of the last call but GT's; None: not watched
        self._users: list[types.CodeType] = []  # those of the user's
        self._found: list[weakref.ref[types.FunctionType]] = []
        self._searched: set[types.CodeType] = set()
        self._events: CallEvents | None = None
        self._package = ""  # of the session's class
        self._output = OutputWatch()

    def reporting_to(self, output: OutputWatch) -> CodeWatch:
        """Have the watch of a call's output told of calls of C code that have effects."""
        self._output = output
        return self

    def __enter__(self) -> CodeWatch:
        self._users = []
        # A session is GT's, also a test's own, with the modules beside it
        self._package = f"{type(current_session.current().session).__module__.rpartition('.')[0]}."
        self._events = call_events(self._add, self._output)
        self.ran = None if self._events is None else []
        if self._events is not None:
            self._events.begin()
        return self

    def __exit__(self, *error: Any) -> None:
        events, self._events = self._events, None
        if events is not None:
            events.end()

    def _add(self, frame: types.FrameType, code: types.CodeType) -> None:
        """Code runs for the first time in this call."""
        name = str(frame.f_globals.get("__name__", ""))
        if self.ran is not None and not name.startswith("gt."):
            self.ran.append((name, code))
        own = name.startswith(self._package)
        if not own and not is_library_code(frame.f_globals) and not _only_a_traceback(frame.f_globals):
            self._users.append(code)

    def roots(self) -> dict[str, types.FunctionType]:
        """The functions that only libraries know, by name."""
        self._found = [known for known in self._found if known() is not None]
        roots: dict[str, types.FunctionType] = {}
        for number, known in enumerate(self._found):
            if (function := known()) is not None:
                name = function.__qualname__
                roots[f"{name} {number}" if name in roots else name] = function
        return roots

    def note_unknown(self, tape: CallRecording, walked: Iterable[types.CodeType]) -> None:
        """Prevent a program of a call that ran code which is not among the walked. Looks for the code's functions."""
        known = {id(code) for code in _with_nested(walked)}
        unknown = [code for code in self._users if id(code) not in known]
        self._users = []
        hidden = [code for code in unknown if code in self._searched]
        for code in unknown:
            if code not in self._searched:
                self._search(code)
        if unknown:
            code, what = (hidden[0], HIDDEN) if hidden else (unknown[0], UNKNOWN)
            tape.cut = tape.cut or bool(hidden)
            tape.prevents.append(Difference(f"{code.co_filename}:{code.co_firstlineno}", f"{code.co_name} {what}"))

    def _search(self, code: types.CodeType) -> None:
        """Make the functions of this code roots from now on, if there are few."""
        self._searched.add(code)
        functions = _functions_of(code)
        if not functions and program_froze():
            gc.unfreeze()  # frozen objects are in no list that is searched
            try:
                functions = _functions_of(code)
            finally:
                gc.freeze()
        if len(functions) <= MAX_FUNCTIONS:
            self._found += map(weakref.ref, functions)


def _only_a_traceback(namespace: Mapping[str, Any]) -> bool:
    """True for globals of code that Cython 3.1 evaluates for a line of a traceback, in modules for any version of Python."""
    return namespace.get("getframe") is sys._getframe and namespace.keys() <= {"getframe", "__builtins__"}


def _functions_of(code: types.CodeType) -> list[types.FunctionType]:
    return [thing for thing in gc.get_referrers(code) if isinstance(thing, types.FunctionType) and thing.__code__ is code]


def _with_nested(codes: Iterable[types.CodeType]) -> Iterable[types.CodeType]:
    """These codes, and those of functions, classes and comprehensions in them."""
    queue = list(codes)
    while queue:
        code = queue.pop()
        yield code
        queue += [part for part in code.co_consts if isinstance(part, types.CodeType)]
