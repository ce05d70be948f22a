"""What stages and links cost, as the options or a file say, for the schedules that are simulated with it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from reprlib import repr as shortened
from typing import Any

from penstock.errors import ArgumentError
from penstock.schedule import Placement, Schedule
from penstock.simulate import NO_COST, Links
from penstock.simulate.costs import LinkCost, StageCost
from penstock.words import counted

WORK = {"forward": "F", "backward_input": "I", "backward_weight": "W"}
"""The options that say how long a stage works, and the words for them."""

ANY_PAIR = '"all": {"latency": 1e-4, "bandwidth": 1e8}'
"""For messages: in a file of links, the one of every pair that is not named."""


@dataclass(frozen=True, slots=True)
class MeasuredLinks(Mapping[tuple[int, int], LinkCost]):
    """Links of hosts, which are ranks in the same order.

    Attributes:
        pairs: by (rank that sends, rank that receives).
        every: of all pairs that are not there; None: they have no cost.
        source: the file, for messages.
    """

    pairs: Mapping[tuple[int, int], LinkCost]
    every: LinkCost | None
    source: str

    def __getitem__(self, ends: tuple[int, int]) -> LinkCost:
        found = self.pairs.get(ends, self.every)
        if found is None:
            raise KeyError(ends)
        return found

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def has_bandwidth(self) -> bool:
        known = [*self.pairs.values(), *([self.every] if self.every else [])]
        return any(link.bytes_per_second < math.inf for link in known)

    def check(self, ranks: int, name: str) -> None:
        """Raises ArgumentError if there are fewer hosts than ranks, and nothing is said of other pairs."""
        hosts = max(map(max, self.pairs), default=-1) + 1
        if self.every is None and hosts < ranks:
            raise ArgumentError(
                f"{self.source} has links of {hosts} hosts, but {name} has {ranks} ranks: measure as many, or give "
                f"{ANY_PAIR} for the pairs that were not measured"
            )


@dataclass(frozen=True, slots=True)
class Costs:
    """What stages and links cost, in the units that they were given in.

    Attributes:
        stages: of every stage, or one for each.
        links: as `simulate` takes them.
        has_memory: whether anything was said about memory.
        contended: as `simulate` takes it.
        source: where the costs of each stage come from.
        assumed: of `WORK` what was not given though other times were, and what it was taken for.
    """

    stages: StageCost | tuple[StageCost, ...]
    links: Links
    has_memory: bool = False
    contended: bool = False
    source: str = ""
    assumed: Mapping[str, float] = field(default_factory=dict)

    @property
    def are_alike(self) -> bool:
        """Whether they are numbers for all stages, and not a file's, of each stage."""
        return isinstance(self.stages, StageCost)

    @property
    def assumption(self) -> str:
        """What was assumed, in a line; empty if nothing was."""
        if not self.assumed:
            return ""
        missing = [letter for name, letter in WORK.items() if name in self.assumed]
        given = [letter for name, letter in WORK.items() if name not in self.assumed]
        value = next(iter(self.assumed.values()))
        which = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
        were = "was" if len(missing) == 1 else "were"
        return f"{' = '.join([*missing, *given[:1]])} = {value:g}, as {which} {were} not given"

    def with_links(self, links: MeasuredLinks) -> Costs:
        """These costs, on a measured network. Raises ArgumentError where they have links, or messages have no size."""
        if self.links != NO_COST:
            raise ArgumentError(f"{self.source} has links, and {links.source} as well: give one of the two")
        costs = replace(self, links=links)
        costs.check_sizes(links.source)
        return costs

    def check_sizes(self, source: str) -> None:
        """Raises ArgumentError where a link of `source` has a bandwidth, but no message has a size."""
        stages = [self.stages] if isinstance(self.stages, StageCost) else self.stages
        if self.has_bandwidth and not any(stage.output_bytes for stage in stages):
            how = "--output-bytes, or output_bytes in the file of --costs"
            raise ArgumentError(f"{source}: how long a message takes depends on its size; give {how}")

    @property
    def has_bandwidth(self) -> bool:
        if isinstance(self.links, MeasuredLinks):
            return self.links.has_bandwidth
        links = [self.links] if isinstance(self.links, LinkCost) else self.links.values()
        return any(link.bytes_per_second < math.inf for link in links)

    def of(self, schedule: Schedule) -> list[StageCost]:
        """Of each of the schedule's stages; a slice of a microbatch costs its share.

        Raises:
            ArgumentError: there are costs for more or fewer stages, or for a link of a rank that does not exist.
        """
        stages = self.of_stages(schedule.placement, schedule.name)
        if schedule.slices > 1:
            stages = [_divided(cost, schedule.slices, (*_DIVIDED, "output_bytes")) for cost in stages]
        return stages

    def of_stages(self, placement: Placement, name: str) -> list[StageCost]:
        """Of each stage, copies included. Raises as `of`; `name` is that of what has the stages."""
        depth = placement.depth
        stages = [self.stages] * depth if isinstance(self.stages, StageCost) else list(self.stages)
        if len(stages) != depth:
            has = counted(len(stages), "stage")
            raise ArgumentError(f"{self.source} has {has}, but {name} needs {depth}: give as many")
        self._check_ranks(placement.ranks, name)
        return stages * placement.pipelines

    def _check_ranks(self, ranks: int, name: str) -> None:
        if isinstance(self.links, MeasuredLinks):
            self.links.check(ranks, name)
            return
        for start, end in () if isinstance(self.links, LinkCost) else self.links:
            if max(start, end) >= ranks:
                raise ArgumentError(
                    f"{self.source} has a link from rank {shortened(start)} to rank {shortened(end)}, but the last "
                    f"rank of {name} is {ranks - 1}: correct the link or leave it out"
                )

    def of_ranks(self, chunks: int) -> Costs:
        """Numbers of each of a rank's stages as those of the rank, which `for_model_of` shares out again."""
        if not isinstance(self.stages, StageCost):
            return self
        return replace(self, stages=_divided(self.stages, 1 / chunks, _DIVIDED))

    def for_model_of(self, schedule: Schedule) -> Costs:
        """The costs with which a schedule trains the same model as all others do.

        Numbers are then a rank's, and each of its chunks takes its share; the stages of a file are the model's, and
        neighbours are put together where the schedule has fewer.

        Raises:
            ArgumentError: the file's stages cannot be put together to as many as the schedule has.
        """
        depth = schedule.placement.depth
        if isinstance(self.stages, StageCost):
            return replace(self, stages=_divided(self.stages, depth // schedule.ranks, _DIVIDED))
        size, rest = divmod(len(self.stages), depth)
        if rest or not size:
            has = counted(len(self.stages), "stage")
            raise ArgumentError(f"{self.source} has {has}, which cannot be put together to {depth}")
        joined = (_joined(self.stages[first : first + size]) for first in range(0, len(self.stages), size))
        return replace(self, stages=tuple(joined))


_DIVIDED = (
    "forward_seconds",
    "backward_input_seconds",
    "backward_weight_seconds",
    "overlapped_seconds",
    "activation_bytes",
    "weight_gradient_bytes",
)
"""What each of several parts of a stage's work has its share of."""


def _divided(cost: StageCost, by: float, names: Sequence[str]) -> StageCost:
    shares = {name: value / by for name in names if (value := getattr(cost, name)) is not None}
    return replace(cost, **shares)


def _joined(stages: Sequence[StageCost]) -> StageCost:
    """Neighbouring stages as one; only the last one's output leaves it."""
    values = {f.name: [getattr(stage, f.name) for stage in stages] for f in fields(StageCost)}
    sums: dict[str, Any] = {name: None if None in column else sum(column) for name, column in values.items()}
    return StageCost(**{**sums, "output_bytes": stages[-1].output_bytes})
