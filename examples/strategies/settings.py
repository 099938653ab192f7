"""Settings of finetune.py: CONFIG, a preset, flags and a DeepSpeed JSON become one `Settings`. Knows no model and no data."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NVME_FOLDER = "/tmp/nvme_offload"
STRATEGIES: dict[str, dict[str, Any]] = {  # keys of `gt:` in the YAML; docs/sharded.md explains them
    "dp": {"zero": 0},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "offload": {"zero": 3, "offload": {"optimizer": "cpu", "params": "cpu"}},
    "infinity": {"zero": 3, "offload": {"optimizer": "nvme", "params": "nvme"}},
}
MESH = {
    "model": "qwen2.5-14b", "strategy": "zero3", "batch_size": None, "max_length": 512, "num_samples": None, "steps": 12000,
    "warmup": 100, "lr": 2e-5, "weights": "bf16", "activation_checkpointing": True, "connect": "env",
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "mesh": MESH,  # 3 hosts of 128 GB
    "mesh-32b": {**MESH, "model": "qwen2.5-32b"},  # 4 hosts
    "mesh-70b": {**MESH, "model": "qwen2.5-72b"},  # 6 to 8 hosts
}
ALIASES = {"model_name": "model", "num_epochs": "epochs", "max_seq_length": "max_length"}

MOST = 1 << 63  # a seed has so many values
COUNTS = ("batch_size", "batch_per_worker", "micro_batches", "epochs", "steps", "max_length", "num_samples", "log_every")


class SettingsError(ValueError):
    """A setting is wrong. The text has its cure."""


@dataclass(frozen=True)
class Settings:
    """Every setting, with its default. Each is a key of CONFIG and a flag."""

    model: str = "gpt2"
    strategy: str = "dp"
    batch_size: int | None = 4
    batch_per_worker: int | None = None
    epochs: int = 1
    max_length: int = 512
    num_samples: int | None = None
    seed: int = 42
    deepspeed_config: str | Mapping[str, Any] | None = None
    data: str | None = None
    lr: float = 5e-5
    warmup: int = 100
    steps: int | None = None
    micro_batches: int | None = None
    clip: float = 1.0
    precision: str = "fp32"
    weights: str = "fp32"
    activation_checkpointing: bool = False
    attention: str = "sdpa"
    workers: int = 0
    device: str = "auto"
    connect: str = ""
    save: str = ""
    save_every: int = 0
    log_every: int = 10
    nvme_path: str = NVME_FOLDER
    compare: bool = False
    plot: str = "strategies.png"

    def sharding(self, workers: int) -> dict[str, Any]:
        """The keys of `gt:` for the strategy. One worker has nothing to shard: it offloads the optimizer's state at most."""
        chosen = deepspeed(self.deepspeed_config)[1] if self.deepspeed_config else STRATEGIES[self.strategy]
        offload = {"path": self.nvme_path, **chosen["offload"]} if "offload" in chosen else {}
        zero = chosen["zero"]
        if workers == 1:
            zero = 0
            offload = {key: value for key, value in offload.items() if key != "params"} if "optimizer" in offload else {}
        return {"zero": zero, **({"offload": offload} if offload else {}), "precision": self.precision}


HELP = {
    "model": "tiny, gpt2, gpt2-medium, ... (models.py has the list), or a folder with config.json",
    "strategy": ", ".join(STRATEGIES),
    "batch_size": "sequences of a step, of all workers together; none: by batch_per_worker",
    "batch_per_worker": "sequences of a micro-batch on each worker; default: batch_size over workers and micro-batches, or 1",
    "max_length": "tokens of a sequence",
    "num_samples": "sequences of the text that are used; none: all",
    "deepspeed_config": "path of a DeepSpeed JSON, in place of the strategy",
    "data": "a text file, a folder of text, or a dataset that was saved to disk; default: GT's own documentation",
    "warmup": "steps in which the learning rate rises to lr; at most a quarter of all",
    "steps": "optimizer steps, in place of epochs",
    "micro_batches": "parts of a batch whose gradients are added up before a step; default: 1",
    "clip": "largest norm of all gradients; 0: any",
    "precision": "fp32, bf16 or fp16: of the computation, with fp32 weights",
    "weights": "fp32, or bf16 for weights, gradients and optimizer state: half the memory, coarser steps",
    "activation_checkpointing": "keep the inputs of layers only, and compute each layer again in backward",
    "attention": "attn_implementation of transformers: sdpa, or eager",
    "workers": "number of workers; default: one for each GPU, or 2 on the CPU",
    "device": "auto, gpu or cpu",
    "connect": "HOST:PORT of a running server, or env for the job of gt run, srun, torchrun, ...",
    "save": "folder of a checkpoint; the same command goes on from it",
    "save_every": "steps between two saves; default: at the end of each epoch",
    "log_every": "steps between two lines",
    "nvme_path": "folder of infinity's files",
    "compare": "run every strategy and compare memory and speed",
    "plot": "PNG that --compare writes, if matplotlib is installed",
}
CHOICES = {
    "strategy": tuple(STRATEGIES), "precision": ("fp32", "bf16", "fp16"), "weights": ("fp32", "bf16"),
    "device": ("auto", "gpu", "cpu"),
}  # fmt: skip


# ---- CONFIG and flags


def read(config: Mapping[str, Any], argv: Sequence[str] | None, about: str | None = None) -> Settings:
    """Defaults, then CONFIG, preset, DeepSpeed JSON and flags: the later one wins. SettingsError names what is wrong."""
    flags = parser(about).parse_args(argv)
    flags_by_name = {key: value for key, value in vars(flags).items() if key != "preset"}
    if flags_by_name.get("deepspeed_config") and "strategy" in flags_by_name:
        strategy, path = flags_by_name["strategy"], flags_by_name["deepspeed_config"]
        raise SettingsError(f"strategy {strategy} and deepspeed_config {path} are two strategies; leave one out")
    chosen = {**known(config, "CONFIG"), **PRESETS.get(flags.preset or "", {})}
    json_config = flags_by_name.get("deepspeed_config", chosen.get("deepspeed_config"))
    from_json = deepspeed(json_config)[0] if json_config else {}
    settings = Settings(**{**chosen, **from_json, **flags_by_name})
    check(settings)
    return settings


def known(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keys under their first spelling. Refused: a key that nobody reads, and two spellings with two values."""
    fields = [field.name for field in dataclasses.fields(Settings)]
    chosen: dict[str, Any] = {}
    for spelled, value in config.items():
        key = ALIASES.get(spelled, spelled)
        if key not in fields:
            near = difflib.get_close_matches(spelled, [*fields, *ALIASES], 1)
            want = f"try {near[0]!r}" if near else f"want one of {', '.join(fields)}"
            raise SettingsError(f"{where} has an unknown key {spelled!r}; {want}")
        if key in chosen and chosen[key] != value:
            raise SettingsError(f"{where} has {key!r} in two spellings, as {chosen[key]!r} and {value!r}; leave one out")
        chosen[key] = value
    return chosen


def parser(about: str | None) -> argparse.ArgumentParser:
    """A flag for each setting; what is not given is left out of the result."""
    flags = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS
    )
    flags.add_argument("--preset", choices=PRESETS, default=None, help="settings of a kind of job, which flags override")
    for field in dataclasses.fields(Settings):
        spellings = [field.name, *(alias for alias, name in ALIASES.items() if name == field.name)]
        names = [f"--{spelled.replace('_', '-')}" for spelled in spellings]
        names += [f"--{spelled}" for spelled in spellings if "_" in spelled]
        about_field = HELP.get(field.name)
        if isinstance(field.default, bool):
            flags.add_argument(*names, dest=field.name, action=argparse.BooleanOptionalAction, help=about_field)
        else:
            flags.add_argument(
                *names, dest=field.name, type=kind_of(field), choices=CHOICES.get(field.name), help=about_field,
                metavar=None if field.name in CHOICES else field.name.upper(),
            )  # fmt: skip
    return flags


def kind_of(field: dataclasses.Field) -> Any:
    """The function that reads a flag's text. `none` is None where the setting may be None."""
    kind = float if "float" in str(field.type) else int if "int" in str(field.type) else str

    def read_text(text: str) -> Any:
        return None if "None" in str(field.type) and text.lower() == "none" else kind(text)

    read_text.__name__ = kind.__name__  # argparse names it in its error
    return read_text


def check(settings: Settings) -> None:
    """Refuse a value of the wrong type or range."""
    for field in dataclasses.fields(Settings):
        value, wanted = getattr(settings, field.name), str(field.type)
        if value is None and "None" in wanted:
            continue
        if field.name in CHOICES and value not in CHOICES[field.name]:
            raise SettingsError(f"{field.name} is {value!r}, want one of {', '.join(CHOICES[field.name])}")
        kinds = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str, Mapping)}[wanted.split(" ")[0]]
        if not isinstance(value, kinds) or (isinstance(value, bool) and wanted != "bool"):
            raise SettingsError(f"{field.name} is {value!r}, want {wanted}")
        if isinstance(value, (int, float)) and not 0 <= value < MOST:  # nan neither
            raise SettingsError(f"{field.name} is {value}, want 0 or more, below {MOST:.3g}")
    for name in COUNTS:
        if getattr(settings, name) == 0:
            raise SettingsError(f"{name} is 0, want 1 or more")
    if settings.max_length == 1:
        raise SettingsError("max_length is 1, want 2 or more: each token is predicted from those before it")
    if settings.weights == "bf16" and settings.precision != "fp32":
        raise SettingsError(f"weights bf16 compute in bf16 as they are; leave out precision {settings.precision}")
    if settings.compare and (settings.deepspeed_config or settings.save):
        raise SettingsError("compare runs every strategy: leave out deepspeed_config and save")


def batch_of(settings: Settings, workers: int) -> tuple[int, int]:
    """Sequences of a step, and its number of micro-batches. Each worker gets equally many of each micro-batch."""
    size, each, parts = settings.batch_size, settings.batch_per_worker, settings.micro_batches
    if size is None:
        return (each or 1) * workers * (parts or 1), parts or 1
    if each and parts is None and size % (each * workers) == 0:
        parts = size // (each * workers)
    rows = workers * (parts or 1)
    over = f"{workers} workers" + (f" in {parts} micro-batches" if parts and parts > 1 else "")
    if size % rows:
        fits = " or ".join(str(n) for n in (size // rows * rows, -(-size // rows) * rows) if n)
        raise SettingsError(f"batch_size {size} does not divide over {over}; try --batch-size {fits}, or another --workers")
    if each and each * rows != size:
        raise SettingsError(f"batch_size {size} over {over} is {size // rows} each, batch_per_worker is {each}; leave one out")
    return size, parts or 1


# ---- DeepSpeed's JSON

# keys of buffers and of overlap: GT's planner decides these itself, and no result depends on them
TUNING = {
    "steps_per_print", "wall_clock_breakdown", "dump_state", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "overlap_comm", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "allgather_partitions",
    "allgather_bucket_size", "round_robin_gradients", "sub_group_size", "stage3_max_live_parameters",
    "stage3_max_reuse_distance", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_gather_16bit_weights_on_model_save", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "fast_init",
    "pipeline_read", "pipeline_write", "auto_cast", "loss_scale_window", "initial_scale_power", "hysteresis", "min_loss_scale",
    "consecutive_hysteresis",
}  # fmt: skip

BATCH_KEYS = {
    "train_batch_size": "batch_size",
    "train_micro_batch_size_per_gpu": "batch_per_worker",
    "gradient_accumulation_steps": "micro_batches",
}


def without_twins(rows: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON. SettingsError for a key that it has twice, of which JSON would take the last value."""
    found = dict(rows)
    if len(found) < len(rows):
        twice = next(key for n, (key, _) in enumerate(rows) if any(key == other for other, _ in rows[:n]))
        raise SettingsError(f"deepspeed_config has the key {twice!r} twice in one object; leave one out")
    return found


def contents(config: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """The JSON as a dict. SettingsError for a file that has none."""
    if isinstance(config, Mapping):
        return config
    try:
        read_json = json.loads(Path(config).read_text(), object_pairs_hook=without_twins)
    except SettingsError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is no JSON: {error}"
        raise SettingsError(f"deepspeed_config {config} cannot be read: {why}; want the path of a JSON file") from None
    if not isinstance(read_json, dict):
        raise SettingsError(f"deepspeed_config {config} has a {type(read_json).__name__}, want a JSON object")
    return read_json


class _Unused:
    """Keys of a JSON that nothing has read: without effect, or not executed."""

    def __init__(self) -> None:
        self.idle: list[str] = []
        self.unread: list[str] = []

    def note(self, within: dict[str, Any], path: str) -> None:
        for key, value in within.items():
            (self.idle if key in TUNING or value == "auto" else self.unread).append(f"{path}{key}")


def section(within: dict[str, Any], name: str, path: str = "") -> dict[str, Any]:
    """An object of the JSON, taken out of the one that it is in; {} if it is not there."""
    value = within.pop(name, None)
    if value is not None and not isinstance(value, dict):
        raise SettingsError(f"deepspeed_config: {path}{name} is {value!r}, want an object")
    return dict(value or {})


def offload_of(zero: dict[str, Any], stage: int, unused: _Unused) -> dict[str, Any]:
    """Keys of `offload:`."""
    offload: dict[str, Any] = {}
    for name, key in (("offload_optimizer", "optimizer"), ("offload_param", "params")):
        part = section(zero, name, "zero_optimization.")
        device, path = part.pop("device", "none"), part.pop("nvme_path", None)
        if device not in ("none", "cpu", "nvme"):
            raise SettingsError(f"deepspeed_config: zero_optimization.{name}.device is {device!r}, want none, cpu or nvme")
        if device != "none":
            offload[key] = device
        if path is not None and device == "nvme" and offload.setdefault("path", str(path)) != str(path):
            raise SettingsError(f"deepspeed_config has two folders for offload, {offload['path']} and {path}; want one")
        unused.note(part, f"zero_optimization.{name}.")
    if "params" in offload and stage < 3:
        raise SettingsError(f"deepspeed_config: zero_optimization.offload_param needs stage 3, and stage is {stage}")
    return offload


def precision_of(rest: dict[str, Any], unused: _Unused) -> dict[str, str]:
    """The setting `precision`, if the JSON has one."""
    chosen: dict[str, str] = {}
    for name in ("bf16", "fp16"):
        part = section(rest, name)
        enabled, scale = part.pop("enabled", False), part.pop("loss_scale", 0)
        if enabled not in (True, False, "auto") or type(enabled) is int:
            raise SettingsError(f"deepspeed_config: {name}.enabled is {enabled!r}, want true or false")
        unused.note({"enabled": enabled} if enabled == "auto" else {}, f"{name}.")
        unused.note({"loss_scale": scale} if scale not in (0, "auto") else {}, f"{name}.")
        if enabled is True:
            if chosen:
                raise SettingsError("deepspeed_config enables bf16 and fp16; want one of them")
            chosen["precision"] = name
        unused.note(part, f"{name}.")
    return chosen


def deepspeed(config: str | Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Settings, keys of `gt:`, and keys without effect. SettingsError names each key that GT does not execute."""
    rest, unused = dict(contents(config)), _Unused()
    sizes: dict[str, int] = {}
    zero = section(rest, "zero_optimization")
    stage = zero.pop("stage", 0)
    if type(stage) is not int or not 0 <= stage <= 3:
        raise SettingsError(f"deepspeed_config: zero_optimization.stage is {stage!r}, want 0, 1, 2 or 3")
    offload = offload_of(zero, stage, unused)
    unused.note(zero, "zero_optimization.")
    settings: dict[str, Any] = {**precision_of(rest, unused)}
    for name in BATCH_KEYS:
        value = rest.pop(name, "auto")
        if value != "auto":
            if type(value) is not int or value < 1:
                raise SettingsError(f"deepspeed_config: {name} is {value!r}, want 1 or more")
            sizes[name] = value
    clip = rest.pop("gradient_clipping", "auto")
    if clip != "auto":
        if type(clip) not in (int, float):
            raise SettingsError(f"deepspeed_config: gradient_clipping is {clip!r}, want a number")
        settings["clip"] = float(clip)
    unused.note(rest, "")
    if unused.unread:
        raise SettingsError(
            f"deepspeed_config has keys that GT does not execute: {', '.join(key or repr(key) for key in unused.unread)}; "
            "leave them out (lr, warmup and epochs are settings of CONFIG)"
        )
    if sizes:  # the three numbers belong together: CONFIG's do not mix with them
        settings |= {"batch_size": None, "batch_per_worker": None, "micro_batches": None}
        settings |= {BATCH_KEYS[name]: value for name, value in sizes.items()}
    return settings, {"zero": stage, **({"offload": offload} if offload else {})}, unused.idle
