"""Trains Mini-GPT on the workers of a config: `python examples/tuning_demo/train.py [--check] [--order 1f1b] ...`.

Connects to GT_SERVER or --connect where one is given; else it starts workers itself. `--device cpu` is the same program
in one plain torch process, which is what --check compares with.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
os.environ.setdefault("GT_CONFIG", str(HERE / "sharding_config.yaml"))

import gt  # noqa: E402  GT reads GT_CONFIG when it connects
from gt.config.load import load  # noqa: E402

sys.path.insert(0, str(HERE))
from model import PRESETS, MiniGPT, count  # noqa: E402

# what a preset trains with unless flags say otherwise
DEFAULTS = {
    "tiny": {"steps": 20, "batch_size": 16, "seq_len": 64, "microbatches": 4, "lr": 3e-3},
    "seed": {"steps": 10, "batch_size": 32, "seq_len": 128, "microbatches": 8, "lr": 3e-4},
    "512m": {"steps": 10, "batch_size": 32, "seq_len": 128, "microbatches": 8, "lr": 3e-4},
}
PATIENCE, FACTOR = 120.0, 10.0  # --check waits so many seconds for the reference, or so many times as long as GT took
TOLERANCE = 1e-5  # relative, over the first 20 steps; later fp32 training is chaotic


def arguments(argv: Sequence[str] | None, about: str | None = __doc__) -> argparse.Namespace:
    """The parsed flags. about: the text above them in --help."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    presets = "tiny (the default): 0.4M parameters; seed: 205M; 512m: 513M"
    parser.add_argument(
        "--preset", choices=PRESETS, default="tiny", help=f"{presets}. Each has defaults for the next five flags"
    )
    parser.add_argument("--steps", type=int, metavar="N")
    parser.add_argument("--batch-size", type=int, metavar="N", help="samples a step")
    parser.add_argument("--seq-len", type=int, metavar="N", help="tokens of a sample")
    parser.add_argument("--microbatches", type=int, metavar="N", help="parts that a batch is split into")
    parser.add_argument("--lr", type=float, help="learning rate")
    parser.add_argument("--order", choices=["gpipe", "1f1b"], default="gpipe", help="of the micro-batches' passes")
    parser.add_argument("--compile", action="store_true", help="capture the step and replay it")
    parser.add_argument("--schedule", help="of the captured step's micro-batches, as 1f1b, auto or auto:2GiB; with --compile")
    parser.add_argument("--data", type=Path, help="any file, read as bytes; default: Python's own library sources")
    parser.add_argument("--check", action="store_true", help="compare with one plain torch process")
    parser.add_argument("--connect", default="", metavar="HOST:PORT", help="of a running server")
    parser.add_argument("--device", choices=["remote", "cpu"], default="remote")
    parser.add_argument("--threads", type=int, help="of torch with --device cpu; default: one a core, and 1 for --check")
    parser.add_argument("--losses", type=Path, help="write the losses here as JSON")
    args = parser.parse_args(argv)
    for name, value in DEFAULTS[args.preset].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in ("steps", "batch_size", "seq_len", "microbatches"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, want at least 1")
    if args.schedule and not args.compile:
        parser.error("--schedule orders a captured step: add --compile")
    if args.batch_size % args.microbatches:
        parser.error(f"--batch-size {args.batch_size} cannot be split into {args.microbatches} equal micro-batches")
    if args.seq_len > PRESETS[args.preset]["max_seq_len"]:
        parser.error(f"--seq-len {args.seq_len} is over the model's {PRESETS[args.preset]['max_seq_len']}")
    return args


# ---- data


def text(path: Path | None, limit: int = 1 << 20) -> torch.Tensor:
    """Bytes as tokens, at most `limit`."""
    if path is not None:
        data = path.read_bytes()[:limit]
    else:
        data = b""
        for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            data += source.read_bytes()
            if len(data) >= limit:
                break
    return torch.frombuffer(bytearray(data[:limit]), dtype=torch.uint8)


def batches(data: torch.Tensor, args: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, targets), each [batch, length] int64, the same ones in every process."""
    if len(data) <= args.seq_len + 1:
        raise SystemExit(f"{args.data} has {len(data)} bytes, --seq-len {args.seq_len} needs {args.seq_len + 2}")
    generator = torch.Generator().manual_seed(1)
    while True:
        starts = torch.randint(len(data) - args.seq_len - 1, (args.batch_size, 1), generator=generator)
        rows = data[starts + torch.arange(args.seq_len + 1)].long()
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


# ---- one step


def passes(order: str, microbatches: int, stages: int) -> list[tuple[str, int]]:
    """("F" or "B", micro-batch) in the order the program issues them.

    Workers execute ops in program order, so the order decides which passes can overlap. With all forwards first, each
    stage works on another micro-batch at the same time. The explicit one-forward-one-backward loop keeps fewer
    activations, but a stage starts its next forward only after the backward has passed through all stages.
    """
    if order == "gpipe":
        return [("F", i) for i in range(microbatches)] + [("B", i) for i in range(microbatches)]
    warmup = min(stages - 1, microbatches)
    rows = [("F", i) for i in range(warmup)]
    for i in range(warmup, microbatches):
        rows += [("F", i), ("B", i - warmup)]
    return rows + [("B", i) for i in range(microbatches - warmup, microbatches)]


def step(model: MiniGPT, optimizer: torch.optim.Optimizer, batch: Sequence[torch.Tensor], args: argparse.Namespace) -> float:
    """One optimizer step over all micro-batches of (tokens, targets); waits for its loss and returns it."""
    parts = list(zip(*(part.to(args.device).chunk(args.microbatches) for part in batch), strict=True))
    optimizer.zero_grad()
    losses: dict[int, torch.Tensor] = {}
    total = []
    for kind, i in passes(args.order, args.microbatches, model.stages):
        if kind == "F":
            losses[i] = model(*parts[i]) / args.microbatches
            total.append(losses[i].detach())
        else:
            losses.pop(i).backward()
    optimizer.step()
    return torch.stack(total).sum().item()


def captured(model: MiniGPT, optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> Callable[..., torch.Tensor]:
    """The same step as a plain loop over micro-batches, recorded once and replayed; the schedule orders its passes."""

    @gt.compile(schedule=args.schedule)
    def run(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=tokens.device)
        for part in gt.microbatches((tokens, targets), args.microbatches):
            loss = model(*part) / args.microbatches
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    return run


def train(args: argparse.Namespace, groups: Sequence[str]) -> list[float]:
    """The losses of all steps; prints one line for each step."""
    torch.manual_seed(0)
    model = MiniGPT(PRESETS[args.preset], groups)
    print(f"{args.preset}: {count(model) / 1e6:.1f}M parameters, {model.config}", flush=True)
    model = model.to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    run = captured(model, optimizer, args) if args.compile and args.device != "cpu" else None
    losses = []
    for number, batch in zip(range(args.steps), batches(text(args.data), args), strict=False):
        start = time.perf_counter()
        losses.append(run(*batch).item() if run else step(model, optimizer, batch, args))
        gt.log(loss=losses[-1])  # a curve for those who look, as with `gt dashboard`
        seconds = time.perf_counter() - start
        rate = batch[0].numel() / seconds
        line = f"step {number + 1:3d}/{args.steps}: loss {losses[-1]:.6f}"
        print(f"{line}, {rate:7.0f} tokens/s, {seconds * 1e3:.0f} ms", flush=True)
    if run:
        print(run.explain(), flush=True)
    return losses


# ---- the comparison and the verdict


def reference(argv: Sequence[str], seconds: float) -> list[float]:
    """The losses of the same program in one plain torch process, which may take `seconds`.

    The process has one thread: a tiny model gains nothing from more threads, and on busy cores they wait for each other.
    """
    print("the same in one plain torch process:", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "losses.json"
        threads = ["--threads", "1"] if "--threads" not in argv else []
        command = [sys.executable, str(HERE / "train.py"), *argv, *threads, "--device", "cpu", "--losses", str(path)]
        try:
            subprocess.run(command, check=True, timeout=seconds, start_new_session=True)  # a Ctrl-C is told once, here
        except subprocess.TimeoutExpired:
            reason = f"--check: the plain torch process did not end within {seconds:.0f} s: try fewer --steps"
            raise SystemExit(f"train.py: {reason}") from None
        return json.loads(path.read_text())


def shape(path: str) -> tuple[int, int]:
    """(tensor-parallel, pipeline-parallel) sizes of the config."""
    config = load(Path(path).read_text(), path) if path else load("")
    stages = [g for g in config.groups.values() if g.name.startswith("pp_stage") and g.name[8:].isdigit()]
    split = [len(g.workers[0]) for g in config.groups.values() if g.name.endswith("_colpar")]
    return max(split, default=1), max(len(stages), 1)


def verdict(losses: list[float], wanted: list[float] | None, workers: int) -> int:
    """Prints the last line; returns 0 if the losses agree."""
    tp, pp = shape(os.environ["GT_CONFIG"])
    line = f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps on {workers} workers (tp {tp}, pp {pp})"
    ok = losses[-1] < losses[0] or len(losses) == 1
    if wanted is not None:
        differences = [abs(a - b) for a, b in zip(losses, wanted, strict=True)]
        line += f", largest difference from one process {max(differences):.1e}"
        ok = ok and all(d <= TOLERANCE * abs(w) for d, w in zip(differences[:20], wanted, strict=False))
    print(f"{'ok' if ok else 'not ok'}: {line}", flush=True)
    return 0 if ok else 1


def main(argv: Sequence[str] | None = None, start: Callable[[], None] | None = None, about: str | None = __doc__) -> int:
    """The exit code: 130 after a Ctrl-C, which ends the workers too. start: starts workers, unless --connect is given."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        return run(arguments(argv, about), argv, start)
    except KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).name}: interrupted", file=sys.stderr)
        return 130
    finally:
        gt.shutdown()


def run(args: argparse.Namespace, argv: Sequence[str], start: Callable[[], None] | None) -> int:
    began = time.perf_counter()
    if args.device == "cpu":
        if args.threads:
            torch.set_num_threads(args.threads)
        losses = train(args, ())
    else:
        if args.connect:
            gt.connect(args.connect)
        elif start is not None:
            start()
        losses = train(args, gt.signal.groups())
    if args.losses:
        args.losses.write_text(json.dumps(losses))
    if args.device == "cpu":
        return 0
    workers = len(gt.stats()["workers"])
    gt.shutdown()
    limit = max(PATIENCE, FACTOR * (time.perf_counter() - began))
    return verdict(losses, reference(argv, limit) if args.check else None, workers)


if __name__ == "__main__":
    sys.exit(main())
