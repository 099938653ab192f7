"""docs/ops.md: the results of `python -m tests.conformance`, from files in benchmarks/results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
RUNS = {  # file -> heading, name of the things that it counts
    "conformance.json": ("Every op", "ops"),
    "conformance-dtypes.json": ("A sample of all dtypes", "ops"),
    "conformance-modules.json": ("Every module", "modules"),
}
MOST = 12  # ops named in a row
Table = Callable[[tuple[str, ...], list[tuple[str, ...]]], str]

PAGE = """# Ops

Will an op that your model needs run on `remote`, whole and split? torch's own operator tests (its OpInfo database) answer
that. They run on `remote`, and each result is compared with plain torch on the CPU. An op that GT lacks raises
`gt.UnsupportedOp`, which names the op, on your line or where the program next waits.

To test the ops that you need:

```
python -m tests.conformance --ops sort 'linalg.*'
```

| word | meaning |
| --- | --- |
| form | the op, its backward, its in-place variant, writes to views and their bases, or inputs that it has to refuse |
| variant | an op with one dtype in one form |
| equal | all samples of the variant are equal, in every split |
| unsupported | a sample raised `gt.UnsupportedOp` |
| split | on one worker all tensors are whole; over two and four each dim of each input is split in turn, unevenly too |
| gathered | an op without a rule for a split gathers its inputs and runs whole |
| random values | compared with those of one worker |

| option | meaning |
| --- | --- |
| `--dtypes one` | float32, or another dtype for ops that lack it |
| `--sample SEED N` | N random pairs of op and dtype |
| `--modules` | torch's list of modules (its ModuleInfo database) |

Each module is called with its sample inputs, in train and eval mode. Results, buffers, and gradients of inputs and
parameters are compared, and once more the gradients of parameters where inputs are data. Over two workers inputs are split as
above, and parameters too where there are at most four. The module is called in a data-parallel, a `_colpar` and a `_rowpar`
group.

{runs}"""

RUN = """## {heading}

`{command}`, torch {torch}, {seconds} s on two shared cores.

{counts}
{entries} {things} ran. Of these {entries_split} have an input that can be split, and are equal. Nothing is gathered for
{entries_without_gather} of them in some split of some sample, and for {entries_every_sample} in some split of every sample.

{rest}
"""


def page(table: Table) -> str:
    return PAGE.format(runs="".join(run(name, *said, table) for name, said in RUNS.items()))


def run(name: str, heading: str, things: str, table: Table) -> str:
    report = json.loads((RESULTS / name).read_text())
    counts: dict[str, Any] = dict(report["counts"])
    asked = {**report["asked"], "summary": f"benchmarks/results/{name}"}
    options = [f"--{key} {' '.join(map(str, v if isinstance(v, list) else [v]))}" for key, v in asked.items() if v is not True]
    options = [f"--{key}" for key, v in asked.items() if v is True] + options
    kinds = ("variants", "equal", "unsupported", "wrong")
    rows = [(n, *(str(counts[n][k]) for k in kinds), f"{counts[n]['share']:.1%}") for n in counts if n.isdigit()]
    head = ("reason why a variant is not equal", "outcome", "variants", things, "workers")
    rest = [
        (row["reason"], row["outcome"], str(row["variants"]), listed(row["ops"]), ", ".join(map(str, row["workers"])))
        for row in report["rest"]
    ]
    return RUN.format(
        heading=heading,
        things=things,
        command=" ".join(["python -m tests.conformance", *options]),
        torch=report["torch"].partition("+")[0],
        seconds=report["seconds"],
        counts=table(("workers", *kinds, "share equal"), rows),
        rest=table(head, rest) if rest else "All are equal.",
        **{key: counts[key] for key in counts if key.startswith("entries")},
    )


def listed(ops: list[str]) -> str:
    more = f" and {len(ops) - MOST} more" if len(ops) > MOST else ""
    return ", ".join(f"`{op}`" for op in ops[:MOST]) + more
