"""Two GPUs of one machine as two hosts: Llama 1.1B data parallel and as a pipeline, beside native torch over the same sockets.

`python benchmarks/gpu/bench_hosts.py [--json FILE] [--cases dp pp] [--size 8x1024] [--parts 4]`. GT's workers have a namespace
of processes each (`unshare`), so that neither sees the other's memory, and NCCL_HOSTID; NCCL may use sockets of loopback alone,
for the rivals too. bf16 compute with fp32 weights, fused AdamW. Prints milliseconds a step, tokens a second, the carrier of
tensors, what NCCL says that it took, and one line of JSON. All rows of a case have the first one's losses. `--model tiny --size
2x64` tries it on CPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import bench_zero
import cases
import native

CONFIGS = {
    "dp": "gt: {data_parallel: [0, 1], precision: bf16}",
    "pp": (cases.ROOT / "configs/llama/pp2.yaml").read_text() + "  precision: bf16\n",
}
RIVALS = {"dp": "ddp", "pp": "1f1b"}
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
COLUMNS = {"": -30, "ms": 10, "alone ms": 10, "tokens/s": 11, "first s": 9, "losses off by": 15}
RATE = 0.95  # of the rival's
HOSTS = 2


@contextlib.contextmanager
def hosts() -> Iterator[str]:
    """The address of a server with a worker on each of two hosts."""
    import torch

    server = subprocess.Popen([sys.executable, "-m", "gt.server", "-p", "0"], stdout=subprocess.PIPE, text=True)
    apart = ["unshare", *(["-r"] if os.geteuid() else []), "--pid", "--fork", "--kill-child", "--mount-proc"]
    workers = []
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        host, _, port = address.rpartition(":")
        for n in range(HOSTS):
            own = {"NCCL_HOSTID": f"host{n}", "GT_RANK": str(n), "GT_IFNAME": "lo"}
            if torch.cuda.is_available():
                own["CUDA_VISIBLE_DEVICES"] = str(n)
            line = [*apart, sys.executable, "-m", "gt.worker", "-H", host, "-p", port, "--name", f"w{n}"]
            workers.append(subprocess.Popen(line, env={**os.environ, **SOCKETS, **own}))
        yield address
    finally:
        for process in (*workers, server):
            process.terminate()
            process.wait(30)


def ours(case: str, size: str, name: str, parts: int, seconds: float) -> cases.Row:
    import torch

    import gt

    rows, length = map(int, size.split("x"))
    with hosts() as address:
        gt.connect(address, CONFIGS[case], workers=HOSTS)
        model = bench_zero.model_of(name)
        if case == "pp":
            gt.signal.apply(model)
        model.to("remote")
        optimizer = bench_zero.optimizer_of(model)
        count = parts if case == "pp" else 1

        def train(input_ids: Any, labels: Any) -> Any:
            total = 0.0
            for ids, wanted in zip(gt.microbatches(input_ids, count), gt.microbatches(labels, count), strict=True):
                loss = model(input_ids=ids, labels=wanted).loss / count
                loss.backward()
                total = total + loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            return total

        backend = "cudagraphs" if torch.cuda.is_available() else "eager"
        step = gt.compile(train, backend=backend, schedule="1f1b" if case == "pp" else None)
        batch = {key: value.to("remote") for key, value in bench_zero.batch_of(HOSTS * rows, length).items()}
        start = time.perf_counter()
        losses = [step(**batch).item() for _ in range(cases.MADE)][: cases.STEPS]
        first = time.perf_counter() - start
        ms, alone = cases.timed(lambda: step(**batch), torch.remote.synchronize, seconds)
        stats = gt.stats()["workers"]
        print(step.explain(), file=sys.stderr)
        gt.shutdown()
    about = {"ways": [worker.get("ways") for worker in stats], "nccl": [worker.get("nccl") for worker in stats]}
    print(json.dumps(about), file=sys.stderr)
    return {"ms": ms, "alone ms": alone, "first s": first, "losses": losses, **about}


# ---- rivals


def stage_of(model: Any, rank: int, cut: int = 0) -> Any:
    """One of two stages of a Llama as a module: hidden states or tokens in, hidden states or logits out.

    cut: layers of the first stage; 0 for half of them.
    """
    import torch

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            body = model.model
            half = cut or -(-len(body.layers) // HOSTS)
            self.embed = body.embed_tokens if rank == 0 else None
            self.layers = body.layers[:half] if rank == 0 else body.layers[half:]
            self.rotary, self.norm = body.rotary_emb, body.norm if rank else None
            self.head = model.lm_head if rank else None

        def forward(self, x: Any) -> Any:
            x = x if self.embed is None else self.embed(x)
            places = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
            rotary = self.rotary(x, places)
            for layer in self.layers:
                out = layer(x, position_embeddings=rotary, position_ids=places)
                x = out[0] if isinstance(out, tuple) else out
            return x if self.head is None else self.head(self.norm(x))

    return Stage()


def pipeline(own: native.World, size: str, name: str, parts: int, seconds: float) -> cases.Row:
    """torch's own pipeline of two stages, 1F1B, by autocast as GT's precision is."""
    import torch
    import torch.distributed as dist
    from torch.distributed import pipelining

    rows, length = map(int, size.split("x"))
    whole = {key: value.to(own.device) for key, value in bench_zero.batch_of(HOSTS * rows, length).items()}
    module = stage_of(bench_zero.model_of(name), own.rank).to(own.device)
    optimizer = bench_zero.optimizer_of(module)
    losses: list[Any] = []

    def loss_of(logits: Any, labels: Any) -> Any:
        flat = logits[:, :-1].float().flatten(0, 1)
        return torch.nn.functional.cross_entropy(flat, labels[:, 1:].flatten())

    run = torch.compile(module) if own.device.type == "cuda" else module
    stage = pipelining.PipelineStage(run, own.rank, HOSTS, own.device)
    schedule = pipelining.Schedule1F1B(stage, parts, loss_fn=loss_of)

    def step() -> Any:
        losses.clear()
        with torch.autocast(own.device.type, torch.bfloat16):
            if own.rank == 0:
                schedule.step(whole["input_ids"])
            else:
                schedule.step(target=whole["labels"], losses=losses)
        optimizer.step()
        optimizer.zero_grad()

    native.reset(own)
    start, said = time.perf_counter(), []
    for _ in range(cases.MADE):
        step()
        value = torch.stack(losses).mean().detach() if own.rank else torch.zeros((), device=own.device)
        dist.all_reduce(value)
        said.append(value.item())
    first = time.perf_counter() - start
    ms, alone = cases.timed(step, own.wait, seconds, own.agree)
    return {"ms": ms, "alone ms": alone, "first s": first, "losses": said[: cases.STEPS]}


# ---- the table


def rows(args: argparse.Namespace, case: str) -> Iterator[tuple[str, cases.Row | None, str]]:
    rest = (args.size, args.model, args.parts, "--seconds", args.seconds)
    with cases.meeting(__file__, HOSTS, "--child", "native", case, *rest) as commands:
        yield f"native {RIVALS[case]}", *cases.together(commands, args.limit, OMP_NUM_THREADS="1", **SOCKETS)
    yield case, *cases.together([[__file__, "--child", "gt", case, *rest]], args.limit)


def child(args: argparse.Namespace) -> int:
    who, case, size, name, parts = args.child
    if who == "gt":
        print(json.dumps(ours(case, size, name, int(parts), args.seconds)))
        return 0
    cases.without_gt()
    own = native.world(args.rank, args.world, args.meet)
    run: Callable[..., cases.Row] = pipeline
    more: Sequence[Any] = (int(parts),)
    if case == "dp":
        run, more = lambda own, size, name, seconds: bench_zero.rival(own, "ddp", size, name, seconds), ()
    print(json.dumps(run(own, size, name, *more, args.seconds)), flush=True)
    os._exit(0)  # a process group is not always taken down in time, and there is nothing left to do


def main() -> int:
    parser = cases.flags(__doc__ or "")
    parser.add_argument("--model", default="1.1b", choices=["1.1b", "tiny"])
    parser.add_argument("--size", default="8x1024", help="rows a GPU x tokens")
    parser.add_argument("--parts", type=int, default=4, help="micro-batches of the pipeline")
    parser.add_argument("--cases", nargs="*", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world", type=int)
    parser.add_argument("--meet")
    args = parser.parse_args()
    if args.child:
        return child(args)
    report = cases.Report("benchmarks/gpu/bench_hosts.py", args.json, COLUMNS, model=args.model, size=args.size)
    report.head()
    length = HOSTS * int(args.size.split("x")[0]) * int(args.size.split("x")[1])
    for case in args.cases:
        wanted: list[float] = []
        best = 0.0
        for name, row, said in rows(args, case):
            if row is not None:
                wanted = wanted or row["losses"]
                row |= {"tokens/s": length / row["ms"] * 1e3, "apart": cases.apart(row["losses"], wanted)}
                if row["apart"] > bench_zero.NOISE:
                    row, said = None, f"its losses {row['losses']} are not those of the first row, {wanted}; {row['ms']:.2f} ms"
            lines = [line for line in said.splitlines() if "ways" in line] if name == case else []
            report.row(name, row, said, cells, lines)
            if row is not None and name != case:
                best = row["ms"]
            elif row is not None and best:
                report.bar(f"{case}: rate over that of native {RIVALS[case]}", best / row["ms"], least=RATE)
    return report.end()


def cells(row: cases.Row) -> list[str]:
    n = cases.number
    return [n(row["ms"]), n(row["alone ms"]), n(row["tokens/s"], ".0f"), n(row["first s"], ".1f"), n(row["apart"], ".1e")]


if __name__ == "__main__":
    sys.exit(main())
