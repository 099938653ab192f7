"""`gt plan script.py args...`: runs a script without workers and prints its plan: layouts, traffic, memory, schedule."""

from __future__ import annotations

import argparse
import contextlib
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

from gt.cli.compare import compare
from gt.errors import ConfigError, GTError
from gt.wire.socket import positive


def main(args: list[str], text: str) -> int:
    parser = argparse.ArgumentParser(prog="gt plan", description=text)
    parser.add_argument("--workers", type=positive(int), default=0, help="number of workers; default: the script's or config's")
    parser.add_argument(
        "--config", action="append", help="YAML of signal groups; default: the script's, or GT_CONFIG; several are compared"
    )
    parser.add_argument("--hosts", metavar="H,H", help="plan for workers on these hosts, h0,h1:4; show the ways between them")
    parser.add_argument("--hostfile", help="the same from a file of lines `host slots=N`")
    parser.add_argument("--ssh", default="", help="command that reaches a host; default: ssh with BatchMode")
    parser.add_argument("--python", default="", help="interpreter on the hosts; default: the path of this one")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    takes_script(parser)
    options = parser.parse_args(args)
    if missing := no_script(options.script):
        print(f"gt plan: {missing}", file=sys.stderr)
        return 1
    if own := [arg for arg in options.args if arg.partition("=")[0] in ("--config", "--hosts", "--hostfile", "--json")]:
        name = options.script
        print(f"gt plan: {name} gets {', '.join(own)}: options of gt plan itself stand before {name}", file=sys.stderr)
    from gt import make_device
    from gt.api import planning

    make_device()

    configs = options.config or []
    if len(configs) > 1 and options.hosts is None and not options.hostfile:
        return compare(configs, options.workers, options.script, options.args, options.json)
    try:
        about = _workers_of_hosts(options)
        if len(configs) > 1 or (about and options.workers):
            raise ConfigError("--hosts takes one --config, and no --workers: h0:4 has four")
        print(f"gt plan: no op is executed: every value that {options.script} reads, such as a loss, is 0", file=sys.stderr)
        with planning(options.workers, configs[0] if configs else None, about) as finish:
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


def _workers_of_hosts(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Descriptions of their hosts by the workers of --hosts or --hostfile, [] without these options."""
    if given.hosts is None and not given.hostfile:
        return []
    from gt.cli import hosts
    from gt.launch import ssh

    known = ssh.read_hostfile(given.hostfile) if given.hostfile else ssh.entries(given.hosts.split(","))
    return hosts.described_workers(known, given.ssh.split() or ssh.SSH, given.python)


def takes_script(parser: argparse.ArgumentParser) -> None:
    """Add the arguments `script` (required) and `args` (optional)."""
    parser.add_argument("script", metavar="script.py", help="program to run")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments").required = False  # argparse requires them


def no_script(script: str) -> str:
    """The error text if there is no such script, or ""."""
    if Path(script).is_dir():
        return f"{script} is a folder, want a program in it"
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
