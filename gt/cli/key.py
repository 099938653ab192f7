"""`gt key FILE`: writes a strong token to a new file, which nobody else can read."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from gt.wire.access.auth import strong


def main(args: list[str], about: str) -> int:
    """Exit code: 0, or 2 if the file cannot be created."""
    parser = argparse.ArgumentParser(prog="gt key", description=about)
    parser.add_argument("file", type=Path, help="file to create; an existing file is left as it is")
    path = parser.parse_args(args).file
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        sys.stderr.write(f"gt key: {path} cannot be made: {error.strerror}\n")
        return 2
    with os.fdopen(descriptor, "w") as file:
        file.write(strong() + "\n")
    print(f"{path} has a token: pass --token-file {path} to server and workers, and GT_TOKEN=$(cat {path}) to programs;")
    print(f"or pass --worker-token-file {path} to server and workers, as their own secret beside the token")
    return 0
