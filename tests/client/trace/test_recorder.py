"""The hand-over of ops to the session, by two threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from gt.client.capture.fragment_tape import FragmentTape
from gt.client.device.remote_tensor import Temporary
from gt.client.trace import recorder as recorder_module
from gt.client.trace.provenance import Origins
from gt.client.trace.recorder import MAX_BUSY_LOOKS, MAX_HELD_CALLS, Recorder
from gt.ir.instr import FIRST, FRAGMENT, FREE
from gt.ir.spec import contiguous
from gt.ir.template import Out, T, Template
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


def test_what_an_interrupt_leaves_of_a_call_is_handed_over_in_its_form() -> None:
    """Uploads are kept apart from ops that read them: without the former the server would end the session."""
    session = Session()
    session.let.set()
    batches: list[list] = []
    session.submit = lambda templates, origins, code, frames, asks=False: batches.append(code)  # type: ignore[method-assign]
    recorder = Recorder(session, lambda: None)
    tape = recorder.tape = FragmentTape(recorder, None, 5, 1, 0, Counter())  # type: ignore[arg-type]
    tape.uploads(recorder.code).extend((16, 1, 0, 7))
    recorder.code.extend((20, 1, 7, 8))
    recorder.end_tape()
    assert recorder.tape is None and not recorder.code
    recorder.flush_stale()
    ((upload, *code),) = [[batch[:4], *batch[4:]] for batch in batches]
    assert upload == [16, 1, 0, 7] and code[0] == FRAGMENT


class Busy(Session):
    """Workers have work or have none. Keeps the code of each batch."""

    def __init__(self, busy: bool) -> None:
        super().__init__()
        self.busy = busy
        self.batches: list[list] = []
        self.turns = 0

    def submit(self, templates: list, origins: list, code: list, frames: list, asks: bool = False) -> None:
        self.batches.append(code)

    def take_turn(self) -> None:
        self.turns += 1


def test_an_op_recorded_during_a_hand_over_comes_behind_what_that_frees() -> None:
    """The I/O thread takes long to forget many ended ids. An op of the program's thread may need the memory that they hold."""
    session = Busy(False)
    recorder = Recorder(session, lambda: None)

    class Forgotten(dict):
        def pop(self, *args: Any) -> Any:
            if 90 not in recorder.code:
                recorder.code.extend((20, 1, 90))
            return super().pop(*args)

    recorder.live_tensors.all = Forgotten()
    recorder.code.extend((20, 1, 7))
    recorder.live_tensors.ended += [Temporary(7), Temporary(8)]
    recorder.flush_stale()
    recorder.flush_ops()
    assert session.batches == [[20, 1, 7, FREE, 2, 7, 8], [20, 1, 90]]


def called(recorder: Recorder, number: int) -> None:
    """A call whose ops are a fragment."""
    recorder.pass_on()
    recorder.tape = FragmentTape(recorder, None, 5, number, 0, Counter())  # type: ignore[arg-type]
    recorder.code.extend((20, 1, number))
    recorder.pass_on()
    recorder.end_tape()


def test_ends_of_calls_wait_for_company_while_workers_are_busy() -> None:
    session = Busy(False)
    recorder = Recorder(session, lambda: None)
    called(recorder, 7)
    assert len(session.batches) == 1 and session.batches[0][0] == FRAGMENT
    session.busy = True
    recorder.code.extend((20, 1, 30))
    called(recorder, 8)
    called(recorder, 9)
    assert len(session.batches) == 1 and session.turns
    recorder.code.extend((20, 1, 31))
    recorder.flush_ops()
    code = session.batches[1]
    assert code[:3] == [20, 1, 30] and code[-3:] == [20, 1, 31]
    assert [code[at + 2] for at in range(len(code) - 2) if code[at : at + 2] == [FRAGMENT, 5]] == [8, 9]


def test_what_waits_for_company_goes_as_soon_as_workers_have_less_to_do() -> None:
    session = Busy(True)
    recorder = Recorder(session, lambda: None)
    called(recorder, 7)
    recorder.flush_stale()
    assert not session.batches
    session.busy = False
    recorder.flush_stale()
    assert len(session.batches) == 1


def test_nothing_waits_for_long() -> None:
    """The dispatcher may wait for what follows; a large upload may wait for the room of the one before it."""
    session = Busy(True)
    recorder = Recorder(session, lambda: None)
    for number in range(2 * MAX_HELD_CALLS):
        called(recorder, number)
    assert session.batches
    session.batches.clear()
    recorder.flush_ops()
    session.batches.clear()
    recorder.emit_large_upload([16, 1, 0, 7])
    recorder.pass_on()
    assert len(session.batches) == 1
    recorder.code.extend((20, 1, 7, 8))
    for _ in range(MAX_BUSY_LOOKS):
        recorder.flush_stale()
    assert len(session.batches) == 1
    recorder.flush_stale()
    assert len(session.batches) == 2


def test_a_wait_for_credit_that_is_interrupted_hands_over_what_was_recorded() -> None:
    session = Session()
    session.let.set()
    interrupts: list[int] = []

    def wait() -> None:
        raise KeyboardInterrupt

    session.wait_credit, session.interrupt = wait, lambda: interrupts.append(len(session.taken))  # type: ignore[attr-defined]
    recorder = Recorder(session, lambda: None)
    recorder.code.extend((20, 1, 7, 8))
    recorder.tape = FragmentTape(recorder, None, 5, 1, 0, Counter())  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        recorder.flush()
    assert interrupts == [1] and not recorder.code


@pytest.mark.parametrize(("shares_cores", "side", "batches"), [(False, 4, 2), (True, 4, 0), (True, 128, 2)])
def test_light_ops_on_few_cores_are_handed_over_later(shares_cores: bool, side: int, batches: int) -> None:
    """After a wait too: an early batch would run on the core of the thread that records. Results of many bytes do not wait."""
    session = Session()
    session.let.set()
    session.shares_cores = shares_cores  # type: ignore[attr-defined]
    recorder = Recorder(session, lambda: None)
    spec = contiguous((side, side), "float32")
    number = recorder.define(Template("aten.add.Tensor", (T(0), T(1)), (), (spec, spec), 0, (Out("new", spec),)))
    for _ in range(3):
        session.taken.clear()
        for _ in range(100):
            recorder.code.extend((number, 1, 7, 8, 9))
            if len(recorder.code) > recorder.batch:
                recorder.end_batch()
        assert len(session.taken) == batches
        recorder.flush_ops()
        recorder.note_wait()


class Meanwhile:
    """Calls `call` in another thread, to its end, the first time that it is called."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self._begun = call, False
        self.result: Any = None

    def __call__(self) -> None:
        if self._begun:
            return
        self._begun = True
        thread = threading.Thread(target=lambda: setattr(self, "result", self._call()), daemon=True)
        thread.start()
        thread.join(limit(20))
        assert not thread.is_alive(), "it waits for the thread that waits for it"


def added(side: int, kind: type[Template] = Template) -> Template:
    spec = contiguous((side, side), "float32")
    return kind("aten.add.Tensor", (T(0), T(1)), (), (spec, spec), 0, (Out("new", spec),))


def ready_session() -> tuple[Session, list[list]]:
    """A session that takes every batch at once, and the rows of templates and origins that it has taken."""
    session, rows = Session(), list[list]()
    session.submit = lambda templates, origins, *rest, **asks: rows.extend(templates + origins)  # type: ignore[method-assign]
    return session, rows


def test_two_threads_that_meet_new_ops_get_two_numbers() -> None:
    """One number for both would decode the rows of one op by the template of the other."""
    session, rows = ready_session()
    recorder = Recorder(session, lambda: None)
    other = Meanwhile(lambda: recorder.define(added(3)))

    class Slow(Template):
        def wire(self) -> list:
            other()
            return super().wire()

    number = recorder.define(added(2, Slow))
    assert number != other.result
    recorder.code.extend((number, 1, 7, 8, 9))
    recorder.flush()
    assert [row[0] for row in rows] == [FIRST, FIRST + 1], "in the order of their numbers"
    assert {n: t.ins[0].shape for n, t in recorder.templates.items()} == {number: (2, 2), other.result: (3, 3)}


def test_two_threads_that_fill_the_table_begin_it_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_TEMPLATES", 1)
    session, rows = ready_session()
    other = Meanwhile(lambda: recorder.define(added(3)))
    recorder = Recorder(session, other)
    recorder.define(added(2))
    monkeypatch.setattr(recorder_module, "MAX_TEMPLATES", 2)
    recorder.define(added(4))
    assert (recorder.define(added(5)), other.result, recorder.cleared) == (FIRST + 1, FIRST, 1)
    recorder.code.extend((FIRST, 1, 7, 8, 9))
    recorder.flush()
    assert [row[0] for row in rows] == [FIRST, FIRST + 1] * (len(rows) // 2)


def test_two_threads_that_meet_new_lines_get_two_origins(monkeypatch: pytest.MonkeyPatch) -> None:
    """One origin for both would plan ops of one thread in the signal group of the other."""
    recorder = Recorder(ready_session()[0], lambda: None)
    other = Meanwhile(lambda: recorder.new_origin("b.py", 2, "stage1", False, -1))
    monkeypatch.setattr(recorder_module, "sendable", lambda text, most: other() or text)
    assert recorder.new_origin("a.py", 1, "stage0", False, -1) != other.result


def test_a_line_that_two_threads_meet_has_a_backward_origin_in_both() -> None:
    """One that found the line half noted took its forward origin for a backward one."""
    origins = Origins(Recorder(ready_session()[0], lambda: None))

    def back() -> int:
        return origins._back(origins._intern("a.py", 1, "stage0", -1, False), None)

    other = Meanwhile(back)

    class Slow(dict):
        def __setitem__(self, key: Any, value: Any) -> None:
            other()
            super().__setitem__(key, value)

    origins._forward = Slow()
    assert origins.is_backward(back()) and origins.is_backward(other.result)
