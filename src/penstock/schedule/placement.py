"""Which rank owns which stage: loop, wave (a V is the shortest), or two copies of the model in opposite directions."""

from __future__ import annotations

from dataclasses import dataclass

from penstock._base.errors import ArgumentError

MAX_RANKS = 65_536
"""The limit for a schedule or a timeline in a file: more than any job has."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rank owns which stage.

    A schedule may run several copies of the model, each a pipeline with its share of the microbatches: bidirectional
    schedules have two. The stages of the first copy come first, then those of the second, in the same order; stage s is
    a copy of the model's stage s % depth. To the executor they are just more stages, and the parameters of a copy are
    tied to those of the original.

    Attributes:
        ranks: how many ranks there are; each owns at least one stage.
        rank_of: the rank of each stage, by stage.
        pipelines: how many copies of the model there are.

    Raises:
        ArgumentError: a stage is on a rank that does not exist, a rank has no stage, or the stages cannot be divided
            evenly among the pipelines.
    """

    ranks: int
    rank_of: tuple[int, ...]
    pipelines: int = 1

    def __post_init__(self) -> None:
        owners = set(self.rank_of)
        if not (self.ranks == len(owners) >= 1 and min(owners) == 0 and max(owners) == self.ranks - 1):
            raise ArgumentError(
                f"stages on ranks {self.rank_of} of {self.ranks}: every rank from 0 to {self.ranks - 1}, and no other, "
                "must own a stage"
            )
        if self.pipelines < 1 or len(self.rank_of) % self.pipelines:
            raise ArgumentError(
                f"{len(self.rank_of)} stages in {self.pipelines} pipelines: each must have as many stages as the others"
            )

    @classmethod
    def loop(cls, ranks: int, chunks: int = 1) -> Placement:
        """Stage s on rank s % ranks: each further chunk starts over at rank 0."""
        return cls(ranks, tuple(range(ranks)) * chunks)

    @classmethod
    def wave(cls, ranks: int, waves: int = 1) -> Placement:
        """Place two chunks per rank and wave, there and back: the two stages at a turn are on the same rank."""
        return cls(ranks, (*range(ranks), *reversed(range(ranks))) * waves)

    @classmethod
    def v(cls, ranks: int) -> Placement:
        """Place one wave: the last rank owns the two middle stages, rank 0 the first and last."""
        return cls.wave(ranks)

    @classmethod
    def bidirectional(cls, ranks: int) -> Placement:
        """Place two copies of the model: one from rank 0 to the last, the other from the last to rank 0."""
        return cls(ranks, (*range(ranks), *reversed(range(ranks))), pipelines=2)

    @property
    def stages(self) -> int:
        """How many stages there are, counting all copies."""
        return len(self.rank_of)

    @property
    def depth(self) -> int:
        """How many stages the model is cut into."""
        return len(self.rank_of) // self.pipelines

    def pipeline_of(self, stage: int) -> int:
        """Return the copy of the model that a stage belongs to."""
        return stage // self.depth

    def is_first(self, stage: int) -> bool:
        """Whether a stage takes the model's inputs."""
        return stage % self.depth == 0

    def is_last(self, stage: int) -> bool:
        """Whether a stage produces the model's output."""
        return stage % self.depth == self.depth - 1

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """Return the stages of one rank, ascending."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    @property
    def by_rank(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every rank: `stages_on` for each."""
        stages_by_rank: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, owner in enumerate(self.rank_of):
            stages_by_rank[owner].append(stage)
        return tuple(map(tuple, stages_by_rank))

    def microbatches_of(self, stage: int, microbatches: int) -> range:
        """Return the microbatches that go through a stage: its pipeline's contiguous share."""
        pipeline = self.pipeline_of(stage)
        return range(microbatches * pipeline // self.pipelines, microbatches * (pipeline + 1) // self.pipelines)

    def __str__(self) -> str:
        copies = range(0, self.stages, self.depth)
        return " | ".join(" ".join(map(str, self.rank_of[first : first + self.depth])) for first in copies)

    @classmethod
    def parse(cls, text: str) -> Placement:
        """Parse what `str` wrote for a placement. Raise ArgumentError if it is not one, ValueError if it has
        non-numbers in it."""
        copies = [tuple(map(int, part.split())) for part in text.split("|")]
        rank_of = tuple(rank for copy in copies for rank in copy)
        if len({len(copy) for copy in copies}) > 1:
            raise ArgumentError(f"stages on ranks {text}: each pipeline must have as many stages as the others")
        return cls(max(rank_of, default=0) + 1, rank_of, len(copies))
