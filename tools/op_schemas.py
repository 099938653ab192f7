"""Writes the closed table of ops, gt/ir/op_schemas.txt: `python -m tools.op_schemas [SOURCE ...]`.

The installed torch is always read, from its dispatcher. A source adds what another version has: a wheel of torch, of whatever
platform (its torchgen is run, not its libraries), or a file that `--dump FILE` wrote where that version is installed. Versions
that are not read keep their rows. The result depends on the sources alone; `--check` writes nothing, and fails on a difference.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from gt.ir.ops import RANDOM
from gt.ir.schema import FILE, Schema
from gt.worker.engine.torch.bounds import BOUNDS
from gt.worker.engine.torch.overloads import row
from tools.op_denied import SCRIPT, denied

DENSE = frozenset({"CPU", "CUDA", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"})
# Kernels that use values of an index tensor as they are: on CPUs workers look at them first, on GPUs nobody does
TRUSTS_VALUES = frozenset(BOUNDS) | {"embedding_renorm_", "_pack_padded_sequence"}
HEAD = """\
# The closed set of ops: made by `python -m tools.op_schemas`, not by hand. gt/ir/schema.py reads it.
# op(arguments by real type; ! is written, ~ may be written, letters share memory) -> (results)  # versions of torch, flags
# - op  why torch has it and workers do not
"""
# Run by a Python that finds torchgen in the wheel's own files: op -> [schema, keys of its kernels, tags]
TORCHGEN = """
import json, os, sys, torchgen
from torchgen.gen import parse_native_yaml
data = os.path.join(os.path.dirname(torchgen.__file__), "packaged", "ATen", "native")
parsed = parse_native_yaml(os.path.join(data, "native_functions.yaml"), os.path.join(data, "tags.yaml"))
ops = {str(f.func.name): f for f in parsed.native_functions}

def keys(f):
    found = {key.name for key, index in parsed.backend_indices.items() if index.has_kernel(f)}
    return found | (keys(ops[str(f.structured_delegate)]) if f.structured_delegate is not None else set())

json.dump({name: [str(f.func), sorted(keys(f)), sorted(f.tags)] for name, f in ops.items()}, sys.stdout)
"""
Lines = dict[str, str]  # op -> its line without versions, or `- ` and why it is left out


def torchgen(path: str) -> dict[str, list]:
    """Schemas and kernels by the torchgen in this folder."""
    answer = subprocess.run(
        [sys.executable, "-c", TORCHGEN],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        cwd=path or None,
    )
    if answer.returncode:
        sys.exit(f"torchgen of {path} failed: {answer.stderr[-2000:]}")
    return json.loads(answer.stdout)


def installed() -> tuple[str, Lines]:
    """(version, lines) of the installed torch: schemas as its dispatcher has them, kernels of all devices as torchgen says."""
    kernels = torchgen("")
    lines: Lines = {}
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        if space == "aten":
            base, _, overload = rest.partition(".")
            _, keys, tags = kernels.get(rest, ("", [], []))
            lines[op_name(rest)] = judged(op_name(rest), torch._C._get_schema(f"aten::{base}", overload), keys, tags)
    return ".".join(torch.__version__.split(".")[:2]), lines


def of_wheel(path: Path) -> tuple[str, Lines]:
    """The same of a wheel."""
    version = ".".join(path.name.split("-")[1].split(".")[:2])
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith("torchgen/")])
        from_torchgen = torchgen(folder)
    lines: Lines = {}
    for rest, (text, keys, tags) in from_torchgen.items():
        try:
            lines[op_name(rest)] = judged(op_name(rest), torch._C.parse_schema(f"aten::{text}"), keys, tags)
        except RuntimeError:  # types that the installed torch has no more
            lines[op_name(rest)] = "- argument"
    return version, lines


def op_name(rest: str) -> str:
    return f"aten.{rest}" if "." in rest else f"aten.{rest}.default"


def judged(op: str, schema: Any, keys: Iterable[str], tags: Iterable[str]) -> str:
    """An op's line, or why it is left out."""
    kernels, why = set(keys), denied(op)
    if why:
        return f"- {why}"
    if "inplace_view" in tags:
        return "- metadata"
    if not kernels & DENSE:
        return "- composite" if "CompositeImplicitAutograd" in kernels else "- kernel"
    if any(argument.is_out for argument in schema.arguments):
        return "- out"
    if any(str(value.real_type) not in ("Tensor", "List[Tensor]") for value in schema.returns):
        return "- returns"
    if "nondeterministic_seeded" in tags and op not in RANDOM:
        return "- random"
    try:
        made = row(op, schema, tags, "0-0", ["trusts_values"] if op.split(".")[1] in TRUSTS_VALUES else [])
    except ValueError:
        return "- argument"
    return made


def merged(sources: dict[str, Lines], old: str) -> str:
    """The table's text: rows of these versions, and of those that the old text has besides."""
    rows: dict[tuple[str, str], set[str]] = defaultdict(set)  # (op, line without versions and flags) -> versions
    flags: dict[str, set[str]] = defaultdict(set)
    left: dict[str, str] = {}
    for line in old.splitlines():
        if line.startswith("- "):
            op, _, why = line[2:].partition("  ")
            left[op] = why
        elif line and line[0] != "#":
            schema = Schema.parse(line)
            form = line.partition("  # ")[0]
            rows[schema.op, form] |= {v for v in versions(schema.since, schema.until) if v not in sources}
            flags[schema.op] |= schema.flags
    for version in sorted(sources, key=ordered):
        for op, line in sources[version].items():
            if line.startswith("- "):
                left[op] = line[2:]
                continue
            form, _, rest = line.partition("  # ")
            rows[op, form].add(version)
            flags[op] = set(rest.split()[1:])
    left |= {op: denied(op) for op in map(op_name, SCRIPT)}
    lines = []
    named = {op for (op, _), seen in rows.items() if seen}
    for (op, form), seen in sorted(rows.items()):
        if seen and not denied(op):
            span = sorted(seen, key=ordered)
            lines.append(f"{form}  # {span[0]}-{span[-1]} {' '.join(sorted(flags[op]))}".rstrip())
    lines += [f"- {op}  {why}" for op, why in sorted(left.items()) if op not in named or denied(op)]
    return HEAD + "\n".join(lines) + "\n"


def ordered(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def versions(since: str, until: str) -> list[str]:
    """Minor versions from one to another."""
    (major, first), (_, last) = ordered(since), ordered(until)
    return [f"{major}.{minor}" for minor in range(first, last + 1)]


def read(path: Path) -> tuple[str, Lines]:
    """A source: a wheel, or a dump."""
    if path.suffix == ".whl":
        return of_wheel(path)
    stored = json.loads(path.read_text())
    return stored["version"], stored["lines"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools.op_schemas", description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="*", type=Path, help="wheels of other versions of torch, and dumps")
    parser.add_argument("--dump", type=Path, help="write what the installed torch has to this file, and no table")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the table would change")
    args = parser.parse_args(argv)
    version, lines = installed()
    if args.dump:
        args.dump.write_text(json.dumps({"version": version, "lines": lines}, indent=0, sort_keys=True))
        return 0
    sources = {version: lines, **dict(map(read, args.sources))}
    old = FILE.read_text()
    new = merged(sources, old)
    if args.check:
        sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), "table", "torch", n=0))
        return int(old != new)
    FILE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
