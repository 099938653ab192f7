"""Costs of a pipeline: times and memory of each stage for one micro-batch. Any unit, the same throughout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

PerStage = tuple[float, ...]
MayBe = tuple[float | None, ...]  # None: the stage has no such action


@dataclass(frozen=True, slots=True)
class Costs:
    """One value a stage. `transfer[s]` is the time between stages s and s + 1, either way, where their workers differ.

    `activation` is alive from F until B; where a schedule has I and W, `kept` of it is alive from I until W.
    `loss`, `reduce` and `optimizer` are times of L, R and O, once a step; None where a stage has none. With `overlap` an
    all-reduce runs beside its worker's compute. With `joint` every optimizer waits for all stages' gradients (clipping), with
    `own` for the gradients of its worker's stages.
    """

    forward: PerStage
    input: PerStage
    weight: PerStage
    transfer: PerStage
    activation: PerStage
    kept: PerStage
    loss: MayBe = ()
    reduce: MayBe = ()
    optimizer: MayBe = ()
    overlap: bool = True
    joint: bool = False
    own: bool = False

    def __post_init__(self) -> None:
        stages = len(self.forward)
        for field in fields(self):
            values = getattr(self, field.name)
            if isinstance(values, bool) or (values == () and field.default == ()):
                continue
            want = stages - 1 if field.name == "transfer" else stages
            if len(values) != want or any(value is not None and not 0 <= value < float("inf") for value in values):
                raise ValueError(f"{field.name} of {stages} stages: want {want} times from 0 up, got {values}")

    @property
    def stages(self) -> int:
        return len(self.forward)

    def once(self, kind: str, stage: int) -> float | None:
        """Time of a stage's L, R or O; None where it has none."""
        values = {"L": self.loss, "R": self.reduce, "O": self.optimizer}[kind]
        return values[stage] if values else None

    def wire(self) -> dict[str, Any]:
        """As in a Report; the inverse of from_wire."""
        return {f.name: v if isinstance(v := getattr(self, f.name), bool) else list(v) for f in fields(self)}

    @classmethod
    def from_wire(cls, row: dict[str, Any]) -> Costs:
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in row.items()}
        return cls(**values)

    def merged(self, blocks: Sequence[Sequence[int]]) -> Costs:
        """Costs of runs of stages, each run as one stage, without L, R and O."""

        # Between the stages of a block there is no transfer: that of its last stage is the block's.
        def total(values: PerStage) -> PerStage:
            return tuple(sum(values[stage] for stage in block) for block in blocks)

        return replace(
            self,
            forward=total(self.forward),
            input=total(self.input),
            weight=total(self.weight),
            transfer=tuple(self.transfer[block[-1]] for block in blocks[:-1]),
            activation=total(self.activation),
            kept=total(self.kept),
            loss=(),
            reduce=(),
            optimizer=(),
        )


def uniform(
    stages: int,
    forward: float = 1.0,
    input: float = 1.0,
    weight: float = 1.0,
    transfer: float = 0.0,
    activation: float = 1.0,
) -> Costs:
    """The same for every stage. W keeps the whole activation, which is the most that it can need."""
    times = (forward,) * stages, (input,) * stages, (weight,) * stages
    return Costs(*times, (transfer,) * (stages - 1), (activation,) * stages, (activation,) * stages)
