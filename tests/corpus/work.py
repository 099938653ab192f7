"""Planning many programs, in several processes if asked to."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.corpus.compare import Changes, difference, digest
from tests.corpus.programs import Entry, entries
from tests.corpus.text import text

CHUNK = 4  # programs that a process is given at once


@functools.cache
def known() -> dict[str, Entry]:
    """Programs by name."""
    return {entry.name: entry for entry in entries()}


def planned(name: str, store: Path | None, compare: Path | None, changes: Changes) -> tuple[str, str, list[str]]:
    """Plan a program, and keep or compare its text: name, digest, and lines of the diff."""
    try:
        now = text(known()[name])
    except Exception as error:
        raise RuntimeError(f"program {name} of the corpus failed") from error
    if store is not None:
        path = store / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(now, errors="surrogateescape")
    lines: list[str] = []
    if compare is not None:
        stored = compare / f"{name}.txt"
        there = stored.exists()
        lines = difference(name, stored.read_text(errors="surrogateescape") if there else "", now, changes)
    return name, digest(now), lines


def carried_out(names: list[str], work: Callable, processes: int) -> Iterator[tuple[str, str, list[str]]]:
    if processes < 2:
        yield from map(work, names)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(work, names, chunksize=CHUNK)
