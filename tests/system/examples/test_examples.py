"""The examples that people look for train, at small sizes: on one worker, and split by a ready config."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.helpers import CONFIGS, EXAMPLES, ROOT
from tests.helpers.limits import limit
from tests.house.test_documents import environment

Session = Callable[..., None]
SMALL = ("--steps", "12", "--every", "4", "--batch", "4", "--context", "16", "--layers", "2", "--heads", "2", "--width", "32")
HF = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
PLAIN: dict[tuple[str, ...], list[float]] = {}  # losses of plain torch, by flags
pytestmark = pytest.mark.usefixtures("plain_threads")
TENSORBOARD = pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports an example by its name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(EXAMPLES) in str(sys.modules[name].__file__):
            del sys.modules[name]


@pytest.mark.parametrize("config", ["", str(CONFIGS / "dp2.yaml")])
def test_nanogpt(session: Session, example: Callable[[str], Any], config: str, capsys: pytest.CaptureFixture[str]) -> None:
    session(config)
    losses = example("nanogpt").main([str(ROOT / "README.md"), *SMALL])
    assert losses[-1] < losses[0] and "characters/s" in capsys.readouterr().out


def test_nanogpt_is_one_short_file() -> None:
    assert len((EXAMPLES / "nanogpt.py").read_text().splitlines()) < 200


@TENSORBOARD
def test_nanogpt_writes_for_tensorboard(session: Session, example: Callable[[str], Any], tmp_path: Any) -> None:
    session()
    example("nanogpt").main([str(ROOT / "README.md"), *SMALL, "--log", str(tmp_path)])
    assert list(tmp_path.glob("events.*"))


@pytest.mark.parametrize("config", ["", str(CONFIGS / "dp2.yaml")])
def test_vision(session: Session, example: Callable[[str], Any], config: str) -> None:
    session(config)
    assert example("vision").main(["--steps", "12", "--batch", "16"]) > 0.45


@pytest.mark.parametrize("config", ["", str(CONFIGS / "dp2.yaml")])
def test_detection(session: Session, example: Callable[[str], Any], config: str) -> None:
    session(config)
    small = ["--steps", "9", "--every", "4", "--batch", "4", "--width", "4"]
    losses, plain = (example("detection").main([*small, "--device", device])[0] for device in ("remote", "cpu"))
    assert losses == pytest.approx(plain) and losses[-1] < losses[0]


def test_detection_keeps_the_best_of_boxes_that_overlap(session: Session, example: Callable[[str], Any]) -> None:
    session("")
    detection = example("detection")
    boxes = torch.tensor(
        [[0, 0, 10, 10], [1, 0, 11, 10], [20, 20, 30, 30], [5, 0, 15, 10], [20, 20, 30, 31]], dtype=torch.float
    )
    scores = torch.tensor([0.5, 0.9, 0.3, 0.2, 0.4])
    centres, classes = torch.tensor([[5.0, 5.0], [12.0, 5.0], [29.0, 29.5], [40.0, 40.0]]), torch.tensor([[1, 0, 1, -1, 0]])
    for device in ("cpu", "remote"):
        assert detection.suppress(boxes.to(device), scores.to(device)).tolist() == [1, 4, 3]
        kinds, wanted = detection.match(centres.to(device), boxes[None].to(device), classes.to(device))
        assert kinds.tolist() == [[1, -1, 1, -1]] and wanted[0, 2].tolist() == [20, 20, 30, 30]


@HF
@pytest.mark.parametrize("config", ["", "llama/dp2.yaml", "llama/tp2pp2.yaml"])
@pytest.mark.parametrize("flags", [(), ("--lora", "4")])
def test_finetune_llama(session: Session, example: Callable[[str], Any], config: str, flags: tuple[str, ...]) -> None:
    session(str(CONFIGS / config) if config else "")
    losses = example("finetune_llama").main(["--steps", "11", "--batch", "4", *flags])
    if flags not in PLAIN:
        PLAIN[flags] = example("finetune_llama").main(["--steps", "11", "--batch", "4", *flags, "--device", "cpu"])
    assert losses == pytest.approx(PLAIN[flags])
    assert flags or losses[-1] < losses[0]


@HF
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_finetune_llama_by_trainer(session: Session, example: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "remote")  # restored after the test
    session(str(CONFIGS / "llama" / "dp2.yaml"))
    losses = example("finetune_llama").main(["--steps", "10", "--batch", "4", "--trainer"])
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("nanogpt.py nosuch.txt", "nosuch.txt is no file"),
        ("nanogpt.py README.md --heads 3", "--width 128 cannot be split into 3 equal --heads"),
        ("vision.py --batch 0", "--steps and --batch want at least 1"),
        ("tuning_demo/train_simple.py --steps 0", "train_simple.py: error: --steps is 0, want at least 1"),
        ("tuning_demo/launch.py --steps 5", "flags for train.py stand behind --"),
    ],
)
def test_a_wrong_flag_of_an_example_is_refused_at_once(command: str, says: str) -> None:
    name, *flags = command.split()
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *flags], cwd=ROOT, env=environment(), capture_output=True, text=True,
        timeout=limit(60),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "") and says in done.stderr
