"""The folder in which Inductor keeps compiled code: a worker loads and executes its files, so nobody else may write there."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

from gt import env

log = logging.getLogger("gt.worker")


def secure() -> None:
    """Make Inductor's folder this user's alone. One in the temporary folder, by a known name, may be another user's.

    A folder that another user owns, or can write to, is replaced for this process. So is not one that the environment names.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if env.inductor_cache():
        return
    path = Path(default_cache_dir())
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_own(path):
        private = tempfile.mkdtemp(prefix="gt-inductor-")
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        log.warning("%s belongs to another user, or others can write to it: compiled code is kept for this process alone", path)
        path = Path(private)
    env.export(TORCHINDUCTOR_CACHE_DIR=str(path))


def _is_own(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
