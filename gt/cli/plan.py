"""`gt plan script.py args...`: runs a script without workers and prints its plan: layouts, traffic, memory, schedule."""

from __future__ import annotations

import argparse
import contextlib
import runpy
import sys
import traceback
from pathlib import Path

from gt.cli.compare import compare
from gt.errors import GTError


def main(args: list[str], text: str) -> int:
    parser = argparse.ArgumentParser(prog="gt plan", description=text)
    parser.add_argument("--workers", type=int, default=0, help="number of workers; default: that of the script or config")
    parser.add_argument(
        "--config", action="append", help="YAML of signal groups; default: the script's, or GT_CONFIG; several are compared"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    takes_script(parser)
    given = parser.parse_args(args)
    from gt import make_device
    from gt.api import planning

    make_device()

    configs = given.config or []
    if len(configs) > 1:
        return compare(configs, given.workers, given.script, given.args, given.json)
    try:
        print("gt plan: no op is executed: every value that the script reads, such as a loss, is 0", file=sys.stderr)
        with planning(given.workers, configs[0] if configs else None) as made:
            run(given.script, given.args)
        plan = made(Path(given.script).name)
    except (GTError, ValueError, OSError) as error:
        print(f"gt plan: {error}", file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    print(plan.json() if given.json else plan, end="\n" if given.json else "")
    return 0


def takes_script(parser: argparse.ArgumentParser) -> None:
    """Add the arguments `script` (required) and `args` (optional)."""
    parser.add_argument("script", metavar="script.py", help="program to run")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments").required = False  # argparse requires them


def run(script: str, args: list[str]) -> None:
    """Run a user's script as `python script args` does, with its output on standard error."""
    argv, path = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [script, *args], str(Path(script).resolve().parent)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            print(f"{script} ended with exit code {end.code}, as it may where it checks values", file=sys.stderr)
    finally:
        sys.argv, sys.path[0] = argv, path
