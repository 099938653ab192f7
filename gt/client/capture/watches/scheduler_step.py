"""One step of a learning-rate scheduler within a captured step, which replays make too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from gt.client.values.fingerprints import unchanged


@dataclass(frozen=True, slots=True)
class SchedulerStep:
    """One call of a scheduler's step(), of numbers alone."""

    scheduler: LRScheduler
    args: tuple
    kwargs: dict[str, Any]

    def run(self) -> None:
        """Step the scheduler."""
        self.scheduler.step(*self.args, **self.kwargs)

    def agrees(self, other: SchedulerStep) -> bool:
        """True if the other one has the same scheduler and arguments."""
        return (
            self.scheduler is other.scheduler
            and len(self.args) == len(other.args)
            and self.kwargs.keys() == other.kwargs.keys()
            and all(map(unchanged, (*self.args, *self.kwargs.values()), (*other.args, *other.kwargs.values())))
        )
