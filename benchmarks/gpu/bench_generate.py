"""One GPU: greedy `generate()` of a Llama through `remote`, with native PyTorch beside it in the same run.

`python benchmarks/gpu/bench_generate.py [--json FILE] [--only NAME ...]`. Llama of 20 layers in bf16, one sequence, a prompt of
64 tokens and 64 new ones. Prints a row a case and one line of JSON: milliseconds a token (median of calls), peak memory,
seconds of the calls before the timed ones, and how many tokens of the first call are not the first row's. The rows with a
static cache keep one and reset it. Native is compiled in the mode "reduce-overhead", GT captures with "cudagraphs".
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import cases

NATIVE = ("native eager", "native static cache, compiled")
GT = ("gt eager", "gt static cache, captured")
COLUMNS = {"ms a token": ".2f", "peak MiB": ".0f", "first s": ".1f", "other tokens": "d"}
MODE = "reduce-overhead"
PROMPT, NEW = 64, 64  # tokens
MOST = 1.1  # at most so many times native's
SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 20, "num_attention_heads": 32}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}  # without a GPU


def generation(kind: str, seconds: float) -> cases.Row:
    """A row. The same weights and prompt in each, made on the CPU."""
    import torch

    cuda, ours, static = torch.cuda.is_available(), kind in GT, "static" in kind
    if ours:
        import gt

        gt.gpu_workers(1)
    import transformers

    torch.manual_seed(0)
    sizes = {**(SIZES if cuda else SMALL), "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 512}
    torch.set_default_dtype(torch.bfloat16)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    torch.set_default_dtype(torch.float32)
    prompt = torch.randint(3, 32000, (1, PROMPT))
    device = "remote" if ours else "cuda" if cuda else "cpu"
    model, prompt = model.to(device).eval(), prompt.to(device)
    cache = transformers.StaticCache(config=model.config, max_cache_len=PROMPT + NEW) if static else None

    def call() -> Any:
        if cache is not None:
            cache.reset()
        with torch.no_grad():
            return model.generate(
                prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, do_sample=False, min_new_tokens=NEW,
                max_new_tokens=NEW, pad_token_id=0,
            )  # fmt: skip

    if static:
        call()  # makes the cache's memory, which must not be that of a CUDA graph
        model.forward = gt.compile(model.forward, backend="cudagraphs") if ours else torch.compile(model.forward, mode=MODE)
    first = time.perf_counter()
    tokens = call().tolist()[0]
    for _ in range(2):
        call()
    first = time.perf_counter() - first
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        start = time.perf_counter()
        call().tolist()
        times.append(time.perf_counter() - start)
    if ours:
        peak = gt.stats()["workers"][0]["peak_bytes"]
        print(model.forward.explain() if static else "", file=sys.stderr)
        gt.shutdown()
    else:
        peak = torch.cuda.max_memory_allocated() if cuda else 0
    return {"ms a token": statistics.median(times) / NEW * 1e3, "peak MiB": peak / 2**20, "first s": first, "tokens": tokens}


def main() -> int:
    parser = cases.flags(__doc__ or "")
    parser.add_argument("--only", nargs="+", default=[*NATIVE, *GT], choices=[*NATIVE, *GT])
    args = parser.parse_args()
    if args.child:
        print(json.dumps(generation(args.child[0], args.seconds)))
        return 0
    report = cases.Report("benchmarks/gpu/bench_generate.py", args.json, {"": -36, **dict.fromkeys(COLUMNS, 14)})
    report.head()
    wanted: list[int] = []
    for kind in args.only:
        row, said = cases.together([[__file__, "--child", kind, "--seconds", args.seconds]], args.limit)
        if row is not None:
            tokens = row.pop("tokens")
            wanted = wanted or tokens
            row["other tokens"] = sum(a != b for a, b in zip(tokens, wanted, strict=True))
        lines = said.strip()[-600:].splitlines() if kind in GT else []
        report.row(kind, row, said, lambda row: [f"{row[k]:{form}}" for k, form in COLUMNS.items()], lines)
    for ours, theirs in zip(GT, NATIVE, strict=True):
        a, b = (report.rows.get(kind, {}).get("ms a token") for kind in (ours, theirs))
        if b:
            report.bar(f"{ours} over {theirs}", a / b if a else float("nan"), most=MOST)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
