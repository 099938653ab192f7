"""Effects outside of tensors, and questions to the system, happen at each call, whatever function of Python has them."""

from __future__ import annotations

import contextlib
import csv
import datetime
import functools
import io
import logging
import math
import multiprocessing
import os
import pathlib
import sqlite3
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import gt

pytestmark = pytest.mark.usefixtures("one")
CALLS = 8


def calls(effect: Callable[[], Any], count: int = CALLS) -> Any:
    """A captured step with this effect, after some calls."""
    weight = torch.ones(4, device="remote")

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        weight.add_(x.sum())
        effect()
        return weight * 2

    for n in range(count):
        step(torch.full((4,), float(n)))
    return step


def in_a_folder(how: str) -> Callable[[pathlib.Path], tuple[Callable[[], Any], Callable[[], int]]]:
    """An effect that makes an entry of a folder, and the number of entries."""

    def make(folder: pathlib.Path) -> tuple[Callable[[], Any], Callable[[], int]]:
        entries: Callable[[], int] = lambda: len(os.listdir(folder))  # noqa: E731
        path: Callable[[], pathlib.Path] = lambda: folder / str(entries())  # noqa: E731
        return {
            "folder": lambda: os.mkdir(path()),
            "touch": lambda: path().touch(),
            "link": lambda: os.symlink(folder, path()),
        }[how], entries

    return make


def rows(_: Any) -> tuple[Callable[[], Any], Callable[[], int]]:
    text = io.StringIO()
    writer = csv.writer(text)
    return lambda: writer.writerow([1]), lambda: text.getvalue().count("1")


def database(_: Any) -> tuple[Callable[[], Any], Callable[[], int]]:
    base = sqlite3.connect(":memory:")
    base.execute("create table rows(n)")

    def count() -> int:
        with contextlib.closing(base):  # Python 3.13 warns of one that is open at its end
            return base.execute("select count(*) from rows").fetchone()[0]

    return lambda: base.execute("insert into rows values (1)"), count


started: list[threading.Thread] = []


def note_thread() -> None:
    started.append(threading.current_thread())


def threads(_: Any) -> tuple[Callable[[], Any], Callable[[], int]]:
    started.clear()

    def effect() -> None:
        thread = threading.Thread(target=lambda: globals()["note_thread"]())
        thread.start()
        thread.join()

    return effect, lambda: len(started)


def pipe(_: Any) -> tuple[Callable[[], Any], Callable[[], int]]:
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def received() -> int:
        count = 0
        while receiver.poll():
            count += receiver.recv()
        receiver.close()
        sender.close()
        return count

    return lambda: sender.send(1), received


def warning(_: Any) -> tuple[Callable[[], Any], Callable[[], int]]:
    shown: list[Any] = []
    warnings.showwarning = lambda *row, **_: shown.append(row)
    warnings.simplefilter("always")
    return lambda: warnings.warn("hot", stacklevel=1), lambda: len(shown)


EFFECTS = {
    "folder": in_a_folder("folder"),
    "touch": in_a_folder("touch"),
    "link": in_a_folder("link"),
    "rows": rows,
    "database": database,
    "threads": threads,
    "pipe": pipe,
    "warning": warning,
}


@pytest.mark.parametrize("name", EFFECTS)
def test_an_effect_happens_at_each_call(name: str, tmp_path: pathlib.Path) -> None:
    with warnings.catch_warnings():
        effect, count = EFFECTS[name](tmp_path)
        step = calls(effect)
        assert count() == CALLS, step.explain()
    assert "in parts" in step.explain() and "the function" in step.explain()


def deadline(_: pathlib.Path) -> tuple[Callable[[], bool], Callable[[], Any]]:
    ends = [time.monotonic() + 3600]
    return lambda: time.monotonic() < ends[0], lambda: ends.__setitem__(0, time.monotonic())


def stop_file(folder: pathlib.Path) -> tuple[Callable[[], bool], Callable[[], Any]]:
    path = folder / "stop"
    return lambda: not path.exists(), path.touch


def names(folder: pathlib.Path) -> tuple[Callable[[], bool], Callable[[], Any]]:
    listed = os.listdir  # held under another name
    return lambda: not listed(folder), lambda: (folder / "a").touch()


@pytest.mark.parametrize("make", [deadline, stop_file, names])
def test_the_clock_and_files_decide_at_each_call(make: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    asks, change = make(tmp_path)
    weight = torch.zeros((), device="remote")

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return weight.add_(x if asks() else -x).clone()

    values = []
    for n in range(2 * CALLS):
        if n == CALLS:
            change()
        values.append(step(torch.ones(())).item())
    assert values == [*range(1, CALLS + 1), *range(CALLS - 1, -1, -1)], step.explain()
    assert "in parts" in step.explain() and "the function asks for the" in step.explain()


FILES = {
    "numpy": (lambda path, n: np.save(path, np.full(2, n)), lambda path: float(np.load(path)[0])),
    "map": (lambda path, n: np.full(2, float(n)).tofile(path), lambda path: float(np.memmap(path, np.float64, "r")[0])),
    "torch": (lambda path, n: torch.save({"n": torch.tensor(n)}, path), lambda path: torch.load(path)["n"].item()),
    "tensor": (lambda path, n: np.full(2, float(n)).tofile(path), lambda path: (
        torch.from_file(path, size=2, dtype=torch.float64)[0].item())),
}  # fmt: skip


@pytest.fixture
def shared_memory() -> Iterator[str]:
    folder = "/dev/shm"
    if not os.access(folder, os.W_OK):
        pytest.skip("no shared memory is a folder here")
    with tempfile.TemporaryDirectory(dir=folder) as made:
        yield made


def test_a_file_in_shared_memory_is_read_at_each_call(shared_memory: str) -> None:
    test_a_file_that_a_library_opens_is_read_at_each_call("numpy", pathlib.Path(shared_memory))


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_a_library_opens_is_read_at_each_call(kind: str, tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "value.npy")
    write, read = FILES[kind]
    step, values = gt.compile(lambda x: x * read(path)), []
    for n in range(CALLS):
        write(path, n // 4)
        values.append(step(torch.ones(())).item())
    assert values == [n // 4 for n in range(CALLS)], step.explain()
    assert "in parts" in step.explain() and "the function opens a file" in step.explain()


def test_a_file_of_a_package_prevents_no_program() -> None:
    path = f"{np.__path__[0]}/__init__.py"
    step = calls(lambda: np.memmap(path, np.uint8, "r").sum())
    assert step._programs[0].replays >= CALLS - 4, step.explain()


@pytest.mark.parametrize("ask", [time.perf_counter_ns, datetime.datetime.now, uuid.uuid4], ids=["clock", "date", "uuid"])
def test_an_answer_of_the_system_is_another_one_at_each_call(ask: Callable[[], Any]) -> None:
    step = gt.compile(lambda x: (x * 2, str(ask())))
    answers = {step(torch.ones(4))[1] for _ in range(CALLS)}
    assert len(answers) == CALLS, step.explain()


SETTINGS = {
    "recursion": (sys.getrecursionlimit, sys.setrecursionlimit, 1000),
    "threads": (torch.get_num_threads, torch.set_num_threads, 1),
    "seed": (lambda: torch.initial_seed(), torch.manual_seed, 1),
    "numpy": (lambda: np.get_printoptions()["precision"], lambda n: np.set_printoptions(precision=n), 1),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_setting_that_a_step_asks_for_is_that_of_each_call(kind: str) -> None:
    ask, change, least = SETTINGS[kind]
    before, step, values = ask(), gt.compile(lambda x: x * ask()), []
    try:
        for n in range(CALLS):
            change(least + n // 4)
            values.append(step(torch.ones(())).item())
    finally:
        change(before)
    assert values == [least + n // 4 for n in range(CALLS)], step.explain()


def test_a_setting_of_the_process_is_set_at_each_call() -> None:
    before, limit, digits = torch.get_num_threads(), sys.getrecursionlimit(), np.get_printoptions()["precision"]
    try:
        calls(lambda: torch.set_num_threads(torch.get_num_threads() + 1))
        assert torch.get_num_threads() == before + CALLS
        calls(lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1))
        assert sys.getrecursionlimit() == limit + CALLS
        calls(lambda: np.set_printoptions(precision=np.get_printoptions()["precision"] + 1))
        assert np.get_printoptions()["precision"] == digits + CALLS
    finally:
        torch.set_num_threads(before)
        sys.setrecursionlimit(limit)
        np.set_printoptions(precision=digits)


def test_a_warning_that_is_shown_once_prevents_no_program() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        step = calls(lambda: warnings.warn("once", stacklevel=1))
    assert sum(str(row.message) == "once" for row in shown) == 1
    assert step._programs[0].replays >= CALLS - 4, step.explain()


def test_a_module_that_the_step_imports_prevents_no_program(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_by_a_step.py").write_text("FACTOR = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)

    def effect() -> int:
        import imported_by_a_step  # type: ignore[import-not-found]

        return imported_by_a_step.FACTOR

    step = calls(effect)
    monkeypatch.delitem(sys.modules, "imported_by_a_step")
    assert step._programs and step._programs[0].replays >= CALLS - 4, step.explain()


class Holder:
    """Objects of libraries with an attribute of the user's, and code that counts in it."""

    def __init__(self) -> None:
        self.things = {
            "logger": logging.getLogger("gt.tests.counted"),
            "loader": torch.utils.data.DataLoader([1, 2]),
            "partial": functools.partial(max, 1),
            "module": math,
            "class": torch.utils.data.DataLoader,
        }


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("kind", Holder().things)
def test_an_attribute_of_a_librarys_object_is_assigned_at_each_call(kind: str, by_name: bool) -> None:
    thing: Any = Holder().things[kind]
    thing.user_count = 0

    def assign() -> None:
        thing.user_count = thing.user_count + 1

    def assign_by_name() -> None:
        setattr(thing, "user_count", getattr(thing, "user_count") + 1)  # noqa: B009, B010

    try:
        step = calls(assign_by_name if by_name else assign)
        assert thing.user_count == CALLS, step.explain()
    finally:
        del thing.user_count
