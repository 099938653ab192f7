"""The schedule, backend and recomputation of one compiled function, and the half that it is of another, if it is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gt.client import current_session
from gt.ir.instr import COMPILED_LATER


@dataclass(frozen=True, slots=True)
class ProgramSettings:
    """Arguments of gt.compile: an empty text or None where the user gives none."""

    own_schedule: str = ""
    own_backend: str = ""
    recompute: bool | None = None

    @property
    def schedule(self) -> str:
        """The user's schedule, or the config's, or ""."""
        return self.own_schedule or current_session.Current.schedule

    @property
    def asked_backend(self) -> str:
        """The user's backend, or the config's."""
        return self.own_backend or current_session.Current.backend

    @property
    def backend(self) -> str:
        """The backend of programs. Graphs of steps with offloaded state have not run on a GPU, so these are compiled alone."""
        backend = self.asked_backend
        return "inductor" if backend == "cudagraphs" and current_session.Current.offloads else backend

    @property
    def recompute_mode(self) -> int:
        """Value of messages.FinishCapture.recompute."""
        graphs = self.asked_backend == "cudagraphs"
        return int(graphs) if self.recompute is None else 2 * self.recompute

    @property
    def how_to_record(self) -> int:
        """Value of ir.instr.RECORD.

        No deferral with a schedule, which needs times of single ops.
        """
        if (backend := self.asked_backend) == "eager":
            return 0
        deferred = backend == "cudagraphs" and not self.schedule
        return 1 + self.recompute_mode if deferred else COMPILED_LATER


@dataclass(frozen=True, slots=True)
class Part:
    """A half of a function with two programs. roots: the Python state on which it depends, by name.

    random: seed and counter from which its random ops count, if not from the generator's state. A backward pass has those of
    its call, whose draws it repeats.
    """

    name: str
    roots: Callable[[], dict[str, Any]]
    forward: bool
    random: Callable[[], tuple[int, int]] | None = None
