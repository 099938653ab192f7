"""The commands of `gt`. Each imports its modules when it runs: most start without torch, `gt doctor` without any package."""

from __future__ import annotations

import argparse
import os
import platform
import select
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

from gt import __version__, env

STDOUT = 1


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code: 130 after a Ctrl-C, 0 if the reader of its output ends first, as `head` does."""
    args = sys.argv[1:] if argv is None else argv
    try:
        code = _main(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        sys.stderr.write(f"\ngt {args[0]}: interrupted\n")
        return 130
    except BrokenPipeError:
        poll = select.poll()
        poll.register(STDOUT, 0)
        if not any(event & select.POLLERR for _, event in poll.poll(0)):
            raise  # another pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # Python flushes it once more at its end
        return 0


def _main(args: list[str]) -> int:
    if args and args[0] in COMMANDS:
        return COMMANDS[args[0]][0](args[1:])
    if args == ["--version"]:
        return version([])
    known = args in (["-h"], ["--help"], [])
    if not known:
        from gt.config.load import hint

        sys.stderr.write(f"gt: no command {args[0]!r}{hint(args[0], COMMANDS)}\n\n")
    lines = ["usage: gt COMMAND [options]\n", *(f"  {name:9} {text}" for name, (_, text) in COMMANDS.items())]
    print("\n".join(lines), file=sys.stdout if known else sys.stderr)
    return 0 if known else 2


def server(args: list[str]) -> int:
    from gt.server import main

    return main(args)


def worker(args: list[str]) -> int:
    from gt.worker.__main__ import leave, main

    leave(main(args, own=True))


def run(args: list[str]) -> int:
    from gt.cli.run import main

    return main(args, COMMANDS["run"][1])


def key(args: list[str]) -> int:
    from gt.cli.key import main

    return main(args, COMMANDS["key"][1])


def plan(args: list[str]) -> int:
    from gt.cli.plan import main

    return main(args, COMMANDS["plan"][1])


def trace(args: list[str]) -> int:
    from gt.cli.trace import main

    return main(args, COMMANDS["trace"][1])


def top(args: list[str]) -> int:
    from gt.cli.top import main

    return main(args, COMMANDS["top"][1])


def metrics(args: list[str]) -> int:
    from gt.cli.metrics import main

    return main(args, COMMANDS["metrics"][1])


def dashboard(args: list[str]) -> int:
    from gt.cli.dashboard import main

    return main(args, COMMANDS["dashboard"][1])


def doctor(args: list[str]) -> int:
    from gt.cli.doctor import main

    return main(args, COMMANDS["doctor"][1])


def ops(args: list[str]) -> int:
    from gt.cli.ops import main

    return main(args, COMMANDS["ops"][1])


def schema(args: list[str]) -> int:
    """Print the JSON Schema of configs."""
    no_options("schema", args)
    from gt.config.json_schema import text

    print(text(), end="")
    return 0


def show_env(args: list[str]) -> int:
    """Print every variable that GT reads, with its value and meaning."""
    no_options("env", args)
    width = max(len(v.name) for v in env.VARIABLES)
    for variable in env.VARIABLES:
        value = env.get(variable.name)
        shown = "(set, not shown)" if variable.name == "GT_TOKEN" and value else value or "-"
        print(f"{variable.name:{width}}  {shown:20}  {variable.help}")
    return 0


def version(args: list[str]) -> int:
    """Print versions of GT, Python and the installed torch, without importing it."""
    no_options("version", args)
    try:
        torch = f"torch {version_of('torch')}"
    except PackageNotFoundError:
        torch = "no torch"
    print(f"gt {__version__} ({torch}, Python {platform.python_version()})")
    return 0


def no_options(name: str, args: list[str]) -> None:
    """Answer --help, and refuse all arguments."""
    argparse.ArgumentParser(prog=f"gt {name}", description=COMMANDS[name][1]).parse_args(args)


COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "server": (server, "run a dispatcher in the foreground"),
    "worker": (worker, "run one worker in the foreground"),
    "run": (run, "run a program as a job: under torchrun, srun, mpirun or Kubernetes, or on hosts by ssh"),
    "key": (key, "write a strong token to a new file, for a server off loopback"),
    "plan": (plan, "plan a program without workers: layouts, traffic, memory, schedule"),
    "trace": (trace, "run a program, and write a timeline of client, dispatcher, workers and transfers for Perfetto"),
    "top": (top, "watch a running server: workers, sessions, links, slow lines"),
    "metrics": (metrics, "serve metrics of a running server over HTTP, for Prometheus"),
    "dashboard": (dashboard, "show a running server in the browser: schedule, memory, traffic, curves, layouts, errors"),
    "doctor": (doctor, "check this machine: python, torch, zmq, shared memory, GPUs; or several, with --hosts"),
    "ops": (ops, "print schemas of ops of the installed torch that GT lacks, as lines for the file GT_OPS"),
    "schema": (schema, "print the JSON Schema of the YAML of signal groups, for editors"),
    "env": (show_env, "print environment variables and their values"),
    "version": (version, "print versions of GT, torch and Python; the same as gt --version"),
}
