"""The thread that makes calls which block."""

from __future__ import annotations

import threading

import pytest

from gt.worker.plane.internode.call_thread import CallThread
from tests.helpers.limits import limit
from tests.helpers.processes import no_thread


def test_a_call_without_a_thread_fails_and_the_next_one_begins_it(monkeypatch):
    """Later calls were given to a thread that there was not."""
    calls = CallThread("gt-test-calls")
    with monkeypatch.context() as few:
        few.setattr(threading.Thread, "start", no_thread)
        failed = calls.submit(lambda: 1)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        failed.result(0)
    assert calls.submit(lambda: 2).result(limit(20)) == 2
    calls.close(limit(20))
