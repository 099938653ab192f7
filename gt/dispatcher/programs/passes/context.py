"""The context of the passes over a captured step: the request, what a pass may ask for, and the reports of the passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gt.config.schema import BUCKET_BYTES
from gt.dispatcher.programs.reorder_check import USED_ELSEWHERE
from gt.ir.instr import Define

if TYPE_CHECKING:
    from gt.dispatcher.programs.passes.stage_costs import OlderShapes

KEEP_COPIES = (
    ". If it is a weight: with zero: 3 a micro-batch frees gathered weights that another one uses, unless the config names the "
    "schedule; write schedule: {} below gt: in the config"
)
MakeDefinition = Callable[[str, dict], Define]  # the definition of a kind with this payload, which all workers will know


@dataclass
class PassContext:
    """Inputs and reports of the passes over one recording.

    asked: text of the schedule, "" for none. compiled: true if a compiler fuses ops between borders. graphs: true if workers
    replay device graphs. recompute: as FinishCapture.recompute. times: measured seconds by definition. older: shapes of tensors
    from before. lasting: tensors alive afterwards. homes: an object for each tensor from before, one where memory is shared.
    fresh: a new tensor id.
    """

    asked: str
    compiled: bool
    graphs: bool
    recompute: int
    times: dict[int, float]
    older: OlderShapes
    lasting: set[int]
    homes: Mapping[int, object]
    fresh: Callable[[], int]
    define: MakeDefinition
    bucket: int = BUCKET_BYTES  # bytes of reductions that wait for one another
    sharded: bool = False  # True if parameters rest in pieces of the data-parallel axis
    ends_copies: bool = False  # True if gathered parameters are freed within the step, as ZeRO stage 3 does by itself
    schedule: dict[str, Any] = field(default_factory=dict)  # the report of the schedule, {} where none was asked for
    recomputed: dict[int, list[int]] = field(default_factory=dict)  # by worker: values, bytes at the peak before and after
    batched: dict[int, list[int]] = field(default_factory=dict)  # by worker: collectives, and as how many they are done
    advanced: dict[int, list[int]] = field(default_factory=dict)  # by worker: parts of offloaded steps, and those that moved up
    rejected: dict[str, str] = field(default_factory=dict)  # passes whose result was not verified, and why

    @cached_property
    def shared(self) -> dict[int, int]:
        """Tensors from before that share the memory of another one, with that: a view and its base."""
        firsts: dict[object, int] = {}
        return {i: first for i, home in self.homes.items() if (first := firsts.setdefault(home, i)) != i}

    @property
    def scheduled(self) -> bool:
        """True if the rows are in the order of a schedule."""
        return bool(self.schedule) and not self.schedule["why"]

    def reject(self, name: str, why: str) -> None:
        """The result of a pass is not taken."""
        self.rejected[name] = why
        if name == "apply_schedule":
            copies = self.ends_copies and USED_ELSEWHERE in why
            self.reject_schedule(f"{why}{KEEP_COPIES.format(self.asked) if copies else ''}")
        elif name == "rematerialize":
            self.recomputed = {}
        elif name == "advance_host_steps":
            self.advanced = {}

    def reject_schedule(self, why: str, pipeline: bool = True) -> None:
        """Report why there is no schedule. pipeline: false for a step that is none, where a config may ask for one."""
        self.schedule = {"name": self.asked.partition(":")[0], "why": why, "pipeline": pipeline}
