"""Fine-tune GPT-2, Llama or Qwen with data parallelism, ZeRO 1 to 3, or offload. The strategy is configuration, not code.

    python examples/strategies/finetune.py                              # as CONFIG says
    python examples/strategies/finetune.py --model gpt2 --strategy zero3
    python examples/strategies/finetune.py --compare                    # every strategy: memory and speed

Edit CONFIG, or override any of it by a flag. README.md has the strategies, and help for errors.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from data import TextDataset, batches, read_text, tokenizer_of
from models import HUB, build, config_of, layers_of, parameters_of, theory, weights_of
from report import MemoryWatch, Outcome, Progress, plot, size, summary, table
from settings import STRATEGIES, Settings, SettingsError, batch_of, deepspeed, read
from torch import nn

import gt

CONFIG = {
    "model": "tiny",           # tiny, gpt2, gpt2-medium, gpt2-large, gpt2-xl, tiny-llama, llama-1b, ..., or a folder
    "strategy": "zero2",       # dp, zero1, zero2, zero3, offload (host memory) or infinity (files)
    "batch_size": 8,           # sequences of a step, of all workers together
    "epochs": 2,
    "max_length": 64,          # tokens of a sequence
    "num_samples": 256,        # sequences of the text; None: all
    "seed": 42,
    "deepspeed_config": None,  # path of a DeepSpeed JSON, in place of the strategy
}  # fmt: skip
AGAIN = 75  # exit code after SIGTERM: saved; start the same command again, and it goes on


# ---- workers


def start(settings: Settings, layers: str) -> int:
    """Connect to workers, or start them, with the strategy as the config; their number."""
    if settings.connect:  # a job of several hosts, or a server that runs already
        wanted = 0 if settings.connect == "env" else settings.workers
        if not settings.workers:
            gt.connect(settings.connect)
        workers = settings.workers or len(gt.stats()["workers"])
        gt.connect(settings.connect, config=config_for(settings, workers, layers), workers=wanted)
        return workers
    gpus = 0 if settings.device == "cpu" else torch.cuda.device_count()
    workers = settings.workers or gpus or 2
    if settings.device == "gpu" and gpus < workers:
        missing = f"no GPU was found, want {workers}" if not gpus else f"{gpus} GPUs were found, want {workers}"
        raise SettingsError(f"{missing}; `gt doctor` says why; --device cpu trains on CPU workers")
    if gpus >= workers:
        gt.gpu_workers(workers, config=config_for(settings, workers, layers))
        return workers
    if settings.device == "auto":
        print(f"{f'only {gpus} GPUs were' if gpus else 'no GPU was'} found: training on {workers} CPU workers")
    gt.cpu_workers(workers, config=config_for(settings, workers, layers))
    return workers


def config_for(settings: Settings, workers: int, layers: str) -> dict[str, Any]:
    """The YAML as a dict. layers: pattern of the modules that activation checkpointing computes again."""
    checkpointed = {"activation_checkpoint": {"modules": layers}} if settings.activation_checkpointing else {}
    return {"gt": {"data_parallel": list(range(workers)), **settings.sharding(workers), **checkpointed}}


def check_room(settings: Settings, parameters: int, workers: int) -> None:
    """Refuse a strategy whose weights, gradients and optimizer state alone exceed a worker's memory, and name one that fits."""
    limits = [worker["memory_limit"] for worker in gt.stats()["workers"] if worker.get("memory_limit")]
    limits += [torch.cuda.get_device_properties(0).total_memory] if not settings.connect and torch.cuda.is_available() else []
    needed = theory(parameters, settings, workers).backward
    if not limits or needed <= min(limits):
        return
    others = {name: dataclasses.replace(settings, strategy=name, deepspeed_config=None) for name in STRATEGIES}
    fits = [name for name, other in others.items() if theory(parameters, other, workers).backward < min(limits)]
    cure = f"try --strategy {' or '.join(fits)}" if fits else "try a smaller model, more workers, or --weights bf16"
    text = f"out of memory: {parameters:,} parameters by {settings.strategy} need {size(needed)} on each of {workers} workers"
    raise SettingsError(f"{text}, which have {size(min(limits))}; {cure}")


def check_save(folder: str) -> None:
    """Refuse a folder that no checkpoint can be written to, before an epoch is spent."""
    where = Path(folder).absolute()
    above = next(path for path in where.parents if path.exists())
    if where.exists() and not where.is_dir():
        raise SettingsError(f"save {folder} is a file; want a folder for the checkpoint")
    try:
        with tempfile.TemporaryFile(dir=above):  # root may write everywhere by its rights, but not in /proc or /sys
            pass
    except OSError as error:
        raise SettingsError(f"save {folder}: {above} cannot be written: {error.strerror}; try a folder of your own") from None


# ---- training


class Training:
    """Model, data, optimizer and schedule of one run, and its checkpoint."""

    def __init__(self, settings: Settings) -> None:
        config = config_of(settings.model, settings.max_length)
        text, source = read_text(settings.data)
        encode, tokens = tokenizer_of(HUB.get(settings.model, settings.model), config.vocab_size)
        self.settings, self.data = settings, TextDataset(text, encode, settings.max_length, settings.num_samples)
        self.workers = start(settings, layers_of(config))
        self.batch, self.parts = batch_of(settings, self.workers)
        if len(self.data) < self.batch:
            raise SettingsError(
                f"the text has {len(self.data)} sequences of {settings.max_length} tokens, and batch_size is {self.batch}; "
                "try a longer text, a larger num_samples, a smaller max_length or batch_size"
            )
        self.batches = len(self.data) // self.batch  # of an epoch
        self.steps = settings.steps or settings.epochs * self.batches
        self.parameters = parameters_of(config)
        check_room(settings, self.parameters, self.workers)
        torch.manual_seed(settings.seed)
        self.model = build(settings, config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.lr, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)
        self.step, self.saving = 0, None
        self.weights = weights_of(settings.model) or "fresh"
        self.announce(source, tokens)

    def rate(self, step: int) -> float:
        """The factor of lr at a step: a linear warm-up, then a cosine down to a tenth."""
        warmup = min(self.settings.warmup, self.steps // 4)
        if step < warmup:
            return (step + 1) / warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(self.steps - warmup, 1)))

    def announce(self, source: str, tokens: str) -> None:
        settings, micro = self.settings, f" in {self.parts} micro-batches" if self.parts > 1 else ""
        strategy = "deepspeed_config" if settings.deepspeed_config else settings.strategy
        state = theory(self.parameters, settings, self.workers)
        print(f"Fine-tuning {settings.model}: {self.parameters:,} parameters, {self.weights} weights")
        print(f"   Strategy: {strategy} {settings.sharding(self.workers)}")
        if self.workers == 1 and settings.strategy != "dp":
            print("   One worker has nothing to shard: it trains as dp does, with the optimizer's state offloaded if asked for")
        print(f"   Workers: {self.workers}, on each {size(state.backward)} of weights, gradients and optimizer state by theory")
        print(f"   Batch: {self.batch} sequences{micro}, {self.batch // self.workers} on each worker")
        print(f"   Text: {source}; tokens: {tokens}")
        data = f"{len(self.data)} sequences of {settings.max_length} tokens"
        print(f"   Training: {data}, {self.batches} batches an epoch, {self.steps} steps")
        if settings.deepspeed_config and (idle := deepspeed(settings.deepspeed_config)[2]):
            print(f"   Without effect, since GT decides them itself: {', '.join(idle)}")
        print(flush=True)

    def train_step(self, batch: torch.Tensor, look: MemoryWatch | None = None) -> torch.Tensor:
        """One step of the optimizer; the loss. look: watches memory after forward, backward and the step."""
        losses = []
        self.optimizer.zero_grad()
        for part in batch.chunk(self.parts):
            tokens = part.to("remote")
            loss = self.model(input_ids=tokens, labels=tokens).loss.float() / self.parts
            if look:
                look.look()
            loss.backward()
            losses.append(loss.detach())
        if look:
            look.look()
        if self.settings.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.schedule.step()
        if look:
            look.look()
        self.step += 1
        return torch.stack(losses).sum()

    # ---- checkpoints

    def state(self) -> dict[str, Any]:
        names = ("model", "weights", "seed", "max_length", "lr", "warmup")
        run = {name: getattr(self.settings, name) for name in names} | {"batch": self.batch, "sequences": len(self.data)}
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "random": gt.RandomState()}
        return {**parts, "step": self.step, "run": run}

    def save(self) -> None:
        self.saving = gt.save(self.state(), self.settings.save, wait=False)  # written while the next steps run

    def finish_save(self) -> None:
        """Wait for the last save. With config.json beside it, from_pretrained reads the folder, and --model takes it."""
        if self.saving:
            self.saving.wait()
            self.model.config.save_pretrained(self.settings.save)

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one. SettingsError for one of another run."""
        folder = self.settings.save
        if not folder or not Path(folder).exists():
            return
        saved, own = gt.load(folder).get("run") or {}, self.state()["run"]  # tensors are not read yet
        other = [f"{key} {saved.get(key)!r} instead of {value!r}" for key, value in own.items() if saved.get(key) != value]
        if other:
            raise SettingsError(f"the checkpoint {folder} has {', '.join(other)}; use the same settings, or another --save")
        self.step = gt.load(folder, into=self.state())["step"]
        print(f"resumed from {folder} at step {self.step}", flush=True)


def told_to_stop() -> list[int]:
    """The list is empty until SIGTERM comes, as SLURM sends it before a time limit."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    return told


def train(training: Training, told: Sequence[int] = ()) -> tuple[Progress, MemoryWatch]:
    """All steps that are left; stops after a step once `told` has something. Losses, and memory of the last look."""
    settings, memory = training.settings, MemoryWatch(training.workers)
    progress = Progress(settings.log_every, training.batch * settings.max_length)
    progress.begin()
    while training.step < training.steps and not told:
        epoch, first = divmod(training.step, training.batches)
        count = min(training.batches, training.steps - epoch * training.batches)
        begin, before = time.perf_counter(), len(progress.losses)
        for index, batch in enumerate(batches(training.data, training.batch, epoch, settings.seed)):
            if index < first:
                continue
            rate = training.optimizer.param_groups[0]["lr"]
            last = index == count - 1
            loss = training.train_step(batch, memory if last else None)
            progress.step(epoch, index, count, loss, rate)
            if settings.save and not last and settings.save_every and training.step % settings.save_every == 0:
                training.save()
            if last or told:
                break
        progress.fetch()
        losses = progress.losses[before:]
        rows = memory.look()
        summary(epoch, losses, time.perf_counter() - begin, len(losses) * training.batch, settings.max_length, rows)
        if settings.save:
            training.save()
    return progress, memory


def finetune(settings: Settings) -> int:
    told = told_to_stop()
    if settings.save:
        check_save(settings.save)
    training = Training(settings)
    training.resume()
    train(training, told if settings.save else ())
    training.finish_save()
    if told and settings.save and training.step < training.steps:
        print(f"saved at step {training.step}, to be continued", flush=True)
        return AGAIN
    where = f"; saved in {settings.save}" if settings.save else ""
    print(f"Training is complete: {training.step} steps{where}")
    return 0


# ---- comparison


def run_one(settings: Settings) -> Outcome:
    """One strategy on workers of its own."""
    training = Training(settings)
    progress, memory = train(training)
    most = max(memory.rows, key=lambda row: row.peak)
    state = theory(training.parameters, settings, training.workers)
    return Outcome(settings.strategy, state, most, progress.speed() * training.batch, progress.losses)


def compare(settings: Settings) -> int:
    """Every strategy with the same model, data, seed and precision. A strategy without room is a line too."""
    outcomes = []
    for name in STRATEGIES:
        try:
            outcomes.append(run_one(dataclasses.replace(settings, strategy=name)))
        except (SettingsError, gt.GTError) as error:
            if "out of memory" not in str(error):
                raise
            outcomes.append(Outcome(name, error="no room"))
            print(f"{name}: {error}", file=sys.stderr)
        finally:
            gt.shutdown()
    good = [outcome for outcome in outcomes if not outcome.error]
    precision = f"weights {settings.weights}, precision {settings.precision}"
    print(f"{settings.model}, {precision}; memory of the worker with the highest peak\n")
    print(table(outcomes))
    apart = max((abs(a - b) for outcome in good for a, b in zip(outcome.losses, good[0].losses, strict=True)), default=0.0)
    print(f"\nlargest difference between losses of a step: {apart:.1e}")
    print(plot(outcomes, Path(settings.plot), f"{settings.model}, {precision}"))
    return 0 if good else 1


# ---- the program

CURES = (  # text of an error -> what to do
    ("out of memory", "try a smaller --batch-size or --max-length, --activation-checkpointing, or --strategy zero3 or offload"),
    ("No space left", "try --nvme-path with a folder on a larger disk, or --strategy offload"),
    ("libcudnn", "CUDA's libraries were not found: load your cluster's modules; `gt doctor` says what is missing"),
)


def main(argv: Sequence[str] | None = None) -> int:
    before = signal.getsignal(signal.SIGTERM)
    try:
        settings = read(CONFIG, argv, __doc__)
        return compare(settings) if settings.compare else finetune(settings)
    except (SettingsError, gt.GTError, OSError) as error:
        cures = [cure for text, cure in CURES if text in str(error) and not isinstance(error, SettingsError)]
        print("\n".join([f"finetune.py: {error}", *cures]), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("finetune.py: interrupted", file=sys.stderr)
        return 130
    finally:
        gt.shutdown()
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
