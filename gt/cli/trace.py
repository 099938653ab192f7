"""`gt trace -o OUT.json script.py args...`: runs a script and writes its timeline."""

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
        help="file for the trace, for ui.perfetto.dev or chrome://tracing; default: trace.json. It stands before script.py: "
        "all behind script.py is the script's own",
    )
    takes_script(parser)
    options = parser.parse_args(args)
    if options.script.endswith(".json"):
        parser.error(f"{options.script} is no program: for a trace in that file put -o before it")
    output, code = options.output or "trace.json", 0
    if options.output is None and (misplaced := _misplaced(options.script, options.args)):
        print(f"gt trace: {misplaced}", file=sys.stderr)
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


def _misplaced(script: str, args: list[str]) -> str:
    """The notice where an option of the script may be meant for gt trace, or ""."""
    for place, arg in enumerate(args):
        option, equals, _ = arg.partition("=")
        if option in ("-o", "--output"):
            end = place + (1 if equals else 2)
            right = " ".join(["gt trace", *args[place:end], script, *args[:place], *args[end:]])
            return f"{script} gets {' '.join(args[place:end])}, and the trace is written to trace.json: else `{right}`"
    return ""
