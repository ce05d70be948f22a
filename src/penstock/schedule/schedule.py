"""A schedule as a value: which rank owns which stage, and for each rank its actions in order."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from operator import index
from typing import SupportsIndex

from penstock._base.errors import ArgumentError, ScheduleError
from penstock._base.files import quoted
from penstock.schedule.action import Action, Op, Overlap
from penstock.schedule.display import Displayable
from penstock.schedule.placement import Placement
from penstock.schedule.row import Row, is_list

_HEADER = re.compile(r"(.+): ([0-9]+) microbatch(?:es)?, stages on ranks ([0-9 |]+)")
_ROW = re.compile(r"rank ([0-9]+):(.*)")


@dataclass(frozen=True, slots=True, init=False)
class Schedule(Displayable):
    """The order of work of a pipeline, for each rank.

    `str` gives a text, one line per rank, that `Schedule.parse` reads back. A schedule need not be legal; `check` says
    whether it is.

    Attributes:
        name: the schedule's name, one line.
        placement: which rank owns which stage.
        microbatches: how many microbatches the batch is cut into. If there are several pipelines, the first takes the
            first microbatches, and so on: see `numbers_on`.
        rows: the actions of each rank.

    Raises:
        ArgumentError: not one row of actions for each rank, no microbatch, or a name that is not one line.
    """

    name: str
    placement: Placement
    microbatches: int
    rows: tuple[Row, ...]

    def __init__(
        self,
        name: str,
        placement: Placement,
        microbatches: int,
        rows: Iterable[Iterable[Action | Overlap]],
    ) -> None:
        if not isinstance(placement, Placement):
            raise ArgumentError(f"placement={placement!r}: expected a Placement, as in Placement.loop(4)")
        if not is_list(rows):
            hint = "Schedule.parse reads a schedule from text"
            raise ArgumentError(f"rows={rows!r:.80}: expected one row of actions for each rank; {hint}")
        built = tuple(row if isinstance(row, Row) else Row(row) for row in rows)
        if len(built) != placement.ranks:
            raise ArgumentError(f"{len(built)} rows for {placement.ranks} ranks; pass one row of actions for each rank")
        if not isinstance(microbatches, SupportsIndex) or index(microbatches) < 1:
            raise ArgumentError(f"microbatches={microbatches!r}: expected an integer >= 1")
        if not isinstance(name, str) or len(name.splitlines()) != 1:
            raise ArgumentError(f"name={name!r}: a schedule's name is one line of text")
        for field, value in zip(self.__slots__, (name, placement, microbatches, built), strict=True):
            object.__setattr__(self, field, value)

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def stages(self) -> int:
        return self.placement.stages

    @property
    def splits(self) -> bool:
        """Whether weight gradients are actions of their own."""
        return any(Op.W.code in row.op for row in self.rows)

    def numbers_on(self, stage: int) -> range:
        """Return the microbatches that go through a stage: its pipeline's contiguous share."""
        return self.placement.microbatches_of(stage, self.microbatches)

    def with_rows(self, rows: Iterable[Iterable[Action | Overlap]]) -> Schedule:
        """Return the schedule with other rows, as every pass does."""
        return Schedule(self.name, self.placement, self.microbatches, rows)

    def __str__(self) -> str:
        plural = "" if self.microbatches == 1 else "es"
        header = f"{self.name}: {self.microbatches} microbatch{plural}, stages on ranks {self.placement}"
        return "\n".join([header, *(f"rank {rank}: {row}".rstrip() for rank, row in enumerate(self.rows))])

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parse what `str` wrote for a schedule. Raise ScheduleError if `text` is not a schedule.

        >>> schedule = Schedule.parse("mine: 1 microbatch, stages on ranks 0 1\\nrank 0: 0F0 0B0\\nrank 1: 1F0 1B0")
        >>> schedule.ranks, schedule.stages, list(map(str, schedule.rows[1]))
        (2, 2, ['1F0', '1B0'])
        """
        header, *lines = text.strip("\n").splitlines() or [""]
        match = _HEADER.fullmatch(header)
        if match is None:
            raise ScheduleError(
                f"{quoted(header)}: expected a first line as in '1f1b: 8 microbatches, stages on ranks 0 1 2 3'"
            )
        rows = []
        for rank, line in enumerate(lines):
            row = _ROW.fullmatch(line.strip())
            if row is None or int(row[1]) != rank:
                raise ScheduleError(f"{line[:60]!r}: expected the actions of rank {rank}, as in 'rank {rank}: 0F0 0B0'")
            rows.append(Row.parse(row[2]))
        try:
            return cls(match[1], Placement.parse(match[3]), int(match[2]), rows)
        except ArgumentError as error:
            raise ScheduleError(f"the text describes no schedule: {error}") from None
