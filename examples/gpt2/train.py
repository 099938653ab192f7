"""Trains GPT-2 as a pipeline over GPUs: `python examples/gpt2/train.py -b 4 -t 128 -v 20 -m 20 -s 20 -i TRAIN.bin -j VAL.bin`.

Files are llm.c's. Without GPUs the same program runs on CPU workers; `--device cpu` is one plain torch process.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

import gt
from gt.ir.schedules import asked

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checkpoint import (
    BadFile,
    Progress,
    Tokenizer,
    Tokens,
    beside,
    load,
    read_config,
    read_state,
    read_tokenizer,
    write_state,
    write_weights,
    writing,
)
from model import GPT2, TURNING, Config, activation_bytes, cut, fresh, layers_cut, placed, workers_of, yaml

DATA = "dev/data/tinyshakespeare/tiny_shakespeare_{}.bin"
TOKENIZER = "gpt2_tokenizer.bin"
NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SMALL = 4096  # tokens: a GPU takes as long for fewer, so a batch is not cut into less
OFTEN = 0.25  # seconds: losses are read together, so that workers never wait for a line to be printed
LEAST = {
    "batch": 1, "length": 1, "lr": 0, "val_every": 1, "val_batches": 0, "sample_every": 0, "sample": 1, "steps": 0,
    "save_every": 0, "weight_decay": 0,
}  # fmt: skip
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("-e", dest="model", default="gpt2_124M.bin", metavar="FILE|dN", help="weights, or d2 to d48: a fresh model of N layers")
    add("--vocab", type=int, default=50257, metavar="N", help="words of a fresh model's vocabulary without a tokenizer")
    add("-i", dest="train", default=DATA.format("train"), metavar="PATTERN", help="token files to train on")
    add("-j", dest="val", default=DATA.format("val"), metavar="PATTERN", help="token files to validate on")
    add("-o", dest="log", type=Path, metavar="FILE", help="append losses here, a line each")
    add("-b", dest="batch", type=int, default=4, metavar="B", help="sequences a step")
    add("-t", dest="length", type=int, default=1024, metavar="T", help="tokens a sequence")
    add("-l", dest="lr", type=float, default=3e-4, metavar="LR", help="learning rate")
    add("-v", dest="val_every", type=int, default=20, metavar="N", help="validate every N steps")
    add("-m", dest="val_batches", type=int, default=20, metavar="N", help="on at most N batches; 0: not at all")
    add("-s", dest="sample_every", type=int, default=20, metavar="N", help="sample text every N steps")
    add("-g", dest="sample", type=int, default=64, metavar="N", help="of N tokens")
    add("-M", dest="parts", type=int, default=0, metavar="N", help="micro-batches a step; default: up to two a stage")
    add("--stages", type=int, default=0, metavar="N", help="of the pipeline; default: for all GPUs, or for two CPU workers")
    add("--cut", default="", metavar="N,N,...", help="layers of each stage; default: by cost, the head counted")
    add("--split-head", action="store_true", help="the head over all stages' workers, each with a part of the vocabulary")
    add("--schedule", default="auto", help="gpipe, 1f1b, zb-h1, interleaved, zb-v, auto or auto:2GiB")
    add("--dtype", choices=NAMES, help="default: that of the file; fp32 for a fresh model")
    add("--steps", type=int, default=0, metavar="N", help="stop after step N; default: once through the data")
    add("--save-every", type=int, default=0, metavar="N", help="write weights and optimizer every N steps, and at the end")
    add("--save-to", type=Path, default=Path("checkpoints"), metavar="FOLDER")
    about = f"for samples; its size is a fresh model's vocabulary; default: {TOKENIZER}, if it is the model's"
    add("--tokenizer", type=Path, metavar="FILE", help=about)
    add("--seed", type=int, default=1337, metavar="N", help="of a fresh model's weights, and of samples")
    add("--weight-decay", type=float, default=0.0, metavar="X")
    add("--tf32", action=argparse.BooleanOptionalAction, default=True, help="for matmuls in fp32 on GPUs that have it")
    add("--backend", choices=["eager", "inductor", "cudagraphs"], help="of the captured step; default: cudagraphs on GPUs")
    add("--explain", action="store_true", help="say at the end what became of the captured step")
    add("--connect", default=os.environ.get("GT_SERVER", ""), metavar="HOST:PORT", help="a running server's workers")
    add("--device", choices=["remote", "cpu"], default="remote")
    return parser


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    args = flags().parse_args(argv)
    for name, least in LEAST.items():
        if not least <= getattr(args, name) < math.inf:
            raise SystemExit(f"train.py: want at least {least} for {name.replace('_', ' ')}, got {getattr(args, name)}")
    return args


# ---- what is trained, and where


def named(args: argparse.Namespace) -> bool:
    """True if -e names a file such as `./d2`, False if it is the size of a fresh model."""
    return not re.fullmatch(r"d\d+", args.model)


def sizes(args: argparse.Namespace) -> Config:
    """The sizes of the file that -e names, or of a fresh model."""
    if named(args):
        try:
            config, dtype = read_config(args.model)
        except BadFile as error:
            raise BadFile(f"{error}; `prepare_data.py --weights FOLDER` makes one, `-e d12` is a fresh model") from None
        args.dtype = args.dtype or next(name for name, d in NAMES.items() if d == dtype)
        return config
    args.dtype = args.dtype or "fp32"
    path = args.tokenizer or Path(TOKENIZER)
    return fresh(args.model, len(read_tokenizer(path).tokens) if args.tokenizer or path.exists() else args.vocab)


def tokenizer_of(args: argparse.Namespace, config: Config) -> tuple[Tokenizer | None, str]:
    """The tokenizer of samples, or the reason why there is none. A tokenizer that --tokenizer names must fit the model."""
    path = args.tokenizer or Path(TOKENIZER)
    if not args.tokenizer and not path.exists():
        return None, f"no tokenizer at {path}: samples are token numbers (prepare_data.py makes one)"
    tokenizer = read_tokenizer(path)
    if len(tokenizer.tokens) <= config.vocab and 0 <= tokenizer.end < config.vocab:
        return tokenizer, ""
    why = f"{path}: {len(tokenizer.tokens)} tokens, of which {tokenizer.end} ends a text, and the model has {config.vocab}"
    if args.tokenizer:
        raise BadFile(f"{why}: another model's tokenizer?")
    return None, f"{why}: samples are token numbers (--tokenizer names another)"


def layers_of(args: argparse.Namespace) -> list[int]:
    """The layers of each stage, from --cut."""
    if not re.fullmatch(r"(\s*\d+\s*(,\s*\d+\s*)*)?", args.cut):
        raise ValueError(f"--cut {args.cut}: want a number of layers for each stage, as in 8,4")
    return [int(n) for n in args.cut.split(",")] if args.cut else []


def most_stages(args: argparse.Namespace, config: Config, gpus: int) -> int:
    """The largest number of stages: one for each worker, or two if the schedule places two on each; then an even number."""
    each = 2 if args.schedule.partition(":")[0] in TURNING else 1
    stages = min(each * (gpus or 2), config.layers)
    return max(stages // each * each, 1)


def settle(args: argparse.Namespace, config: Config, gpus: int) -> list[int]:
    """Fill in and check the options that depend on the machine and the model; returns the worker of each stage."""
    asked(args.schedule)
    counts = layers_of(args)
    if args.device == "cpu":
        args.stages = 1
        args.split_head = False
    args.stages = args.stages or len(counts) or most_stages(args, config, gpus)
    if not 1 <= args.stages <= config.layers:
        raise ValueError(f"--stages {args.stages}: want 1 to {config.layers}, the number of layers")
    if counts and (len(counts) != args.stages or sum(counts) != config.layers):
        raise ValueError(f"--cut {args.cut}: want {args.stages} numbers that add up to {config.layers} layers")
    most = args.batch if args.stages == 1 else 2 * args.stages
    fits = [n for n in range(1, most + 1) if args.batch % n == 0]
    least = SMALL if gpus else 1
    worth = [n for n in fits if args.batch // n * args.length >= least] or [1]
    args.parts = args.parts or (1 if args.stages == 1 else worth[-1])
    if args.parts < 1 or args.batch % args.parts:
        raise ValueError(f"-b {args.batch} is not divisible by -M {args.parts} micro-batches: want a multiple of {args.parts}")
    if max(args.length, args.sample) > config.context:
        raise ValueError(f"-t {args.length} -g {args.sample}: the model has room for {config.context} tokens")
    return workers_of(args.stages, args.schedule, args.split_head)


def built(args: argparse.Namespace, config: Config) -> tuple[GPT2, list[int]]:
    """The model on the CPU, its pieces in their stages' groups, and the number of pieces of each stage."""
    counts = layers_of(args)
    split, part = args.split_head, args.batch // args.parts
    pieces = layers_cut(counts, split) if counts else cut(GPT2(config), args.stages, part, args.length, split)
    groups = placed(pieces, split) if args.device == "remote" else ()
    if named(args):
        return load(args.model, groups, NAMES[args.dtype]), pieces
    return GPT2(config, groups).materialize(NAMES[args.dtype]).initialize(args.seed), pieces


def start(args: argparse.Namespace, workers: list[int]) -> None:
    """Start workers with the stages' signal groups, on GPUs if there are enough."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stages.yaml"
        path.write_text(yaml(workers, args.split_head))
        if args.connect:
            gt.connect(args.connect, config=str(path))
        else:
            (gt.gpu_workers if args.gpus else gt.cpu_workers)(max(workers) + 1, config=str(path))


def gpus_of(args: argparse.Namespace) -> int:
    """The number of GPUs for workers: those of this machine, or of a server's workers."""
    if args.device == "cpu":
        return 0
    if not args.connect:
        return torch.cuda.device_count()
    gt.connect(args.connect, config="")
    devices = [worker["device"] for worker in gt.stats()["workers"]]
    gt.shutdown()
    return len(devices) - devices.count("cpu")


def device_name(args: argparse.Namespace) -> str:
    gpus, workers = args.gpus, args.workers
    if args.connect and workers:
        return f"{'GPU' if gpus else 'CPU'} ({workers} workers of {args.connect})"
    if not gpus:
        return f"CPU ({workers} workers)" if workers else "CPU"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:  # torch would make a CUDA context in this process to say it
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return f"{gpus} CUDA GPUs"


# ---- steps


def steps(model: GPT2, optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> tuple[Step, Step]:
    """A training step and a validation step on (tokens, targets): their mean loss, a tensor where the model is."""
    parts, apart = args.parts, model.groups[0] != model.groups[-1]

    def train(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=tokens.device)
        twin = model.twin() if apart else None
        for part in gt.microbatches((tokens, targets), parts):
            loss = model(*part, twin) / parts
            loss.backward()
            total = total + loss.detach()
        if twin is not None:
            model.embed.wte.weight.grad.add_(twin.grad)
        optimizer.step()
        return total

    @torch.no_grad()
    def validate(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device=tokens.device)
        for part in gt.microbatches((tokens, targets), parts):
            total = total + model(*part) / parts
        return total

    if args.device == "cpu":
        return train, validate
    schedule = args.schedule if args.stages > 1 else None
    return gt.compile(train, schedule=schedule, backend=args.backend), gt.compile(validate, backend=args.backend)


def sampler(model: GPT2, args: argparse.Namespace) -> Callable[[int, int], list[int]]:
    """Draws args.sample tokens after an end of text; a number that is the seed gives the same ones."""

    @torch.no_grad()
    def draw(tokens: torch.Tensor, place: torch.Tensor, coin: torch.Tensor) -> torch.Tensor:
        return tokens.index_copy(1, place + 1, model.next_token(tokens[:, :-1], place, coin)[None])  # nothing follows the last

    run = draw if args.device == "cpu" else gt.compile(draw, backend=args.backend)

    def sample(end: int, number: int) -> list[int]:
        coins = torch.rand(args.sample, 1, generator=torch.Generator().manual_seed(args.seed + number))
        tokens = torch.full((1, args.sample + 1), end).to(args.device)
        for n, coin in enumerate(coins):  # no value is waited for before the last
            tokens = run(tokens, torch.tensor([n]), coin)
        return tokens[0, 1:].tolist()

    return sample


def mean(losses: Iterator[torch.Tensor]) -> float:
    parts = [loss.float().reshape(1) for loss in losses]
    return torch.cat(parts).mean().item()


# ---- what is printed


def table(rows: Sequence[Sequence[tuple[str, object]]]) -> None:
    """Blocks of name and value, as llm.c prints them."""
    line = f"+{'-' * 24}+{'-' * 52}+"
    for block in rows:
        print(line)
        for name, value in block:
            print(f"| {name:<22} | {value!s:<50} |")
    print(line, flush=True)


class Report:
    """Lines about steps. Losses are fetched together, every quarter of a second."""

    def __init__(self, args: argparse.Namespace, total: int) -> None:
        self.tokens, self.total, self.path = args.batch * args.length, total, args.log
        self.waiting: list[tuple[int, torch.Tensor]] = []
        self.losses: list[float] = []
        self.since = time.perf_counter()

    def log(self, line: str) -> None:
        if self.path:
            with writing(self.path), self.path.open("a") as file:
                file.write(f"{line}\n")

    def begin(self) -> None:
        """Begin timing: no loss is pending, and earlier time belongs to no step."""
        self.flush()
        self.since = time.perf_counter()

    def step(self, number: int, loss: torch.Tensor) -> None:
        self.waiting.append((number, loss))
        if time.perf_counter() - self.since > OFTEN or number < 4:  # the first are recorded, which takes long
            self.flush()

    def flush(self) -> None:
        if not self.waiting:
            return
        losses = torch.stack([loss for _, loss in self.waiting]).tolist()  # one value to wait for
        seconds = (time.perf_counter() - self.since) / len(losses)
        for (number, _), loss in zip(self.waiting, losses, strict=True):
            rate = int(self.tokens / seconds)
            line = f"step {number + 1:4d}/{self.total}: train loss {loss:f} ({seconds * 1e3:f} ms, {rate} tok/s)"
            print(line, flush=True)
            self.log(f"s:{number} trl:{loss:.4f}")
            self.losses.append(loss)
            gt.log(loss=loss)  # a curve for those who look, as with `gt dashboard`
        self.waiting.clear()
        self.since = time.perf_counter()


def announce(args: argparse.Namespace, config: Config, pieces: list[int], data: Sequence[Tokens], device: str) -> None:
    where = "GPUs" if args.gpus else "CPU workers"
    head = not args.split_head
    stages = "+".join(str(n - (k == 0) - (head and k == len(pieces) - 1)) for k, n in enumerate(pieces))
    stages += "" if head else ", split head"
    tf32 = args.gpus and args.dtype == "fp32" and torch.get_float32_matmul_precision() != "highest"
    first = [
        (f"workers ({where})", args.workers), ("stages (layers)", f"{len(pieces)} ({stages})"),
        ("micro-batches", args.parts), ("schedule", args.schedule if len(pieces) > 1 else "-"), ("model", args.model),
        ("train data pattern", args.train), ("val data pattern", args.val), ("output log file", args.log or "-"),
        ("batch size B", args.batch), ("sequence length T", args.length), ("learning rate", f"{args.lr:f}"),
        ("val_loss_every", args.val_every), ("val_max_batches", args.val_batches), ("sample_every", args.sample_every),
        ("genT", args.sample),
    ]  # fmt: skip
    second = [("device", device), ("TF32", "enabled" if tf32 else "disabled"), ("dtype", args.dtype)]
    third = [
        ("max_sequence_length T", config.context), ("vocab_size V", config.vocab), ("padded_vocab_size Vp", config.padded),
        ("num_layers L", config.layers), ("num_heads NH", config.heads), ("channels C", config.width),
        ("num_parameters", config.parameters),
    ]  # fmt: skip
    fourth = [("train_num_batches", len(data[0])), ("val_num_batches", min(len(data[1]), args.val_batches))]
    table([[("Parameter", "Value")], first, second, third, fourth])


def allocated(model: GPT2, pieces: list[int], args: argparse.Namespace) -> None:
    """The two lines, and each stage's share where there are several, with that of a split head, which is all workers'.

    Activations are those of a step's forward passes.
    """
    weights = [sum(p.nbytes for p in piece.parameters()) for piece in model.pieces()]
    weights[-1] -= model.embed.wte.weight.nbytes  # which is the embedding's
    activations = [args.parts * n for n in activation_bytes(model, args.batch // args.parts, args.length)]
    for name, found in (("model parameters", weights), ("activations", activations)):
        ends = list(itertools.accumulate(pieces, initial=0))
        shares = [f"{sum(found[a:b]) >> 20}" for a, b in itertools.pairwise(ends)]
        shares += [f"and {found[-1] >> 20} of the head"] if args.split_head else []
        print(f"allocated {sum(found) >> 20} MiB for {name}" + (f" (by stage {' '.join(shares)})" if len(shares) > 1 else ""))
    sys.stdout.flush()


# ---- training


def save(args: argparse.Namespace, model: GPT2, optimizer: torch.optim.Optimizer, done: int) -> None:
    path = args.save_to / f"gpt2_{done:08d}.bin"
    write_state(beside(path), model, optimizer, Progress(done, done * args.batch * args.length))
    write_weights(path, model.config, dict(model.named_parameters()))
    print(f"saved {path}", flush=True)


def train(args: argparse.Namespace, model: GPT2, data: Sequence[Tokens], tokenizer: Tokenizer | None) -> list[float]:
    """Losses of all steps."""
    model = model.to(args.device)
    capture = {"fused": True} if args.device == "remote" else {}
    rates = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": args.weight_decay}
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, **rates, **capture)
    progress, state = Progress(), beside(args.model)
    if named(args) and state.exists():
        progress = read_state(state, model, optimizer)
        print(f"resumed from {args.model} at step {progress.step}", flush=True)
    tokens = args.batch * args.length
    if progress.tokens % tokens:
        raise BadFile(f"{state}: training stands at token {progress.tokens}, which is no multiple of -b times -t, {tokens}")
    first, total = progress.tokens // tokens, args.steps or len(data[0])
    if progress.step > total:
        print(f"nothing is left to do: {args.model} stands at step {progress.step}, and --steps is {total}", flush=True)
        return []
    batches = itertools.chain(data[0].since(first % len(data[0])), itertools.chain.from_iterable(itertools.repeat(data[0])))
    step, validate = steps(model, optimizer, args)
    sample, report = sampler(model, args), Report(args, total)
    for number in range(progress.step, total + 1):
        last = number == total
        if args.val_batches and (number % args.val_every == 0 or last):
            report.flush()
            value = mean(validate(*pair) for pair in itertools.islice(data[1], args.val_batches))
            print(f"val loss {value:f}", flush=True)
            report.log(f"s:{number} tel:{value:.4f}")
            report.begin()
        if args.sample_every and ((number and number % args.sample_every == 0) or last):
            report.flush()
            text = sample(tokenizer.end if tokenizer else model.config.vocab - 1, number)
            print(f"generating:\n---\n{tokenizer.decode(text) if tokenizer else ' '.join(map(str, text))}\n---", flush=True)
            report.begin()
        if last:
            break
        report.step(number, step(*next(batches)))
        done = number + 1
        if args.save_every and (done % args.save_every == 0 or done == total):
            report.flush()
            save(args, model, optimizer, done)
            report.begin()
    report.flush()
    if args.explain and args.device == "remote":
        print(step.explain(), flush=True)
    return report.losses


def writable(args: argparse.Namespace) -> None:
    """Raise BadFile for a file that the first or the last step could not write."""
    if args.log:
        with writing(args.log):
            args.log.open("a").close()
    if args.save_every:
        with writing(args.save_to):
            args.save_to.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=args.save_to).close()


def prepared(args: argparse.Namespace) -> tuple[GPT2, list[Tokens], Tokenizer | None, list[int]]:
    """Model, both sets of data, tokenizer, workers of stages; everything is checked before a worker is started."""
    config = sizes(args)
    gpus = gpus_of(args)
    workers = settle(args, config, gpus)
    args.gpus = gpus if gpus > max(workers) else 0  # CPU workers where there are too few
    args.workers = max(workers) + 1 if args.device == "remote" else 0
    args.backend = args.backend or ("cudagraphs" if args.gpus else "eager")
    if args.gpus and args.tf32:
        torch.set_float32_matmul_precision("high")
    patterns = (args.train, args.val if args.val_batches else args.train)
    data = [Tokens(pattern, args.batch, args.length, config.vocab) for pattern in patterns]
    tokenizer, without = tokenizer_of(args, config)
    writable(args)
    model, pieces = built(args, config)
    announce(args, config, pieces, data, device_name(args))
    if without:
        print(without)
    allocated(model, pieces, args)
    return model, data, tokenizer, workers


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Losses of all steps; SystemExit with one line where a file, a flag or a worker is at fault. The rest is ours to mend."""
    args = arguments(argv)
    try:
        try:
            model, data, tokenizer, workers = prepared(args)
        except ValueError as error:  # of flags; later, one would be ours
            raise BadFile(error) from None
        if args.device == "remote":
            start(args, workers)
        return train(args, model, data, tokenizer)
    except (BadFile, gt.GTError) as error:
        todo = "\ntrain.py: use a smaller -b or -t, more micro-batches (-M) or more --stages"
        raise SystemExit(f"train.py: {error}{todo if 'out of memory' in str(error) else ''}") from None
    except KeyboardInterrupt:
        print("train.py: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        gt.shutdown()


if __name__ == "__main__":
    main()
