"""The header of safetensors files, beside the library; every damaged or foreign file is refused by name."""

from __future__ import annotations

import json
import os
import random
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from gt.client.checkpoint.safetensors_format import NAMES, layout, open_file, read_header
from gt.errors import CheckpointError


def write(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def read(path):
    fd, size = open_file(path)
    try:
        return read_header(fd, size, path)
    finally:
        os.close(fd)


def test_the_library_reads_our_header_and_we_read_its(tmp_path):
    rng = random.Random(0)
    for n in range(20):
        tensors = {}
        for name, dtype in enumerate(sorted(NAMES)):
            shape = tuple(rng.randint(0, 4) for _ in range(rng.randint(0, 3)))
            tensors[f"t{name}"] = torch.randint(0, 2, shape).to(getattr(torch, dtype))
        ours, theirs = tmp_path / f"{n}.safetensors", tmp_path / f"{n}-library.safetensors"
        header, entries = layout([(k, str(t.dtype)[6:], tuple(t.shape)) for k, t in tensors.items()], {"format": "pt"})
        data = bytearray(header) + bytes(sum(e.nbytes for e in entries))
        for entry in entries:
            raw = tensors[entry.name].reshape(-1).view(torch.uint8).numpy().tobytes() if entry.nbytes else b""
            data[entry.offset : entry.offset + entry.nbytes] = raw
        ours.write_bytes(data)
        loaded = load_file(ours)
        assert set(loaded) == set(tensors)
        for name, tensor in tensors.items():
            assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
            wide = torch.complex64 if tensor.is_complex() else torch.float64
            assert torch.equal(loaded[name].to(wide), tensor.to(wide))
        save_file(tensors, theirs, {"a": "b"})
        found, metadata = read(theirs)
        assert metadata == {"a": "b"} and {k: (e.dtype, e.shape) for k, e in found.items()} == {
            k: (str(t.dtype)[6:], tuple(t.shape)) for k, t in tensors.items()
        }


ROW = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header, data, said",
    [
        ({"a": ROW}, bytes(7), r"wants \d+ bytes, the file has \d+: it was cut"),
        ({"a": ROW}, bytes(9), "it was extended"),
        ({"a": {**ROW, "data_offsets": [0, 4]}}, bytes(4), r"has 4 bytes, F32\[2\] has 8"),
        ({"a": ROW, "b": {**ROW, "data_offsets": [4, 12]}}, bytes(12), "'b' begins at byte 4 of the data, want 8"),
        ({"a": ROW, "b": {**ROW, "data_offsets": [12, 20]}}, bytes(20), "begins at byte 12 of the data, want 8"),
        ({"a": {**ROW, "dtype": "F33"}}, bytes(8), "dtype 'F33', want one of"),
        ({"a": {**ROW, "dtype": ["F32"]}}, bytes(8), "dtype"),
        ({"a": {**ROW, "shape": [-2]}}, bytes(8), r"shape \[-2\]"),
        ({"a": {**ROW, "shape": [2.0]}}, bytes(8), "shape"),
        ({"a": {**ROW, "shape": [True, 2]}}, bytes(8), "shape"),
        ({"a": {**ROW, "shape": [1 << 61, 8]}}, bytes(8), "has 8 bytes"),
        ({"a": {**ROW, "shape": "2"}}, bytes(8), "shape"),
        ({"a": {**ROW, "data_offsets": [8, 0]}}, bytes(8), "has -8 bytes"),
        ({"a": {**ROW, "data_offsets": [0]}}, bytes(8), "data_offsets"),
        ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8), "wants the keys dtype, shape and data_offsets, and no others"),
        ({"a": [1]}, bytes(8), "and no others"),
        ([ROW], bytes(8), "not a JSON object"),
        (b'{"a":1,"a":1}', b"", "twice"),
        (b"{", b"", r"its header has 1 bytes"),
        (b"{]", b"", "not JSON"),
        (b'{"__metadata__": {"a": 1}}', b"", "not an object of strings"),
        (b"[" * 5000, b"", "not JSON"),
        (b"\xff\xff", b"", "not JSON"),
    ],
)
def test_a_wrong_header_is_refused_with_the_reason(tmp_path, header, data, said):
    write(tmp_path / "x", header, data)
    with pytest.raises(CheckpointError, match=said) as caught:
        read(tmp_path / "x")
    assert str(tmp_path / "x") in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"1234567", struct.pack("<Q", 1 << 63) + b"{}", struct.pack("<Q", 100) + b"{}"])
def test_a_file_shorter_than_its_header_is_refused(tmp_path, text):
    (tmp_path / "x").write_bytes(text)
    with pytest.raises(CheckpointError, match="no safetensors file, or a damaged one"):
        read(tmp_path / "x")


def test_a_header_of_too_many_parts_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr("gt.client.checkpoint.safetensors_format.MAX_HEADER_COMMAS", 1000)
    monkeypatch.setattr("gt.client.checkpoint.safetensors_format.json.loads", None)
    write(tmp_path / "f", b'{"a":[' + b"{}," * 1001 + b"0]}")
    with pytest.raises(CheckpointError, match="its header has 1001 commas, at most 1000 are read"):
        read(tmp_path / "f")
    with pytest.raises(CheckpointError, match="the header of 300 tensors has 1499 commas, at most 1000 are read"):
        layout([(str(n), "float32", (2, 2)) for n in range(300)], {})


@pytest.mark.parametrize("text", ["," * 1500, '",' * 1500, '\\",' * 1500, "\\\\," * 1500, "\n\\"])
def test_commas_within_strings_are_no_parts_of_a_header(tmp_path, monkeypatch, text):
    monkeypatch.setattr("gt.client.checkpoint.safetensors_format.MAX_HEADER_COMMAS", 1000)
    header, _ = layout([("a,b", "float32", (2,)), ('"', "float32", (2,))], {"note": text, ",": ",", text: '"'})
    (tmp_path / "f").write_bytes(header + bytes(16))
    entries, metadata = read(tmp_path / "f")
    assert set(entries) == {"a,b", '"'} and metadata == {"note": text, ",": ",", text: '"'}


@pytest.mark.parametrize("part", [b'"a":"b",', b'"\\"":"\\\\",', b'"":"",'])
def test_commas_between_strings_are_parts_of_a_header(tmp_path, monkeypatch, part):
    monkeypatch.setattr("gt.client.checkpoint.safetensors_format.MAX_HEADER_COMMAS", 1000)
    monkeypatch.setattr("gt.client.checkpoint.safetensors_format.json.loads", None)
    for count in (1001, 9000):
        write(tmp_path / "f", b"{" + part * count + b'"c":0}')
        with pytest.raises(CheckpointError, match=f"its header has {count} commas, at most 1000 are read"):
            read(tmp_path / "f")


def test_only_regular_files_are_opened(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    opened, open_ = [], os.open
    monkeypatch.setattr(os, "open", lambda path, *args: (opened.append(path), open_(path, *args))[1])
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path, "/dev/zero", "/dev/null"):
        with pytest.raises(CheckpointError, match=r"not a regular file|cannot be read"):
            open_file(path)
    assert not opened, "to open some devices has effects"
    with pytest.raises(CheckpointError, match="cannot be read: no such file"):
        open_file(tmp_path / "none")


def test_mutated_headers_are_read_or_refused(tmp_path):
    """Whatever the bytes: an answer whose tensors are within the file, or CheckpointError."""
    rng = random.Random(3)
    save_file({"a": torch.ones(3, 4), "b": torch.ones(2, dtype=torch.int64)}, tmp_path / "good")
    good = (tmp_path / "good").read_bytes()
    for _ in range(400):
        text = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            text[rng.randrange(len(text))] = rng.choice(b'0123456789{}[],:"-eE.\x00\xff')
        (tmp_path / "x").write_bytes(text[: rng.choice([len(text), rng.randrange(len(text))])])
        try:
            entries, _ = read(tmp_path / "x")
        except CheckpointError:
            continue
        assert all(e.offset >= 8 and e.offset + e.nbytes <= len(text) for e in entries.values())
