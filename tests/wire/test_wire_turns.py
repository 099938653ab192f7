"""A link's turns are taken by whoever is at hand: nothing waits for a thread that sleeps, whatever comes when."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import random
import signal
import sys
import threading
import time

import pytest

from gt.wire import codec, dealer, signals
from gt.wire.dealer import STEP_SECONDS, Dealer
from gt.wire.messages import Ack, Fetch, Report, Stats, UploadChunk
from gt.wire.router import Arrived, Router
from gt.wire.signals import Latch, Waiters, uninterrupted
from tests.helpers.limits import limit

ROUNDS = int(os.environ.get("GT_TEST_ROUNDS", "1500"))  # of each thread
PATIENCE = limit(20.0)  # seconds; what is lost would wait for ever, or for the next turn by the clock


class Echo:
    """A dispatcher's end that answers each Fetch with a Report and each Stats with a burst of Acks, now or somewhat later."""

    def __init__(self, seed: int) -> None:
        self.router = Router("127.0.0.1", 0)
        self._random, self._over = random.Random(seed), False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        draw, late = self._random, []
        while not self._over:
            found = self.router.poll(0.0 if late else 0.05)
            late += [item for item in found if isinstance(item, Arrived)]
            draw.shuffle(late)
            for item in late[: draw.randrange(1, 4)]:
                message = codec.unpack(item.body)
                late.remove(item)
                if isinstance(message, Stats):
                    for n in range(message.request):
                        self.router.send(item.peer, Ack(n))
                elif isinstance(message, Fetch):
                    self.router.send(item.peer, Report(message.request, {}))

    def close(self) -> None:
        self._over = True
        self._thread.join()
        self.router.close()


class Caller:
    """Asks over a link from several threads, as a session does: whoever leads takes in the others' answers."""

    def __init__(self, echo: Echo, **options) -> None:
        self.answers = {n: threading.Event() for n in range(8 * ROUNDS)}
        self.acks = 0
        self.lost: list[str] = []
        self.gone = threading.Event()
        self.link = Dealer(f"127.0.0.1:{echo.router.port}", self._take, self._lose, **options)

    def _lose(self, reason: str) -> None:
        self.lost.append(reason)
        self.gone.set()

    def _take(self, message, frames) -> None:
        if isinstance(message, Report):
            self.answers[message.request].set()
        else:
            self.acks += 1

    def ask(self, number: int, draw: random.Random) -> None:
        answer = self.answers[number]
        self.link.send(Fetch(number, 0), wake=False)
        if draw.random() < 0.3:
            self.link.push()
        elif draw.random() < 0.3:
            self.link.wake()
        if draw.random() < 0.2 or not self.link.lead(answer.is_set, draw.choice((0.0, 0.001, PATIENCE))):
            self.link.resume()
            assert answer.wait(PATIENCE), f"answer {number} does not come"

    def run(self, first: int, rounds: int, seed: int) -> None:
        draw = random.Random(seed)
        for n in range(first, first + rounds):
            if draw.random() < 0.05:
                self.link.send(Stats(draw.randrange(300)), wake=False)
                self.link.push()
            if draw.random() < 0.02:
                for _ in range(draw.randrange(100)):  # more than libzmq holds: they wait here for room
                    self.link.send(UploadChunk(1, 0, 1 << 16), (bytes(1 << 16),), wake=False)
                self.link.push()
            self.ask(n, draw)


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("threads", [1, 4])
def test_no_answer_is_left_lying(turns, threads, monkeypatch):
    if not turns:
        monkeypatch.setattr(Dealer, "_pause", lambda self: 1_000_000)  # no turn by the clock mends what was overlooked
    echo = Echo(threads)
    calls: list[int] = []
    caller = Caller(echo, on_turn=(lambda: calls.append(0)) if turns else None)
    failed: list[BaseException] = []

    def work(index: int) -> None:
        try:
            caller.run(index * ROUNDS, ROUNDS, index)
        except BaseException as error:
            failed.append(error)

    others = [threading.Thread(target=work, args=(n,)) for n in range(1, threads)]
    for thread in others:
        thread.start()
    try:
        caller.run(0, ROUNDS, 0)
    finally:
        for thread in others:
            thread.join()
        caller.link.close()
        echo.close()
    assert not failed and not caller.lost and bool(calls) == turns


def test_signals_while_leading_raise_there_and_tear_nothing():
    """Ctrl-C at any moment of a turn: the wait ends, and the link goes on."""
    echo = Echo(0)
    caller = Caller(echo)
    stop, rings = threading.Event(), 0
    draw = random.Random(1)

    def ring() -> None:
        while not stop.wait(draw.random() * 0.002):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    armed = [False]

    def interrupt(number: int, frame: object) -> None:
        if armed[0]:  # once, or the next could end the handling of this one
            armed[0] = False
            signal.default_int_handler(number, frame)

    number, before = 0, signal.signal(signal.SIGINT, interrupt)
    ringer = threading.Thread(target=ring)
    try:
        ringer.start()
        while rings < 200:
            try:
                armed[0] = True
                while True:
                    number += 1
                    with uninterrupted():
                        caller.link.send(Fetch(number % ROUNDS, 0), wake=False)
                    caller.link.push()
                    caller.link.lead(caller.answers[number % ROUNDS].is_set, 1.0)
            except KeyboardInterrupt:
                rings += 1
    finally:
        try:
            stop.set()
            ringer.join()
        finally:
            signal.signal(signal.SIGINT, before)
    last = caller.answers[8 * ROUNDS - 1]
    caller.link.send(Fetch(8 * ROUNDS - 1, 0), wake=False)
    assert caller.link.lead(last.is_set, PATIENCE) or last.wait(PATIENCE)
    caller.link.close()
    echo.close()
    assert not caller.lost


def test_the_links_thread_takes_few_turns_while_another_takes_them():
    """Each would take the interpreter from a thread that sends. A few remain, which see that the connection has ended."""
    echo, turns = Echo(0), threading.Semaphore(0)
    link = Dealer(f"127.0.0.1:{echo.router.port}", lambda *_: None, lambda _: None, on_turn=turns.release)
    try:
        assert turns.acquire(timeout=PATIENCE)  # so it is connected
        link._aside = link._due = math.inf  # as after each push, for a thread that pushes all the time
        start = time.monotonic()
        while turns.acquire(blocking=False):
            pass
        for _ in range(6):
            assert turns.acquire(timeout=PATIENCE)
        # Of these, one may have begun before, and one have been taken before the thread saw that it is aside
        assert time.monotonic() - start > 3 * STEP_SECONDS
    finally:
        link.close()
        echo.close()


def test_a_turn_with_nothing_to_do_asks_for_events_once(monkeypatch):
    """The first look has consumed the descriptor's signal for what came before, and nothing has used the socket since."""
    echo = Echo(1)
    caller = Caller(echo)
    caller.ask(0, random.Random(1))
    here, looks = threading.get_ident(), 0
    events_of = dealer.events_of

    def counted(sock):
        nonlocal looks
        looks += threading.get_ident() == here
        return events_of(sock)

    monkeypatch.setattr(dealer, "events_of", counted)
    of_turns = set()
    for _ in range(50):
        before = looks
        caller.link.push()
        of_turns.add(looks - before)
    caller.link.close()
    echo.close()
    assert of_turns - {0} == {1}  # 0: the link's thread was in a turn


def test_the_end_of_a_link_ends_a_lead():
    echo = Echo(0)
    caller = Caller(echo)
    caller.link.send(Fetch(0, 0))
    assert caller.link.lead(caller.answers[0].is_set, PATIENCE) or caller.answers[0].wait(PATIENCE)
    closer = threading.Timer(0.05, echo.close)
    closer.start()
    start = time.monotonic()
    assert not caller.link.lead(lambda: False, PATIENCE)
    assert time.monotonic() - start < PATIENCE / 2
    closer.join()
    assert caller.gone.wait(PATIENCE)
    caller.link.close()
    assert len(caller.lost) == 1


def test_handlers_run_on_leaving():
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with uninterrupted():
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
            assert seen == []
        assert seen == [signal.SIGINT]
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def terminations():
    """SIGTERMs that a handler of the program's own has seen."""
    seen: list[int] = []

    def terminate(number: int, frame: object) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGTERM, terminate), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield seen
        assert signal.getsignal(signal.SIGTERM) is terminate
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])


@pytest.mark.parametrize("at", range(4))  # of the changes of handlers: two on entering, two on leaving
@pytest.mark.parametrize("late", [False, True])
def test_ctrl_c_while_handlers_are_changed_loses_no_other(at, late, terminations, monkeypatch):
    changes = iter(range(100))

    def change(number: int, handler: object) -> None:
        now = next(changes) == at
        if now and not late:
            signal.raise_signal(signal.SIGINT)
        signals_set(number, handler)
        if now and late:
            signal.raise_signal(signal.SIGINT)

    signals_set = signals._set
    monkeypatch.setattr(signals, "_set", change)
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        pass
    signal.raise_signal(signal.SIGTERM)
    assert terminations == [signal.SIGTERM]


def test_the_thread_that_has_forked_delays_handlers_in_the_child():
    """It is the main thread there, which runs them."""
    codes: list[int] = []

    def fork() -> None:
        child = os.fork()
        if not child:
            seen: list[int] = []
            signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
            with uninterrupted():
                os.kill(os.getpid(), signal.SIGUSR1)
                inside = len(seen)
            os._exit(10 * inside + len(seen))
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    assert codes == [1]


def test_two_handlers_run_on_leaving_though_one_raises(terminations):
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert terminations == []
    assert terminations == [signal.SIGTERM]


def test_a_handler_that_is_not_put_back_delays_nothing_and_the_next_block_puts_it_back(terminations, monkeypatch):
    with monkeypatch.context() as patch, uninterrupted():
        patch.setattr(signals, "_set", lambda number, handler: None)  # as if Ctrl-C came at each change
        left = signal.getsignal(signal.SIGTERM)
    signals._set(signal.SIGTERM, left)
    signal.raise_signal(signal.SIGTERM)
    assert terminations == [signal.SIGTERM]
    with uninterrupted():
        signal.raise_signal(signal.SIGTERM)
        assert terminations == [signal.SIGTERM]
    assert terminations == [signal.SIGTERM] * 2


@pytest.mark.parametrize("at", range(24))
def test_a_wait_that_ctrl_c_ends_at_any_moment_is_a_keyboard_interrupt(at):
    """threading.Event ended in a RuntimeError now and then: its lock had been released already."""
    latch, events = Latch(), iter(range(1000))

    def press(frame, event, value):
        if next(events) == at:
            sys.setprofile(None)
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        sys.setprofile(press)
        try:
            assert not latch.wait(1e-3)
        finally:
            sys.setprofile(None)
    threading.Thread(target=latch.set).start()
    assert latch.wait(limit(20))


def test_waiting_threads_ask_again_at_each_change():
    waiters, asked, numbers = Waiters(), queue.SimpleQueue(), []

    def ready():
        asked.put(len(numbers))
        return len(numbers) == 3

    threads = [threading.Thread(target=waiters.wait_for, args=(ready,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(3):
        for _ in threads:
            assert asked.get(timeout=limit(20)) == number
        numbers.append(number)
        waiters.notify_all()
    for thread in threads:
        thread.join(limit(20))
        assert not thread.is_alive()
    assert not waiters.wait_for(lambda: False, 1e-3) and waiters.wait_for(lambda: True)


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_other_signals_whose_handler_raises_are_delayed_too(number):
    """As of signal.alarm with a TimeoutError: in the middle of a turn it ended the session."""

    def late(number, frame):
        raise TimeoutError

    before, whole = signal.signal(number, late), []
    try:
        with pytest.raises(TimeoutError), uninterrupted():
            signal.raise_signal(number)
            whole.append(True)
        assert whole and signal.getsignal(number) is late
    finally:
        signal.signal(number, before)
