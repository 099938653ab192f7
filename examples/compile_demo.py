"""A step captured once and replayed with one message, in a pipeline schedule: `python examples/compile_demo.py [SCHEDULE]`.

Four CPU workers are the stages of a small network. The step is a plain loop over micro-batches.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

import gt

STAGES, PARTS, STEPS = 4, 8, 10


def main(schedule: str = "zb-h1") -> int:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "stages.yaml"
        config.write_text("".join(f"stage{n}: {{shard: {{axis: 0, workers: [{n}]}}}}\n" for n in range(STAGES)))
        gt.cpu_workers(STAGES, config=str(config))
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(STAGES)).to("remote")
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2, fused=True)
    x, y = torch.randn(64, 64), torch.randn(64, 64)

    @gt.compile(schedule=schedule)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=x.device)
        for part, target in gt.microbatches((x, y), PARTS):
            for n, layer in enumerate(layers):
                with gt.signal.context(f"stage{n}"):
                    part = layer(part).tanh()
                    if n == STAGES - 1:
                        loss = torch.nn.functional.mse_loss(part, target) / PARTS
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    losses = []
    for n in range(STEPS):
        start = time.perf_counter()
        loss = step(x, y)
        issued = time.perf_counter() - start
        losses.append(loss.item())
        seconds = time.perf_counter() - start
        print(f"step {n + 1:2d}: loss {losses[-1]:.4f}, issued in {issued * 1e3:.2f} ms, {seconds * 1e3:.1f} ms with its loss")
    print(step.explain())
    for worker in gt.stats()["workers"]:
        print(worker["name"], ",".join(action for action, _, _ in worker["actions"]))
    gt.shutdown()
    learned = losses[-1] < losses[0]
    print("ok" if learned else f"not ok: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return 0 if learned else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedule", nargs="?", default="zb-h1", help="such as 1f1b or auto; docs/schedules.md has all")
    try:
        code = main(parser.parse_args().schedule)
    except ValueError as error:  # no schedule has this name
        parser.error(str(error))
    sys.exit(code)
