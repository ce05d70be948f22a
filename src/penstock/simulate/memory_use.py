"""How much memory each rank needs over time: a constant part, and activations that come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.schedule import Op, Schedule, stages_with_backward
from penstock.schedule.timeline import Timeline
from penstock.simulate.columns import Floats, Ints
from penstock.simulate.costs import StageCost, costs_by_stage


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one rank by kind, in the unit of the costs (bytes).

    Attributes:
        parameters, gradients, optimizer: of all its stages, all the time.
        seconds: when the activations change.
        activations: their size from then until the next change.
    """

    parameters: float
    gradients: float
    optimizer: float
    seconds: tuple[float, ...]
    activations: tuple[float, ...]

    @property
    def peak_activations(self) -> float:
        return max(self.activations, default=0.0)

    @property
    def peak(self) -> float:
        """The most that the rank needs at once."""
        return self.parameters + self.gradients + self.optimizer + self.peak_activations


def memory(schedule: Schedule, costs: StageCost | Sequence[StageCost], timeline: Timeline) -> list[Memory]:
    """The memory of each rank over the timeline.

    A microbatch's `activation_bytes` are held from the start of its F to the end of its B; if the backward is split,
    all but `weight_gradient_bytes` are freed at the end of I, and these at the end of W. On a stage without a backward
    they are freed at the end of F.

    Args:
        schedule: the one that the timeline shows.
        costs: as for `simulate`.
        timeline: simulated or real.

    Raises:
        ArgumentError: not one cost for each stage.
    """
    by_stage = costs_by_stage(schedule.placement, costs)
    kept = stages_with_backward(schedule)
    table = np.zeros((2, len(Op), schedule.stages))  # what is taken at the start, and freed at the end
    for stage, cost in enumerate(by_stage):
        table[0, Op.F.code, stage] = cost.activation_bytes
        table[1, Op.F.code, stage] = 0 if stage in kept else cost.activation_bytes
        table[1, Op.B.code, stage] = cost.activation_bytes
        table[1, Op.I.code, stage] = cost.activation_bytes - cost.weight_gradient_bytes
        table[1, Op.W.code, stage] = cost.weight_gradient_bytes
    found = []
    for rank, track in enumerate(timeline.tracks):
        held = [by_stage[stage] for stage in schedule.placement.stages_on(rank)]
        op, stages = (np.frombuffer(c, dtype=c.typecode) for c in (track.actions.op, track.actions.stage))
        seconds, activations = _course(table, op, stages, np.frombuffer(track.start), np.frombuffer(track.end))
        found.append(
            Memory(
                sum(cost.parameter_bytes for cost in held),
                sum(cost.gradient_bytes for cost in held),
                sum(cost.optimizer_bytes for cost in held),
                tuple(seconds.tolist()),
                tuple(activations.tolist()),
            )
        )
    return found


def _course(table: Floats, op: Ints, stage: Ints, start: Floats, end: Floats) -> tuple[Floats, Floats]:
    """When activations change, and to what. A rank runs one action after another, so its nodes are in order of time."""
    moments = np.stack([start, end], axis=1).ravel()
    changes = np.stack([table[0, op, stage], -table[1, op, stage]], axis=1).ravel()
    changed = changes != 0
    return moments[changed], np.cumsum(changes[changed])
