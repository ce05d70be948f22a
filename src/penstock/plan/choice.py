"""The choices that a plan makes, and all those that are open for a job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.errors import ArgumentError
from penstock.files import STRICT
from penstock.plan.cluster import Cluster
from penstock.plan.sizes import Sizes
from penstock.schedule import generator, generators
from penstock.schedule.generators import Generator, Numbers
from penstock.words import counted


@dataclass(frozen=True, slots=True)
class Choice:
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
        for name in ("replicas", "ranks", "chunks", "microbatches", "rows"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ArgumentError(f"{name}={value!r}: expected an integer >= 1")
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


def choices(sizes: Sizes, cluster: Cluster, global_batch: int, schedules: Sequence[str] | None = None) -> list[Choice]:
    """All that use every device and train exactly that batch.

    Raises:
        ArgumentError: no number of replicas divides the batch; names the nearest batches that work.
    """
    if global_batch < 1:
        raise ArgumentError(f"global_batch={global_batch}: expected the rows of a step, at least 1")
    units, found = len(sizes.units), []
    for replicas in divisors(cluster.devices):
        ranks = cluster.devices // replicas
        if global_batch % replicas or ranks > units:
            continue
        part = global_batch // replicas
        for rows in (rows for rows in divisors(part) if rows <= sizes.largest):
            for made in _open_schedules(ranks, part // rows, units, schedules):
                found.append(Choice(replicas, ranks, made.chunks, made.name, part // rows, rows))
    if not found and schedules is not None and choices(sizes, cluster, global_batch):
        why = "; ".join(dict.fromkeys(_broken(name, cluster, global_batch) for name in schedules))
        raise ArgumentError(
            f"none of {', '.join(schedules)} works with {counted(cluster.devices, 'device')}, {counted(units, 'unit')} "
            f"and {counted(global_batch, 'row')}: {why}; name more schedules, or none to choose from all"
        )
    if not found:
        raise ArgumentError(_nothing_divides(sizes, cluster, global_batch))
    return found


def _broken(name: str, cluster: Cluster, global_batch: int) -> str:
    """What a schedule needs that these numbers do not have; of its rules, the first that all choices break."""
    entry = generator(name)
    for replicas in (one for one in divisors(cluster.devices) if not global_batch % one):
        part, ranks = global_batch // replicas, cluster.devices // replicas
        for count in divisors(part):
            if ranks > 1 and (rule := entry.broken(Numbers(ranks, count, entry.chunks))):
                return f"{name} needs {rule.text}"
    return f"{name} needs a unit for each stage"


@dataclass(frozen=True, slots=True)
class _Open:
    name: str
    chunks: int


def _open_schedules(ranks: int, microbatches: int, units: int, wanted: Sequence[str] | None) -> Iterator[_Open]:
    """The schedules that work for these numbers; on one rank all orders are alike."""
    if ranks == 1:
        yield _Open("1f1b", 1)
        return
    for entry in generators():
        if (wanted is None or entry.name in wanted) and entry.slices == 1:
            for chunks in _chunks_of(entry):
                if ranks * chunks <= units and not entry.broken(Numbers(ranks, microbatches, chunks)):
                    yield _Open(entry.name, chunks)


def _chunks_of(entry: Generator) -> Sequence[int]:
    return (2, 4) if entry.chunks > 1 and not entry.broken(Numbers(4, 8, 4)) else (entry.chunks,)


def _nothing_divides(sizes: Sizes, cluster: Cluster, global_batch: int) -> str:
    units = len(sizes.units)
    least = min(d for d in divisors(cluster.devices) if cluster.devices // d <= units)
    near = sorted({global_batch // least * least, -(-global_batch // least) * least} - {0})
    return (
        f"global_batch={global_batch} cannot be divided over {counted(cluster.devices, 'device')}: a pipeline has at "
        f"most {counted(units, 'unit')}, so there are at least {least} replicas; give {' or '.join(map(str, near))}"
    )


def divisors(number: int) -> list[int]:
    """All numbers that divide this one, in ascending order."""
    return [each for each in range(1, number + 1) if number % each == 0]
