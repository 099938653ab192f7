"""Size report: files and functions that have grown past a reader's patience.

A file may have 600 lines where one idea fills them, a function 60; ruff holds complexity and parameters. The total is printed
and has no limit: blank lines, plain names and comments are welcome. Raising an allowance is a decision made in review.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES, FUNCTION_LINES = 600, 60
ALLOWED = {"files": 0, "functions": 0}  # how many may be over the limits


def functions(path: Path) -> Iterator[tuple[str, int, int]]:
    """(name, line, lines) of every function of a file."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
            yield node.name, node.lineno, node.end_lineno - node.lineno + 1


def main() -> int:
    files, longs, total, lengths = [], [], 0, []
    for path in sorted((ROOT / "gt").rglob("*.py")):
        name, lines = path.relative_to(ROOT).as_posix(), len(path.read_text().splitlines())
        total += lines
        if lines > FILE_LINES:
            files.append(f"{name}: {lines} lines")
        for function, line, length in functions(path):
            lengths.append(length)
            if length > FUNCTION_LINES:
                longs.append(f"{name}:{line} {function}: {length} lines")
    counted = {"files": len(files), "functions": len(longs)}
    for line in files + longs:
        print(f"  long  {line}")
    p90 = sorted(lengths)[len(lengths) * 9 // 10] if lengths else 0
    counts = ", ".join(f"{key} {counted[key]} of {allowed}" for key, allowed in ALLOWED.items())
    print(f"gt/: {total} lines, {len(lengths)} functions, 90th percentile {p90} lines; {counts}")
    over = [key for key in ALLOWED if counted[key] > ALLOWED[key]]
    if over:
        print(f"over the allowance: {', '.join(over)}; split, or raise ALLOWED in tools/sizes.py")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
