"""`python -m tests.interrupts [--minutes N] [--seed N] [--case SEED] [--layouts NAME ...]`: see engine.py."""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import sys
import time

from tests.helpers.limits import limit
from tests.interrupts.engine import Engine, Wrong, layouts

CASES = 25  # on one server, before the next layout has its turn
CASE_SECONDS = limit(90)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.interrupts")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="this case alone, of one layout")
    parser.add_argument("--times", type=int, default=1, help="how often --case is tried")
    parser.add_argument("--layouts", nargs="*", default=[])
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    logging.getLogger("gt").setLevel(logging.ERROR)
    until, seed, found = time.monotonic() + 60 * options.minutes, options.seed * 1_000_000, 0
    while True:
        for layout in layouts(options.layouts):
            with Engine(layout) as engine:
                began = time.monotonic()
                for _ in range(CASES if options.case is None else options.times):
                    if time.monotonic() > until and options.case is None:
                        return 1 if found else 0
                    faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
                    try:
                        case = engine.run(options.case if options.case is not None else seed)
                        if options.verbose:
                            print(f"{time.monotonic() - began:.1f} s", case, case.failed, flush=True)
                    except Wrong as error:
                        found += 1
                        print(f"WRONG {error}", flush=True)
                        break  # its session may have ended
                    finally:
                        faulthandler.cancel_dump_traceback_later()
                        seed += 1
                row = {"layout": layout["name"], "seconds": round(time.monotonic() - began, 1), **engine.counts}
                print(json.dumps(row), flush=True)
        if time.monotonic() > until or options.case is not None:
            return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
