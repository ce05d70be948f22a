"""What a plan can be required to have, and the configurations that this leaves open for a job."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock._base.errors import ArgumentError, check_counts
from penstock._base.files import STRICT
from penstock._base.formatting import pluralize
from penstock.costs.sizes import Sizes
from penstock.plan.cluster import Cluster
from penstock.schedule import Placement, schedule_spec, schedule_specs
from penstock.schedule.generators import ScheduleParams

_SUGGESTIONS = 3
"""How many working combinations an error names instead of the requested one."""


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How devices are used, before it is decided where to cut.

    Attributes:
        replicas: dp.
        ranks: p; replicas * ranks devices are used.
        chunks: stages of the model on each rank.
        schedule: its name.
        microbatches: of each replica's part of the batch.
        rows: of each microbatch.

    Raises:
        ArgumentError: a number is less than 1.
    """

    __pydantic_config__ = STRICT
    replicas: int
    ranks: int
    chunks: int
    schedule: str
    microbatches: int
    rows: int

    def __post_init__(self) -> None:
        counts = ("replicas", "ranks", "chunks", "microbatches", "rows")
        check_counts(**{name: getattr(self, name) for name in counts})
        if not isinstance(self.schedule, str):
            raise ArgumentError(f"schedule={self.schedule!r}: expected a name")

    @property
    def devices(self) -> int:
        """How many it uses."""
        return self.replicas * self.ranks

    @property
    def stages(self) -> int:
        """How many stages the model is cut into."""
        return self.ranks * self.chunks

    @property
    def placement(self) -> Placement:
        """Which rank has which stage, copies of the model included."""
        return schedule_spec(self.schedule).placed(ScheduleParams(self.ranks, self.microbatches, self.chunks))

    @property
    def splits(self) -> bool:
        """Whether a weight gradient may come after the input gradient has left."""
        return schedule_spec(self.schedule).splits_backward


@dataclass(frozen=True, slots=True)
class FixedNumbers:
    """What a plan must have; None: whatever is best.

    Attributes:
        schedules: the names to choose from.
        replicas, pipeline, microbatches: dp, p, and the microbatches of each replica.

    Raises:
        ArgumentError: a number is less than 1.
    """

    schedules: Sequence[str] | None = None
    replicas: int | None = None
    pipeline: int | None = None
    microbatches: int | None = None

    def __post_init__(self) -> None:
        check_counts(required=False, **self.numbers)

    @property
    def numbers(self) -> dict[str, int | None]:
        """Those that a plan must have, by name."""
        return {"replicas": self.replicas, "pipeline": self.pipeline, "microbatches": self.microbatches}

    def misses(self, choice: ParallelConfig) -> list[float]:
        """Return by what factor each fixed number is missed, as logarithms."""
        pairs = zip(self.numbers.values(), (choice.replicas, choice.ranks, choice.microbatches), strict=True)
        return [abs(math.log2(fixed / number)) for fixed, number in pairs if fixed is not None]


ANY = FixedNumbers()


def enumerate_configs(
    sizes: Sizes, cluster: Cluster, global_batch: int, wanted: FixedNumbers = ANY
) -> list[ParallelConfig]:
    """Enumerate the configurations that use every device, train exactly this batch and satisfy `wanted`.

    Raises:
        ArgumentError: there are none; names the nearest batches that work, or what works instead of what is wanted.
    """
    if global_batch < 1:
        raise ArgumentError(f"global_batch={global_batch}: expected the rows of a step, at least 1")
    replicas, pipeline = wanted.replicas or 0, wanted.pipeline or 0
    for name, number, partner in (("replicas", replicas, pipeline), ("pipeline", pipeline, replicas)):
        if number and cluster.devices % number:
            divides = cluster.devices // partner if partner else f"one of {divisors(cluster.devices)}"
            instead = "" if partner and cluster.devices % partner else f", or {divides} in its place"
            raise ArgumentError(
                f"{name}={number}: {pluralize(cluster.devices, 'device')} cannot be divided by {number}; pass "
                f"{number * partner or _multiples(cluster.devices, number)} devices{instead}"
            )
    units, configs = len(sizes.units), []
    for replicas in divisors(cluster.devices):
        ranks = cluster.devices // replicas
        if global_batch % replicas or ranks > units:
            continue
        replica_rows = global_batch // replicas
        for rows in (rows for rows in divisors(replica_rows) if rows <= sizes.largest):
            for chunks, name in _candidate_schedules(ranks, replica_rows // rows, units, wanted.schedules):
                configs.append(ParallelConfig(replicas, ranks, chunks, name, replica_rows // rows, rows))
    if not configs and wanted.schedules is None:
        min_replicas = min(d for d in divisors(cluster.devices) if cluster.devices // d <= units)
        raise ArgumentError(
            f"global_batch={global_batch} cannot be divided over {pluralize(cluster.devices, 'device')}: a pipeline "
            f"has at most {pluralize(units, 'unit')}, so there are at least {min_replicas} replicas; pass "
            f"{_multiples(global_batch, min_replicas)}"
        )
    job = f"{pluralize(cluster.devices, 'device')}, {pluralize(units, 'unit')} and {pluralize(global_batch, 'row')}"
    fitting = [config for config in configs if not any(wanted.misses(config))]
    fixed = ", ".join(f"{name}={number}" for name, number in wanted.numbers.items() if number is not None)
    if wanted.schedules is not None and not fitting:
        unrestricted = enumerate_configs(sizes, cluster, global_batch, replace(wanted, schedules=None))
        rules = "; ".join(dict.fromkeys(_describe_violation(name, unrestricted) for name in wanted.schedules))
        raise ArgumentError(
            f"{fixed}{': ' if fixed else ''}none of {', '.join(wanted.schedules)} works with {job}: {rules}; name more "
            "schedules, or none to choose from all"
        )
    if not fitting:
        closest = sorted(configs, key=lambda c: (sum(miss > 0 for miss in wanted.misses(c)), sum(wanted.misses(c))))
        texts = dict.fromkeys(f"{config.replicas} x {config.ranks} x {config.microbatches}" for config in closest)
        raise ArgumentError(
            f"{fixed}: no plan for {job} has that; the closest have {' or '.join([*texts][:_SUGGESTIONS])} (replicas x "
            "pipeline x microbatches): pass such numbers"
        )
    return fitting


def _describe_violation(name: str, configs: Sequence[ParallelConfig]) -> str:
    """Describe what a schedule needs that these numbers do not have: the first constraint that all configurations
    violate."""
    entry = schedule_spec(name)
    for config in configs:
        if config.ranks > 1 and (
            rule := entry.violated_constraint(ScheduleParams(config.ranks, config.microbatches, entry.chunks))
        ):
            return f"{name} needs {rule.text}"
    return f"{name} needs a unit for each stage"


def _candidate_schedules(
    ranks: int, microbatches: int, units: int, allowed: Sequence[str] | None
) -> Iterator[tuple[int, str]]:
    """Yield the stages per rank and names of schedules that work for these numbers; on one rank all orders are
    alike."""
    if ranks == 1:
        yield 1, "1f1b"
        return
    for entry in schedule_specs():
        if allowed is None or entry.name in allowed:
            is_flexible = entry.chunks > 1 and not entry.violated_constraint(ScheduleParams(4, 8, 4))
            for chunks in (2, 4) if is_flexible else (entry.chunks,):
                if ranks * chunks <= units and not entry.violated_constraint(
                    ScheduleParams(ranks, microbatches, chunks)
                ):
                    yield chunks, entry.name


def _multiples(number: int, divisor: int) -> str:
    """Return the nearest multiples below and above."""
    return " or ".join(map(str, sorted({number // divisor * divisor, -(-number // divisor) * divisor} - {0})))


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, in ascending order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
