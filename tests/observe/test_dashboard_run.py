"""The dashboard beside real runs: the tuning demo on eight workers, two programs, and a worker that is killed."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

import pytest

from tests.helpers.limits import limit
from tests.observe.browser import Browser, chromium
from tools.dashboard_pictures import READY, demo, server

needs_browser = pytest.mark.skipif(not chromium(), reason="no chromium is installed: apt-get install chromium")
pytestmark = [needs_browser, pytest.mark.slow, pytest.mark.timeout(limit(400))]

CHOOSE = "{{const s = document.getElementById('session'); s.value = '{}'; s.dispatchEvent(new Event('change'))}}"


def test_two_programs_and_a_killed_worker_are_on_the_page() -> None:
    with server() as (address, link, processes), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        with Browser(Path(folder), 1280, 3000) as browser, demo(address, flags=("--compile", "--schedule", "1f1b")):
            browser.open(link)
            browser.wait(READY, 300)
            title = browser.run("document.querySelector('#pipeline h3').innerText")
            assert "train.py · 1f1b" in title and "predicted" in title
            lanes = browser.run("document.querySelectorAll('#memory canvas').length")
            rows = browser.run("document.querySelectorAll('#workers tbody tr').length")
            assert lanes == rows == 8
            browser.wait("document.querySelector('#layouts').innerText.includes('blocks.0.qkv_weight')", 60)
            browser.wait("document.querySelector('#curves').innerText.includes('session 0 · loss')", 60)
            with demo(address, flags=()):  # eager
                browser.wait("document.querySelectorAll('#sessions tbody tr').length === 2", 120)
                browser.wait("document.querySelector('#curves').innerText.includes('session 1 · ops a second')", 60)
                assert browser.run("document.querySelectorAll('#session option').length") == 3
                browser.run(CHOOSE.format("1"))
                browser.wait("document.querySelectorAll('#sessions tbody tr').length === 1")
                browser.wait("document.getElementById('pipeline').dataset.state === 'empty'")
                browser.run(CHOOSE.format("-1"))
                browser.run("document.querySelector('#log button').click()")
                browser.wait("document.querySelector('#log pre').innerText.includes('train.py:')", 60)
                processes[3].send_signal(signal.SIGKILL)
                browser.wait("[...document.querySelectorAll('#workers .state')].some((s) => s.innerText === 'lost')", 60)
                browser.wait("document.querySelector('#errors').innerText.includes('is lost: its connection ended')")
                assert "7" in browser.run("document.querySelector('[data-figure=workers]').innerText")
            processes[0].terminate()
            browser.wait("document.body.dataset.link === 'lost'", 60)
            assert browser.errors == [] or all("ERR_" in error for error in browser.errors), browser.errors
