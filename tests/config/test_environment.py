"""Variables with texts that mean nothing: each is refused by an error that names the variable and the text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gt import api, env
from gt.errors import ConfigError, DispatcherLost
from gt.ir import schema
from gt.launch import job
from gt.launch.launchers import JobPlace
from gt.wire.socket import host_and_port, server_of_environment
from gt.worker.loop import WorkerOptions
from gt.worker.plane import registry
from gt.worker.process import network_links

LONG = "9" * 5000
ADDRESSES = [
    "h", "http://h:1", "h:1/x", "h h:1", "h:70000", "h:0", "h:x", "h:-1", " ", "h:1 ", "::1:80", "[]:1", ":1", "h:", "h:\u0661",
    "h:" + LONG, "[::1:80",
]  # fmt: skip
NUMBERS = ["x", "-1", "0", "1.5", "\u0661", " 1", LONG]
SIZES = ["x", "-1", "0", "1TB", "1.5GiB", "4", "4 G", f"{LONG}GiB", "9999999999GiB"]
BAD: dict[str, tuple[Callable[[], object], list[str]]] = {
    "GT_SERVER": (server_of_environment, ADDRESSES),
    "GT_JOB": (job.running, ["h:1", "h:1 0", "h:1 x", "h 4", f"h:1 {LONG}"]),
    "GT_PORT": (job._port, [*NUMBERS, "65536"]),
    "GT_WORKERS": (lambda: job.workers_of(JobPlace("")), NUMBERS),
    "GT_RANK": (lambda: env.whole("GT_RANK"), ["x", "-1", "1.5", LONG]),
    "GT_GRACE": (lambda: env.seconds("GT_GRACE"), ["x", "-1", "nan", "inf", "1e10", LONG]),
    "GT_STALL_TIMEOUT": (lambda: api._switches(None), ["x", "-1", "nan", "inf", LONG]),
    "GT_PORTS": (network_links.ports, ["x", "0", "5-1", "1-70000", "-1", f"1-{LONG}", "\u0661"]),
    "GT_HEAP_SIZE": (lambda: registry.heap_size(1), SIZES),
    "GT_MEMORY_LIMIT": (lambda: WorkerOptions("h", 1).limit, SIZES),
    "GT_OPS": (schema._load, ["/nowhere", "/", __file__]),
}


@pytest.mark.parametrize("name, text", [(name, text) for name, (_, texts) in BAD.items() for text in texts])
def test_a_text_that_means_nothing_is_refused_by_the_variables_name(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Addresses and sizes were refused without it; a port of `connect(ssh=...)` was a ValueError of int()."""
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=name) as info:
        BAD[name][0]()
    assert f"{text!r:.20}" in str(info.value) or text in str(info.value)
    assert len(str(info.value)) < 300


@pytest.mark.parametrize("text", ADDRESSES)
def test_an_address_that_is_none_says_what_one_looks_like(text: str) -> None:
    with pytest.raises(DispatcherLost, match=r"is not an address: want host:port, such as .* or \[::1\]:\d+, with") as info:
        host_and_port(text)
    assert len(str(info.value)) < 300


def test_addresses_are_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [host_and_port(text) for text in ("h:1", "tcp://h-0.x_y:65535", "[::1]:80", "[fe80::1%eth0]:80", "10.0.0.1:1")]
    assert pairs == [("h", 1), ("h-0.x_y", 65535), ("::1", 80), ("fe80::1%eth0", 80), ("10.0.0.1", 1)]
    monkeypatch.setenv("GT_SERVER", "")  # as unset
    assert server_of_environment("own") == "own"


@pytest.mark.parametrize("text", ["", "\xff", None])
def test_a_token_file_of_the_environment_is_named(text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    monkeypatch.setenv("GT_TOKEN_FILE", str(path))
    with pytest.raises(OSError, match=f"GT_TOKEN_FILE names a file without a token: .*{path}"):
        env.token()
