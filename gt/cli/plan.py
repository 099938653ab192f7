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
    options = parser.parse_args(args)
    if missing := no_script(options.script):
        print(f"gt plan: {missing}", file=sys.stderr)
        return 1
    from gt import make_device
    from gt.api import planning

    make_device()

    configs = options.config or []
    if len(configs) > 1:
        return compare(configs, options.workers, options.script, options.args, options.json)
    try:
        print(f"gt plan: no op is executed: every value that {options.script} reads, such as a loss, is 0", file=sys.stderr)
        with planning(options.workers, configs[0] if configs else None) as finish:
            code = run(options.script, options.args)
        if code:
            why = ": a check of values, which are 0 here, may be the reason" if code == 1 else ""
            print(f"gt plan: {options.script} ended with exit code {code}{why}", file=sys.stderr)
        plan = finish(Path(options.script).name)
        print("gt plan: the plan is complete", file=sys.stderr)
    except (GTError, ValueError, OSError) as error:
        print(f"gt plan: {error}", file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    print(plan.json() if options.json else plan, end="\n" if options.json else "")
    return 0


def takes_script(parser: argparse.ArgumentParser) -> None:
    """Add the arguments `script` (required) and `args` (optional)."""
    parser.add_argument("script", metavar="script.py", help="program to run")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments").required = False  # argparse requires them


def no_script(script: str) -> str:
    """The error text if there is no such script, or ""."""
    return "" if Path(script).is_file() else f"there is no file {script} in {Path.cwd()}"


def run(script: str, args: list[str]) -> int:
    """Run a user's script as `python script args` does, with its output on standard error. Returns its exit code."""
    argv, path = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [script, *args], str(Path(script).resolve().parent)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    finally:
        sys.argv, sys.path[0] = argv, path
    return 0
