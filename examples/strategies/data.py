"""Text as rows of tokens. TextDataset is the class to replace by your own data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from settings import SettingsError

CHECKOUT = Path(__file__).resolve().parents[2]
TEXTS = (".txt", ".md", ".raw", ".tokens", ".rst", ".py", ".jsonl")
WIKITEXT = (
    "python -c \"from datasets import load_dataset; load_dataset('Salesforce/wikitext', 'wikitext-2-raw-v1')"
    ".save_to_disk('wikitext')\""
)
Encode = Callable[[str], list[int]]


class TextDataset:
    """Rows of `length` tokens, one after the other through the text. What is left at the end is dropped.

    In its place any object works that has len() and gives, by index, an int64 tensor of `length` tokens.
    """

    def __init__(self, text: str, encode: Encode, length: int, most: int | None = None) -> None:
        characters = len(text) if most is None else most * length * 6
        found = encode(text[:characters])
        while most is not None and len(found) < most * length and characters < len(text):  # as far as needed
            characters *= 2
            found = encode(text[:characters])
        tokens = torch.tensor(found, dtype=torch.int64)
        count = min(len(tokens) // length, most or len(tokens))
        self.rows = tokens[: count * length].view(count, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def batches(dataset: TextDataset, size: int, epoch: int, seed: int) -> Iterator[torch.Tensor]:
    """The batches of an epoch, in an order that depends on seed and epoch alone. The last rows that fill none are left out."""
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()
    for first in range(0, len(order) - size + 1, size):
        yield torch.stack([dataset[index] for index in order[first : first + size]])


# ---- text


def read_text(source: str | None) -> tuple[str, str]:
    """A text, and its name for people."""
    if source is None:
        files = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]
        text = "\n".join(file.read_text() for file in files if file.exists())
        return text, "GT's own documentation; --data FILE for yours"
    path = Path(source)
    if path.is_file():
        return read_file(path), str(path)
    if not path.is_dir():
        fill = f"; this makes the folder, once, with a network: {WIKITEXT}" if path.name == "wikitext" else ""
        raise SettingsError(f"data {source} is no file and no folder{fill}")
    if any((path / name).exists() for name in ("dataset_dict.json", "dataset_info.json")):
        return saved_dataset(path), f"{path}, a saved dataset"
    files = sorted(file for file in path.rglob("*") if file.suffix in TEXTS)
    if not files:
        raise SettingsError(f"data {source} has no file that ends in {', '.join(TEXTS)}, and no saved dataset")
    return "\n".join(map(read_file, files)), f"{len(files)} files of {path}"


def read_file(path: Path) -> str:
    """A file's text; of JSON lines, their `text`."""
    try:
        text = path.read_text()
        return "\n".join(json.loads(line)["text"] for line in text.splitlines() if line) if path.suffix == ".jsonl" else text
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"{path} is no text that can be read: {type(error).__name__}: {error}") from None


def saved_dataset(folder: Path) -> str:
    """The column `text` of a dataset of the library datasets, of its part `train` if it has parts."""
    try:
        from datasets import DatasetDict, load_from_disk
    except ModuleNotFoundError:
        raise SettingsError(f"{folder} is a saved dataset: to read it, pip install datasets") from None
    saved = load_from_disk(str(folder))
    rows = saved["train"] if isinstance(saved, DatasetDict) else saved
    if "text" not in rows.column_names:
        raise SettingsError(f"{folder} has the columns {', '.join(rows.column_names)}, want text")
    return "\n".join(rows["text"])


# ---- tokens


def tokenizer_of(model: str, words: int) -> tuple[Encode, str]:
    """The function from text to tokens, and its name: that of the model if it is on this machine, else bytes."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError):
        tokenizer = ()
    if len(tokenizer) < 256:  # transformers makes an empty one of a config alone
        if words < 256:
            raise SettingsError(f"{model} has {words} words and no tokenizer here; bytes need 256") from None
        return lambda text: list(text.encode()), "bytes, as there is no tokenizer on this machine"
    if len(tokenizer) > words:
        raise SettingsError(f"the tokenizer of {model} has {len(tokenizer)} words, and the model {words}")
    return lambda text: tokenizer(text, verbose=False)["input_ids"], f"that of {model}"
