"""Comparable values of Python objects, by which two states of a program are told apart."""

from __future__ import annotations

import ctypes
import datetime
import decimal
import logging
import pathlib
import random
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from enum import Enum
from types import FunctionType
from typing import Any

import numpy as np
import torch

from gt.client.capture.user_code import module_of
from gt.client.device.remote_tensor import Shown

MAX_COMPARED_BYTES = 1 << 16  # largest array or CPU tensor that is compared by value
_UNSET = object()  # value of a context variable without one
_C_DATA = (ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array)  # classes of numbers in C, a user's too
_PRECISION_OF: Any = getattr(torch._C, "_get_fp32_precision_getter", lambda backend, op: "")
_PRECISIONS = [("generic", "all"), *((b, op) for b in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn"))]
_SCALAR_TYPES = frozenset({
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type(...), slice, range,
    datetime.date, datetime.datetime, datetime.timedelta, pathlib.PosixPath,
})  # fmt: skip


def is_scalar_like(value: Any) -> bool:
    """True if a value is compared as a whole: it has no parts that change and no user code."""
    return type(value) in _SCALAR_TYPES or isinstance(value, (Enum, np.generic))


def is_named(thing: Any) -> bool:
    """True for a class or function that its module has under its name: each call finds the same one."""
    if not isinstance(thing, (type, FunctionType)):
        return False
    found: Any = sys.modules.get(thing.__module__)
    for name in thing.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is thing


def is_plain(value: Any) -> bool:
    """True for a value that is compared as a whole, and for a list or tuple of some."""
    return all(map(is_scalar_like, value)) if type(value) in (list, tuple) else is_scalar_like(value)


def comparable(value: Any) -> Any:
    """A form in which equal scalar-like values compare equal: the sign of zero counts, and all NaNs are equal."""
    return repr(value) if isinstance(value, (float, complex, np.generic)) else value


def fingerprint(node: Any) -> Any:
    """The comparable value of an object that changes in place; None for objects that have no such value."""
    if isinstance(node, np.ndarray):
        return (node.shape, node.dtype.str, node.tobytes() if node.nbytes <= MAX_COMPARED_BYTES else b"")
    if isinstance(node, torch.Tensor):
        if node.device.type != "cpu" or node.layout is not torch.strided or node.nbytes > MAX_COMPARED_BYTES:
            # Not compared by value: torch counts writes in a version. An inference tensor has none
            return (node.shape, 0 if node.is_inference() else node._version)
        return (node.shape, node.dtype, bytes(node.detach().contiguous().view(-1).view(torch.uint8).numpy()))
    if isinstance(node, (set, frozenset)):
        return frozenset((type(e), comparable(e)) if is_scalar_like(e) else id(e) for e in node)
    if isinstance(node, random.Random):
        return node.getstate()
    if isinstance(node, torch.Generator):
        return bytes(node.get_state().numpy()) if node.device.type in ("cpu", *Shown.types) else None
    if isinstance(node, (np.random.Generator, np.random.RandomState)):
        bits = node.bit_generator if isinstance(node, np.random.Generator) else node._bit_generator  # type: ignore[attr-defined]
        return repr(bits.state)
    if isinstance(node, ContextVar):
        value = node.get(_UNSET)
        return type(value), comparable(value) if is_scalar_like(value) else id(value)
    if isinstance(node, logging.Logger):
        return node.manager.disable, tuple(map(_log_settings, _with_parents(node)))
    if isinstance(node, BaseException):
        return tuple((type(value), comparable(value)) if is_scalar_like(value) else id(value) for value in node.args)
    if isinstance(node, decimal.Context):
        return repr(node)
    if node is torch.backends or node is warnings:
        return _module_settings(node)
    if isinstance(node, (bytearray, memoryview, *_C_DATA)) or module_of(type(node)) in ("array", "ctypes", "_ctypes"):
        try:
            return bytes(memoryview(node))
        except TypeError:
            return None
    return None


def _module_settings(module: Any) -> tuple:
    """The settings of a module that are not its attributes, or change in place."""
    if module is warnings:
        return tuple(warnings.filters), warnings.showwarning
    return tuple(_PRECISION_OF(*place) for place in _PRECISIONS)


def _with_parents(logger: logging.Logger) -> Iterator[logging.Logger]:
    """A logger, and those whose handlers and level its records meet."""
    above: logging.Logger | None = logger
    while above is not None:
        yield above
        above = above.parent


def _log_settings(logger: logging.Logger) -> tuple:
    """Settings that decide whether a logger's record is shown."""
    handlers = tuple((id(handler), handler.level, len(handler.filters)) for handler in logger.handlers)
    return logger.level, logger.disabled, logger.propagate, len(logger.filters), handlers


def is_writeable(array: np.ndarray) -> bool:
    """True if code may write to an array's memory, through the array or through one that it is a view of."""
    base: Any = array
    while isinstance(base, np.ndarray) and not base.flags.writeable:
        base = base.base
    return isinstance(base, np.ndarray)


def unchanged(old: Any, new: Any) -> bool:
    """True for the same object, and for equal scalars of one type."""
    if old is new:
        return True
    return type(old) is type(new) and is_scalar_like(old) and bool(comparable(old) == comparable(new))
