"""Costs: the numbers that turn a schedule into a timeline. Only seconds and bytes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock._base.errors import ArgumentError
from penstock.schedule import Op, Placement, Schedule

BOUND = 1e100
"""Costs are below this, and bandwidths above its inverse, so that sums and quotients stay finite."""


SECONDS_FIELD = {
    Op.F: "forward_seconds",
    Op.B: "backward_seconds",
    Op.I: "backward_input_seconds",
    Op.W: "backward_weight_seconds",
}
"""The field of `StageCost` with the duration of an op. Other ops take no time."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one microbatch costs on one stage, and what the stage holds.

    Attributes:
        forward_seconds: F, the forward.
        backward_input_seconds: I, the gradient of the stage's inputs.
        backward_weight_seconds: W, the gradient of its parameters.
        output_bytes: what goes to the next stage; the gradient that comes back has the same size.
        activation_bytes: what a microbatch keeps on the stage from the start of F to the end of its backward.
        weight_gradient_bytes: what a microbatch keeps on the stage from the end of I to the end of W, if the backward
            is split: those of the activations that W needs, and gradients that I leaves for it. So it may be more than
            `activation_bytes`.
        parameter_bytes, gradient_bytes, optimizer_bytes: what the stage holds all the time.
        unsharded_bytes: what its whole parameters take besides, from the start of `UNSHARD` to the end of `RESHARD`, if
            it is sharded and the schedule has these.
        overlapped_seconds: F together with the backward of another microbatch, if a schedule overlaps them; None: as
            long as one after the other.

    Raises:
        ArgumentError: a cost is negative or beyond `BOUND`.
    """

    forward_seconds: float
    backward_input_seconds: float
    backward_weight_seconds: float
    output_bytes: float = 0
    activation_bytes: float = 0
    weight_gradient_bytes: float = 0
    parameter_bytes: float = 0
    gradient_bytes: float = 0
    optimizer_bytes: float = 0
    overlapped_seconds: float | None = None
    unsharded_bytes: float = 0

    def __post_init__(self) -> None:
        for name in self.__slots__:  # of millions, so `fields` and a call for each would take the longest
            value = getattr(self, name)
            if value is not None and not 0 <= value < BOUND:
                check_cost(name, value)

    @property
    def backward_seconds(self) -> float:
        """B = I + W."""
        return self.backward_input_seconds + self.backward_weight_seconds

    @property
    def held_bytes(self) -> float:
        """What the stage holds all the time."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    def seconds(self, op: Op) -> float:
        """Return the seconds of one action with this op."""
        name = SECONDS_FIELD.get(op)
        return 0.0 if name is None else getattr(self, name)


@dataclass(frozen=True, slots=True)
class LinkCost:
    """What a message between two ranks costs.

    Raises:
        ArgumentError: the latency is negative, or one of the two is finite and beyond `BOUND`.
    """

    latency_seconds: float
    bytes_per_second: float = math.inf

    def __post_init__(self) -> None:
        check_cost("latency_seconds", self.latency_seconds)
        check_bandwidth("bytes_per_second", self.bytes_per_second)

    @classmethod
    def slowest(cls, links: Collection[LinkCost]) -> LinkCost:
        """Return a link with the longest latency and the least bandwidth of all these."""
        return cls(max(link.latency_seconds for link in links), min(link.bytes_per_second for link in links))

    def seconds(self, message_bytes: float) -> float:
        """Return the seconds from the send of a message to its arrival."""
        return self.latency_seconds + message_bytes / self.bytes_per_second


def check_cost(name: str, value: float) -> None:
    """Raise ArgumentError unless a cost is 0 or more, and below `BOUND`: no sum of them is infinite."""
    if not value >= 0:
        raise ArgumentError(f"{name}={value}: expected a cost of 0 or more")
    if value >= BOUND:
        raise ArgumentError(f"{name}={value}: expected a number below {BOUND:g}; pass it in a larger unit")


def check_bandwidth(name: str, value: float) -> None:
    """Raise ArgumentError unless a bandwidth is above 0, or if it makes a quotient infinite; it may be infinite."""
    if not value > 0:
        raise ArgumentError(f"{name}={value}: expected a bandwidth above 0")
    if value <= 1 / BOUND:
        raise ArgumentError(f"{name}={value}: expected a bandwidth above {1 / BOUND:g}; pass sizes in a smaller unit")
    if value < math.inf:
        check_cost(name, value)


NO_COST = LinkCost(0.0)
"""Messages arrive the moment they are sent."""

Links = LinkCost | Mapping[tuple[int, int], LinkCost]
"""One cost for all links, or one for each link in use, by (sending rank, receiving rank)."""


StageCosts = StageCost | Sequence[StageCost]
"""What a stage costs: the same for every microbatch, or a cost for each (for each slice, where they are sliced)."""


def as_cost_tuple(cost: StageCosts) -> tuple[StageCost, ...]:
    """Return a stage's costs as a tuple: a single one, or one for each microbatch."""
    return (cost,) if isinstance(cost, StageCost) else tuple(cost)


def costs_by_stage(placement: Placement, costs: StageCost | Sequence[StageCosts]) -> list[StageCosts]:
    """Return the cost of each stage, copies included. Raise ArgumentError if there are too few or too many."""
    if isinstance(costs, StageCost):
        return [costs] * placement.stages
    by_stage = list(costs) * (placement.pipelines if len(costs) == placement.depth else 1)
    if len(by_stage) != placement.stages:
        raise ArgumentError(f"{len(by_stage)} costs for {placement.stages} stages; pass one, or one for each stage")
    return by_stage


def costs_by_microbatch(schedule: Schedule, costs: StageCost | Sequence[StageCosts]) -> list[tuple[StageCost, ...]]:
    """Return, for each stage, one cost or one for each microbatch.

    Raises:
        ArgumentError: there are too few or too many, or they do not agree on what the stage holds all the time.
    """
    by_stage = []
    for stage, stage_cost in enumerate(costs_by_stage(schedule.placement, costs)):
        per_microbatch = as_cost_tuple(stage_cost)
        if not isinstance(stage_cost, StageCost) and len(per_microbatch) != schedule.microbatches:
            raise ArgumentError(
                f"stage {stage} has {len(per_microbatch)} costs for {schedule.microbatches} microbatches; pass one, or "
                "one for each"
            )
        for name in _STATIC_FIELDS:
            if len({getattr(cost, name) for cost in per_microbatch}) > 1:
                raise ArgumentError(
                    f"stage {stage}: {name} is not the same for all microbatches, but it is there all the time; pass "
                    "the same in each cost"
                )
        by_stage.append(per_microbatch)
    return by_stage


_STATIC_FIELDS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "unsharded_bytes")
"""The fields that are the same for all microbatches of a stage."""


def cost_between(links: Links, source_rank: int, target_rank: int) -> LinkCost:
    """Return the cost of a message. Raise ArgumentError if `links` has no cost between these ranks."""
    link = links if isinstance(links, LinkCost) else links.get((source_rank, target_rank))
    if link is None:
        raise ArgumentError(
            f"links has no cost from rank {source_rank} to rank {target_rank}, which this schedule uses; pass one"
        )
    return link


_DIVISIBLE_FIELDS = (
    *("forward_seconds", "backward_input_seconds", "backward_weight_seconds", "overlapped_seconds"),
    *("activation_bytes", "weight_gradient_bytes", "unsharded_bytes"),
)
"""The costs that are shared out when a stage is divided."""


def divide_cost(cost: StageCost, parts: float) -> StageCost:
    """Return the cost of each of `parts` equal parts of a stage."""
    shares = {name: value / parts for name in _DIVISIBLE_FIELDS if (value := getattr(cost, name)) is not None}
    return replace(cost, **shares)
