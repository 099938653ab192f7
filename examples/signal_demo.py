"""Signal groups: the YAML says where the named parts of a program run and how they are split.

The program names its parts; the same program without the YAML gives the same answer on one worker.
"""

import os
import tempfile
from pathlib import Path

import torch

import gt

CONFIG = """\
pp_stage0:        {shard: {axis: 0, workers: [0, 1]}}
pp_stage0_colpar: {shard: {axis: 1, workers: [0, 1]}}
pp_stage0_rowpar: {shard: {axis: 0, workers: [0, 1]}}
pp_stage1:        {shard: {axis: 0, workers: [2]}}
data:             {shard: {axis: 0, workers: [0, 1, 2, 3]}}
"""


def show(name: str, t: torch.Tensor) -> None:
    """Print the layout of a tensor and the piece of each worker."""
    seen = gt.inspect(t)
    pieces = ", ".join(f"{piece['worker']} {tuple(piece['shape'])}" for piece in seen["pieces"])
    print(f"  {name:10s} {tuple(t.shape)} {seen['layout']}: {pieces}")


def main() -> None:
    path = Path(tempfile.mkdtemp()) / "sharding.yaml"
    path.write_text(CONFIG)
    os.environ["GT_CONFIG"] = str(path)
    gt.cpu_workers(4)
    print("groups:", ", ".join(gt.signal.groups()))

    torch.manual_seed(0)
    x, up, down, last = torch.randn(8, 16), torch.randn(16, 64), torch.randn(64, 16), torch.randn(16, 4)
    local = torch.relu(x @ up) @ down @ last
    up, down, last = (torch.nn.Parameter(w.to("remote")) for w in (up, down, last))
    x = x.to("remote")

    print("tensor parallel: the first matmul splits output features, the second input features, then one all-reduce")
    with gt.signal.context("pp_stage0"):
        with gt.signal.context("pp_stage0_colpar"):
            h = torch.relu(x @ up)
        with gt.signal.context("pp_stage0_rowpar"):
            y = h @ down
    for name, t in (("up", up), ("h", h), ("down", down), ("y", y)):
        show(name, t)

    print("pipeline: the next stage is another worker; the transfer has a name")
    with gt.signal.context("stage0_to_stage1"):
        y = y
    with gt.signal.context("pp_stage1"):
        z = y @ last
    show("last", last)
    show("z", z)

    print("data parallel: a group without tensor-parallel groups splits what enters it along its axis")
    with gt.signal.context("data"):
        d = torch.relu(x)
    show("relu(x)", d)

    z.sum().backward()
    show("up.grad", up.grad)
    print(f"largest difference from one process: {(z.detach().cpu() - local).abs().max().item():.1e}")
    gt.shutdown()
    path.unlink()
    path.parent.rmdir()


if __name__ == "__main__":
    main()
