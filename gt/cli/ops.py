"""`gt ops NAME ...`: prints schemas of overloads of the installed torch, as lines for the file GT_OPS."""

from __future__ import annotations

import argparse
import sys

from gt.errors import ConfigError, UnsupportedOp
from gt.ir.schema import TABLE


def main(args: list[str], about: str) -> int:
    parser = argparse.ArgumentParser(prog="gt ops", description=about)
    parser.add_argument("names", nargs="+", metavar="NAME", help="an overload, as aten.add.Tensor, of any namespace")
    lines = []
    for name in parser.parse_args(args).names:
        from gt.worker.engine.torch.overloads import line, look_up

        try:
            lines.append(line(look_up(name)))
            TABLE.add(lines[-1:], "gt ops")  # refuses ops that are left out because of their effects
        except (ConfigError, UnsupportedOp, ValueError) as error:
            print(f"gt ops: {error}", file=sys.stderr)
            return 1
    print("\n".join(lines))
    return 0
