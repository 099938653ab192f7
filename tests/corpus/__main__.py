"""`python -m tests.corpus --store FOLDER`, then, after a change, `--compare FOLDER`: does every program still have its plan?

Programs are the examples, the ready configs and random ones. The dispatcher plans them with workers that are only thought of;
the text of one has each message to each worker, programs with their schedules, and what `gt plan` says. `--check` asks
the same of the digests in tests/corpus/digests.txt, which `--digests` writes.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import importlib.metadata
import re
import sys
import time
from pathlib import Path

from tests.corpus.compare import DIGESTS, Changes, read_digests, write_digests
from tests.corpus.work import carried_out, known, planned

PACKAGES = ("torch", "transformers")  # whose versions plans depend on


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def renamed(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not old or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}, want old=new")
    return old, new


def pattern(text: str) -> str:
    try:
        return re.compile(text).pattern
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.corpus", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--store", type=Path, metavar="FOLDER", help="write a text file for each program")
    parser.add_argument("--compare", type=Path, metavar="FOLDER", help="print how texts differ from those; 1 if any does")
    parser.add_argument("--digests", action="store_true", help=f"write {DIGESTS.name}")
    parser.add_argument("--check", action="store_true", help="name the programs that have another digest; 1 if any")
    parser.add_argument("--rename", type=renamed, action="append", default=[], metavar="OLD=NEW", help="a word of stored texts")
    parser.add_argument("--ignore", type=pattern, action="append", default=[], metavar="REGEX", help="deleted from both texts")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="names of programs, as random/pipeline-*")
    parser.add_argument("-n", dest="processes", type=int, default=1, help="processes")
    args = parser.parse_args(argv)
    if not (args.store or args.compare or args.digests or args.check):
        parser.error("want --store, --compare, --digests or --check")
    if args.digests and args.only != ["*"]:
        parser.error("--digests are of the whole corpus: leave out --only")
    if args.compare and not args.compare.is_dir():
        parser.error(f"--compare {args.compare}: no such folder; --store writes one")
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    start = time.monotonic()
    names = [name for name in known() if any(fnmatch.fnmatch(name, pattern) for pattern in args.only)]
    if not names:
        sys.stderr.write(f"no program is called {' or '.join(args.only)}\n")
        return 2
    work = functools.partial(planned, store=args.store, compare=args.compare, changes=Changes(args.rename, args.ignore))
    wanted = read_digests()[0] if args.check else {}
    rows, differing = [], []
    for name, value, lines in carried_out(names, work, args.processes):
        rows.append((name, value))
        if lines or (args.check and wanted.get(name) != value):
            differing.append(name)
            sys.stdout.write("\n".join([*lines, f"{name} differs", ""]))
    if args.digests:
        write_digests(rows, versions())
    compared = f", {len(differing)} of them differ" if args.compare or args.check else ""
    sys.stderr.write(f"{len(rows)} programs{compared}, in {time.monotonic() - start:.0f} s\n")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
