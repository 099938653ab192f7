"""docs/ops.md: what runs of `python -m tests.conformance` came to, as files in benchmarks/results have it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
RUNS = {  # file -> heading, what it counts
    "conformance.json": ("Every op", "ops"),
    "conformance-dtypes.json": ("A sample of all dtypes", "ops"),
    "conformance-modules.json": ("Every module", "modules"),
}
MOST = 12  # ops named in a row
Table = Callable[[tuple[str, ...], list[tuple[str, ...]]], str]

PAGE = """# Ops

torch's own operator tests (its OpInfo database), run on the `remote` device against plain torch on the CPU: every op's sample
inputs in four forms (the op, its backward, its in-place variant, writes to the views that it gives and to what they view, each
of which the others see), and what it has to refuse. On one worker everything is whole; over two and four each dim of each input
is split in turn, unevenly too. Values that are drawn are compared with one worker's. A variant is an op with one dtype in one
form; it is equal if all its samples are, in every split. `--dtypes one` is float32, or another for ops that lack it;
`--sample SEED N` draws N pairs of op and dtype.

`--modules` takes torch's list of modules (its ModuleInfo database): each is called with its sample inputs in train and eval
mode; results, buffers, and gradients of inputs and parameters are compared, and once more those of parameters where inputs are
data. Over two workers inputs are split as above, parameters too where there are at most four, and the module is called in a
data parallel, a `_colpar` and a `_rowpar` group.

{runs}
Whatever GT cannot do raises `gt.UnsupportedOp`, which names the op, on your line or where the program next waits.
"""

RUN = """## {heading}

`{command}`, torch {torch}, {seconds} s on two shared cores.

{counts}
{entries} {things} ran. {entries_split} of them have an input that can be split and are equal: {entries_without_gather} run with
nothing gathered in some split of some sample, {entries_every_sample} in some split of every sample. What has no rule for a
split is gathered and run whole.

{rest}
"""


def page(table: Table) -> str:
    return PAGE.format(runs="".join(run(name, *said, table) for name, said in RUNS.items()))


def run(name: str, heading: str, things: str, table: Table) -> str:
    found = json.loads((RESULTS / name).read_text())
    counts: dict[str, Any] = dict(found["counts"])
    asked = {**found["asked"], "summary": f"benchmarks/results/{name}"}
    given = [f"--{key} {' '.join(map(str, v if isinstance(v, list) else [v]))}" for key, v in asked.items() if v is not True]
    given = [f"--{key}" for key, v in asked.items() if v is True] + given
    kinds = ("variants", "equal", "unsupported", "wrong")
    rows = [(n, *(str(counts[n][k]) for k in kinds), f"{counts[n]['share']:.1%}") for n in counts if n.isdigit()]
    head = ("what is not equal, and why", "outcome", "variants", things, "workers")
    rest = [
        (row["reason"], row["outcome"], str(row["variants"]), listed(row["ops"]), ", ".join(map(str, row["workers"])))
        for row in found["rest"]
    ]
    return RUN.format(
        heading=heading,
        things=things,
        command=" ".join(["python -m tests.conformance", *given]),
        torch=found["torch"].partition("+")[0],
        seconds=found["seconds"],
        counts=table(("workers", *kinds, "share equal"), rows),
        rest=table(head, rest) if rest else "All are equal.",
        **{key: counts[key] for key in counts if key.startswith("entries")},
    )


def listed(ops: list[str]) -> str:
    more = f" and {len(ops) - MOST} more" if len(ops) > MOST else ""
    return ", ".join(f"`{op}`" for op in ops[:MOST]) + more
