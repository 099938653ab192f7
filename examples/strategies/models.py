"""The models that finetune.py knows by name, those in a local folder, and the memory that training one takes by theory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from settings import Settings, SettingsError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config

GPT2 = {"tiny": (4, 128, 4), "gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "gpt2-large": (36, 1280, 20),
        "gpt2-xl": (48, 1600, 25)}  # layers, width, heads  # fmt: skip
LLAMA = {"tiny-llama": (2, 128, 384, 4, 2, 512), "llama-1b": (22, 2048, 5632, 32, 4, 32000),
         "llama-8b": (32, 4096, 14336, 32, 8, 128256), "llama-70b": (80, 8192, 28672, 64, 8, 128256),
         }  # layers, width, inner width, heads, heads of keys, words  # fmt: skip
QWEN = {"qwen2.5-14b": (48, 5120, 13824, 40, 8, 152064), "qwen2.5-32b": (64, 5120, 27648, 40, 8, 152064),
        "qwen2.5-72b": (80, 8192, 29568, 64, 8, 152064)}  # fmt: skip
NAMES = (*GPT2, *LLAMA, *QWEN)
HUB = {  # where from_pretrained finds the weights, if they are in its cache
    **{name: name for name in GPT2 if name != "tiny"},
    "qwen2.5-14b": "Qwen/Qwen2.5-14B", "qwen2.5-32b": "Qwen/Qwen2.5-32B", "qwen2.5-72b": "Qwen/Qwen2.5-72B",
}  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LAYERS = {"gpt2": "*.h.*"}  # modules that activation checkpointing computes again, by model_type
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


# ---- building


def config_of(name: str, max_length: int) -> PretrainedConfig:
    """The config of a name, or of a folder. SettingsError for one that is neither, or is shorter than max_length."""
    if name in GPT2:
        layers, width, heads = GPT2[name]
        words = 512 if name == "tiny" else 50257
        ends = {"bos_token_id": None, "eos_token_id": None} if name == "tiny" else {}  # GPT-2's are past its words
        config: Any = GPT2Config(vocab_size=words, n_layer=layers, n_embd=width, n_head=heads, n_positions=1024, **ends)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    elif name in LLAMA or name in QWEN:
        layers, width, inner, heads, keys, words = {**LLAMA, **QWEN}[name]
        config = (LlamaConfig if name in LLAMA else Qwen2Config)(
            hidden_size=width, num_hidden_layers=layers, intermediate_size=inner, num_attention_heads=heads,
            num_key_value_heads=keys, vocab_size=words, max_position_embeddings=8192, tie_word_embeddings=False,
        )  # fmt: skip
    elif Path(name).is_dir():
        try:
            config = AutoConfig.from_pretrained(name, local_files_only=True)
        except (OSError, ValueError) as error:
            raise SettingsError(f"the folder {name} has no model: {str(error).splitlines()[0]}") from None
    else:
        raise SettingsError(f"model is {name!r}, want a folder with config.json, or one of {', '.join(NAMES)}")
    config.use_cache = False
    room = getattr(config, "max_position_embeddings", max_length)
    if max_length > room:
        raise SettingsError(f"max_length {max_length} is more than the {room} positions of {name}; try --max-length {room}")
    return config


def layers_of(config: PretrainedConfig) -> str:
    """The pattern of its layers' names, for `activation_checkpoint`."""
    return LAYERS.get(config.model_type, "*.layers.*")


def weights_of(name: str) -> str:
    """The folder or name of pretrained weights on this machine, "" where there are none."""
    if Path(name).is_dir():
        return name if any(Path(name).glob("*.safetensors")) else ""
    if name not in HUB:
        return ""
    from huggingface_hub import try_to_load_from_cache

    cached = [try_to_load_from_cache(HUB[name], f"model.safetensors{end}") for end in ("", ".index.json")]
    return HUB[name] if any(isinstance(path, str) for path in cached) else ""


def parameters_of(config: PretrainedConfig) -> int:
    """The number of parameters; nothing is allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())


def build(settings: Settings, config: PretrainedConfig) -> nn.Module:
    """The model on `remote`: pretrained, or with fresh weights, which each worker draws for its pieces alone."""
    options = {"dtype": DTYPES[settings.weights], "attn_implementation": settings.attention}
    if source := weights_of(settings.model):
        model = AutoModelForCausalLM.from_pretrained(source, config=config, local_files_only=True, **options)
        model = model.to("remote")
    else:
        with torch.device("remote"):
            model = AutoModelForCausalLM.from_config(config, **options)
    model.loss_type = "ForCausalLM"  # GPT-2's class name tells transformers none
    return model.train()


# ---- memory by theory


@dataclass(frozen=True)
class Theory:
    """Bytes on one worker. kept: after a step. backward: at its end, without activations. away: in host memory or files."""

    kept: float
    backward: float
    away: float


def theory(parameters: int, settings: Settings, workers: int) -> Theory:
    """Weights P, gradients P, AdamW's two moments 2 P, as docs/sharded.md has them. Activations are not in it."""
    sharding, own = settings.sharding(workers), parameters * BYTES[settings.weights]
    stage, offload = sharding["zero"], sharding.get("offload", {})
    part = own / workers if stage else own
    away = part * ((2 if "optimizer" in offload else 0) + (1 if "params" in offload else 0))
    whole = parameters * BYTES[settings.precision if settings.weights == "fp32" else "bf16"]
    copies = whole if stage in (1, 2) else 0  # stage 3 holds copies of a few layers, which are left out
    gradients = part if stage > 1 else own
    return Theory(4 * part - away, 3 * part + gradients + copies - away, away)
