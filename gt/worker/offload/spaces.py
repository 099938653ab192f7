"""Spaces in which evicted tensors rest: host memory by the engine, or one file for each folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gt.errors import ConfigError
from gt.worker.engine.base import Engine
from gt.worker.offload.files import InFile, OffloadFile
from gt.worker.offload.tensors import Kept, Resting

MAX_TOLD = 64  # faults of folders that are remembered
MAX_FOLDERS = 4  # folders that sessions may name on one worker


class Spaces:
    """Spaces of one worker. need: raises MemoryError if so many bytes of host memory may not be allocated."""

    def __init__(self, engine: Engine, need: Callable[[int], object] = lambda nbytes: None) -> None:
        self._engine, self._need = engine, need
        self._files: dict[str, OffloadFile] = {}
        self._told: set[tuple[str, int | None]] = set()  # folders and what is wrong with them, which has been raised

    def evict(self, tensor: Any, space: str, folder: str) -> Resting | None:
        """A tensor in a space; None for one that stays.

        It stays if it shares its memory with others, if its folder's fault is known, or without memory for its copy.

        OSError for a folder that takes no tensor, once for each fault: each tensor would tell it again in each step.
        """
        spec, nbytes = self._engine.spec(tensor), self._engine.storage(tensor)[1]
        if not nbytes or spec.offset or spec.nbytes != nbytes or self._engine.shared(tensor):
            return None
        if space == "cpu":
            away = self._engine.evicted(tensor)
            return Kept(tensor, nbytes) if away is None else away
        data = self._engine.memory_of(tensor)
        if data is None:
            raise ConfigError("offload to files needs the torch engine: leave GT_BACKEND out, or write cpu")
        engine = self._engine
        try:
            return InFile(
                self._file(folder),
                data,
                lambda buffer: engine.in_memory(buffer, spec),
                lambda: self._close(folder),
                lambda buffer: engine.lane().in_memory(buffer, spec),
                self._need,
            )
        except MemoryError:
            self._drop_unused(folder)
            return None
        except OSError as error:
            self._drop_unused(folder)
            if (folder, error.errno) in self._told:
                return None
            if len(self._told) >= MAX_TOLD:
                self._told.clear()
            self._told.add((folder, error.errno))
            raise

    def _drop_unused(self, folder: str) -> None:
        """A file that took no tensor would keep one of the places for folders from other sessions."""
        file = self._files.get(folder)
        if file is not None and file.unused:
            file.close()
            del self._files[folder]

    def _close(self, folder: str) -> None:
        """The last tensor has left a file: a fault of its folder is news from then on."""
        self._files.pop(folder, None)
        self._told = {fault for fault in self._told if fault[0] != folder}

    def _file(self, folder: str) -> OffloadFile:
        file = self._files.get(folder)
        if file is None:
            if len(self._files) >= MAX_FOLDERS:
                raise ConfigError(f"offload to {folder!r:.200}: this worker has files in {MAX_FOLDERS} folders already")
            file = self._files[folder] = OffloadFile(folder)
        return file
