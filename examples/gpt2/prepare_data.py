"""Token files from any text, and GPT-2's published weights as llm.c's: see README.md.

prepare_data.py TEXT... [--to FOLDER] [--vocabulary FOLDER]     NAME_train.bin, NAME_val.bin, gpt2_tokenizer.bin
prepare_data.py --weights FOLDER [--to FOLDER]                  gpt2_124M.bin from a Hugging Face folder
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checkpoint import BadFile, Tokenizer, shapes, write_tokenizer, write_tokens, write_weights
from model import PAD, Config

FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))  # a GPT-2 vocabulary, as Hugging Face and OpenAI name it
Encode = Callable[[str], Sequence[int]]


# ---- text


def characters() -> dict[str, int]:
    """The byte that each character of GPT-2's vocabulary files stands for: printable ones themselves, others from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [n for n in range(256) if n not in plain]
    return {**{chr(n): n for n in plain}, **{chr(256 + k): n for k, n in enumerate(rest)}}


def by_bytes() -> tuple[Tokenizer, Encode]:
    """A tokenizer of 256 bytes and an end of text."""
    return Tokenizer([bytes([n]) for n in range(256)] + [b""], 256), lambda text: text.encode()


def by_pairs(folder: Path) -> tuple[Tokenizer, Encode]:
    """GPT-2's byte pairs, from the vocabulary in a folder, executed by tiktoken or transformers."""
    names = next((n for n in FILES if all((folder / name).exists() for name in n)), None)
    if names is None:
        raise BadFile(f"{folder}: no GPT-2 vocabulary: want {' or '.join(' and '.join(n) for n in FILES)}")
    numbers = json.loads((folder / names[0]).read_text("utf-8"))
    known = characters()
    tokens = [b""] * (max(numbers.values()) + 1)
    end = numbers.get("<|endoftext|>", len(tokens) - 1)
    ranks = {}
    for text, number in numbers.items():
        if number != end and known.keys() >= set(text):
            tokens[number] = bytes(known[c] for c in text)
            ranks[tokens[number]] = number
        elif number != end:  # an extra special token, as it is written: no text becomes it
            tokens[number] = text.encode()
    if tiktoken := found("tiktoken"):
        words = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
        return Tokenizer(tokens, end), tiktoken.Encoding(
            "gpt2", pat_str=words, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": end}
        ).encode_ordinary
    if names == FILES[0] and (transformers := found("transformers")):
        tokenizer = transformers.GPT2TokenizerFast.from_pretrained(str(folder), local_files_only=True)
        return Tokenizer(tokens, end), partial(tokenizer.encode, split_special_tokens=True)  # a text's "<|endoftext|>" is text
    raise BadFile(f"{folder} has a GPT-2 vocabulary, but there is no library to use it: pip install tiktoken")


def found(name: str):
    """A module, or None where it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None


def text(args: argparse.Namespace) -> list[str]:
    """Writes token files and tokenizer; a line about each."""
    if args.shard < 0:
        raise ValueError(f"want at least 0 for --shard, got {args.shard}")
    tokenizer, encode = by_pairs(args.vocabulary) if args.vocabulary else by_bytes()
    pieces = []
    for path in args.text:
        try:
            read = path.read_text("utf-8", "replace")
        except OSError as error:
            raise BadFile(f"{path}: cannot read the text ({(error.strerror or 'error').lower()})") from None
        if tokenizer.decode(encode(read[:1000])) != read[:1000]:
            raise BadFile(f"{path}: tokens of {args.vocabulary} do not give the text back: its vocabulary lacks bytes")
        pieces.append(np.array([tokenizer.end, *encode(read)], np.uint16))
    tokens = np.concatenate(pieces)
    validation = args.val_tokens if args.val_tokens is not None else min(32768, len(tokens) // 10)
    if not 0 < validation < len(tokens):
        raise BadFile(f"{len(tokens)} tokens: cannot hold back {validation} of them for validation (--val-tokens)")
    lines, name = [], args.name or args.text[0].stem
    train = tokens[validation:]
    count = max(len(train) // args.shard, 1) if args.shard else 1
    shards = np.split(train, [n * args.shard for n in range(1, count)])  # what is left is the last's: alone it may be no batch
    files = [(f"{name}_val.bin", tokens[:validation])]
    files += [(f"{name}_train{f'_{n:06d}' if args.shard else ''}.bin", shard) for n, shard in enumerate(shards)]
    for file, part in files:
        write_tokens(args.to / file, part)
        lines.append(f"{args.to / file}: {len(part)} tokens")
    write_tokenizer(args.to / "gpt2_tokenizer.bin", tokenizer)
    kind = "byte pairs" if args.vocabulary else "bytes (--vocabulary FOLDER for GPT-2's byte pairs)"
    return [*lines, f"{args.to / 'gpt2_tokenizer.bin'}: {len(tokenizer.tokens)} tokens, {kind}"]


# ---- weights

NAMES = {  # of ours -> of Hugging Face's
    "embed.wte": "wte", "embed.wpe": "wpe", "head.lnf": "ln_f", "ln1": "ln_1", "ln2": "ln_2", "qkv": "attn.c_attn",
    "attproj": "attn.c_proj", "fc": "mlp.c_fc", "fcproj": "mlp.c_proj",
}  # fmt: skip
STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def safetensors(path: Path) -> dict[str, torch.Tensor]:
    """A file's tensors. A file is the length of a JSON header in 8 bytes, the header with offsets of tensors, the data."""
    data = np.memmap(path, np.uint8, "r")
    size = int(data[:8].view("<u8")[0]) if len(data) >= 8 else 0
    if not 0 < size <= len(data) - 8:
        raise BadFile(f"{path}: truncated, or no safetensors file")
    rows = json.loads(data[8 : 8 + size].tobytes())
    tensors = {}
    for name, row in rows.items():
        if name == "__metadata__" or row["dtype"] not in STORED:
            continue  # a causal mask is stored as bytes
        a, b = (8 + size + n for n in row["data_offsets"])
        if b > len(data):
            raise BadFile(f"{path}: truncated: {name} ends at byte {b}, the file at {len(data)}")
        tensors[name] = torch.from_numpy(data[a:b].copy()).view(STORED[row["dtype"]]).view(row["shape"])
    return tensors


def theirs(name: str) -> str:
    """Hugging Face's name of a parameter."""
    layer, _, rest = name.removeprefix("h.").partition(".") if name.startswith("h.") else ("", "", name)
    module, _, kind = rest.rpartition(".")
    return f"{f'h.{layer}.' if layer else ''}{NAMES[module]}.{kind}"


def pytorch(path: Path) -> dict[str, torch.Tensor]:
    """A file's tensors, as torch.save writes them."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has no class for what is wrong with a file
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise BadFile(f"{path}: truncated, or no file of torch's ({why})") from None


def read_folder(folder: Path) -> tuple[Config, dict[str, torch.Tensor]]:
    """Sizes and tensors, which have as many layers as the sizes say."""
    if (folder / "model.safetensors").exists():
        read = safetensors(folder / "model.safetensors")
    elif (folder / "pytorch_model.bin").exists():
        read = pytorch(folder / "pytorch_model.bin")
    else:
        raise BadFile(f"{folder}: want a folder with config.json and model.safetensors or pytorch_model.bin")
    read = {name.removeprefix("transformer."): tensor for name, tensor in read.items()}
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        sizes = [int(config[key]) for key in ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size")]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise BadFile(f"{folder}/config.json: is none of a GPT-2 ({error})") from None
    layers = {int(match[1]) for match in map(re.compile(r"h\.(\d+)\.").match, read) if match}
    if layers and max(layers) + 1 != sizes[0]:
        raise BadFile(f"{folder}: config.json wants {sizes[0]} layers (n_layer), and there are tensors of {max(layers) + 1}")
    return Config(*sizes, padded=-(-sizes[-1] // PAD) * PAD), read


def taken(folder: Path, read: dict[str, torch.Tensor], name: str, shape: Sequence[int]) -> torch.Tensor:
    """The tensor of our parameter `name`, checked for its shape."""
    tensor, turned = read.get(theirs(name)), name.startswith("h.") and len(shape) == 2  # stored [in, out] there
    if tensor is None:
        raise BadFile(f"{folder}: has no tensor {theirs(name)}: not a GPT-2")
    want = [*reversed(shape)] if turned else [*shape]
    if [*tensor.shape] != want:
        raise BadFile(f"{folder}: {theirs(name)} is {[*tensor.shape]}, config.json wants {want}")
    return tensor.t() if turned else tensor


def weights(args: argparse.Namespace) -> list[str]:
    """Writes the file; a line about it."""
    config, read = read_folder(args.weights)
    rows = {"embed.wte.weight": (config.vocab, config.width), "embed.wpe.weight": (config.context, config.width)}
    for name, shape in rows.items():  # before a model is made of sizes that may be any
        taken(args.weights, read, name, shape)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    wanted = {**shapes(config), **rows}
    made = {name: taken(args.weights, read, name, shape).to(dtype) for name, shape in wanted.items()}
    vocabulary = made["embed.wte.weight"]
    padding = vocabulary.new_zeros(config.padded - config.vocab, config.width)
    made["embed.wte.weight"] = torch.cat([vocabulary, padding])
    path = args.to / (args.name or ("gpt2_124M.bin" if args.dtype == "fp32" else "gpt2_124M_bf16.bin"))
    write_weights(path, config, made)
    return [f"{path}: {config.parameters} parameters, {config.layers} layers, {args.dtype}"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="*", type=Path, help="text files, read as UTF-8")
    parser.add_argument("--to", type=Path, default=Path(), metavar="FOLDER", help="where files go; default: here")
    parser.add_argument("--name", help="of the files; default: that of the first text, or gpt2_124M.bin")
    parser.add_argument("--vocabulary", type=Path, metavar="FOLDER", help="GPT-2's vocab.json and merges.txt; default: bytes")
    parser.add_argument("--val-tokens", type=int, metavar="N", help="first N tokens to validate on; default: 32768, or a tenth")
    parser.add_argument("--shard", type=int, default=0, metavar="N", help="training files of N tokens, the last of more")
    parser.add_argument("--weights", type=Path, metavar="FOLDER", help="a Hugging Face GPT-2 folder, instead of text")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of --weights")
    args = parser.parse_args(argv)
    if bool(args.text) == bool(args.weights):
        parser.error("want text files, or --weights")
    try:
        for line in (weights if args.weights else text)(args):
            print(line)
    except ValueError as error:
        raise SystemExit(f"prepare_data.py: {error}") from None


if __name__ == "__main__":
    main()
