"""Hugging Face transformers models with random weights, small enough for tests: a config, a batch, and arguments of generate().

Nothing is fetched: every model is made from its config.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")

import torch
import transformers as hf

VOCABULARY, WIDTH, LAYERS, HEADS = 96, 32, 2, 4


@dataclass(frozen=True)
class Kind:
    """A kind of model: `build(**sizes)` makes it, `batch(model, rows, length)` a training step's arguments."""

    build: Callable[..., torch.nn.Module]
    batch: Callable[[torch.nn.Module, int, int], dict[str, torch.Tensor]]
    generates: bool = True


def words(model: Any, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Tokens, the second row padded, and the tokens themselves as labels."""
    tokens = torch.randint(3, model.config.vocab_size, (rows, length))
    mask = torch.ones_like(tokens)
    mask[1, -length // 4 :] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def blanks(model: Any, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Some of the tokens are to be found."""
    batch = words(model, rows, length)
    asked = torch.rand(rows, length) < 0.3
    return {**batch, "labels": batch["labels"].masked_fill(~asked, -100)}


def pictures(model: Any, rows: int, length: int) -> dict[str, torch.Tensor]:
    size = model.config.image_size
    return {"pixel_values": torch.randn(rows, 3, size, size), "labels": torch.randint(model.config.num_labels, (rows,))}


def decoder(name: str, heads_of: int = 2, **more: Any) -> Kind:
    """A decoder of Llama's kind, its heads of keys and values fewer than those of queries."""

    def build(width: int = WIDTH, layers: int = LAYERS, heads: int = HEADS, vocabulary: int = VOCABULARY, **given: Any) -> Any:
        config = getattr(hf, f"{name}Config")(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=max(heads // heads_of, 1), head_dim=width // heads,
            max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more, **given,
        )  # fmt: skip
        return getattr(hf, f"{name}ForCausalLM")(config)

    return Kind(build, words)


def gpt2(width: int = WIDTH, layers: int = LAYERS, heads: int = HEADS, vocabulary: int = VOCABULARY, **given: Any) -> Any:
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": vocabulary, "n_positions": 512}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **ends, **given))


def bert(width: int = WIDTH, layers: int = LAYERS, heads: int = HEADS, vocabulary: int = VOCABULARY, **given: Any) -> Any:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 4 * width}
    return hf.BertForMaskedLM(hf.BertConfig(vocab_size=vocabulary, max_position_embeddings=512, **sizes, **given))


def t5(width: int = WIDTH, layers: int = LAYERS, heads: int = HEADS, vocabulary: int = VOCABULARY, **given: Any) -> Any:
    sizes = {"d_model": width, "d_kv": width // heads, "d_ff": 2 * width, "num_layers": layers, "num_heads": heads}
    ends = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=vocabulary, **sizes, **ends, **given))


def vit(width: int = WIDTH, layers: int = LAYERS, heads: int = HEADS, size: int = 16, patch: int = 4, **given: Any) -> Any:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 4 * width}
    return hf.ViTForImageClassification(hf.ViTConfig(image_size=size, patch_size=patch, num_labels=10, **sizes, **given))


EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True}
KINDS = {
    "gpt2": Kind(gpt2, words),
    "llama": decoder("Llama"),
    "qwen2": decoder("Qwen2"),
    "qwen3": decoder("Qwen3"),
    "mistral": decoder("Mistral", sliding_window=6),
    "gemma": decoder("Gemma", heads_of=4),
    "mixtral": decoder("Mixtral", num_local_experts=4, **EXPERTS),
    "qwen3_moe": decoder("Qwen3Moe", num_experts=4, moe_intermediate_size=24, **EXPERTS),
    "bert": Kind(bert, blanks, generates=False),
    "t5": Kind(t5, words),
    "vit": Kind(vit, pictures, generates=False),
}


def make(name: str, rows: int = 2, length: int = 12, **sizes: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model with the weights of seed 0, and a batch for it."""
    torch.manual_seed(0)
    model = KINDS[name].build(**sizes)
    return model, KINDS[name].batch(model, rows, length)
