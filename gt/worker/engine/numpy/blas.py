"""The number of threads of NumPy's OpenBLAS, for which it has no Python call. Other BLAS libraries are left as they are."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


def set_threads(count: int) -> None:
    for library in _loaded():
        for name in _SETTERS:
            setter = getattr(library, name, None)
            if setter is not None:
                setter(ctypes.c_int(count))
                return


def _loaded() -> Iterator[ctypes.CDLL]:
    """OpenBLAS as this process has it in memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    for path in sorted({line.split(maxsplit=5)[5] for line in lines if "openblas" in line}):
        yield ctypes.CDLL(path)
