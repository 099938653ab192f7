"""docs/ops.md: what runs of `python -m tests.conformance` came to, as files in benchmarks/results have it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
RUNS = {"conformance.json": "Every op", "conformance-dtypes.json": "A sample of all dtypes"}  # file -> heading
MOST = 12  # ops named in a row
Table = Callable[[tuple[str, ...], list[tuple[str, ...]]], str]

PAGE = """# Ops

torch's own operator tests (its OpInfo database), run on the `remote` device against plain torch on the CPU: every op's sample
inputs in four forms (the op, its backward, its in-place variant, writes through the views that it gives), and what it has to
refuse. On one worker everything is whole; over two and four each dim of each input is split in turn, unevenly too. Values that
are drawn are compared with one worker's. A variant is an op with one dtype in one form; it is equal if all its samples are, in
every split. `--dtypes one` is float32, or another for ops that lack it; `--sample SEED N` draws N pairs of op and dtype.

{runs}
Whatever GT cannot do raises `gt.UnsupportedOp`, which names the op, on your line or where the program next waits.
"""

RUN = """## {heading}

`{command}`, torch {torch}, {seconds} s on two shared cores.

{counts}
{entries} ops ran. {entries_split} of them have an input that can be split and are equal: {entries_without_gather} run with
nothing gathered in some split of some sample, {entries_every_sample} in some split of every sample. What has no rule for a
split is gathered and run whole.

{rest}
"""


def page(table: Table) -> str:
    return PAGE.format(runs="".join(run(name, heading, table) for name, heading in RUNS.items()))


def run(name: str, heading: str, table: Table) -> str:
    found = json.loads((RESULTS / name).read_text())
    counts: dict[str, Any] = dict(found["counts"])
    asked = {**found["asked"], "summary": f"benchmarks/results/{name}"}
    given = [f"--{key} {' '.join(map(str, v if isinstance(v, list) else [v]))}" for key, v in asked.items()]
    kinds = ("variants", "equal", "unsupported", "wrong")
    rows = [(n, *(str(counts[n][k]) for k in kinds), f"{counts[n]['share']:.1%}") for n in ("1", "2", "4")]
    rest = [
        (row["reason"], row["outcome"], str(row["variants"]), listed(row["ops"]), ", ".join(map(str, row["workers"])))
        for row in found["rest"]
    ]
    return RUN.format(
        heading=heading,
        command=" ".join(["python -m tests.conformance", *given]),
        torch=found["torch"].partition("+")[0],
        seconds=found["seconds"],
        counts=table(("workers", *kinds, "share equal"), rows),
        rest=table(("what is not equal, and why", "outcome", "variants", "ops", "workers"), rest) if rest else "All are equal.",
        **{key: counts[key] for key in counts if key.startswith("entries")},
    )


def listed(ops: list[str]) -> str:
    more = f" and {len(ops) - MOST} more" if len(ops) > MOST else ""
    return ", ".join(f"`{op}`" for op in ops[:MOST]) + more
