"""examples/gpt2: the losses of plain torch, llm.c's files to the byte, resuming, samples, and a line for each error."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import gt
from tests.helpers import ROOT, longer
from tests.helpers.limits import limit
from tests.helpers.processes import unhurried

EXAMPLE = ROOT / "examples" / "gpt2"
MODULES = ("model", "checkpoint", "train", "prepare_data")  # the tuning demo has some of these names too
TEXT = "".join(f"{n} and {n * n % 97}, which is {'even' if n % 2 == 0 else 'odd'};\n" for n in range(2000))
STEPS = 20


@pytest.fixture(scope="module")
def gpt2() -> Iterator[Any]:
    """The example's modules."""
    before = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.modules.update(before)


@pytest.fixture(scope="module")
def data(gpt2: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, its tokens by bytes, and their tokenizer."""
    folder = tmp_path_factory.mktemp("gpt2")
    (folder / "text.txt").write_text(TEXT)
    gpt2.prepare_data.main([str(folder / "text.txt"), "--to", str(folder)])
    return folder


@pytest.fixture
def run(gpt2: Any, data: Path, server: Any, monkeypatch: pytest.MonkeyPatch, plain_threads: None) -> Callable[..., list]:
    """train.py with these flags in the folder of the data; its workers are the shared server's. Gives the losses."""
    monkeypatch.chdir(data)
    monkeypatch.setattr(gt, "cpu_workers", lambda n, config: gt.connect(server.address, config=config, token=server.token))

    def run(*flags: object, steps: int = STEPS) -> list[float]:
        files = ("-i", "text_train.bin", "-j", "text_val.bin", "-b", 4, "-t", 16, "-v", 1000, "-m", 1, "-s", 0)
        return gpt2.train.main([str(flag) for flag in (*files, "--steps", steps, *flags)])

    return run


# ---- losses


@pytest.fixture(scope="module")
def plain() -> dict[str, list[float]]:
    """Losses of plain torch by size of model."""
    return {}


CASES = [
    ("d2", 1, "auto"), *[("d2", 2, name) for name in ("gpipe", "1f1b", "zb-h1", "auto")],
    ("d4", 4, "interleaved"), ("d4", 4, "zb-v"), ("d4", 3, "1f1b"),
    ("d4", 2, "zb-h1 --split-head"), ("d4", 4, "1f1b --split-head"),
]  # fmt: skip
QUICK = [("d2", 1, "auto"), ("d2", 2, "1f1b"), ("d4", 4, "interleaved"), ("d4", 2, "zb-h1 --split-head")]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "stages", "schedule"), longer(CASES, QUICK))
def test_losses_are_plain_torchs(
    size: str, stages: int, schedule: str, run: Callable, plain: dict, capsys: pytest.CaptureFixture
) -> None:
    if size not in plain:
        plain[size] = run("-e", size, "--device", "cpu")
    capsys.readouterr()
    found = run("-e", size, "--stages", stages, "--schedule", *schedule.split(), "--explain")
    out = capsys.readouterr().out
    assert len(found) == STEPS and found[-1] < found[0] - 0.5
    assert max(abs(a - b) / b for a, b in zip(found, plain[size], strict=True)) < 1e-5
    assert f"{STEPS - 3} replays" in out
    if stages > 1:
        name, *more = schedule.split()
        assert f"schedule {name}" in out and f"{stages + len(more)} stages, 4 micro-batches" in out, out
        assert out.count(" of the head)") == 2 * len(more), out  # its memory is no stage's alone


def test_bf16_trains(run: Callable) -> None:
    found = run("-e", "d2", "--stages", 2, "--dtype", "bf16", "-l", "3e-3", steps=8)
    want = run("-e", "d2", "--device", "cpu", "--dtype", "bf16", "-l", "3e-3", steps=8)
    assert found[6] < found[0] - 1 and found == pytest.approx(want, rel=1e-2)


def test_printed_lines(run: Callable, data: Path, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    log = tmp_path / "log"
    flags = ("-o", log, "-l", "3e-4", "-v", 2, "-m", 2, "-s", 2, "-g", 8, "-M", 2, "--stages", 2, "--schedule", "1f1b")
    losses = run("-e", "d2", *flags, steps=3)
    out = capsys.readouterr().out
    rows = dict(re.findall(r"^\| (.{22}) \| (.{50}) \|$", out, re.M))
    rows = {name.strip(): value.strip() for name, value in rows.items()}
    assert rows["device"] == "CPU (2 workers)" and rows["TF32"] == "disabled" and rows["stages (layers)"] == "2 (1+1)"
    assert rows["batch size B"] == "4" and rows["sequence length T"] == "16" and rows["train data pattern"] == "text_train.bin"
    assert rows["num_layers L"] == "2" and rows["vocab_size V"] == "257" and rows["num_parameters"] == "560768"
    assert re.search(r"^allocated 2 MiB for model parameters", out, re.M)
    assert re.search(r"^allocated \d+ MiB for activations", out, re.M)
    steps = re.findall(r"^step +(\d+)/3: train loss (\S+) \((\d+\.\d+) ms, (\d+) tok/s\)$", out, re.M)
    assert [(int(n), float(loss)) for n, loss, _, _ in steps] == [(n + 1, round(loss, 6)) for n, loss in enumerate(losses)]
    assert len(re.findall(r"^val loss \d+\.\d{6}$", out, re.M)) == 3  # at 0, at 2, at the end
    assert out.count("generating:\n---\n") == 2
    lines = log.read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["s:0", "s:0", "s:1", "s:2", "s:2", "s:3"]
    assert all(re.fullmatch(r"s:\d+ (trl|tel):\d+\.\d{4}", line) for line in lines)


def test_a_servers_workers_say_what_they_are(
    gpt2: Any, run: Callable, server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """GT_SERVER is what --connect is by default."""
    monkeypatch.setenv("GT_SERVER", server.address)
    monkeypatch.setenv("GT_TOKEN", server.token)
    monkeypatch.setattr(gt, "cpu_workers", None)
    assert len(run("-e", "d2", "-m", 0, steps=2)) == 2
    assert f"CPU (2 workers of {server.address})" in capsys.readouterr().out

    precision: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precision.append)
    monkeypatch.setattr(gt, "stats", lambda: {"workers": [{"device": "cuda"}] * 3})
    args = gpt2.train.arguments(["-e", "d4", "-b", "4", "-t", "16", "-m", "0", "-i", "text_train.bin"])
    gpt2.train.prepared(args)
    assert (args.gpus, args.stages, args.parts, args.backend, precision) == (3, 3, 1, "cudagraphs", ["high"])
    assert f"GPU (3 workers of {server.address})" in capsys.readouterr().out
    assert gpt2.train.gpus_of(gpt2.train.arguments(["--device", "cpu"])) == 0


def test_without_validation_no_file_is_wanted(run: Callable, capsys: pytest.CaptureFixture) -> None:
    assert len(run("-e", "d2", "-m", 0, "-j", "nothing.bin", "--device", "cpu", steps=7)) == 7
    out = capsys.readouterr().out
    assert "val loss" not in out and "step    7/7" in out


def test_samples_depend_on_the_seed_alone(run: Callable, capsys: pytest.CaptureFixture) -> None:
    def sample(*flags: object) -> str:
        run("-e", "d2", "-s", 1, "-g", 12, *flags, steps=1)
        return capsys.readouterr().out.partition("generating:\n")[2]

    first = sample("--stages", 2)
    assert first.count("---") == 2 and first == sample("--stages", 2) == sample("--device", "cpu")
    assert first != sample("--device", "cpu", "--seed", 7)


def test_a_sample_may_fill_the_context(
    gpt2: Any, run: Callable, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpt2.train, "TOKENIZER", "none.bin")
    model = gpt2.model.GPT2(gpt2.model.Config(2, 2, 16, 16, 257, 384)).materialize().initialize(0)
    gpt2.checkpoint.write_weights(tmp_path / "small.bin", model.config, dict(model.named_parameters()))
    for where in (("--device", "cpu"), ("--stages", 2)):
        run("-e", tmp_path / "small.bin", "-s", 1, "-g", 16, "--seed", 1, *where, steps=1)
        text = capsys.readouterr().out.partition("generating:\n---\n")[2].partition("\n---")[0]
        assert len(text.split()) == 16, text


# ---- the model, against GPT-2 written out


def published(folder: Path, config: Any) -> dict[str, np.ndarray]:
    """Writes a Hugging Face folder of random weights as its format is specified, and gives them."""
    rng, c = np.random.default_rng(0), config.width
    shapes = {"wte.weight": (config.vocab, c), "wpe.weight": (config.context, c), "ln_f.weight": (c,), "ln_f.bias": (c,)}
    for n in range(config.layers):
        for name, a, b in (("attn.c_attn", c, 3 * c), ("attn.c_proj", c, c), ("mlp.c_fc", c, 4 * c), ("mlp.c_proj", 4 * c, c)):
            shapes.update({f"h.{n}.{name}.weight": (a, b), f"h.{n}.{name}.bias": (b,)})
        shapes.update({f"h.{n}.{name}": (c,) for name in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias")})
    arrays = {name: (rng.standard_normal(shape) * 0.2).astype("<f4") for name, shape in shapes.items()}
    rows, at = {"__metadata__": {"format": "pt"}}, 0
    for name, array in arrays.items():
        rows[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    head = json.dumps(rows).encode()
    body = b"".join(array.tobytes() for array in arrays.values())
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + body)
    sizes = {"n_layer": config.layers, "n_head": config.heads, "n_embd": c, "n_positions": config.context}
    (folder / "config.json").write_text(json.dumps({**sizes, "vocab_size": config.vocab}))
    return arrays


def logits(weights: dict[str, np.ndarray], heads: int, layers: int, tokens: np.ndarray) -> np.ndarray:
    """GPT-2 on one sequence, in float64, from Hugging Face's names and layouts."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def dense(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    length = len(tokens)
    x = w["wte.weight"][tokens] + w["wpe.weight"][:length]
    size = x.shape[1] // heads
    for n in range(layers):
        q, k, v = np.split(dense(norm(x, f"h.{n}.ln_1"), f"h.{n}.attn.c_attn"), 3, -1)
        out = np.zeros_like(q)
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)
            scores = q[:, part] @ k[:, part].T / np.sqrt(size)
            odds = np.exp(np.where(np.tri(length, dtype=bool), scores, -np.inf) - scores.max(-1, keepdims=True))
            out[:, part] = odds / odds.sum(-1, keepdims=True) @ v[:, part]
        x = x + dense(out, f"h.{n}.attn.c_proj")
        y = dense(norm(x, f"h.{n}.ln_2"), f"h.{n}.mlp.c_fc")
        gelu = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        x = x + dense(gelu, f"h.{n}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


def test_published_weights_give_published_logits(gpt2: Any, tmp_path: Path) -> None:
    config = gpt2.model.Config(layers=2, heads=3, width=24, context=16, vocab=61, padded=128)
    arrays = published(tmp_path, config)
    gpt2.prepare_data.main(["--weights", str(tmp_path), "--to", str(tmp_path)])
    model = gpt2.checkpoint.load(tmp_path / "gpt2_124M.bin")
    assert model.config == config
    tokens = np.random.default_rng(1).integers(config.vocab, size=12)
    want = logits(arrays, 3, 2, tokens)
    with torch.no_grad():
        found = model.logits(torch.from_numpy(tokens)[None])[0].numpy()
        loss = model(torch.from_numpy(tokens[None, :-1]), torch.from_numpy(tokens[None, 1:])).item()
    assert np.allclose(found[:, : config.vocab], want, atol=1e-4) and np.isneginf(found[:, config.vocab :]).all()
    odds = want - np.log(np.exp(want).sum(-1, keepdims=True))  # the padded vocabulary has no share
    assert loss == pytest.approx(-odds[np.arange(11), tokens[1:]].mean(), rel=1e-5)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vocab_size", 60, r"wte.weight is \[61, 24\], config.json wants \[60, 24\]"),
        ("n_positions", 32, r"wpe.weight is \[16, 24\], config.json wants \[32, 24\]"),
        ("n_embd", 3 * 10**9, r"wte.weight is \[61, 24\], config.json wants \[61, 3000000000\]"),
        ("n_layer", 1, r"config.json wants 1 layers \(n_layer\), and there are tensors of 2"),
        ("n_layer", 10**9, r"config.json wants 1000000000 layers \(n_layer\), and there are tensors of 2"),
        ("n_head", None, r"config.json: is none of a GPT-2 .*"),
    ],
)
def test_tensors_of_other_sizes_are_named(key: str, value: Any, message: str, gpt2: Any, tmp_path: Path) -> None:
    published(tmp_path, gpt2.model.Config(layers=2, heads=3, width=24, context=16, vocab=61, padded=128))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(SystemExit, match=f"^prepare_data.py: {re.escape(str(tmp_path))}(: |/){message}$"):
        gpt2.prepare_data.main(["--weights", str(tmp_path), "--to", str(tmp_path)])
    assert not (tmp_path / "gpt2_124M.bin").exists()


def test_a_truncated_file_of_torch_is_named(gpt2: Any, tmp_path: Path) -> None:
    torch.save({"wte.weight": torch.ones(64, 64)}, tmp_path / "pytorch_model.bin")
    whole = (tmp_path / "pytorch_model.bin").read_bytes()
    for size in (0, 10, len(whole) // 2):
        (tmp_path / "pytorch_model.bin").write_bytes(whole[:size])
        with pytest.raises(SystemExit, match=r"^prepare_data.py: .*/pytorch_model.bin: truncated, or no file of torch's .*$"):
            gpt2.prepare_data.main(["--weights", str(tmp_path)])


def test_sizes_are_the_published_ones(gpt2: Any) -> None:
    known = {"d12": 124439808, "d24": 354823168, "d36": 774030080, "d48": 1557611200}
    assert {name: gpt2.model.fresh(name).parameters for name in known} == known
    config = gpt2.model.fresh("d12")
    padding = (config.padded - config.vocab) * config.width
    assert sum(p.numel() for p in gpt2.model.GPT2(config).parameters()) - padding == 124439808
    assert all(gpt2.model.fresh(f"d{n}").width % gpt2.model.fresh(f"d{n}").heads == 0 for n in range(2, 49))


@pytest.mark.parametrize(
    "flags, gpus, parts",
    [("-b 4 -t 128", 2, 1), ("-b 4 -t 128", 0, 4), ("-b 32 -t 1024", 2, 4), ("-b 8 -t 256 -M 8", 2, 8), ("-b 6 -t 1024", 2, 1)],
)
def test_a_gpu_is_not_given_small_micro_batches(flags: str, gpus: int, parts: int, gpt2: Any) -> None:
    args = gpt2.train.arguments([*flags.split(), "-e", "d12", "--stages", "2"])
    gpt2.train.settle(args, gpt2.model.fresh("d12"), gpus)
    assert args.parts == parts


@pytest.mark.parametrize(
    ("model", "schedule", "gpus", "stages"),
    [("d12", "auto", 2, 2), ("d12", "zb-v", 2, 4), ("d12", "interleaved", 3, 6), ("d3", "zb-v", 2, 2), ("d4", "zb-v", 0, 4)],
)
def test_every_gpu_has_stages_by_default(model: str, schedule: str, gpus: int, stages: int, gpt2: Any) -> None:
    args = gpt2.train.arguments(["-e", model, "-b", "8", "--schedule", schedule])
    workers = gpt2.train.settle(args, gpt2.model.fresh(model), gpus)
    assert len(workers) == args.stages == stages and max(workers) + 1 == stages // (1 if schedule == "auto" else 2)


def test_stages_are_cut_by_cost(gpt2: Any) -> None:
    model = gpt2.model.GPT2(gpt2.model.fresh("d12"))
    for stages in range(1, 13):
        pieces = gpt2.model.cut(model, stages, 8, 1024)
        assert len(pieces) == stages and sum(pieces) == 14 and min(pieces) > 0
    assert gpt2.model.cut(model, 2, 8, 1024) == [9, 5]  # 8 and 4 layers: the head weighs as much as four to five more
    assert gpt2.model.layers_cut([9, 3]) == [10, 4] and gpt2.model.layers_cut([4, 4, 4, 0]) == [5, 4, 4, 1]
    assert gpt2.model.workers_of(4, "zb-v") == [0, 1, 1, 0] and gpt2.model.workers_of(4, "interleaved") == [0, 1, 0, 1]


def test_activations_are_counted_as_autograd_keeps_them(gpt2: Any) -> None:
    model = gpt2.model.GPT2(gpt2.model.fresh("d2", 257)).materialize().initialize(0)
    held: dict[int, torch.Tensor] = {p.untyped_storage().data_ptr(): p for p in model.parameters()}
    weights = sum(p.untyped_storage().nbytes() for p in held.values())

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        held.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    tokens = torch.randint(257, (2, 24))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(tokens, tokens)
    kept = sum(t.untyped_storage().nbytes() for t in held.values()) - weights
    assert sum(gpt2.model.activation_bytes(model, 2, 24)) == pytest.approx(kept, rel=1e-3)


# ---- files


def rows(layers: int, c: int, context: int, padded: int) -> list[tuple[int, ...]]:
    """Shapes in a weights file, as llm.c has them."""
    per = [(c,), (c,), (3 * c, c), (3 * c,), (c, c), (c,), (c,), (c,), (4 * c, c), (4 * c,), (c, 4 * c), (c,)]
    return [(padded, c), (context, c), *[(layers, *shape) for shape in per], (c,), (c,)]


@pytest.mark.parametrize(("version", "dtype"), [(3, torch.float32), (5, torch.bfloat16)])
def test_weights_as_llmc_has_them(version: int, dtype: torch.dtype, gpt2: Any, tmp_path: Path) -> None:
    layers, heads, c, context, vocab, padded = 3, 2, 8, 5, 61, 128
    rng = np.random.default_rng(version)
    arrays = [rng.standard_normal(shape).astype("<f4") for shape in rows(layers, c, context, padded)]
    if version == 5:
        arrays = [(a.view("<u4") >> 16).astype("<u2") for a in arrays]
    head = np.zeros(256, "<i4")
    head[:8] = 20240326, version, context, vocab, layers, heads, c, padded
    path = tmp_path / "theirs.bin"
    path.write_bytes(head.tobytes() + b"".join(a.tobytes() for a in arrays))

    model = gpt2.checkpoint.load(path)
    assert model.config == gpt2.model.Config(layers, heads, c, context, vocab, padded)
    wide = [(a.astype("<u4") << 16).view("<f4") if version == 5 else a for a in arrays]
    assert np.array_equal(model.embed.wte.weight.detach().float().numpy(), wide[0])
    assert np.array_equal(model.h[2].qkv.weight.detach().float().numpy(), wide[4][2])
    assert np.array_equal(model.h[1].fcproj.weight.detach().float().numpy(), wide[12][1])
    assert next(model.parameters()).dtype == dtype

    gpt2.checkpoint.write_weights(tmp_path / "ours.bin", model.config, dict(model.named_parameters()))
    assert (tmp_path / "ours.bin").read_bytes() == path.read_bytes()


def test_a_trained_checkpoint_is_what_the_model_is(run: Callable, data: Path, tmp_path: Path, gpt2: Any) -> None:
    run("-e", "d2", "--stages", 2, "--save-every", 2, "--save-to", tmp_path, steps=2)
    path = tmp_path / "gpt2_00000002.bin"
    head = np.fromfile(path, "<i4", 256)
    assert head[:8].tolist() == [20240326, 3, 1024, 257, 2, 2, 128, 384]
    assert path.stat().st_size == 1024 + 4 * sum(int(np.prod(shape)) for shape in rows(2, 128, 1024, 384))
    model = gpt2.checkpoint.load(path)
    gpt2.checkpoint.write_weights(tmp_path / "again.bin", model.config, dict(model.named_parameters()))
    assert (tmp_path / "again.bin").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("dtype", longer(["fp32", "bf16"], ["fp32"]))
def test_resuming_is_as_not_stopping(dtype: str, run: Callable, tmp_path: Path) -> None:
    flags = ("--stages", 2, "--schedule", "1f1b", "--save-to", tmp_path)
    whole = run("-e", "d2", *flags, "--dtype", dtype, "--save-every", 4, steps=8)
    assert run("-e", tmp_path / "gpt2_00000004.bin", *flags, steps=8) == whole[4:]
    assert run("-e", tmp_path / "gpt2_00000004.bin", *flags, steps=3) == []
    shutil.rmtree(tmp_path / "gpt2_00000004.state")  # then it is a model to begin with
    assert len(run("-e", tmp_path / "gpt2_00000004.bin", *flags, steps=8)) == 8


def test_tokenizer_files(gpt2: Any, tmp_path: Path) -> None:
    tokens, path = [b"a", "é".encode(), b"", b" b"], tmp_path / "t.bin"
    body = b"".join(bytes([len(t)]) + t for t in tokens)
    path.write_bytes(struct.pack("<4i", 20240328, 2, 4, 2) + bytes(1008) + body)
    found = gpt2.checkpoint.read_tokenizer(path)
    assert found == gpt2.checkpoint.Tokenizer(tokens, 2) and found.decode([0, 3, 1, 2, 99]) == "a bé"
    gpt2.checkpoint.write_tokenizer(tmp_path / "again.bin", found)
    assert (tmp_path / "again.bin").read_bytes() == path.read_bytes()
    path.write_bytes(struct.pack("<4i", 20240328, 1, 4, 0) + bytes(1008) + body)
    assert gpt2.checkpoint.read_tokenizer(path).end == 50256  # version 1 does not say


def test_batches_come_from_all_shards_in_order(gpt2: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shards = [rng.integers(50000, size=size).astype("<u2") for size in (40, 13, 25)]
    for n, shard in enumerate(shards):
        head = struct.pack("<3i", 20240520, 1, len(shard)) + bytes(1012)
        (tmp_path / f"data_{n}.bin").write_bytes(head + shard.tobytes())
    want = []
    for shard in shards:
        at = 0
        while at + 13 <= len(shard):  # 3 x 4 tokens and the one after
            want.append((shard[at : at + 12].reshape(3, 4), shard[at + 1 : at + 13].reshape(3, 4)))
            at += 12
    tokens = gpt2.checkpoint.Tokens(str(tmp_path / "data_*.bin"), 3, 4, 50257)
    assert len(tokens) == len(want) == 6
    for first in range(7):
        found = list(tokens.since(first))
        assert len(found) == 6 - first
        for (x, y), (a, b) in zip(found, want[first:], strict=True):
            assert x.dtype == torch.int64 and np.array_equal(x, a) and np.array_equal(y, b)


def test_text_becomes_tokens_and_text_again(gpt2: Any, data: Path, tmp_path: Path) -> None:
    tokens = np.concatenate([np.fromfile(data / f"text_{part}.bin", "<u2")[512:] for part in ("val", "train")])
    assert tokens.tolist() == [256, *TEXT.encode()]
    tokenizer = gpt2.checkpoint.read_tokenizer(data / "gpt2_tokenizer.bin")
    assert tokenizer.end == 256 and tokenizer.decode(tokens.tolist()) == TEXT
    gpt2.prepare_data.main([str(data / "text.txt"), "--to", str(tmp_path), "--shard", "20000", "--val-tokens", "100"])
    parts = [np.fromfile(path, "<u2")[512:] for path in sorted(tmp_path.glob("text_train_*.bin"))]
    assert [len(p) for p in parts[:-1]] == [20000] * (len(parts) - 1) and np.array_equal(np.concatenate(parts), tokens[100:])
    assert len(parts) > 1 and 20000 <= len(parts[-1]) < 40000  # what is left has no file of its own
    with pytest.raises(SystemExit, match=r"^prepare_data.py: want at least 0 for --shard, got -5$"):
        gpt2.prepare_data.main([str(data / "text.txt"), "--to", str(tmp_path), "--shard", "-5"])
    with pytest.raises(SystemExit, match=r"text.txt/text_val.bin: cannot be written \(.*\)$"):
        gpt2.prepare_data.main([str(data / "text.txt"), "--to", str(data / "text.txt")])


def test_byte_pairs_come_from_a_library(gpt2: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary's characters stand for bytes; what encodes is tiktoken, here one that knows only single bytes."""
    names = {character: n for n, character in enumerate(gpt2.prepare_data.characters())}
    (tmp_path / "vocab.json").write_text(json.dumps({**names, "<|endoftext|>": 256}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    monkeypatch.setattr(gpt2.prepare_data, "found", lambda name: None)
    with pytest.raises(SystemExit, match="no library to use it: pip install tiktoken"):
        gpt2.prepare_data.main([str(data / "text.txt"), "--to", str(tmp_path), "--vocabulary", str(tmp_path)])

    class Encoding:
        def __init__(self, name: str, pat_str: str, mergeable_ranks: dict, special_tokens: dict) -> None:
            assert special_tokens == {"<|endoftext|>": 256} and sorted(mergeable_ranks) == [bytes([n]) for n in range(256)]
            self.ranks = mergeable_ranks

        def encode_ordinary(self, text: str) -> list[int]:
            return [self.ranks[bytes([n])] for n in text.encode()]

    monkeypatch.setattr(gpt2.prepare_data, "found", lambda name: SimpleNamespace(Encoding=Encoding))
    gpt2.prepare_data.main([str(data / "text.txt"), "--to", str(tmp_path), "--vocabulary", str(tmp_path)])
    tokenizer = gpt2.checkpoint.read_tokenizer(tmp_path / "gpt2_tokenizer.bin")
    with pytest.raises(SystemExit, match="do not give the text back"), monkeypatch.context() as lossy:
        lossy.setattr(Encoding, "encode_ordinary", lambda self, text: [])
        gpt2.prepare_data.main([str(data / "text.txt"), "--to", str(tmp_path), "--vocabulary", str(tmp_path)])
    tokens = np.concatenate([np.fromfile(tmp_path / f"text_{part}.bin", "<u2")[512:] for part in ("val", "train")])
    assert tokens[0] == tokenizer.end == 256 and tokenizer.decode(tokens.tolist()) == TEXT


def test_special_tokens_in_a_text_are_text(gpt2: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    names = {character: n for n, character in enumerate(gpt2.prepare_data.characters())}
    (tmp_path / "vocab.json").write_text(json.dumps({**names, "<|endoftext|>": 256, "<|to pad|>": 257}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    text = "one<|endoftext|>two <|to pad|> " * 20
    (tmp_path / "text.txt").write_text(text)
    gpt2.prepare_data.main([str(tmp_path / "text.txt"), "--to", str(tmp_path), "--vocabulary", str(tmp_path)])
    tokens = np.concatenate([np.fromfile(tmp_path / f"text_{part}.bin", "<u2")[512:] for part in ("val", "train")])
    tokenizer = gpt2.checkpoint.read_tokenizer(tmp_path / "gpt2_tokenizer.bin")
    assert tokenizer.tokens[257] == b"<|to pad|>" and tokens.max() == tokens[0] == 256
    assert tokenizer.decode(tokens.tolist()) == text and (tokens == 256).sum() == 1


# ---- what is wrong


def broken(data: Path, folder: Path, name: str) -> None:
    """A file that is not what it should be, of bytes that would be."""
    head = [20240326, 3, 16, 61, 1, 1, 8, 128]
    if name == "magic":
        head[0] = 7
    if name == "version":
        head[1] = 4
    if name == "heads":
        head[5] = 3
    if name == "negative":
        head[2] = -16
    if name == "narrow":
        head[6] = -8
    if name == "huge":
        head[2] = head[4] = head[5] = head[6] = 2**31 - 1
    body = bytes(4 * sum(int(np.prod(shape)) for shape in rows(1, 8, 16, 128)))
    cut = {"short": 100, "long": -4}.get(name, 0)
    content = struct.pack("<8i", *head) + bytes(992) + (body + bytes(4) if name == "long" else body[: len(body) - cut])
    (folder / "weights.bin").write_bytes(content[:500] if name == "header" else content)
    good = (data / "text_train.bin").read_bytes()
    start = {"magic": bytes(8), "version": good[:4] + struct.pack("<i", 9)}.get(name, good[:8])
    (folder / "tokens.bin").write_bytes(start + good[8:-10])


ERRORS = [
    (("-e", "nothing.bin"), "", r"nothing.bin: cannot read the weights file \(no such file.*\); .*--weights.*-e d12"),
    (("-e", "weights.bin"), "magic", r"weights.bin: wrong magic 7: a weights file begins with 20240326"),
    (("-e", "weights.bin"), "version", r"weights.bin: wrong version 4 of a weights file: want 3 or 5"),
    (("-e", "weights.bin"), "short", r"weights.bin: truncated: its header wants \d+ bytes of weights, the file has \d+"),
    (("-e", "weights.bin"), "long", r"weights.bin: \d+ bytes, its header wants \d+: .* damaged"),
    (("-e", "weights.bin"), "header", r"weights.bin: truncated: the header of a weights file has 1024 bytes, this file 500"),
    (("-e", "weights.bin"), "heads", r"weights.bin: no GPT-2 has these sizes: .*heads=3, width=8"),
    (("-e", "weights.bin"), "negative", r"weights.bin: no GPT-2 has these sizes: .*context=-16"),
    (("-e", "weights.bin"), "narrow", r"weights.bin: no GPT-2 has these sizes: .*width=-8"),
    (("-e", "weights.bin"), "huge", r"weights.bin: truncated: its header wants \d{25,} bytes of weights, the file has \d+"),
    (("-i", "nothing*.bin"), "", r"nothing\*.bin: no such file; prepare_data.py makes token files"),
    (("-i", "tokens.bin"), "magic", r"tokens.bin: wrong magic 0: a tokens file begins with 20240520"),
    (("-i", "tokens.bin"), "version", r"tokens.bin: wrong version 9 of a tokens file: want 1"),
    (("-j", "tokens.bin"), "short", r"tokens.bin: truncated: its header wants \d+ bytes of tokens, the file has \d+"),
    (("--tokenizer", "none.bin"), "", r"none.bin: cannot read the tokenizer file \(no such file or directory\)"),
    (("--tokenizer", "tokens.bin"), "", r"tokens.bin: wrong magic 20240520: a tokenizer file begins with 20240328"),
    (("-b", 64, "-t", 1024), "", r"text_train.bin: \d+ tokens, one batch of -b 64 -t 1024 needs 65537: use smaller ones"),
    (("-b", 4, "-M", 3), "", r"-b 4 is not divisible by -M 3 micro-batches"),
    (("-t", 2048), "", r"-t 2048 -g 64: the model has room for 1024 tokens"),
    (("-b", 0), "", r"want at least 1 for batch, got 0"),
    (("-l", -1), "", r"want at least 0 for lr, got -1.0"),
    (("-l", "nan"), "", r"want at least 0 for lr, got nan"),
    (("--weight-decay", "-0.1"), "", r"want at least 0 for weight decay, got -0.1"),
    (("--steps", -1), "", r"want at least 0 for steps, got -1"),
    (("--save-every", -1), "", r"want at least 0 for save every, got -1"),
    (("-o", "none/log"), "", r"none/log: cannot be written \(no such file or directory\)"),
    (("--save-every", 1, "--save-to", "text_val.bin"), "", r"text_val.bin: cannot be written \(file exists\)"),
    (("--connect", "nowhere"), "", r"'nowhere' is not an address: want host:port"),
    (("--stages", 3), "", r"--stages 3: want 1 to 2, the number of layers"),
    (("--cut", "2,1"), "", r"--cut 2,1: want 2 numbers that add up to 2 layers"),
    (("--cut", "a,b"), "", r"--cut a,b: want a number of layers for each stage, as in 8,4"),
    (("-e", "d4", "--stages", 4, "--schedule", "zb-v", "--split-head"), "", r"--split-head: not with --schedule zb-v"),
    (("-e", "d4", "--stages", 3, "--schedule", "zb-v"), "", r"--schedule zb-v has two .* want an even number of --stages"),
    (("--schedule", "1f2b"), "", r"schedule '1f2b' is not known: want one of gpipe, 1f1b"),
    (("-e", "d49"), "", r"-e d49: want a checkpoint file, or d2 to d48"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "name", "message"), ERRORS, ids=[f"{' '.join(map(str, e[0]))} {e[1]}" for e in ERRORS])
def test_an_error_is_one_line(
    flags: tuple, name: str, message: str, gpt2: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any worker is started."""
    broken(data, tmp_path, name)
    monkeypatch.chdir(tmp_path)
    for file in ("text_train.bin", "text_val.bin", "gpt2_tokenizer.bin"):
        (tmp_path / file).symlink_to(data / file)
    files = ("-i", "text_train.bin", "-j", "text_val.bin", "-t", 16, "-e", "d2", "--stages", 2)
    with pytest.raises(SystemExit) as caught:
        gpt2.train.main([str(flag) for flag in (*files, *flags)])
    assert re.fullmatch(f"train.py: {message}.*", str(caught.value)), caught.value


def test_tokens_of_another_tokenizer_are_named(run: Callable, data: Path, gpt2: Any) -> None:
    gpt2.checkpoint.write_tokens(data / "large.bin", np.full(200, 50000, np.uint16))
    with pytest.raises(SystemExit, match=r"large.bin: token 50000 is none of the model's 257: another tokenizer's file\?"):
        run("-e", "d2", "-i", "large.bin", "--device", "cpu")


@pytest.mark.parametrize("sizes", [(300, 256), (257, 60000), (257, -7)])
def test_a_tokenizer_is_the_models_or_not_used(
    sizes: tuple, gpt2: Any, run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """One that is named is refused; for one that only lies there, samples are numbers."""
    count, end = sizes
    model = gpt2.model.GPT2(gpt2.model.Config(2, 2, 16, 16, 257, 384)).materialize().initialize(0)
    gpt2.checkpoint.write_weights(tmp_path / "small.bin", model.config, dict(model.named_parameters()))
    for file in ("text_train.bin", "text_val.bin"):
        (tmp_path / file).symlink_to(Path(file).resolve())
    monkeypatch.chdir(tmp_path)
    gpt2.checkpoint.write_tokenizer(gpt2.train.TOKENIZER, gpt2.checkpoint.Tokenizer([b"a"] * count, end))
    flags = ("-e", "small.bin", "-s", 1, "-g", 4, "--device", "cpu")
    told = f"gpt2_tokenizer.bin: {count} tokens, of which {end} ends a text, and the model has 257"
    with pytest.raises(SystemExit, match=f"^train.py: {told}: another model's tokenizer\\?$"):
        run(*flags, "--tokenizer", "gpt2_tokenizer.bin", steps=1)
    capsys.readouterr()
    run(*flags, steps=1)
    out = capsys.readouterr().out
    assert f"\n{told}: samples are token numbers" in out and re.search(r"generating:\n---\n\d+ \d+ \d+ \d+\n", out), out


class Defect(ValueError):
    pass


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (gt.DispatcherLost("the server has stopped"), "train.py: the server has stopped"),
        (gt.OpFailed("out of memory"), "train.py: out of memory\ntrain.py: use a smaller -b or -t, more micro-batches"),
        (OSError(28, "No space left on device"), "train.py: checkpoints/gpt2_00000001.bin: cannot be written (no space left"),
        (KeyboardInterrupt(), "130"),
        (Defect(), None),
    ],
)
def test_a_run_ends_with_one_line_unless_it_is_a_defect(
    error: Any, code: str | None, gpt2: Any, run: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(*_: object) -> None:
        with gpt2.checkpoint.writing("checkpoints/gpt2_00000001.bin"):
            raise error

    monkeypatch.setattr(gpt2.train, "save", fail)
    with pytest.raises(Defect if code is None else SystemExit) as caught:
        run("-e", "d2", "-m", 0, "--device", "cpu", "--save-every", 1, steps=1)
    assert code is None or str(caught.value.code).startswith(code)
    assert ("train.py: interrupted\n" in capsys.readouterr().err) == (code == "130")


def test_a_folder_may_be_named_as_a_size(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [Path(f"text_{part}.bin").resolve() for part in ("train", "val")]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d2").mkdir()
    assert len(run("-e", "d2", "-i", files[0], "-j", files[1], "--device", "cpu", steps=1)) == 1


# ---- README.md


def commands() -> list[list[str]]:
    """Its shell lines in words, without comments."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (EXAMPLE / "README.md").read_text(), re.S | re.M)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]


def test_the_readme_names_every_flag_and_no_other(gpt2: Any) -> None:
    parser = gpt2.train.flags()
    for line in commands():
        if line[:2] == ["python", "examples/gpt2/train.py"]:
            parser.parse_args(line[2:])
    known = {name for action in parser._actions for name in action.option_strings if action.dest != "help"}
    rows = [row.split(" | ")[0] for row in (EXAMPLE / "README.md").read_text().splitlines() if row.startswith("| `-")]
    named = set(re.findall(r"(?<![\w-])(--?[a-zA-Z][\w-]*)", " ".join(rows).replace("--[no-]", "--")))
    assert named <= known and known - named == {"--no-tf32", "--device"}, named ^ known


@pytest.mark.slow
def test_the_readmes_first_lines_run(tmp_path: Path) -> None:
    """As they are, with workers of their own."""
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "examples").symlink_to(EXAMPLE.parent)
    env = {**os.environ, "PYTHONPATH": str(EXAMPLE.parent.parent)}
    for line in commands()[1:3]:
        done = subprocess.run(
            [sys.executable, *line[1:]], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=limit(90), check=False
        )
        assert done.returncode == 0 and not unhurried(done.stderr), f"{done.stdout}\n{done.stderr}"
    assert re.search(r"^step   40/40: train loss \d", done.stdout, re.M) and done.stdout.count("generating:") == 2
