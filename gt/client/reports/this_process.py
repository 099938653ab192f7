"""This process as observers of the server see it."""

from __future__ import annotations

import os
import pwd
import socket
import sys
from pathlib import Path
from typing import Any

from gt.logs import sendable

MAX_ABOUT_CHARACTERS = 255  # of each text


def about_process() -> dict[str, Any]:
    """User, program, host and number."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user without a name
        user = str(os.getuid())
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] not in ("", "-c") else "python"
    names = {"user": user, "program": program, "host": socket.gethostname()}
    return {**{key: sendable(name)[:MAX_ABOUT_CHARACTERS] for key, name in names.items()}, "pid": os.getpid()}
