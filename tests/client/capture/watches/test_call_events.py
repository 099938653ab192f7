"""Events of a thread's calls: what both ways of watching tell, whom they leave alone, and what is left when they end."""

from __future__ import annotations

import csv
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, SimpleNamespace

import pytest
import torch

from gt.client.capture.watches import call_events as events
from gt.client.capture.watches.output_watch import OutputWatch

NEW = hasattr(sys, "monitoring")
WAYS = [pytest.param(True, marks=pytest.mark.skipif(not NEW, reason="Python has no sys.monitoring")), False]


def helper() -> None:
    os.getcwd()


def rows(to: io.StringIO) -> None:
    csv.writer(to).writerow([1])


def copied(to: io.StringIO) -> None:
    take = csv.writer(to).writerow
    take([1])


def found() -> None:
    os.path.abspath("x")  # a function of the standard library, which asks for the folder


EFFECTS: dict[str, tuple[Callable[[], None], str]] = {
    "direct": (helper, "asks for the state of files or of the system"),
    "of the standard library": (found, "asks for the state of files or of the system"),
    "a method": (lambda: rows(io.StringIO()), "writes rows"),
    "a method under a name of its own": (lambda: copied(io.StringIO()), "writes rows"),
}


@pytest.fixture(params=WAYS, ids=lambda new: "monitored" if new else "profiled")
def watch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A watch that is begun, what it has told, and its end."""
    if not request.param:
        monkeypatch.setattr(events, "_monitoring", None)
    output, seen = OutputWatch(), list[CodeType]()

    def note(frame: FrameType, code: CodeType) -> None:
        assert frame.f_code is code
        seen.append(code)

    def begin() -> events.CallEvents:
        made = events.call_events(note, output)
        assert made is not None and isinstance(made, events.MonitoredCalls if request.param else events.ProfiledCalls)
        made.begin()
        return made

    yield SimpleNamespace(begin=begin, output=output, seen=seen)
    assert sys.getprofile() is None
    assert not NEW or not any(map(sys.monitoring.get_tool, events._TOOLS))  # type: ignore[attr-defined]


def test_each_code_is_told_of_once_in_each_watch(watch: SimpleNamespace) -> None:
    for _ in range(2):
        made = watch.begin()
        helper()
        helper()
        made.end()
        helper()
    assert watch.seen.count(helper.__code__) == 2


@pytest.mark.parametrize("name", EFFECTS)
def test_calls_of_c_code_with_effects_are_told(watch: SimpleNamespace, name: str) -> None:
    call, what = EFFECTS[name]
    for _ in range(2):  # the second watch sees what the first has seen
        watch.output.place = ""
        made = watch.begin()
        call()
        made.end()
        assert watch.output.what == what and __file__ in watch.output.place


def test_a_writer_as_an_argument_writes_nothing(watch: SimpleNamespace) -> None:
    writer = csv.writer(io.StringIO())
    made = watch.begin()
    id(writer)
    str.__len__("x")
    made.end()
    assert not watch.output.place


def test_calls_within_libraries_are_nobodys_output(watch: SimpleNamespace) -> None:
    made = watch.begin()
    torch.utils.data.get_worker_info()
    torch.nn.Linear(2, 2)
    made.end()
    assert not watch.output.place and torch.nn.Linear.__init__.__code__ in watch.seen


def test_other_threads_are_left_alone(watch: SimpleNamespace) -> None:
    made = watch.begin()
    thread = threading.Thread(target=helper)
    watch.output.place = "nothing more is told of this thread"
    thread.start()
    thread.join()
    made.end()
    assert helper.__code__ not in watch.seen


def test_a_thread_that_ran_code_first_hides_it_from_nobody(watch: SimpleNamespace) -> None:
    go, ran = threading.Event(), threading.Event()

    def beside() -> None:
        go.wait()
        helper()
        ran.set()

    thread = threading.Thread(target=beside)
    thread.start()
    made = watch.begin()
    go.set()
    ran.wait()
    helper()
    made.end()
    thread.join()
    assert watch.seen.count(helper.__code__) == 1 and watch.output.place


@pytest.mark.skipif(not NEW, reason="Python has no sys.monitoring")
def test_a_profiler_serves_where_other_tools_have_the_numbers() -> None:
    tools = sys.monitoring  # type: ignore[attr-defined]
    for tool in events._TOOLS:
        tools.use_tool_id(tool, "another")
    try:
        made = events.call_events(lambda frame, code: None, OutputWatch())
        assert isinstance(made, events.ProfiledCalls)
        made.begin()
        made.end()
    finally:
        for tool in events._TOOLS:
            tools.free_tool_id(tool)
