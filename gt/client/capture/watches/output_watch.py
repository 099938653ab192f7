"""Output of a recorded call: prints, log records, writes and opened files, which a replay would not make. Knows no tensors."""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import logging
import os
import subprocess
import sys
import threading
from types import FrameType
from typing import Any

from gt.client.capture.user_code import is_library

_ON_BEHALF = frozenset({"logging", "pathlib", "shutil", "tempfile", "os", "subprocess"})  # which have output for their callers


class OutputWatch:
    """While it is entered, notes this thread's first output, which a replay would not make.

    place: of the caller, or "". what: the output as a verb. Prints of libraries count, their log records and files do not.
    """

    def __init__(self) -> None:
        self.place = self.what = ""
        self._thread = threading.get_ident()
        self._patches: list[tuple[Any, str, Any, Any]] = []  # owner, name, value that was there or None, wrapper

    def __enter__(self) -> OutputWatch:
        self._patch(builtins, "print", "prints", of_libraries=True)
        for owner in (builtins, io):
            self._patch(owner, "open", "opens a file")
        self._patch(os, "write", "writes to a file")
        self._patch(subprocess.Popen, "__init__", "starts a process")
        self._patch(logging.Logger, "handle", "logs")
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
                self._note(sys._getframe(1), what, of_libraries)
            return function(*values, **options)

        with contextlib.suppress(AttributeError, TypeError):  # a stream without attributes of its own
            original = vars(owner).get(name)
            setattr(owner, name, noting)
            self._patches.append((owner, name, original, noting))

    def _note(self, frame: FrameType | None, what: str, of_libraries: bool) -> None:
        # Logger.info and others call handle(), Path.write_text calls open(): the first caller outside of them is of interest
        while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _ON_BEHALF:
            frame = frame.f_back
        if frame is not None and (of_libraries or not is_library(frame.f_globals.get("__name__"))):
            self.place, self.what = f"{frame.f_code.co_filename}:{frame.f_lineno}", what
