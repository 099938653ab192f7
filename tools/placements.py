"""Writes configs/{gpt2,llama,qwen}/*.yaml: `python -m tools.placements`. A test holds that the files are these.

Each places a model of transformers, by its modules' names, on 2, 4 or 8 workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SIZES = (2, 4, 8)


class Split(NamedTuple):
    """The number of workers along each axis: data, tensor and pipeline parallel; and the stage of ZeRO."""

    dp: int
    tp: int
    pp: int
    zero: int = 0

    def __str__(self) -> str:
        axes = "".join(f"{key}{n}" for key, n in self._asdict().items() if n > 1 and key != "zero")
        return axes + (f"-zero{self.zero}" if self.zero else "")

    def words(self) -> str:
        kinds = (f"{self.dp}-way data parallel", f"{self.tp}-way tensor parallel", f"{self.pp} pipeline stages")
        axes = [text for text, n in zip(kinds, self) if n > 1]
        return ", ".join([*axes, f"ZeRO stage {self.zero}"] if self.zero else axes)


SPLITS = [
    *(Split(dp, tp, pp) for n in SIZES for dp, tp, pp in ((1, n, 1), (1, 1, n), (n, 1, 1))),
    Split(1, 2, 2), Split(2, 2, 1), Split(2, 1, 2), Split(1, 4, 2), Split(2, 2, 2),
    *(Split(n, 1, 1, zero) for n in SIZES for zero in (1, 2, 3)), Split(2, 2, 1, 3), Split(4, 2, 1, 3), Split(2, 1, 2, 1),
]  # fmt: skip


class Family(NamedTuple):
    """Models whose modules have the same names. outer: what holds everything but the head; layers, norm, table: in it."""

    about: str
    outer: str
    layers: str
    norm: str
    columns: tuple[tuple[str, int], ...]  # pattern, how many weights are in one
    rows: tuple[str, ...]
    table: str  # the embedding in it, whose weight may be the head's as well
    note: str


GATED = {
    "outer": "model", "layers": "layers", "norm": "norm", "table": "embed_tokens",
    "columns": (("*.self_attn.[qkv]_proj", 1), ("*.mlp.gate_proj", 1), ("*.mlp.up_proj", 1)),
    "rows": ("*.self_attn.o_proj", "*.mlp.down_proj"),
}  # fmt: skip
KEYS = "Key-value heads that the tensor-parallel workers do not divide are right, but gathered: `gt plan` says so."
FAMILIES = {
    "gpt2": Family(
        "GPT-2 (transformers' GPT2LMHeadModel)", "transformer", "h", "ln_f",
        (("*.attn.c_attn", 3), ("*.mlp.c_fc", 1)), ("*.attn.c_proj", "*.mlp.c_proj"), "wte",
        "Heads that the tensor-parallel workers do not divide (12 over 8) are right, but gathered: `gt plan` says so.",
    ),
    "llama": Family("Llama (transformers' LlamaForCausalLM), and Mistral", **GATED, note=KEYS),
    "qwen": Family("Qwen 2, 2.5 and 3 (transformers' Qwen2ForCausalLM, Qwen3ForCausalLM)", **GATED, note=KEYS),
}  # fmt: skip


def text(family: Family, split: Split) -> str:
    return "\n".join(lines(family, split)) + "\n"


def lines(family: Family, split: Split) -> Iterator[str]:
    yield f"# {family.about} on {split.dp * split.tp * split.pp} workers: {split.words()}."
    if split.zero and split.tp == split.pp == 1:
        yield "# The program needs no line for it."
        yield "gt:"
        yield f"  data_parallel: {list(range(split.dp))}"
        yield f"  zero: {split.zero}"
        return
    yield "# In the program: gt.signal.apply(model)."
    if split.tp > 1:
        yield f"# {family.note}"
    stages = [f"pp_stage{n}" for n in range(split.pp)]
    width = max(len(row[0]) for row in groups(split)) + 1
    for name, workers in groups(split):
        yield f"{name + ':':{width}} {{workers: {workers}}}"
    yield "gt:"
    if split.zero:
        yield f"  zero: {split.zero}"
    yield "  modules:"
    rules = list(modules(family, split, stages))
    width = max(len(pattern) for pattern, _, _ in rules) + 3
    for pattern, group, why in rules:
        written = f'"{pattern}":'
        yield f"    {written:{width}} {group}" + (f"  # {why}" if why else "")


def groups(split: Split) -> Iterator[tuple[str, list]]:
    for stage in range(split.pp):
        first = stage * split.dp * split.tp
        rows = [list(range(first + n * split.tp, first + (n + 1) * split.tp)) for n in range(split.dp)]
        workers = [row[0] for row in rows] if split.tp == 1 else rows if split.dp > 1 else rows[0]
        for suffix in ("", "_colpar", "_rowpar") if split.tp > 1 else ("",):
            yield f"pp_stage{stage}{suffix}", workers


def modules(family: Family, split: Split, stages: list[str]) -> Iterator[tuple[str, str, str]]:
    """(pattern, group, comment)"""
    last = stages[-1]
    yield "", last, "the model itself: its loss"
    yield family.outer, stages[0], "embeddings, and what no other rule has"
    if split.pp > 1:
        yield f"{family.outer}.{family.layers}.*", f"[{', '.join(stages)}]", "cut evenly, however many there are"
        yield f"{family.outer}.{family.norm}", last, ""
    if split.tp > 1:
        yield (
            f"{family.outer}.{family.table}",
            "_rowpar",
            "each worker has rows of the table, for it and for a head that shares it",
        )
    yield "lm_head", f"{last}_colpar" if split.tp > 1 else last, "scores stay split over the vocabulary" if split.tp > 1 else ""
    if split.tp > 1:
        for pattern, parts in family.columns:
            group = f"{{group: _colpar, parts: {parts}}}" if parts > 1 else "_colpar"
            yield pattern, group, "of the layer's stage; q, k and v in one" if parts > 1 else ""
        for pattern in family.rows:
            yield pattern, "_rowpar", ""


def files() -> Iterator[tuple[Path, str]]:
    for name, family in FAMILIES.items():
        for split in SPLITS:
            yield CONFIGS / name / f"{split}.yaml", text(family, split)


def main() -> None:
    for path, written in files():
        path.parent.mkdir(exist_ok=True)
        path.write_text(written)


if __name__ == "__main__":
    main()
