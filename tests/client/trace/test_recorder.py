"""The hand-over of ops to the session, by two threads."""

from __future__ import annotations

import threading

from gt.client.trace.recorder import Recorder
from tests.helpers.limits import limit


class Session:
    """Takes a batch when it is let."""

    def __init__(self) -> None:
        self.failure = None
        self.waiting = False
        self.entered, self.let = threading.Event(), threading.Event()
        self.taken: list[str] = []

    def submit(self, templates: list, origins: list, code: list, frames: list, asks: bool = False) -> None:
        self.entered.set()
        assert self.let.wait(limit(20))
        self.taken.append("batch")


def test_a_question_follows_what_another_thread_is_handing_over() -> None:
    """The code is gone from the buffer then, and not yet with the session."""
    session = Session()
    recorder = Recorder(session, lambda: None)
    recorder.code.extend((20, 1, 2))

    def ask() -> None:
        recorder.flush_ops()
        session.taken.append("question")

    handing = threading.Thread(target=recorder.flush_stale)
    handing.start()
    assert session.entered.wait(limit(20)) and not recorder.code
    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(0.2)  # it would be through by now, were it not to wait
    session.let.set()
    handing.join()
    asking.join()
    assert session.taken == ["batch", "question"]
