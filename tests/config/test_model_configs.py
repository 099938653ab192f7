"""The ready configs for models of transformers: each places a small one of random weights, whose numbers are plain torch's."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gt
from tools import placements

transformers = pytest.importorskip("transformers")
ROWS, LENGTH, WORDS = 8, 12, 96
FILES = {f"{path.parent.name}/{path.stem}": text for path, text in placements.files()}
SPLITS = {str(split): split for split in placements.SPLITS}
Grads = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """transformers warns, through logging, of what tiny models lack."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    yield
    logging.disable(before)


def made(kind: str, layers: int = 2, heads: int = 8, kv: int = 8, width: int = 64, vocabulary: int = WORDS) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"vocab_size": vocabulary, "n_positions": LENGTH, "n_embd": width, "n_layer": layers, "n_head": heads}
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **off, bos_token_id=0, eos_token_id=0))
    sizes = {
        "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "max_position_embeddings": LENGTH,
    }  # fmt: skip
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    if kind == "qwen2":
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, head_dim=width // heads))


def trained(model: torch.nn.Module, device: str, padded: bool = False) -> tuple[torch.Tensor, Grads]:
    """Loss and gradients of one batch; padded: its rows are of several lengths."""
    words = torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    more: dict[str, torch.Tensor] = {}
    labels = words
    if padded:
        mask = torch.arange(LENGTH) < torch.arange(LENGTH - ROWS + 1, LENGTH + 1)[:, None]
        more, labels = {"attention_mask": mask.long().to(device)}, words.masked_fill(~mask, -100)
    loss = model(input_ids=words.to(device), labels=labels.to(device), **more).loss
    loss.backward()
    return loss.detach().cpu(), {name: p.grad.cpu() for name, p in model.named_parameters()}


@functools.cache
def plain(padded: bool, kind: str, *sizes: int) -> tuple[torch.Tensor, Grads]:
    return trained(made(kind, *sizes), "cpu", padded)


def same(model: torch.nn.Module, kind: str, *sizes: int, padded: bool = False) -> None:
    loss, grads = trained(model, "remote", padded)
    want, wanted = plain(padded, kind, *sizes)
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6)
    for name, grad in wanted.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_the_files_are_what_the_tool_writes() -> None:
    for name, text in FILES.items():
        assert (placements.CONFIGS / f"{name}.yaml").read_text() == text, f"{name}: run python -m tools.placements"
    assert len(FILES) == sum(len(list((placements.CONFIGS / family).iterdir())) for family in placements.FAMILIES)


# sharded ones of the other families differ from these in names of modules only
TRIED = [n for n in FILES if "zero" not in n or n.startswith("gpt2/") or n in ("llama/dp4-zero3", "qwen/dp2tp2-zero3")]


@pytest.mark.usefixtures("plain_threads")
@pytest.mark.parametrize("name", TRIED)
def test_a_model_placed_by_a_ready_config_is_torchs(name: str, session: Callable) -> None:
    """One layer more than stages: the cut is uneven."""
    folder, _, split = name.partition("/")
    kind = {"qwen": "qwen3"}.get(folder, folder)
    dp, tp, pp, zero = SPLITS[split]
    layers = max(2, pp + (1 < pp < 8))
    session(placements.CONFIGS / f"{name}.yaml")
    model = made(kind, layers).to("remote")
    placed = gt.signal.apply(model)
    same(model, kind, layers)
    where = {n: gt.inspect(p) for n, p in model.named_parameters()}
    used = {piece["index"] for row in where.values() for piece in row["pieces"]}
    assert used == set(range(dp * tp * pp))
    assert len({rule.group for n, rule in placed.items() if n[-1:].isdigit()}) == (pp if pp > 1 else 0)
    split_weights = {n for n, row in where.items() if "S(" in row["layout"]}
    matrices = {n for n, p in model.named_parameters() if p.dim() > 1 and (".h." in n or ".layers." in n)}
    assert matrices <= split_weights if tp > 1 or zero else not split_weights


HEADS = [  # (kind, config, heads, key-value heads, width)
    ("llama", "llama/tp4", 4, 2, 64), ("llama", "llama/tp4", 2, 1, 64), ("llama", "llama/tp2", 6, 2, 48),
    ("llama", "llama/tp2", 3, 3, 48), ("llama", "llama/tp8", 4, 2, 32), ("qwen2", "qwen/tp4", 4, 2, 64),
    ("qwen3", "qwen/tp4", 4, 1, 64), ("gpt2", "gpt2/tp4", 2, 2, 64), ("gpt2", "gpt2/tp2", 3, 3, 48),
    ("gpt2", "gpt2/tp8", 12, 12, 48), ("llama", "llama/dp2tp2pp2", 3, 1, 48),
]  # fmt: skip


@pytest.mark.usefixtures("plain_threads")
@pytest.mark.parametrize(("kind", "config", "heads", "kv", "width"), HEADS)
def test_heads_that_workers_do_not_divide(kind: str, config: str, heads: int, kv: int, width: int, session: Callable) -> None:
    """Fewer heads than workers, fewer of keys than of queries; rows are of several lengths."""
    session(placements.CONFIGS / f"{config}.yaml")
    model = made(kind, 2, heads, kv, width).to("remote")
    gt.signal.apply(model)
    same(model, kind, 2, heads, kv, width, padded=True)


def steps(kind: str, *sizes: int) -> None:
    model = made(kind, *sizes).to("remote")
    gt.signal.apply(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        words = torch.randint(WORDS, (ROWS * (64 if sizes[4:] else 1), LENGTH)).to("remote")
        model(input_ids=words, labels=words).loss.backward()
        optimizer.step()


def planned(config: str, kind: str, *sizes: int) -> Any:
    return gt.plan(steps, kind, *sizes, config=str(placements.CONFIGS / f"{config}.yaml")).body


@pytest.mark.parametrize("name", ["gpt2/tp2", "llama/tp2", "qwen/tp2", "llama/dp2"])
def test_nothing_is_gathered_where_heads_divide(name: str) -> None:
    """Two all-reduces a layer and direction, as in Megatron; scores and table of a large vocabulary stay split."""
    kind = name.partition("/")[0].replace("qwen", "qwen3")
    body = planned(name, kind, 2, 8, 8, 64, 50257)
    assert body["unplaced"] == [] and all(row["rule"] for row in body["weights"])
    assert all(row["kind"].startswith("all_reduce") for row in body["collectives"])
    if name != "llama/dp2":
        whole = 4 * ROWS * 64 * LENGTH * 64  # of rows; the look-up makes one, the head's gradient one
        counts = [row["count"] for row in body["collectives"] if row["bytes"] == whole]
        assert sum(counts) == 2 * 4 + 2
        assert sum(row["bytes"] * row["count"] for row in body["collectives"] if row["bytes"] != whole) < whole


def test_few_scores_are_gathered() -> None:
    kinds = [(row["kind"], row["where"].partition(":")[0]) for row in planned("llama/tp2", "llama", 2)["collectives"]]
    assert ("all_gather", "loss_utils.py") in kinds


@pytest.mark.parametrize(("config", "kind", "heads", "kv"), [("llama/tp4", "llama", 4, 2), ("gpt2/tp2", "gpt2", 3, 3)])
def test_the_plan_warns_where_heads_do_not_divide(config: str, kind: str, heads: int, kv: int) -> None:
    warnings = planned(config, kind, 2, heads, kv, 48)["warnings"]
    assert any(f"modeling_{kind}.py" in warning and "all_gather over tp" in warning for warning in warnings), warnings


@pytest.mark.usefixtures("plain_threads")
@pytest.mark.parametrize(("name", "schedule"), [("gpt2/dp2pp2", "1f1b"), ("llama/tp2pp2", "zb-h1"), ("qwen/pp4", "1f1b")])
def test_a_pipeline_of_a_model_is_captured_in_its_schedule(name: str, schedule: str, session: Callable) -> None:
    """The loss is in the last stage, whoever computes it; GPT-2's embedding is the first stage's, and the last one's head."""
    session(placements.CONFIGS / f"{name}.yaml")
    kind = {"qwen": "qwen3"}.get(name.partition("/")[0], name.partition("/")[0])
    batches = torch.randint(WORDS, (5, ROWS, LENGTH), generator=torch.Generator().manual_seed(1))

    def losses(device: str) -> list[float]:
        model = made(kind, 4).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(words: torch.Tensor) -> torch.Tensor:
            total = torch.zeros((), device=device)
            for part in gt.microbatches(words, 4):
                loss = model(input_ids=part, labels=part).loss / 4
                loss.backward()
                total = total + loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            return total

        if device == "cpu":
            return [step(words).item() for words in batches]
        gt.signal.apply(model)
        run = gt.compile(step, schedule=schedule)
        found = [run(words).item() for words in batches]
        (program,) = run._programs
        assert program.replays and not program.answer["schedule"]["why"], run.explain()
        return found

    assert losses("remote") == pytest.approx(losses("cpu"), abs=2e-5)
