"""`python -m tests.attacks`: see the package's docstring. Prints a table and writes findings.json beside the cases."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path

from tests.attacks import report
from tests.attacks.case import Case
from tests.attacks.confirm import signs_of
from tests.attacks.engine import EACH, Engine


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.attacks", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--cases", type=int, default=1 << 62, help="at most so many, whatever the time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="torch", help="engine of the workers")
    parser.add_argument("--parts", nargs="+", choices=list(EACH), default=list(EACH))
    parser.add_argument("--ops", default="", help="only ops whose names have this")
    parser.add_argument("--out", type=Path, help="folder for cases, logs and findings.json; a new one by default")
    parser.add_argument("--confirm", action="store_true", help="play each finding again on fresh processes")
    parser.add_argument("--replay", type=Path, help="play this case's file, and say what it shows")
    parser.add_argument("--matrix", action="store_true", help="signals, targets and moments")
    parser.add_argument("--only", nargs="*", default=[], help="with --matrix: cells whose name has one of these")
    parser.add_argument("--size", type=int, default=1 << 30, help="with --matrix: bytes of the large upload")
    args = parser.parse_args()
    logging.getLogger("gt").setLevel(logging.CRITICAL)
    folder = args.out or Path(tempfile.mkdtemp(prefix="gt-attacks-"))
    folder.mkdir(parents=True, exist_ok=True)
    if args.replay:
        signs = signs_of(Case.load(args.replay), folder)
        sys.stdout.write("\n".join(f"{sign.kind}: {sign.text}" for sign in signs) + "\n" if signs else "nothing\n")
        return int(bool(signs))
    if args.matrix:
        from tests.attacks import matrix

        return matrix.main(folder, args.only, args.size)
    engine = Engine(folder, args.seed, args.backend, tuple(args.parts), only=args.ops)
    engine.run(args.cases, args.minutes * 60)
    if args.confirm:
        engine.confirm()
    found = engine.result()
    (folder / "findings.json").write_text(json.dumps(found, indent=1))
    sys.stdout.write(report.table(dict(found)) + f"\n\ncases and logs: {folder}\n")
    return int(bool(found["findings"]))


if __name__ == "__main__":
    sys.exit(main())
