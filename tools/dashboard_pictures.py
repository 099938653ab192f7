"""Writes the pictures of docs/observe.md: `python -m tools.dashboard_pictures [FOLDER]`. Needs chromium; takes a minute or two.

The tuning demo trains on eight CPU workers, the page is opened in a headless browser, and each panel is cut out of it.
Errors are of a program that reads beyond a tensor, and of a worker that is killed; `--only errors` makes their pictures alone.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.observe.browser import Browser

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "examples" / "tuning_demo"
FLAGS = ("--compile", "--schedule", "1f1b", "--microbatches", "8")
LINK, LISTENING = re.compile(r"gt dashboard: (http://\S+)"), re.compile(r"listening on (\S+)")
PANELS = ("pipeline", "memory", "curves", "traffic", "layouts")
TABLES = ("workers", "sessions", "lines", "log")  # drawn besides, once the log is followed
MAX_HEIGHT = 620.0  # of a panel's picture
FAILING = """
import sys, torch, gt
gt.connect(sys.argv[1])
losses = torch.arange(8.0).to("remote")
try:
    print(losses[torch.tensor([9]).to("remote")].item())
except gt.OpFailed:
    sys.stdin.readline()
"""
SHARP = "[...document.querySelectorAll('canvas')].every((c) => !c.chart.draw || Math.abs(c.width - c.clientWidth) <= 1)"
READY = f"{list(PANELS)}.every((id) => document.getElementById(id).dataset.state === 'ready')"


@contextmanager
def server(workers: int = 8, *options: str) -> Iterator[tuple[str, str, list[subprocess.Popen]]]:
    """Address, the page's link and processes: the server first, then workers, for as long as the context lasts."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "gt.server", "-p", "0", "--dashboard", "0", *options]
    processes = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)]
    try:
        address, link = (_line(processes[0], pattern) for pattern in (LISTENING, LINK))
        port = address.rpartition(":")[2]
        for _ in range(workers):
            processes.append(subprocess.Popen([sys.executable, "-m", "gt.worker", "-p", port], env=env))
        yield address, link, processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
        assert processes[0].stdout is not None
        processes[0].stdout.close()


@contextmanager
def demo(address: str, steps: int = 100_000, flags: tuple[str, ...] = FLAGS) -> Iterator[subprocess.Popen]:
    """The tuning demo, in a process of its own for as long as the context lasts."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GT_CONFIG": str(DEMO / "sharding_config.yaml"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(DEMO / "train.py"), "--connect", address, "--steps", str(steps), *flags]
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _line(process: subprocess.Popen, pattern: re.Pattern[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := pattern.search(line):
            return found[1]
    raise SystemExit("the server has ended")


def pictures(browser: Browser, folder: Path) -> None:
    """The whole page in light, dark and on a phone's width, then each panel."""
    for name, theme, width in (("light", "light", 1280), ("dark", "dark", 1280), ("phone", "light", 390)):
        browser.theme(theme)
        browser.resize(width, 860 if width > 500 else 780, mobile=width < 500)
        browser.run("new Promise((done) => setTimeout(done, 2500))")
        browser.screenshot(folder / f"dashboard_{name}.png", whole=False)
    browser.resize(1040, 3600)
    browser.run("document.querySelector('#log button').click()")
    browser.wait("document.querySelector('#log pre').innerText.includes('model.py:')", 120)  # the first lines are of a look
    browser.run("new Promise((done) => setTimeout(done, 2500))")
    for panel in (*PANELS, *TABLES):
        cut_out(browser, panel, folder)


def cut_out(browser: Browser, panel: str, folder: Path, name: str = "") -> None:
    """The picture of one panel, by its name or another. Charts are drawn when they are in sight."""
    browser.run(f"document.getElementById('{panel}').scrollIntoView()")
    browser.wait(SHARP)
    box = browser.run(
        f"(() => {{ const b = document.getElementById('{panel}').getBoundingClientRect();"
        " return {x: b.x + scrollX, y: b.y + scrollY, width: b.width, height: b.height}; })()"
    )
    browser.screenshot(folder / f"dashboard_{name or panel}.png", clip={**box, "height": min(box["height"], MAX_HEIGHT)})


def errors(browser: Browser, folder: Path) -> None:
    """The panels of errors and workers, of a server with two workers of which one is killed."""
    with server(2) as (address, link, processes), tempfile.TemporaryDirectory() as sources:
        source = Path(sources) / "evaluate.py"
        source.write_text(FAILING)
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        program = subprocess.Popen([sys.executable, str(source), address], env=env, stdin=subprocess.PIPE, text=True)
        try:
            browser.resize(1040, 3600)
            browser.open(link)
            browser.wait("document.querySelectorAll('#workers tbody tr').length === 2", 120)
            browser.wait("document.getElementById('errors').innerText.includes('evaluate.py')", 120)
            processes[-1].kill()
            browser.wait("document.getElementById('errors').innerText.includes('is lost')", 60)
            cut_out(browser, "errors", folder)
            browser.wait("document.getElementById('workers').innerText.includes('lost')", 60)
            cut_out(browser, "workers", folder, "lost")
        finally:
            program.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--only", choices=("errors",), help="make these pictures alone")
    given = parser.parse_args()
    folder = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile, Browser(Path(profile)) as browser:
        errors(browser, folder)
    if given.only:
        return
    with server() as (address, link, _), tempfile.TemporaryDirectory() as profile, Browser(Path(profile)) as browser:
        browser.open(link)
        with demo(address):
            browser.wait(READY, 240)
            browser.run("new Promise((done) => setTimeout(done, 20000))")
            pictures(browser, folder)
            if browser.errors:
                raise SystemExit("\n".join(browser.errors))


if __name__ == "__main__":
    main()
