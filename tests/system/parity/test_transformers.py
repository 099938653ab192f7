"""Hugging Face models as they are: on `remote` they train, generate, are saved, loaded and captured as in plain torch."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gt
from tests.helpers import longer
from tests.helpers.transformer_models import KINDS, hf, make

pytestmark = pytest.mark.usefixtures("plain_threads")
Batch = dict[str, torch.Tensor]
GENERATE = [name for name, kind in KINDS.items() if kind.generates]

TWO = """
all: {workers: [0, 1]}
tp: {shard: {axis: 0, workers: [0, 1]}}
tp_colpar: {shard: {axis: 1, workers: [0, 1]}}
tp_rowpar: {shard: {axis: 0, workers: [0, 1]}}
"""
COLPAR = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "c_fc", "query", "key", "value", "q", "k", "v", "wi"]
COLPAR += ["intermediate.dense"]
ROWPAR = ["o_proj", "down_proj", "c_proj", "o", "wo", "output.dense"]


def both(name: str, **sizes: Any) -> tuple[tuple[Any, Batch], tuple[Any, Batch]]:
    """The same model and batch, in plain torch and on `remote`, without dropout."""
    model, batch = make(name, **sizes)
    moved = copy.deepcopy(model.eval()).to("remote")
    return (model, batch), (moved, {key: value.to("remote") for key, value in batch.items()})


def stepping(model: Any, group: str = "") -> Callable[[Batch], torch.Tensor]:
    """A training step with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        with gt.signal.context(group) if group else torch.enable_grad():
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def trained(model: Any, batch: Batch, steps: int = 3, group: str = "") -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Losses, the first step's gradients and the weights after the last."""
    step, losses, gradients = stepping(model, group), [], {}
    for n in range(steps):
        losses.append(step(batch).item())
        if not n:
            gradients = {key: None if p.grad is None else p.grad.cpu().clone() for key, p in model.named_parameters()}
    return losses, gradients, {key: value.detach().cpu() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("name", KINDS)
def test_a_model_trains_as_in_plain_torch_to_the_bit(name: str, one: None) -> None:
    plain, moved = both(name)
    losses, gradients, weights = trained(*plain)
    found = trained(*moved)
    assert found[0] == losses and losses[-1] < losses[0]
    for theirs, ours in ((gradients, found[1]), (weights, found[2])):
        assert theirs.keys() == ours.keys()
        for key, want in theirs.items():
            assert want is ours[key] is None or torch.equal(want, ours[key]), key


@pytest.mark.parametrize("name", GENERATE)
def test_a_model_generates_the_same_tokens(name: str, one: None) -> None:
    (model, batch), (moved, _) = both(name)
    for each in (model, moved):  # routers' loss is for training, and with a cache takes the mask for the new tokens'
        each.config.output_router_logits = False
    tokens = batch["input_ids"]
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0  # padded on the left, as decoders are
    given = {"input_ids": tokens, "attention_mask": mask}
    there = {key: value.to("remote") for key, value in given.items()}
    how = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False}
    want = model.generate(**given, **how)
    assert torch.equal(moved.generate(**there, **how).cpu(), want)
    assert torch.equal(moved.generate(**there, **how, use_cache=False).cpu(), want)


def test_ways_to_generate(one: None) -> None:
    (model, batch), (moved, there) = both("llama")
    for how in ({"num_beams": 3}, {"cache_implementation": "static"}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}):
        want = model.generate(batch["input_ids"], max_new_tokens=5, **how)
        assert torch.equal(moved.generate(there["input_ids"], max_new_tokens=5, **how).cpu(), want), how

    def sampled(seed: int) -> list:
        torch.manual_seed(seed)
        return moved.generate(there["input_ids"], max_new_tokens=6, do_sample=True, top_k=50, top_p=0.95).tolist()

    assert sampled(1) == sampled(1) != sampled(2)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_each_token_replays_a_program_with_a_static_cache(name: str, one: None) -> None:
    (model, batch), (moved, there) = both(name)
    cache = hf.StaticCache(config=moved.config, max_cache_len=32)
    moved.forward = gt.compile(moved.forward)
    how: dict[str, Any] = {"min_new_tokens": 12, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    for length in (6, 6, 4):
        cache.reset()
        want = model.generate(batch["input_ids"][:, :length], **how)
        assert torch.equal(moved.generate(there["input_ids"][:, :length], past_key_values=cache, **how).cpu(), want)
    counts = [int(line.split(" replays")[0].split()[-1]) for line in moved.forward.explain().splitlines() if " replays" in line]
    assert max(counts) >= 3 * 11 - 4  # all tokens but the first of each call, less those that were recorded


@pytest.mark.parametrize("name", longer(KINDS, ["gpt2", "llama", "t5", "qwen3_moe"]))
def test_a_captured_step_has_the_bits_of_plain_torch(name: str, one: None) -> None:
    (model, batch), (moved, _) = both(name)
    plain, captured = stepping(model), gt.compile(stepping(moved))
    assert [captured(batch).item() for _ in range(6)] == [plain(batch).item() for _ in range(6)]
    assert sum(program.replays for program in captured._programs) >= 2, captured.explain()


def test_a_compiled_call_without_padding_is_the_eager_one(one: None) -> None:
    """While it is recorded the model cannot look whether the mask has zeros, so it uses it: the same within rounding."""
    (model, batch), (moved, _) = both("llama")
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    plain, captured = stepping(model), gt.compile(stepping(moved))
    assert [captured(batch).item() for _ in range(5)] == pytest.approx([plain(batch).item() for _ in range(5)], rel=1e-6)
    assert captured._programs, captured.explain()


def rules(model: Any) -> dict[str, Any]:
    """Tensor parallel: what leads into a block by output features, what leads out of it by input features."""
    found: dict[str, Any] = {"*": "tp"}
    for name, _ in model.named_modules():
        if name.endswith("c_attn"):
            found[name] = {"group": "tp_colpar", "parts": 3}
        for ends, group in ((COLPAR, "tp_colpar"), (ROWPAR, "tp_rowpar")):
            if any(f".{name}".endswith(f".{end}") for end in ends):
                found[name] = group
    return found


@pytest.mark.parametrize("how", ["data", "tensor"])
@pytest.mark.parametrize("name", KINDS)
def test_two_workers_give_the_same_within_rounding(name: str, how: str, session: Callable[..., None]) -> None:
    session(TWO)
    plain, moved = both(name, rows=4)
    if how == "tensor":
        gt.signal.apply(moved[0], rules(moved[0]))
    losses, gradients, _ = trained(*plain)
    found = trained(*moved, group="all" if how == "data" else "")
    assert found[0] == pytest.approx(losses, rel=1e-5)
    for key, want in gradients.items():
        if want is not None:
            torch.testing.assert_close(found[1][key], want, rtol=2e-4, atol=2e-6)
    layouts = [gt.inspect(p)["layout"] for p in moved[0].parameters()]
    assert any("S" in layout for layout in layouts) == (how == "tensor")
    assert gt.stats()["dispatcher"]["tensor_bytes_relayed"] == 0


# ---- files


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_a_model_is_saved_and_loaded(name: str, one: None, tmp_path: Path) -> None:
    """GPT-2's and T5's embeddings are tied: the file has them once."""
    _, (moved, batch) = both(name)
    moved.save_pretrained(tmp_path)
    want = moved(**batch).logits.cpu()
    for how in ({}, {"device_map": "remote"}):
        again = type(moved).from_pretrained(tmp_path, **how).eval().to("remote")
        assert {p.device.type for p in again.parameters()} == {"remote"}
        assert torch.equal(again(**batch).logits.cpu(), want)
        tied = again.get_output_embeddings().weight is again.get_input_embeddings().weight
        assert tied == (name != "llama")
    low = type(moved).from_pretrained(tmp_path, dtype=torch.bfloat16).to("remote").eval()
    assert low(**batch).logits.dtype is torch.bfloat16
    assert torch.equal(type(moved).from_pretrained(tmp_path).eval()(**{k: v.cpu() for k, v in batch.items()}).logits, want)


def test_a_model_is_made_on_the_device(one: None) -> None:
    model, batch = make("llama")
    with torch.device("remote"):
        there = hf.LlamaForCausalLM(model.config)
    assert there.device.type == "remote" and there.model.rotary_emb.inv_freq.device.type == "remote"
    there.load_state_dict(model.state_dict())
    assert there(**{k: v.to("remote") for k, v in batch.items()}).loss.item() == model(**batch).loss.item()


def test_recomputed_activations_have_the_same_gradients(one: None) -> None:
    model, batch = make("llama")
    model.activation_checkpointing_enable()
    moved = copy.deepcopy(model.train()).to("remote").train()
    model(**batch, use_cache=False).loss.backward()
    moved(**{k: v.to("remote") for k, v in batch.items()}, use_cache=False).loss.backward()
    for a, b in zip(model.parameters(), moved.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad.cpu())


# ---- transformers.Trainer


def train(device: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> tuple[list[float], float]:
    """Losses and the last evaluation of a Trainer: on the CPU if asked for, else on the device that it takes by itself."""
    from accelerate.state import AcceleratorState

    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    given: dict[str, Any] = {"output_dir": str(folder / device), "report_to": [], "logging_steps": 1, "disable_tqdm": True}
    given |= {"per_device_train_batch_size": 2, "learning_rate": 1e-3, "seed": 3, "save_strategy": "epoch"}
    again, captured = arguments.pop("again", False), arguments.pop("captured", False)
    for resumed in (False, True)[: 1 + again]:
        model, batch = make("llama", rows=8)
        if captured:
            batch = {key: batch[key] for key in ("input_ids", "labels")}  # a mask that changes is a program for each kind of it
        data = [{key: value[n] for key, value in batch.items()} for n in range(8)]
        settings = hf.TrainingArguments(**{**given, "num_train_epochs": 2 + resumed, "use_cpu": device == "cpu", **arguments})
        trainer = hf.Trainer(model=model, args=settings, train_dataset=data, eval_dataset=data)
        trainer.remove_callback(hf.trainer_callback.PrinterCallback)
        if captured and device == "remote":
            trainer.training_step = step = gt.compile(trainer.training_step)
        trainer.train(resume_from_checkpoint=resumed)
        assert {p.device.type for p in model.parameters()} == {device}
        if captured and device == "remote":
            replays = [int(count) for count in re.findall(r"(\d+) replays", step.explain())]
            assert sum(replays) >= 8 and " parts" not in step.explain(), step.explain()
    found = [row["loss"] for row in trainer.state.log_history if "loss" in row], trainer.evaluate()["eval_loss"]
    AcceleratorState._reset_state(reset_partial_state=True)
    return found


TRAINERS: dict[str, dict[str, Any]] = {
    "resumed": {"again": True},
    "accumulating": {"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine", "warmup_steps": 2},
    "checkpointing": {"activation_checkpointing": True},
    "captured": {"captured": True, "num_train_epochs": 4, "save_strategy": "no"},
    "captured in bf16": {"captured": True, "bf16": True, "num_train_epochs": 4, "save_strategy": "no"},
    "best": {"eval_strategy": "epoch", "load_best_model_at_end": True, "optim": "adamw_torch"},
}


@pytest.mark.parametrize("how", TRAINERS)
def test_the_trainer_trains(how: str, one: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = train("cpu", tmp_path, monkeypatch, **TRAINERS[how])
    assert train("remote", tmp_path, monkeypatch, **TRAINERS[how]) == want
