"""A state as JSON: nested dicts, lists, numbers and texts, with the names of tensors in place of tensors.

JSON has a closed set of values, so reading a checkpoint runs no code. Anything else is refused, by the path that leads to it.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from gt.errors import CheckpointError
from gt.ir.spec import DTYPES

MAX_DEPTH = 200
MAX_ALIKE_KEYS = 100  # keys of a dict with one hash: each is compared with all of these before it
LONG_BITS = 2048  # bits from which a number is written in base 16: Python refuses more than some hundred decimal digits
Path = tuple[Any, ...]  # keys and indices from the root
Put = Callable[[Path, torch.Tensor], str]  # takes a tensor, returns its name
Get = Callable[[str], torch.Tensor]

_STATE_DICT = "state_dict"


def has_state(thing: Any) -> bool:
    """True for a module, an optimizer, a scheduler: for an object with state_dict and load_state_dict."""
    return not isinstance(thing, (type, Mapping, torch.Tensor)) and callable(getattr(thing, _STATE_DICT, None))


def show(path: Path) -> str:
    """A path as in Python: state['model']['weight']."""
    return "state" + "".join(f"[{_key(key)!r:.100}]" for key in path)


def name_of(path: Path) -> str:
    """A path as the name of a tensor: its keys with dots between."""
    return ".".join(str(_key(key)) for key in path)


def _key(key: Any) -> Any:
    """A key, or what stands for it in names and errors: Python writes no long number in decimal digits."""
    if isinstance(key, tuple):
        return tuple(map(_key, key))
    return hex(key) if isinstance(key, int) and key.bit_length() > LONG_BITS else key


# Example: {"step": 3, "betas": (0.9, 0.99), "w": tensor} has the JSON {"dict":
# [["step", 3], ["betas", {"tuple": [0.9, 0.99]}], ["w", {"tensor": "model/w"}]]}. A
# dict is a list of pairs, since keys need not be texts. An object has one key, its kind
def encode(thing: Any, put: Put, path: Path = ()) -> Any:
    """The JSON of a state. CheckpointError names a part that has no JSON."""
    if len(path) > MAX_DEPTH:
        raise CheckpointError(f"{show(path[:3])}... is nested more than {MAX_DEPTH} deep, or contains itself")
    thing = _plain(thing)
    if thing is None or isinstance(thing, bool):
        return thing
    if isinstance(thing, str):
        return str(thing)
    if isinstance(thing, int):
        return int(thing) if thing.bit_length() <= LONG_BITS else {"int": hex(thing)}
    if isinstance(thing, float):
        return float(thing) if math.isfinite(thing) else {"float": repr(float(thing))}
    if isinstance(thing, torch.Tensor):
        return {"tensor": put(path, thing)}
    if isinstance(thing, Mapping):
        return _encode_mapping(thing, put, path)
    if isinstance(thing, (list, tuple)):
        rows = [encode(value, put, (*path, n)) for n, value in enumerate(thing)]
        return rows if isinstance(thing, list) else {"tuple": rows}
    if isinstance(thing, np.ndarray) and thing.dtype.kind in "biuf" and thing.dtype.itemsize <= 8:  # longer ones torch lacks
        own = np.array(thing, thing.dtype.newbyteorder("="), order="C")  # in this machine's order of bytes
        return {"array": put(path, torch.from_numpy(own))}
    if isinstance(thing, (bytes, bytearray)):
        return {"bytes": base64.b64encode(thing).decode()}
    if isinstance(thing, complex):
        return {"complex": [repr(thing.real), repr(thing.imag)]}
    if isinstance(thing, torch.dtype):
        return {"dtype": str(thing)[6:]}
    raise CheckpointError(
        f"{show(path)} is a {type(thing).__module__}.{type(thing).__qualname__}, want a tensor, number, text, None, dict, "
        "list, tuple, or an object with a state_dict"
    )


def _plain(thing: Any) -> Any:
    """A NumPy number as Python's, the state of a generator or an object with a state_dict; all else as it is."""
    if isinstance(thing, np.generic):
        return thing.item()
    if isinstance(thing, torch.Generator):
        return thing.get_state()
    return thing.state_dict() if has_state(thing) else thing


def _encode_mapping(thing: Mapping, put: Put, path: Path) -> dict:
    rows = [[encode(key, put, path), encode(value, put, (*path, key))] for key, value in thing.items()]
    # A key has to be hashable again when it is read: no list, dict or tensor
    if any(isinstance(key, list) or (isinstance(key, dict) and not key.keys() <= _KEYS) for key, _ in rows):
        raise CheckpointError(f"{show(path)} has a key that is not supported: want text, a number, or a tuple of these")
    metadata = getattr(thing, "_metadata", None)  # versions of modules, in torch's state dicts
    if metadata is not None:
        return {"ordered": rows, "metadata": encode(metadata, put, path)}
    return {"ordered": rows} if isinstance(thing, OrderedDict) else {"dict": rows}


def decode(node: Any, get: Get) -> Any:
    """Inverse of `encode`; ValueError, KeyError or TypeError for what `encode` does not make."""
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    if isinstance(node, list):
        return [decode(row, get) for row in node]
    kinds = set(node)
    if kinds in ({"ordered"}, {"ordered", "metadata"}):
        ordered = OrderedDict(_decode_pairs(node["ordered"], get))
        if "metadata" in node:
            ordered._metadata = decode(node["metadata"], get)  # type: ignore[attr-defined]
        return ordered
    ((kind, value),) = node.items()
    return _DECODERS[kind](value, get)


def _decode_pairs(rows: Any, get: Get) -> list[tuple[Any, Any]]:
    """Keys and values of a dict; ValueError for keys that were made to have one hash, for which a dict takes hours."""
    pairs = [(decode(key, get), decode(value, get)) for key, value in rows]
    alike = max(Counter(hash(key) for key, _ in pairs).values()) if len(pairs) > MAX_ALIKE_KEYS else 0
    if alike > MAX_ALIKE_KEYS:
        raise ValueError(f"a dict has {alike} keys of one hash, want {MAX_ALIKE_KEYS} at most")
    return pairs


def names(node: Any) -> set[str]:
    """Names of all tensors of a state's JSON."""
    tensors: set[str] = set()

    def note(name: str) -> torch.Tensor:
        tensors.add(name)
        return torch.empty(0)

    decode(node, note)
    return tensors


_KEYS = frozenset({"tuple", "float", "int"})  # kinds of JSON objects that are keys
_DTYPES = {name: getattr(torch, name) for name in DTYPES}

_DECODERS: dict[str, Callable[[Any, Get], Any]] = {
    "dict": lambda rows, get: dict(_decode_pairs(rows, get)),
    "tuple": lambda rows, get: tuple(decode(row, get) for row in rows),
    "tensor": lambda name, get: get(name),
    "array": lambda name, get: get(name).numpy(),
    "float": lambda text, get: float(text),
    "int": lambda text, get: int(text, 16),
    "complex": lambda parts, get: complex(float(parts[0]), float(parts[1])),
    "bytes": lambda text, get: base64.b64decode(text, validate=True),
    "dtype": lambda name, get: _DTYPES[name],
}
