"""Shared parts of the GPU benchmarks: cases run in processes of their own, and each result is kept at once."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers import ROOT
from tests.helpers.limits import limit

GPU = ROOT / "benchmarks" / "gpu"


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", sys.path[:])
    spec = importlib.util.spec_from_file_location("cases", GPU / "cases.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "cases", module)
    return module


def test_a_case_is_what_its_first_process_prints_last(cases: ModuleType) -> None:
    speak = "import sys, json; print('a word'); print(json.dumps({'n': %d})); print('said', file=sys.stderr)"
    assert cases.together([["-c", speak % 1], ["-c", speak % 2]], 60) == ({"n": 1}, "said\n")


def test_a_case_that_hangs_is_given_up_with_all_it_started_and_says_where_it_was(cases: ModuleType, tmp_path: Path) -> None:
    """Its own child holds a pipe open, which ends with the child."""
    code = f"""
import subprocess, sys, time
def stuck():
    time.sleep(60)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=open({str(tmp_path / "fifo")!r}, "w"))
stuck()
"""
    os.mkfifo(tmp_path / "fifo")
    reading = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    start = time.monotonic()
    row, why = cases.together([["-c", code]], 1.5)
    assert row is None and "given up after 1.5 s" in why and "in stuck" in why
    assert time.monotonic() - start < limit(20)
    os.set_blocking(reading, True)
    assert os.read(reading, 1) == b""  # nobody has it any more
    os.close(reading)


def test_one_process_that_fails_ends_the_others_and_says_why(cases: ModuleType) -> None:
    start = time.monotonic()
    row, why = cases.together([["-c", "import time; time.sleep(60)"], ["-c", "raise SystemExit('no such GPU')"]], 60)
    assert time.monotonic() - start < limit(30)
    assert row is None and "exit codes" in why and "no such GPU" in why


def test_results_are_on_disk_after_each_row(cases: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "out.json"
    report = cases.Report("some.py", path, {"": -8, "ms": 8})
    report.row("a", {"ms": 2.0}, "", lambda row: [f"{row['ms']:.1f}"])
    assert json.loads(path.read_text())["figures"] == {"a": {"ms": 2.0}}
    report.row("b", None, "it broke", lambda row: [])
    assert json.loads(path.read_text())["figures"]["b"] == {"failed": "it broke"}
    report.bar("a over b", 1.2, most=1.03)
    assert "MISSED" in json.loads(path.read_text())["bars"][0]
    assert report.end() == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]["a"] == {"ms": 2.0}


def test_cases_of_rivals_are_read_as_they_are_written(cases: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("native_case", GPU / "native.py")
    assert spec is not None and spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "native_case", native)
    spec.loader.exec_module(native)
    assert native.Case.read("8,4:4:1f1b") == native.Case("1f1b", 2, True, (8, 4), 4)
    assert native.Case.read("4,4,4,0:8:zb-v") == native.Case("zb-v", 2, False, (4, 4, 4, 0), 8)
    assert native.Case.read("ddp@4:eager") == native.Case("ddp", 4, False)
    with pytest.raises(SystemExit, match="schedules"):
        native.Case.read("8,4:4:fastest")


def module_of(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", GPU / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, f"gpu_{name}", module)
    spec.loader.exec_module(module)
    return module


def test_what_the_table_of_all_figures_runs_can_be_asked_for(cases: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    table = module_of("table", monkeypatch)
    said: dict[str, str] = {}
    for item in table.ITEMS:
        script, *rest = item.words
        if script not in said:
            ask = [sys.executable, GPU / script, "--help"]
            said[script] = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
        flags = {word for word in rest if word.startswith("--")} | {"--json"} | ({"--one", "--native"} if item.one else set())
        assert flags <= set(re.findall(r"--[a-z]+", said[script])), item
        layers = {"d12": 12, "d36": 36}.get(rest[rest.index("--model") + 1] if "--model" in rest else "d12")
        for word in rest if script == "bench_pipeline.py" else ():
            if re.match(r"\d+,[\d,]+(\+head)?:\d+:[a-z]", word):
                assert sum(map(int, word.partition(":")[0].removesuffix("+head").split(","))) == layers, word
        assert not item.one or item.one in {other.name for other in table.ITEMS if other.gpus == 1}


def test_the_table_runs_what_there_are_gpus_for_and_goes_on_where_it_was(
    cases: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    table = module_of("table", monkeypatch)
    (tmp_path / "bench.py").write_text(
        "import json, os, sys\n"
        "name, *rest = sys.argv[1:-2]\n"
        "row = {'ms': 61.25, 'gpus': os.environ['CUDA_VISIBLE_DEVICES'], 'rest': rest}\n"
        "bars = ['ms: 3, want at most 2  MISSED'] if name == 'c' else []\n"
        "whole = {'figures': {f'{name} native graph': row}, 'bars': bars, 'ended': name != 'e'}\n"
        "json.dump(whole, open(sys.argv[-1], 'w'))\n"
        "sys.exit(name in 'ce')\n"
    )
    monkeypatch.setattr(table, "HERE", tmp_path)
    monkeypatch.setenv("COMMIT", "abc")
    items = [
        table.Item("a", 1, 10, "bench.py a"),
        table.Item("b", 2, 10, "bench.py b", "a"),
        table.Item("c", 1, 10, "bench.py c 'two words'"),
        table.Item("d", 1, 1000, "bench.py d"),
        table.Item("e", 1, 10, "bench.py e"),
    ]
    one = table.Table(tmp_path, ["4", "6"], 500, False)
    assert [item.name for item in one.run(items)] == ["d"] and sorted(one.failed) == ["c", "e"]
    found = {path.stem: json.loads(path.read_text())["figures"] for path in tmp_path.glob("*.json")}
    assert found["gpu-a-abc"]["a native graph"]["gpus"] == "4" and found["gpu-c-abc"]["c native graph"]["rest"] == ["two words"]
    assert found["gpu-b-abc"]["b native graph"] == {"ms": 61.25, "gpus": "4,6", "rest": ["--one", "61.25"]}
    capsys.readouterr()
    again = table.Table(tmp_path, ["4", "6"], 5000, False)
    assert again.run(items) == [] and again.failed == ["c", "e"]  # what missed a bar still has, what broke off is run again
    begun = [line for line in capsys.readouterr().out.splitlines() if "begun" in line]
    assert begun == ["d: begun on GPU 4", "e: begun on GPU 6"]


@pytest.mark.parametrize("least, most", [(0.0, None), (None, 1.0)])
def test_nan_holds_no_bound_and_is_no_loss(cases: ModuleType, least: float | None, most: float | None) -> None:
    report = cases.Report("some.py", None, {"": -8})
    report.bar("a over b", 0.5, most=most, least=least)
    assert report.end() == 0
    report.bar("c over d", math.nan, most=most, least=least)
    assert report.end() == 1 and "MISSED" in report.bars[-1]
    assert cases.apart([2.0, math.nan], [2.0, 2.0]) == math.inf and cases.apart([2.0, 3.0], [2.0, 2.0]) == 0.5


def test_the_cost_of_awaited_replays_is_measured_beside_plain_torch_with_the_same_bits(tmp_path: Path) -> None:
    """The script compares losses and weights itself."""
    script, path = ROOT / "benchmarks" / "bench_awaited.py", tmp_path / "out.json"
    command = [sys.executable, script, "--parameters", "2", "--rounds", "1", "--calls", "2", "--json", path]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=limit(60), check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    figures = json.loads(path.read_text())["figures"]
    assert json.loads(done.stdout.splitlines()[-1])["figures"] == figures and set(figures) == {"2"}
    for row in figures.values():
        assert row["empty message"] > 0 and row["calls of functions"] > 0
        for way in ("awaited", "pipelined"):
            assert {"wall", "over native", "caller", "client", "dispatcher", "worker", "native's wall"} <= set(row[way])


@pytest.mark.slow
def test_nothing_grows_with_replays_and_a_lost_worker_comes_back(cases: ModuleType) -> None:
    """A short soak: what it looks at, and that its bars hold."""
    row, said = cases.together([[GPU / "soak.py", "--child", "soak", "--model", "mlp", "--replays", 300]], 100)
    assert row is not None and len(row["looks"]) == 10, said
    early, last = row["looks"][1], row["looks"][-1]
    assert set(last["resident"]) == {"client", "gt.server", "gt.worker 0", "gt.worker 1"}
    assert last["descriptors"] == early["descriptors"] and last["tensors"] == early["tensors"]
    assert all(mib < early["resident"][name] + 8 for name, mib in last["resident"].items())
    assert row["lost s"] < 2 and row["back s"] < 10
