"""`python -m tests.conformance`: torch's operator tests on the remote device, against plain torch on the CPU.

--ops and --dtypes say what, --modules that it is nn modules; --sample SEED N takes N (op, dtype) pairs and a few samples of
each; --json keeps every variant. --gpu runs them on GPU workers, and --part K N the K-th of N parts of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

from gt.ir.spec import DTYPES

from . import modules, report
from .place import WORKERS, Cluster
from .run import Plan, Runner, Variant, entries

FEW = 6  # samples of an op in a sample of pairs


def pairs(ops: list[str], dtypes: list[str], database: dict[str, Any] | None = None) -> list[tuple[Any, torch.dtype]]:
    """(OpInfo or ModuleInfo, dtype) asked for; "all" is every dtype that it claims on the CPU and GT has."""
    found = []
    for name, entry in (entries() if database is None else database).items():
        if ops and not any(fnmatch.fnmatch(name, pattern) for pattern in ops):
            continue
        known = entry.dtypes if isinstance(entry, modules.ModuleInfo) else entry.supported_dtypes("cpu")
        claimed = {str(d)[6:]: d for d in known if str(d)[6:] in DTYPES}
        if "one" in dtypes:  # float32, or where it has none the first it has
            found += [(entry, claimed["float32" if "float32" in claimed else min(claimed)])] if claimed else []
        else:
            found += [(entry, d) for n, d in sorted(claimed.items()) if "all" in dtypes or n in dtypes]
    return found


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.conformance", description=__doc__)
    parser.add_argument("--ops", nargs="+", default=[], help="names or patterns, as in torch's database (sort, linalg.*)")
    dtypes = "torch's names, all, or one (float32 where it is claimed)"
    parser.add_argument("--modules", action="store_true", help="torch's list of nn modules instead of its ops")
    parser.add_argument("--dtypes", nargs="+", default=["float32"], help=dtypes)
    parser.add_argument("--workers", nargs="+", type=int, choices=WORKERS, default=list(WORKERS))
    parser.add_argument("--most", type=int, default=0, help="samples of each op, at most")
    parser.add_argument("--sample", nargs=2, type=int, metavar=("SEED", "N"), help="N pairs of op and dtype, drawn by seed")
    parser.add_argument("--part", nargs=2, type=int, metavar=("K", "N"), default=[0, 1], help="K from 0")
    parser.add_argument("--gpu", action="store_true", help="GPU workers, as many as --workers has at most")
    parser.add_argument("--json", type=Path, help="a file for every variant")
    parser.add_argument("--summary", type=Path, help="a file for the counts and the rest, of which docs/ops.md is made")
    return parser.parse_args(argv)


def run(chosen: list[tuple[Any, torch.dtype]], plan: Plan, server: Any = None, quiet: bool = False) -> list[dict]:
    """Rows of all variants."""
    torch.set_num_threads(1)
    cluster, rows, start, wrong = Cluster(server, max(plan.workers) if plan.gpu else 0), [], time.monotonic(), 0
    try:
        runner = Runner(cluster, plan)
        for number, (entry, dtype) in enumerate(chosen):
            found: list[Variant] = runner.run(entry, dtype)
            rows += [variant.row() for variant in found]
            wrong += sum(variant.outcome == "wrong" for variant in found)
            if not quiet:
                at = f"{number + 1}/{len(chosen)} {time.monotonic() - start:.0f} s, {wrong} wrong"
                sys.stderr.write(f"\r{at}: {entry.name} {dtype}".ljust(90))
    finally:
        cluster.close()
    return rows


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    database = modules.entries() if args.modules else entries()
    chosen, plan = pairs(args.ops, args.dtypes, database), Plan(args.workers, args.most)
    if args.sample:
        seed, count = args.sample
        every = pairs(args.ops, ["all"], database)
        chosen = random.Random(seed).sample(every, min(count, len(every)))
        plan = Plan(args.workers, args.most or FEW, seed)
    chosen = chosen[args.part[0] :: args.part[1]]
    plan = dataclasses.replace(plan, gpu=args.gpu)
    start = time.monotonic()
    with torch.backends.cudnn.flags(allow_tf32=False):
        rows = run(chosen, plan)
    sys.stdout.write(f"\n{report.text(rows)}\n")
    asked = {name: value for name, value in vars(args).items() if value and not isinstance(value, Path)}
    about = {"asked": asked, "torch": torch.__version__, "seconds": round(time.monotonic() - start)}
    for path, found in ((args.json, {"rows": rows}), (args.summary, report.summary(rows))):
        if path is not None:
            path.write_text(json.dumps({**about, **found}, indent=1) + "\n")
    return int(any(row["outcome"] == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
