"""The safetensors format: a JSON header with each tensor's dtype, shape and place, then the tensors' bytes without gaps.

The safetensors library writes and reads whole files in one process. Here workers write and read parts of one file at offsets,
which the library does not tell. So the header is made and checked here; tests compare it with the library.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gt.client.checkpoint.folder import reason
from gt.errors import CheckpointError
from gt.ir.spec import DTYPES

LENGTH_BYTES = 8  # bytes of the number at a file's beginning: the header's length
MAX_HEADER_BYTES = 100_000_000  # as the library's
MAX_HEADER_COMMAS = 2_000_000  # of about 300,000 tensors, which take seconds; a file of one model has thousands
ALIGNED = 64  # the first tensor begins at a multiple of this
NAMES = {  # torch's dtype -> the format's
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "complex64": "C64", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_TORCH = {name: dtype for dtype, name in NAMES.items()}
_METADATA = "__metadata__"
_STRING = re.compile(b'"[^"]*"')  # where no quote is escaped
WRITER = "format"  # the metadata that names the library of the tensors, and no tensor


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One tensor of a file. dtype: torch's name. offset: in the file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype][0]


def layout(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> tuple[bytes, list[FileEntry]]:
    """The header of a file with these tensors (name, dtype, shape), its length first, and the place of each tensor.

    Tensors with larger elements are first, so that each is aligned to its elements.
    """
    rows = sorted(tensors, key=lambda row: -DTYPES[row[1]][0])
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    # Offsets in the header count from the first byte of data
    at, places = 0, []
    for name, dtype, shape in rows:
        end = at + prod(shape) * DTYPES[dtype][0]
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        places.append(at)
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format allows spaces behind the JSON, by which the data is aligned
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNED)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"the header of {len(rows)} tensors has {len(text)} bytes, at most {MAX_HEADER_BYTES} are read")
    if (commas := _commas(text)) > MAX_HEADER_COMMAS:
        raise CheckpointError(f"the header of {len(rows)} tensors has {commas} commas, at most {MAX_HEADER_COMMAS} are read")
    first = LENGTH_BYTES + len(text)
    entries = [FileEntry(name, dtype, tuple(shape), first + start) for (name, dtype, shape), start in zip(rows, places)]
    return struct.pack("<Q", len(text)) + text, entries


def _commas(text: bytes) -> int:
    """Commas of a header outside its strings, which cost nothing. It may be no JSON: then the number is any."""
    commas = text.count(b",")
    if commas <= MAX_HEADER_COMMAS:
        return commas
    # Without escaped quotes, every second quote ends a string. A comma has two strings at most, a name and a value.
    bare = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return commas if bare.count(b'"') > 4 * (MAX_HEADER_COMMAS + 1) else _STRING.sub(b"", bare).count(b",")


def checksum(fd: int, size: int) -> int:
    """crc32 of a file's header, of as many bytes as the file has."""
    prefix = os.pread(fd, LENGTH_BYTES, 0)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == LENGTH_BYTES else 0
    return zlib.crc32(os.pread(fd, LENGTH_BYTES + min(length, MAX_HEADER_BYTES, size), 0))


def open_file(path: Path) -> tuple[int, int]:
    """Descriptor and size of a regular file, opened to be read. CheckpointError for anything else."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO without a writer does not block then
    try:
        about = os.stat(path)  # first: to open some devices has effects
        fd = os.open(path, flags) if stat.S_ISREG(about.st_mode) else None
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise CheckpointError(f"{path!s:.1000} cannot be read: {reason(error)}") from None
    if fd is not None:
        about = os.fstat(fd)  # another may have taken its place
        if stat.S_ISREG(about.st_mode):
            return fd, about.st_size
        os.close(fd)
    raise CheckpointError(f"{path} is not a regular file")


def read_header(fd: int, size: int, path: Path) -> tuple[dict[str, FileEntry], dict[str, str]]:
    """Tensors and metadata of a file of `size` bytes. CheckpointError unless the header fits the file to the byte."""

    def bad(why: str) -> CheckpointError:
        return CheckpointError(f"{path} is no safetensors file, or a damaged one: {why}")

    # A limit before each step: the file may be of somebody who means harm, and nothing is allocated by its numbers
    if size < LENGTH_BYTES:
        raise bad(f"it has {size} bytes, want at least {LENGTH_BYTES}")
    prefix = os.pread(fd, LENGTH_BYTES, 0)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == LENGTH_BYTES else 0
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
        raise bad(f"its header has {length} bytes, the file {size}")
    text = os.pread(fd, length, LENGTH_BYTES)
    if len(text) < length:
        raise bad(f"its header has {len(text)} bytes, want {length}: it was cut while it was read")
    # A part of JSON costs up to a microsecond, and each but the first of an object or list has a comma before it. Those in
    # strings do not count: metadata may be a long text
    if (commas := _commas(text)) > MAX_HEADER_COMMAS:
        raise bad(f"its header has {commas} commas, at most {MAX_HEADER_COMMAS} are read: save the tensors in several files")
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # not UTF-8 either
        raise bad(f"its header is not JSON: {error!s:.200}") from None
    if not isinstance(header, dict):
        raise bad("its header is not a JSON object")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise bad(f"{_METADATA} is not an object of strings")

    # Tensors have to fill the data without a gap or overlap. Else bytes could be hidden, or two names share them
    spans, entries, first = [], {}, LENGTH_BYTES + length
    for name, row in header.items():
        entry, start, end = _entry(name, row, first, bad)
        spans.append((start, end, name))
        entries[name] = entry
    expected = 0
    for start, end, name in sorted(spans):
        if start != expected:
            raise bad(
                f"tensor {name!r:.100} begins at byte {start} of the data, want {expected}: tensors overlap, or have a gap"
            )
        expected = end
    if first + expected != size:
        raise bad(
            f"its header wants {first + expected} bytes, the file has {size}: "
            f"it was {'cut' if first + expected > size else 'extended'}"
        )
    return entries, metadata


def _entry(name: str, row: Any, first: int, bad: Any) -> tuple[FileEntry, int, int]:
    """One row of a header, with the place of its data."""
    if not isinstance(row, dict) or set(row) != {"dtype", "shape", "data_offsets"}:
        raise bad(f"tensor {name!r:.100} wants the keys dtype, shape and data_offsets, and no others")
    kind, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if not isinstance(kind, str) or kind not in _TORCH:
        raise bad(f"tensor {name!r:.100} has dtype {kind!r:.40}, want one of {', '.join(sorted(_TORCH))}")
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [None]
    whole = all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)
    # Strides of an empty tensor are products of its other sizes
    if not whole or len(offsets) != 2 or len(shape) > 64 or (0 in shape and prod(max(n, 1) for n in shape) >= 1 << 59):
        raise bad(f"tensor {name!r:.100} has shape {shape!r:.80} and data_offsets {offsets!r:.80}")
    entry = FileEntry(name, _TORCH[kind], tuple(shape), first + offsets[0])
    if offsets[1] - offsets[0] != entry.nbytes:
        raise bad(f"tensor {name!r:.100} has {offsets[1] - offsets[0]} bytes, {kind}{shape!r:.80} has {entry.nbytes}")
    return entry, offsets[0], offsets[1]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError for a name that it has twice."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a name occurs twice")
    return unique
