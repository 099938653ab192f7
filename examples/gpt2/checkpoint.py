"""llm.c's files: GPT-2 weights (fp32 and bf16), tokenizer, tokens; and beside weights, the optimizer's state by gt.save.

Little endian, each begins with 256 int32. Whatever is wrong with a file is a BadFile of one line.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from model import GPT2, Config

import gt

HEADER = 1024  # bytes
WEIGHTS, TOKENIZER, TOKENS = 20240326, 20240328, 20240520  # the first int32
DTYPES = {3: torch.float32, 5: torch.bfloat16}  # version of weights
VERSION = {dtype: version for version, dtype in DTYPES.items()}
SIZES = ("context", "vocab", "layers", "heads", "width", "padded")  # in the header of weights, from [2] on

# the order of weights in a file; a * stands for every layer
ORDER = (
    "embed.wte.weight", "embed.wpe.weight", "h.*.ln1.weight", "h.*.ln1.bias", "h.*.qkv.weight", "h.*.qkv.bias",
    "h.*.attproj.weight", "h.*.attproj.bias", "h.*.ln2.weight", "h.*.ln2.bias", "h.*.fc.weight", "h.*.fc.bias",
    "h.*.fcproj.weight", "h.*.fcproj.bias", "head.lnf.weight", "head.lnf.bias",
)  # fmt: skip


class BadFile(ValueError):
    """A file is missing, damaged, of another format, or cannot be written."""


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turns an OSError of the block into a BadFile."""
    try:
        yield
    except gt.CheckpointError as error:
        raise BadFile(str(error)) from None
    except gt.GTError:  # that a worker is lost is an OSError too
        raise
    except OSError as error:
        raise BadFile(f"{path}: cannot be written ({(error.strerror or str(error)).lower()})") from None


def header(path: str | Path, magic: int, versions: Sequence[int], what: str) -> np.ndarray:
    """The 256 int32 at the beginning, checked."""
    try:
        with open(path, "rb") as file:
            data = file.read(HEADER)
    except OSError as error:
        raise BadFile(f"{path}: cannot read the {what} file ({(error.strerror or 'error').lower()})") from None
    if len(data) < HEADER:
        raise BadFile(f"{path}: truncated: the header of a {what} file has {HEADER} bytes, this file {len(data)}")
    found = np.frombuffer(data, "<i4")
    if found[0] != magic:
        raise BadFile(f"{path}: wrong magic {found[0]}: a {what} file begins with {magic}")
    if found[1] not in versions:
        raise BadFile(f"{path}: wrong version {found[1]} of a {what} file: want {' or '.join(map(str, versions))}")
    return found


def sized(path: str | Path, want: int, what: str) -> None:
    have = os.path.getsize(path)
    if have < want:
        raise BadFile(f"{path}: truncated: its header wants {want} bytes of {what}, the file has {have}")
    if have > want:
        raise BadFile(f"{path}: {have} bytes, its header wants {want}: this is no {what} file, or a damaged one")


def write(path: str | Path, head: dict[int, int], body: Callable[[BinaryIO], None]) -> None:
    """Write a file atomically. head: int32s by place."""
    path = Path(path)
    numbers = np.zeros(256, "<i4")
    for place, value in head.items():
        numbers[place] = value
    part = path.with_name(f"{path.name}.part")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            file.write(numbers.tobytes())
            body(file)
        os.replace(part, path)


def raw(tensor: torch.Tensor) -> np.ndarray:
    """Its bytes in row-major order, fetched."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy()


# ---- weights


def in_order(layers: int) -> list[str]:
    """Names of parameters as a file has them."""
    return [p.replace("*", str(n)) for p in ORDER for n in range(layers if "*" in p else 1)]


def shapes(config: Config) -> dict[str, torch.Size]:
    """The shape of each parameter, in the order of a file."""
    found = {name: p.shape for name, p in GPT2(config).named_parameters()}
    return {name: found[name] for name in in_order(config.layers)}


def read_config(path: str | Path) -> tuple[Config, torch.dtype]:
    """Sizes and dtype of a weights file; its length is checked."""
    head = header(path, WEIGHTS, tuple(DTYPES), "weights")
    sizes = {name: int(head[2 + n]) for n, name in enumerate(SIZES)}
    dtype = DTYPES[int(head[1])]
    try:
        config = Config(**sizes)
    except ValueError as error:
        raise BadFile(f"{path}: {error}") from None
    numbers = config.parameters + (config.padded - config.vocab) * config.width  # no model is made of sizes that may be any
    sized(path, HEADER + dtype.itemsize * numbers, "weights")
    return config, dtype


def read_weights(path: str | Path) -> tuple[Config, dict[str, torch.Tensor]]:
    """Sizes, and parameters by name, in the file's dtype."""
    config, dtype = read_config(path)
    with open(path, "rb") as file:
        file.seek(HEADER)
        return config, {name: _tensor(file, shape, dtype) for name, shape in shapes(config).items()}


def _tensor(file: BinaryIO, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    data = np.fromfile(file, np.uint8, shape.numel() * dtype.itemsize)
    return torch.from_numpy(data).view(dtype).view(shape)


def write_weights(path: str | Path, config: Config, weights: dict[str, torch.Tensor]) -> None:
    """Write weights of one dtype, float32 or bfloat16, which becomes the file's."""
    dtype = next(iter(weights.values())).dtype
    head = {0: WEIGHTS, 1: VERSION[dtype], **{2 + n: getattr(config, name) for n, name in enumerate(SIZES)}}
    write(path, head, lambda file: [raw(weights[name]).tofile(file) for name in in_order(config.layers)])


def load(path: str | Path, groups: Sequence[str] = (), dtype: torch.dtype | None = None) -> GPT2:
    """A model on the CPU with a file's weights. dtype: another than the file's."""
    config, weights = read_weights(path)
    found = next(iter(weights.values())).dtype
    model = GPT2(config, groups).materialize(dtype or found)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights.pop(name))
    return model


# ---- the optimizer's state, beside weights


@dataclass(frozen=True)
class Progress:
    """The progress of training."""

    step: int = 0
    tokens: int = 0  # of the training data


def beside(path: str | Path) -> Path:
    """The folder with the optimizer's state for a weights file."""
    return Path(path).with_suffix(".state")


def write_state(path: Path, model: GPT2, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Save the optimizer's state, by the names of its parameters, and the progress: workers write what they hold."""
    names = {p: name for name, p in model.named_parameters()}
    state = {names[p]: values for p, values in optimizer.state.items()}
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        gt.save({"optimizer": state, "step": progress.step, "tokens": progress.tokens}, path)


def read_state(path: Path, model: GPT2, optimizer: torch.optim.Optimizer) -> Progress:
    """Gives the optimizer of the model's parameters what was saved."""
    try:
        made = gt.load(path)
        number = {name: n for n, (name, _) in enumerate(model.named_parameters())}
        state = {number[name]: values for name, values in made["optimizer"].items()}
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        return Progress(made["step"], made["tokens"])
    except gt.CheckpointError as error:
        raise BadFile(str(error)) from None
    except (KeyError, TypeError):
        raise BadFile(f"{path}: no optimizer state of this model") from None


# ---- tokenizer


@dataclass(frozen=True)
class Tokenizer:
    """The bytes of each token, and the token that ends a text."""

    tokens: list[bytes]
    end: int

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; the end of a text and ids of the padded vocabulary are left out."""
        known = (self.tokens[n] for n in ids if n != self.end and 0 <= n < len(self.tokens))
        return b"".join(known).decode("utf-8", "replace")


def read_tokenizer(path: str | Path) -> Tokenizer:
    head = header(path, TOKENIZER, (1, 2), "tokenizer")
    data, at, tokens = Path(path).read_bytes(), HEADER, []
    for n in range(head[2]):
        if at >= len(data) or at + 1 + data[at] > len(data):
            raise BadFile(f"{path}: truncated: its header wants {head[2]} tokens, the file has {n}")
        tokens.append(data[at + 1 : at + 1 + data[at]])
        at += 1 + data[at]
    return Tokenizer(tokens, int(head[3]) if head[1] == 2 else 50256)


def write_tokenizer(path: str | Path, tokenizer: Tokenizer) -> None:
    long = next((n for n, t in enumerate(tokenizer.tokens) if len(t) > 255), None)
    if long is not None:
        raise ValueError(f"token {long} has {len(tokenizer.tokens[long])} bytes, a tokenizer file has room for 255")
    head = {0: TOKENIZER, 1: 2, 2: len(tokenizer.tokens), 3: tokenizer.end}
    write(path, head, lambda file: file.writelines(bytes([len(t)]) + t for t in tokenizer.tokens))


# ---- tokens


def write_tokens(path: str | Path, tokens: np.ndarray) -> None:
    write(path, {0: TOKENS, 1: 1, 2: len(tokens)}, lambda file: tokens.astype("<u2").tofile(file))


def read_tokens(path: str | Path) -> np.ndarray:
    """Tokens as uint16, mapped into memory."""
    count = int(header(path, TOKENS, (1,), "tokens")[2])
    sized(path, HEADER + 2 * count, "tokens")
    return np.memmap(path, "<u2", "r", HEADER, (count,)) if count else np.zeros(0, "<u2")


class Tokens:
    """Batches from the files of a pattern, one after the other in order of name.

    A batch is batch * length + 1 tokens, and the next begins batch * length later; what is left of a file is left out.
    """

    def __init__(self, pattern: str, batch: int, length: int, vocab: int) -> None:
        paths = sorted(glob.glob(pattern))
        if not paths:
            raise BadFile(f"{pattern}: no such file; prepare_data.py makes token files from any text")
        self.pattern, self.batch, self.length, self.vocab = pattern, batch, length, vocab
        self.shards = [(path, read_tokens(path)) for path in paths]
        for path, shard in self.shards:
            if len(shard) <= batch * length:
                need = f"one batch of -b {batch} -t {length} needs {batch * length + 1}"
                raise BadFile(f"{path}: {len(shard)} tokens, {need}: use smaller ones, or more text")

    def __len__(self) -> int:
        """The number of batches in all files."""
        return sum((len(shard) - 1) // (self.batch * self.length) for _, shard in self.shards)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self.since(0)

    def since(self, first: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(tokens, targets), each [batch, length] int64, from that batch to the last."""
        size = self.batch * self.length
        for path, shard in self.shards:
            count = (len(shard) - 1) // size
            for n in range(min(first, count), count):
                rows = shard[n * size : (n + 1) * size + 1].astype(np.int64)
                if rows.max() >= self.vocab:
                    raise BadFile(f"{path}: token {rows.max()} is none of the model's {self.vocab}: another tokenizer's file?")
                pair = torch.from_numpy(rows)
                yield pair[:-1].view(self.batch, -1), pair[1:].view(self.batch, -1)
            first -= min(first, count)
