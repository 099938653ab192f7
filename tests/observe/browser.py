"""A headless chromium, driven by the DevTools protocol over its pipe: no package is needed, only the browser."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.limits import limit

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--mute-audio", "--disable-background-networking", "--disable-component-update",
    "--disable-features=Translate,OptimizationHints", "--no-default-browser-check", "--remote-debugging-pipe",
)  # fmt: skip

# The browser reads commands from descriptor 3 and answers on 4
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def chromium() -> str:
    """Path of an installed browser, "" without one."""
    return next((path for name in NAMES if (path := shutil.which(name))), "")


class Browser:
    """A browser with one page. `errors`: texts of the page's exceptions, console errors and policy violations."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 900) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        arguments = [chromium(), *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(theirs_in), str(theirs_out), *arguments], pass_fds=(theirs_in, theirs_out),
            stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        self.errors: list[str] = []
        target = self.send("Target.getTargets")["targetInfos"]
        page = next(row["targetId"] for row in target if row["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Performance"):
            self.send(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *about: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._session = ""
        try:
            self.send("Browser.close")
            self._process.wait(limit(10))
        except (OSError, RuntimeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command; RuntimeError if the browser refuses it or is gone."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + limit(30)
        while True:
            answer = self._next(end)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], max(0.0, end - time.monotonic()))[0]:
                raise RuntimeError("the browser does not answer")
            part = os.read(self._in, 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self._buffer += part
        body, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(body)
        if "method" in message:
            self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        name, params = message["method"], message["params"]
        self.events = [*self.events, message] if name.startswith("Tracing") else self.events
        if name == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"].get("exception", {}).get("description", params)))
        elif name == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(str([one.get("description", one.get("value")) for one in params["args"]]))
        elif name == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    # ---- what tests do

    def resize(self, width: int, height: int, mobile: bool = False) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def theme(self, name: str) -> None:
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script:.80}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = 20.0) -> Any:
        """The value of an expression, once it is true: it is asked for in each frame of the page."""
        end = time.monotonic() + limit(seconds)
        tries = f"""new Promise((done) => {{
            const began = performance.now();
            const look = () => {{
                let value; try {{ value = {script}; }} catch {{ value = null; }}
                if (value || performance.now() - began > 1000) done(value); else setTimeout(look, 30);
            }};
            look();
        }})"""
        while time.monotonic() < end:
            try:
                value = self.run(tries)
            except RuntimeError as error:  # the page was left meanwhile
                if "context" not in str(error) and "navigated" not in str(error):
                    raise
                continue
            if value:
                return value
        raise AssertionError(
            f"not true within {seconds:g} s: {script}; the page says {self.run('document.body.innerText')!r:.1500}"
        )

    def key(self, name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def screenshot(self, path: Path, whole: bool = True, clip: dict[str, float] | None = None) -> None:
        more: dict[str, Any] = {"clip": {**clip, "scale": 1}} if clip else {}
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **more)["data"]
        path.write_bytes(base64.b64decode(data))

    def traced(self, act: Callable[[], None]) -> list[dict[str, Any]]:
        """The events of the browser's performance trace while something happens."""
        self.events = []
        self.send("Tracing.start", traceConfig={"includedCategories": ["devtools.timeline", "blink.user_timing", "v8"]})
        act()
        self.send("Tracing.end")
        end = time.monotonic() + limit(30)
        while not any(message["method"] == "Tracing.tracingComplete" for message in self.events):
            self._next(end)
        rows = [row for m in self.events if m["method"] == "Tracing.dataCollected" for row in m["params"]["value"]]
        self.events = []
        return rows
