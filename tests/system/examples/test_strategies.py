"""examples/strategies: every strategy trains alike, resumes bit by bit, refuses by name, and compares itself."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gt
from tests.helpers import EXAMPLES

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
    pytest.mark.usefixtures("plain_threads"),
]
FOLDER = EXAMPLES / "strategies"
SMALL = ("--model", "tiny", "--max-length", "16", "--batch-size", "4", "--num-samples", "16", "--epochs", "1", "--lr", "1e-3")
STRATEGIES = ("dp", "zero1", "zero2", "zero3", "offload", "infinity")
LOSSES: dict[str, list[float]] = {}  # of one worker, by flags


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a module of the example by its name; the example's modules are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in [name for name, module in sys.modules.items() if str(FOLDER) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


@pytest.fixture
def train(example: Callable, server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[float]]:
    """Runs the program on workers of the shared server; the losses of its steps."""
    finetune, settings = example("finetune"), example("settings")
    monkeypatch.setenv("GT_TOKEN", server.token)
    monkeypatch.chdir(tmp_path)

    def run(*flags: str, workers: int = 2, config: dict[str, Any] | None = None) -> list[float]:
        try:
            line = (*SMALL, "--nvme-path", str(tmp_path), "--connect", server.address, "--workers", str(workers), *flags)
            chosen = settings.read(finetune.CONFIG if config is None else config, line)
            training = finetune.Training(chosen)
            training.resume()
            progress, _ = finetune.train(training)
            training.finish_save()
            return progress.losses
        finally:
            gt.shutdown()

    return run


@pytest.mark.parametrize("model", ["tiny", "tiny-llama"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_has_the_losses_of_one_worker(train: Callable, strategy: str, model: str) -> None:
    flags = ("--model", model, "--activation-checkpointing") if strategy == "zero3" else ("--model", model)
    if model not in LOSSES:
        LOSSES[model] = train("--model", model, workers=1)
    losses = train(*flags, "--strategy", strategy)
    assert losses == pytest.approx(LOSSES[model], abs=1e-5) and len(losses) == 4 and losses[-1] < losses[0]


@pytest.mark.parametrize("strategy", ["zero2", "offload"])
def test_training_goes_on_with_the_same_bits(train: Callable, strategy: str) -> None:
    flags = ("--strategy", strategy, "--steps", "6", "--micro-batches", "2")
    whole = train(*flags)
    settings = sys.modules["settings"]
    stop, first = iter([False, False, False, True]), []

    class Told:  # true from the third step on, in the midst of an epoch
        def __bool__(self) -> bool:
            return next(stop, True)

    finetune = sys.modules["finetune"]
    original = finetune.train
    try:
        finetune.train = lambda training: original(training, Told())
        first = train(*flags, "--save", "c")
    finally:
        finetune.train = original
    second = train(*flags, "--save", "c")
    assert 0 < len(first) < 6 and first + second == whole
    with pytest.raises(settings.SettingsError, match=r"checkpoint c has seed 42 instead of 7; use the same settings"):
        train(*flags, "--save", "c", "--seed", "7")
    assert json.loads(Path("c/config.json").read_text())["model_type"] == "gpt2"
    continued = train("--model", "c")
    assert continued[0] < whole[0]


def test_compare_makes_a_table_and_a_picture(
    example: Callable, server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GT_TOKEN", server.token)
    picture = tmp_path / "a.png"
    line = (
        *SMALL,
        "--connect",
        server.address,
        "--workers",
        "2",
        "--nvme-path",
        str(tmp_path),
        "--plot",
        str(picture),
        "--compare",
    )
    assert example("finetune").main(line) == 0
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in capsys.readouterr().out.splitlines() if row[:1] == "|"]
    assert [row[0] for row in rows] == ["strategy", *STRATEGIES]
    kept = {row[0]: (row[1], row[2]) for row in rows[1:]}
    assert all(theory == measured for theory, measured in kept.values()), kept
    assert len({row[-1] for row in rows[1:]}) == 1 and float(rows[1][-2]) > 0
    if importlib.util.find_spec("matplotlib"):
        assert picture.read_bytes()[:4] == b"\x89PNG"
    else:
        assert not picture.exists()


# ---- settings: nothing is started


@pytest.mark.parametrize(
    ("config", "flags", "text"),
    [
        ({"modle": "gpt2"}, (), "CONFIG has an unknown key 'modle'; try 'model'"),
        ({"model": "gpt2", "model_name": "tiny"}, (), "CONFIG has 'model' in two spellings, as 'gpt2' and 'tiny'"),
        ({"strategy": "zero4"}, (), "strategy is 'zero4', want one of dp, zero1, zero2, zero3, offload, infinity"),
        ({"epochs": 0}, (), "epochs is 0, want 1 or more"),
        ({"batch_size": "4"}, (), "batch_size is '4', want int | None"),
        ({}, ("--weights", "bf16", "--precision", "fp16"), "leave out precision fp16"),
        ({"deepspeed_config": "/nothing.json"}, (), "deepspeed_config /nothing.json cannot be read"),
        ({"lr": float("nan")}, (), "lr is nan, want 0 or more"),
        ({"seed": 1 << 80}, (), "want 0 or more, below 9.22e+18"),
        ({"max_length": 1}, (), "max_length is 1, want 2 or more: each token is predicted from those before it"),
        *(
            ({"deepspeed_config": config}, (), text)
            for config, text in (
                ({"gradient_clipping": "1.0"}, "gradient_clipping is '1.0', want a number"),
                ({"zero_optimization": {"stage": 2.0}}, "zero_optimization.stage is 2.0, want 0, 1, 2 or 3"),
                ({"bf16": {"enabled": 1}}, "bf16.enabled is 1, want true or false"),
                ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "offload_param needs stage 3"),
                (
                    {
                        "zero_optimization": {
                            "stage": 3,
                            **{
                                f"offload_{kind}": {"device": "nvme", "nvme_path": f"/{kind}"}
                                for kind in ("optimizer", "param")
                            },
                        }
                    },
                    "has two folders for offload, /optimizer and /param; want one",
                ),
            )
        ),
    ],
)
def test_a_wrong_setting_is_named(example: Callable, config: dict[str, Any], flags: tuple[str, ...], text: str) -> None:
    settings = example("settings")
    with pytest.raises(settings.SettingsError) as error:
        settings.read(config, flags)
    assert text in str(error.value)


def test_a_folder_that_cannot_be_saved_to_is_named_before_an_epoch_is_spent(example: Callable, tmp_path: Path) -> None:
    finetune, settings = example("finetune"), example("settings")
    (tmp_path / "file").write_text("text")
    finetune.check_save(str(tmp_path / "deep" / "folder"))
    for folder, text in (
        ("file", "is a file; want a folder"),
        ("file/checkpoint", "file cannot be written: .*; try a folder"),
        ("/proc/checkpoint", "/proc cannot be written: .*; try a folder"),
    ):
        with pytest.raises(settings.SettingsError, match=text):
            finetune.check_save(str(tmp_path / folder))


def test_both_spellings_presets_and_flags(example: Callable) -> None:
    read = example("settings").read
    chosen = read({"model_name": "gpt2-xl", "num_epochs": 3, "num_samples": None}, ["--max_seq_length", "256"])
    assert (chosen.model, chosen.epochs, chosen.num_samples, chosen.max_length) == ("gpt2-xl", 3, None, 256)
    mesh = read({"model": "tiny"}, ["--preset", "mesh"])
    assert (mesh.model, mesh.steps, mesh.warmup, mesh.lr) == ("qwen2.5-14b", 12000, 100, 2e-5)
    assert read({}, ["--preset", "mesh", "--steps", "5", "--batch-size", "none"]).steps == 5


def test_a_batch_divides_or_the_error_names_what_does(example: Callable) -> None:
    settings = example("settings")
    assert settings.batch_of(settings.Settings(batch_size=12, micro_batches=2), 3) == (12, 2)
    assert settings.batch_of(settings.Settings(batch_size=None), 3) == (3, 1)
    assert settings.batch_of(settings.Settings(batch_size=24, batch_per_worker=4), 3) == (24, 2)
    with pytest.raises(settings.SettingsError, match="batch_size 4 does not divide over 3 workers; try --batch-size 3 or 6"):
        settings.batch_of(settings.Settings(batch_size=4), 3)


def test_a_json_of_deepspeed_is_read_or_refused_by_name(example: Callable, tmp_path: Path) -> None:
    settings = example("settings")
    config = {
        "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/scratch", "pin_memory": True},
            "overlap_comm": True,
        },
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "train_batch_size": "auto",
        "bf16": {"enabled": True}, "fp16": {"enabled": False}, "gradient_clipping": 0.5,
    }  # fmt: skip
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    chosen = settings.read({"batch_size": 5}, ["--deepspeed-config", str(path)])
    assert chosen.sharding(4) == {"zero": 3, "offload": {"path": "/scratch", "optimizer": "nvme"}, "precision": "bf16"}
    assert (settings.batch_of(chosen, 4), chosen.clip) == ((24, 3), 0.5)
    assert "zero_optimization.overlap_comm" in settings.deepspeed(config)[2]
    refused = {**config, "optimizer": {"type": "Lamb"}, "zero_optimization": {"stage": 1, "zero_hpz_partition_size": 8}}
    with pytest.raises(
        settings.SettingsError, match=r"does not execute: zero_optimization.zero_hpz_partition_size, optimizer;"
    ):
        settings.read({"deepspeed_config": refused}, [])
    with pytest.raises(settings.SettingsError, match="enables bf16 and fp16"):
        settings.deepspeed({"bf16": {"enabled": True}, "fp16": {"enabled": True}})


@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        (
            '{"train_batch_size": 4, "train_batch_size": 8}',
            (),
            "has the key 'train_batch_size' twice in one object; leave one out",
        ),
        ('{"": 1}', (), "does not execute: ''; leave them out"),
        ("[" * 100_000, (), "cannot be read: it is no JSON: .*want the path of a JSON file"),
        ("{}", ("--strategy", "dp"), "strategy dp and deepspeed_config .* are two strategies; leave one out"),
    ],
)
def test_an_odd_json_is_refused_with_what_to_do(example: Callable, tmp_path: Path, text: str, flags: tuple, said: str) -> None:
    settings = example("settings")
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(settings.SettingsError, match=said):
        settings.read({}, ["--deepspeed-config", str(path), *flags])


def test_data_is_a_file_a_folder_or_an_error(example: Callable, tmp_path: Path) -> None:
    data, settings = example("data"), example("settings")
    (tmp_path / "a.txt").write_text("ab" * 40)
    (tmp_path / "b.jsonl").write_text('{"text": "cd"}\n')
    text, _ = data.read_text(str(tmp_path))
    assert text == "ab" * 40 + "\ncd"
    rows = data.TextDataset(text, lambda part: list(part.encode()), 8, 5)
    assert len(rows) == 5 and bytes(rows[0].tolist()) == b"abababab"
    first, again = (torch.stack(list(data.batches(rows, 2, 0, 1))) for _ in range(2))
    assert torch.equal(first, again) and first.shape == (2, 2, 8)
    (tmp_path / "b.jsonl").write_text("[1]\n")
    with pytest.raises(settings.SettingsError, match=r"b\.jsonl is no text"):
        data.read_text(str(tmp_path))
    with pytest.raises(settings.SettingsError, match="data wikitext is no file and no folder; this makes the folder"):
        data.read_text("wikitext")


def test_the_program_names_the_error_and_the_cure(
    example: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = example("finetune").main
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["--device", "gpu"]) == 1
    assert "no GPU was found, want 2; `gt doctor` says why; --device cpu trains on CPU workers" in capsys.readouterr().err
    assert main(["--model", "nothing"]) == 1 and main(["--max-length", "5000"]) == 1
    errors = capsys.readouterr().err
    assert "model is 'nothing', want a folder with config.json, or one of tiny, gpt2," in errors
    assert "max_length 5000 is more than the 1024 positions of tiny; try --max-length 1024" in errors


def test_no_room_is_said_before_training(example: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    finetune, settings = example("finetune"), example("settings")
    monkeypatch.setattr(gt, "stats", lambda: {"workers": [{"memory_limit": 5 << 30}] * 4}, raising=False)
    with pytest.raises(settings.SettingsError) as error:
        finetune.check_room(settings.Settings(strategy="dp"), 1_000_000_000, 4)
    want = "by dp need 14.90 GiB on each of 4 workers, which have 5.00 GiB; try --strategy zero3 or offload or infinity"
    assert want in str(error.value)
    one = settings.Settings(strategy="infinity", nvme_path="/x").sharding(1)
    assert one == {"zero": 0, "offload": {"path": "/x", "optimizer": "nvme"}, "precision": "fp32"}
    finetune.check_room(settings.Settings(strategy="zero3"), 1_000_000_000, 4)


# ---- the mesh presets fit their hosts


@pytest.mark.parametrize(("preset", "hosts"), [("mesh", 3), ("mesh-32b", 4), ("mesh-70b", 6), ("mesh-70b", 8)])
def test_a_mesh_preset_fits_the_memory_of_its_hosts(example: Callable, preset: str, hosts: int) -> None:
    models = example("models")
    chosen = example("settings").read({}, ["--preset", preset])
    parameters = models.parameters_of(models.config_of(chosen.model, chosen.max_length))
    state = models.theory(parameters, chosen, hosts).backward
    assert state < 0.85 * 128e9, f"{state / 1e9:.1f} GB of 128"  # the rest: activations and copies, as `gt plan` has them
    if preset == "mesh":
        assert 38e9 < state < 40e9
