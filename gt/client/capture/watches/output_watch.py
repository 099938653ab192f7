"""Output of a recorded call: prints, log records, warnings, writes, changed files and threads, which a replay would not make.

Questions to the operating system count too: the clock, random bytes, the state of files. Their answers may decide what a step
does, and no guard compares them. Knows no tensors. Functions are replaced by name. A call of one under another name is a call
of C code, which CodeWatch reports.
"""

from __future__ import annotations

import _locale
import _signal  # type: ignore[import-not-found]
import _thread
import atexit
import builtins
import contextlib
import datetime
import functools
import gc
import inspect
import io
import logging
import os
import resource
import signal
import site
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Iterable
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from gt.client.capture.user_code import is_library

WARNS, ASKS_TIME, ASKS_SETTING, OPENS = "warns", "asks for the time", "asks for a setting", "opens a file"
ASKS_THREAD, ASKS_SYSTEM = "asks for a thread or its state", "asks for the state of files or of the system"
_FILES = (
    "mkdir rmdir remove unlink rename replace link symlink truncate ftruncate chmod chown utime mkfifo mknod open write writev"
)
_TABLE: Iterable[tuple[ModuleType | type, str, str]] = (
    (os, _FILES, "changes files"),
    (os, "system fork forkpty kill killpg posix_spawn", "starts or signals a process"),
    (os, "chdir fchdir umask nice setpriority sched_setaffinity", "changes a setting of the process"),
    (sys, "setrecursionlimit setswitchinterval", "changes a setting of Python"),
    (sys, "getrecursionlimit getswitchinterval getrefcount", ASKS_SETTING),
    (_locale, "setlocale localeconv nl_langinfo", ASKS_SETTING),
    (_signal, "getsignal getitimer", ASKS_SETTING),
    (_thread, "get_ident get_native_id", ASKS_THREAD),
    (io, "open", OPENS),
    (gc, "enable disable freeze unfreeze set_threshold", "changes a setting of Python"),
    (gc, "isenabled get_threshold get_count get_stats", ASKS_SETTING),
    (_thread, "start_new_thread start_joinable_thread", "starts a thread"),
    (atexit, "register unregister", "registers a function for the end of the program"),
    (signal, "setitimer alarm raise_signal", "changes signals"),
    (torch, "from_file", OPENS),
    (torch, "set_num_threads set_num_interop_threads set_flush_denormal", "changes a setting of torch"),
    (torch, "get_num_threads get_num_interop_threads", ASKS_SETTING),
    (time, "time monotonic perf_counter process_time thread_time", ASKS_TIME),
    (time, "time_ns monotonic_ns perf_counter_ns process_time_ns thread_time_ns", ASKS_TIME),
    (time, "localtime gmtime ctime asctime strftime", ASKS_TIME),
    (datetime.datetime, "now utcnow today", ASKS_TIME),
    (datetime.date, "today", ASKS_TIME),
    (os, "urandom getrandom", "asks the system for random bytes"),
    (os, "stat lstat access listdir scandir readlink getcwd getloadavg", ASKS_SYSTEM),
    (os, "times getpriority sched_getaffinity", ASKS_SYSTEM),
    (resource, "getrusage getrlimit", ASKS_SYSTEM),
)  # functions in C that have effects, or whose answer is another one at each call
EFFECTS = {getattr(module, name): what for module, names, what in _TABLE for name in names.split() if hasattr(module, name)}
_WRITERS = (
    ("_csv", "Writer", "writes rows"),
    ("sqlite3", "Connection", "uses a database"),
    ("sqlite3", "Cursor", "uses a database"),
)  # classes in C whose methods have effects
_SETTINGS = (
    ("torch", "set_printoptions", "changes a setting of torch"),
    ("numpy", "set_printoptions seterr", "changes a setting of numpy"),
    ("numpy", "get_printoptions geterr", ASKS_SETTING),
    ("torch", "initial_seed", "asks for the seed"),
    ("torch.random", "initial_seed", "asks for the seed"),
    ("threading", "active_count enumerate", ASKS_THREAD),
    ("numpy", "loadtxt genfromtxt fromregex", OPENS),
)  # functions that are written in Python


def questions() -> dict[CodeType, str]:
    """The code of these functions, which may be called by any name."""
    named = [(vars(sys.modules[m])[name], what) for m, names, what in _SETTINGS if m in sys.modules for name in names.split()]
    return {function.__code__: what for f, what in named if isinstance(function := inspect.unwrap(f), FunctionType)}


_CAPTURE = "gt.client.capture."  # code that calls the captured function
# Folders of packages and of the system, whose files are no data of the program; memory that processes share is data
_PACKAGES = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_PACKAGES += [*getattr(site, "getsitepackages", list)(), f"{sys.base_prefix}/lib/python3/dist-packages"]
_SHARED = [f"{prefix}/{folder}" for prefix in (sys.prefix, sys.base_prefix) for folder in ("share", "etc")]
_FOLDERS = (*filter(None, _PACKAGES), *_SHARED, "/proc", "/sys", "/dev")
_NO_DATA = tuple({f"{os.path.normpath(path)}{os.sep}" for path in _FOLDERS})
_DATA = f"{os.sep}dev{os.sep}shm{os.sep}"
_OF_PYTHON = frozenset({"importlib", "linecache", "tokenize", "inspect"})  # which read and write files for Python itself


class OutputWatch:
    """While it is entered, notes this thread's first output, which a replay would not make.

    place: of the caller, or "". what: the output as a verb. Prints of libraries count, and files that they open for the user's
    code, as numpy.load does. Their log records and other files do not.
    """

    def __init__(self) -> None:
        self.place = self.what = ""
        self._thread = threading.get_ident()
        self._patches: list[tuple[Any, str, Any, Any]] = []  # owner, name, value that was there or None, wrapper
        # Of modules that the program has imported: a Python may lack sqlite3
        rows = ((getattr(sys.modules.get(module), name, None), what) for module, name, what in _WRITERS)
        self.writers = {kind: what for kind, what in rows if kind is not None}

    def __enter__(self) -> OutputWatch:
        self._patch(builtins, "print", "prints", of_libraries=True)
        for owner in (builtins, io):
            self._patch(owner, "open", OPENS)
        self._patch(os, "write", "writes to a file")
        self._patch(subprocess.Popen, "__init__", "starts a process")
        self._patch(logging.Logger, "handle", "logs")
        for module, names, what in _SETTINGS:
            for name in names.split() if module in sys.modules else ():
                self._patch(sys.modules[module], name, what)
        self._patch(warnings, "_showwarnmsg", WARNS)  # which is called for those that a filter lets through
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                self._patch(stream, "write", "writes to a stream")
        return self

    def __exit__(self, *error: Any) -> None:
        # A name that the function itself has replaced in the call stays as it is
        for owner, name, original, wrapper in reversed(self._patches):
            if vars(owner).get(name) is wrapper:
                setattr(owner, name, original) if original is not None else delattr(owner, name)

    def _patch(self, owner: Any, name: str, what: str, of_libraries: bool = False) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def noting(*values: Any, **options: Any) -> Any:
            if not self.place and threading.get_ident() == self._thread:
                self._note(sys._getframe(1), what, of_libraries or (what is OPENS and _is_data(values, options)))
            return function(*values, **options)

        with contextlib.suppress(AttributeError, TypeError):  # a stream without attributes of its own
            original = vars(owner).get(name)
            setattr(owner, name, noting)
            self._patches.append((owner, name, original, noting))

    def note_call(self, frame: FrameType | None, what: str) -> None:
        """This frame calls code that has an effect: of EFFECTS, `questions()`, or a method of `writers`.

        what: as these have it.
        """
        if not self.place and threading.get_ident() == self._thread:
            self._note(frame, what, what is OPENS)

    def _note(self, frame: FrameType | None, what: str, of_libraries: bool) -> None:
        # Logger.info and others call handle(), Path.write_text calls open(): the first caller outside of them is of interest
        top = ""
        while frame is not None and (top := _top(frame)) in sys.stdlib_module_names:
            # A log record has the time, and is noted by itself; repr() of a dataclass asks for the thread
            if top in _OF_PYTHON or (top == "logging" and what is ASKS_TIME) or (what is ASKS_THREAD and top != "threading"):
                return
            frame = frame.f_back
        if frame is None:
            return
        if is_library(frame.f_globals.get("__name__")):
            if not of_libraries:
                return
            if what is OPENS:
                frame = _users(frame) if top != "gt" else None
        if frame is not None:
            self.place, self.what = f"{frame.f_code.co_filename}:{frame.f_lineno}", what


def _is_data(values: tuple, options: dict[str, Any]) -> bool:
    """True for a call of open() with a path that is no file of a package or of the system."""
    path = values[0] if values else options.get("file")
    with contextlib.suppress(TypeError, ValueError, OSError):
        file = os.path.abspath(os.fsdecode(path))  # type: ignore[arg-type]
        return file.startswith(_DATA) or not file.startswith(_NO_DATA)
    return False


def _users(frame: FrameType | None) -> FrameType | None:
    """The user's code in the call by which this code of a library runs; None if there is none."""
    while frame is not None and not (name := str(frame.f_globals.get("__name__"))).startswith(_CAPTURE):
        if not is_library(name):
            return frame
        frame = frame.f_back
    return None


def _top(frame: FrameType) -> str:
    """Name of the package of a frame's code."""
    return str(frame.f_globals.get("__name__")).partition(".")[0]
