"""`gt ops NAME ...`: schemas of overloads of the installed torch, as lines for a file that GT_OPS names."""

from __future__ import annotations

import argparse
import sys

from gt.errors import ConfigError, UnsupportedOp
from gt.ir.schema import TABLE


def main(args: list[str], about: str) -> int:
    parser = argparse.ArgumentParser(prog="gt ops", description=about)
    parser.add_argument("names", nargs="+", metavar="NAME", help="as aten.add.Tensor; the namespace may be another library's")
    lines = []
    for name in parser.parse_args(args).names:
        from gt.worker.engine.torch.overloads import line, look_up

        try:
            lines.append(line(look_up(name)))
            TABLE.add(lines[-1:], "gt ops")  # refuses what is left out for what it does
        except (ConfigError, UnsupportedOp, ValueError) as error:
            print(f"gt ops: {error}", file=sys.stderr)
            return 1
    print("\n".join(lines))
    return 0
