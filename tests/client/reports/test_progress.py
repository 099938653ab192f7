"""Bars: on a terminal after a while, nothing elsewhere; no thread."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import gt
from gt.client.exchange import host_buffers
from gt.client.exchange.kept_uploads import KeptUploads
from gt.client.reports import progress
from gt.wire import messages

tqdm = pytest.importorskip("tqdm")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_on(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal as standard error, for the test that calls this: pytest sets its own before each."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0.0)
    return stream


def test_a_terminal_shows_how_far_the_work_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown_on(monkeypatch)
    before = set(threading.enumerate())  # others of this process may end meanwhile
    with progress.bar("loading", 4) as tick:
        for _ in range(4):
            tick(1)
            tick(0)
        assert set(threading.enumerate()) <= before
    assert "gt: loading" in terminal.getvalue() and set(threading.enumerate()) <= before


@pytest.mark.parametrize("rows, columns", [(0, 0), (24, 60)])
def test_a_real_terminal_shows_bars_whether_its_size_is_known(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int) -> None:
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0.0)
    keyboard, screen = pty.openpty()
    try:
        fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        with os.fdopen(screen, "w", closefd=False) as stream:
            monkeypatch.setattr(sys, "stderr", stream)
            with progress.bar("loading", 4) as tick:
                tick(2)
                tick(0)
            stream.write("the end")
        text = ""
        while "the end" not in text:  # the kernel hands it over in pieces
            text += os.read(keyboard, 1 << 16).decode()
    finally:
        os.close(keyboard)
        os.close(screen)
    widest = max(map(len, text.replace("\r", "\n").splitlines()))
    assert "gt: loading:  50%" in text and widest <= (columns or 80)


def test_short_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown_on(monkeypatch)
    monkeypatch.setattr(progress, "DELAY_SECONDS", 1e6)
    with progress.bar("loading", 4) as tick:
        tick(4)
        tick(0)
    assert "loading" not in terminal.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO(), None, object()])
def test_a_log_shows_nothing(monkeypatch: pytest.MonkeyPatch, stream: Any) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "opened", lambda: pytest.fail("a bar was opened"))
    with progress.bar("loading", 4) as tick:
        tick(4)


def test_without_tqdm_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown_on(monkeypatch)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with progress.bar("loading", 4) as tick:
        tick(4)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("shape", [(1000, 7), (3, 999), (5,), ()])
def test_a_long_copy_is_the_same_array(monkeypatch: pytest.MonkeyPatch, shape: tuple) -> None:
    shown_on(monkeypatch)
    monkeypatch.setattr(host_buffers, "LONG_COPY_BYTES", 16)
    monkeypatch.setattr(host_buffers, "PART_BYTES", 256)
    source = np.random.default_rng(0).standard_normal(shape).T
    copied = host_buffers.copy(np.empty(source.shape, source.dtype), source)
    assert (copied == source).all() and copied.flags.c_contiguous


def test_a_plan_shows_its_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown_on(monkeypatch)
    gt.plan(lambda: (gt.ones(8, 8) @ gt.ones(8, 8)).sum().item(), workers=1)
    assert "gt: planning" in terminal.getvalue()


def test_saving_and_loading_show_their_bytes(session: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    session()
    kind = progress.opened()
    monkeypatch.setattr(progress, "opened", lambda: lambda **about: kind(mininterval=0, miniters=1, **about))
    state = {"remote": gt.ones(64, 64), "here": torch.ones(1000)}
    terminal = shown_on(monkeypatch)
    gt.save(state, tmp_path / "a-checkpoint")
    gt.load(tmp_path / "a-checkpoint", device="cpu")
    text = terminal.getvalue()
    assert "gt: saving a-checkpoint" in text and "20.4k/20.4k" in text
    assert "gt: loading a-checkpoint: 20.4kB" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_a_wait_for_uploads_shows_their_bytes(session: Any, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    session()
    stream = shown_on(monkeypatch) if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    assert torch.ones(1 << 10).to("remote").sum().item() == 1 << 10
    assert "uploading" not in stream.getvalue(), "a short one"
    assert torch.ones(5 << 20).to("remote").sum().item() == 5 << 20
    assert ("gt: uploading" in stream.getvalue() and "21.0M" in stream.getvalue()) is terminal


def test_bytes_of_an_upload_count_once_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, sent = shown_on(monkeypatch), []
    arenas: Any = SimpleNamespace(take=lambda nbytes: None)
    uploads = KeptUploads(arenas, lambda message, parts: sent.append(message.total))
    size = 5 * messages.CHUNK
    for tensor in (7, 8):
        uploads.keep(tensor, np.zeros(size, np.uint8))
    assert uploads.waiting_bytes == 2 * size
    with uploads.bar() as look:
        uploads.begin(messages.UploadRequest(7, 1, [[[0, size]]], 2 * messages.CHUNK))
        look(0)
        assert uploads.waiting_bytes == 2 * size - 2 * messages.CHUNK and len(sent) == 2
        uploads.begin(messages.UploadRequest(7, 2, [[[0, size]]], size))  # of another worker, which gets all of them
        assert uploads.waiting_bytes == size
        uploads.send_chunks(1, size)
        uploads.release([7])
        look(0)
        assert uploads.waiting_bytes == size
        uploads.release([8])
        look(0)
        look(0)
    assert "100%" in terminal.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_first_replay_shows_that_workers_may_compile(session: Any, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    session()
    stream = shown_on(monkeypatch) if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    step = gt.compile(lambda x: (x @ x).sum())
    x = gt.ones(8, 8)
    for _ in range(5):
        assert step(x).item() == 512.0
    assert ("first replay of a captured step" in stream.getvalue()) is terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_a_recording_shows_its_ops(session: Any, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """The bar is no output of the function, for which its calls would not be captured."""
    session()
    stream = shown_on(monkeypatch) if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    kind = progress.opened()
    monkeypatch.setattr(progress, "opened", lambda: lambda **about: kind(mininterval=0, miniters=1, **about))

    def long_step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(300):
            x = x * 1.5 - 1.0
        return x.sum()

    step = gt.compile(long_step)
    for _ in range(3):
        assert step(gt.ones(2) * 2.0).item() == 4.0
    assert (re.search(r"gt: recording .*long_step: [1-9]\d* ops", stream.getvalue()) is not None) is terminal
    assert step.explain().startswith("test_a_recording_shows_its_ops.<locals>.long_step: 1 program"), step.explain()
