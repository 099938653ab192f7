"""`gt trace script.py -o OUT.json`: runs a script and writes its timeline."""

from __future__ import annotations

import argparse
import sys
import traceback

from gt.cli.plan import no_script, run, takes_script
from gt.errors import GTError


def main(args: list[str], text: str) -> int:
    parser = argparse.ArgumentParser(prog="gt trace", description=text)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="file for the trace, for ui.perfetto.dev or chrome://tracing; default: trace.json",
    )
    takes_script(parser)
    options = parser.parse_args(_reordered(args))
    output, code = options.output or "trace.json", 0
    if missing := no_script(options.script):
        print(f"gt trace: {missing}", file=sys.stderr)
        return 1
    from gt import make_device
    from gt.api import shutdown, trace
    from gt.observe import timeline

    make_device()
    report: dict = {}
    try:
        with trace(output) as report:
            try:
                code = run(options.script, options.args)
            finally:
                shutdown()
    except (GTError, OSError) as error:
        print(f"gt trace: {error}", file=sys.stderr)
        return _ended(output, report)
    except Exception:
        traceback.print_exc()
        return _ended(output, report)
    except KeyboardInterrupt:
        _ended(output, report)
        raise
    if "slices" not in report:
        print(f"gt trace: {options.script} did nothing with remote tensors, so there is nothing to trace", file=sys.stderr)
        return 1
    print(f"{output}: {report['slices']} slices")
    if "schedule" in report:
        print(f"{output}: {timeline.said(report['schedule'])}")
    if code:
        print(f"gt trace: {options.script} ended with exit code {code}", file=sys.stderr)
    return code


def _ended(output: str, report: dict) -> int:
    """Exit code of a program that has failed. Its trace up to then is written."""
    if "slices" in report:
        print(f"{output}: {report['slices']} slices, until the program ended", file=sys.stderr)
    return 1


def _reordered(args: list[str]) -> list[str]:
    """Arguments with the output first: `script.py -o OUT` and `OUT.json script.py` mean the same as `-o OUT script.py`.

    Options behind the script are the script's own, but for -o right behind it.
    """
    if len(args) > 1 and args[0].endswith(".json"):
        return ["-o", *args]
    if len(args) > 2 and not args[0].startswith("-") and args[1] in ("-o", "--output"):
        return [*args[1:3], args[0], *args[3:]]
    return args
