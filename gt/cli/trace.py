"""`gt trace OUT.json script.py args...`: runs a script, and writes the last replay of its captured step as a Chrome trace."""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path

from gt.cli.plan import run, takes_script
from gt.errors import GTError


def main(args: list[str], text: str) -> int:
    parser = argparse.ArgumentParser(prog="gt trace", description=text)
    parser.add_argument("out", metavar="out.json", help="file for the trace, for chrome://tracing or ui.perfetto.dev")
    takes_script(parser)
    given = parser.parse_args(args)
    folder = Path(given.out).absolute().parent
    if not folder.is_dir():
        print(f"gt trace: {given.out} cannot be written: there is no folder {folder}", file=sys.stderr)
        return 1
    from gt import make_device
    from gt.api import shutdown, tracing
    from gt.observe import timeline

    make_device()
    try:
        with tracing(given.out) as order:
            run(given.script, given.args)
    except (GTError, OSError) as error:
        print(f"gt trace: {error}", file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        shutdown()
    if not order:
        print(f"gt trace: {given.script} did nothing with remote tensors, so there is nothing to trace", file=sys.stderr)
        return 1
    print(f"{given.out}: {timeline.said(order)}")
    return 0
