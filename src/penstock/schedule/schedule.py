"""A schedule as a value: which rank owns which stage, and for each rank its actions in order.

Rows are columns of integers, so that schedules of millions of actions stay small; `Action`s are views on them.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from penstock.errors import ArgumentError, ScheduleError
from penstock.schedule.action import OPS, Action, Overlap, parse_item

_NONE = -1
_HEADER = re.compile(r"(.+): ([0-9]+) microbatch(?:es)?, stages on ranks ([0-9 ]+)")
_ROW = re.compile(r"rank ([0-9]+):(.*)")


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rank owns which stage.

    Attributes:
        ranks: how many ranks there are; each owns at least one stage.
        rank_of: the rank of each stage, by stage.

    Raises:
        ArgumentError: a stage is on a rank that does not exist, or a rank has no stage.
    """

    ranks: int
    rank_of: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.ranks < 1 or set(self.rank_of) != set(range(self.ranks)):
            raise ArgumentError(
                f"stages on ranks {self.rank_of} of {self.ranks}: every rank from 0 to {self.ranks - 1}, and no other, "
                "must own a stage"
            )

    @classmethod
    def loop(cls, ranks: int, chunks: int = 1) -> Placement:
        """Stage s on rank s % ranks: each further chunk starts over at rank 0."""
        return cls(ranks, tuple(range(ranks)) * chunks)

    @classmethod
    def v(cls, ranks: int) -> Placement:
        """Two chunks a rank, there and back: the last rank owns the two middle stages, rank 0 the first and last."""
        return cls(ranks, (*range(ranks), *reversed(range(ranks))))

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.rank_of)

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """The stages of one rank, ascending."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)


class Row(Sequence[Action]):
    """The actions of one rank, in order. Immutable; the columns are for readers that cannot afford views.

    Attributes:
        stage, op, microbatch, peer: one entry an action; -1 stands for None, and `op` holds `Op.code`.
        joined: 1 where an action overlaps with the next one.
    """

    __slots__ = ("joined", "microbatch", "op", "peer", "stage")

    def __init__(self, items: Iterable[Action | Overlap] = ()) -> None:
        self.stage, self.op = array("i"), array("b")
        self.microbatch, self.peer, self.joined = array("i"), array("i"), array("b")
        for item in items:
            for part in item.parts:
                self.stage.append(part.stage)
                self.op.append(part.op.code)
                self.microbatch.append(_NONE if part.microbatch is None else part.microbatch)
                self.peer.append(_NONE if part.peer is None else part.peer)
                self.joined.append(isinstance(item, Overlap) and part is item.parts[0])

    def items(self) -> Iterator[Action | Overlap]:
        """The actions, with two that overlap as one `Overlap`. `Row(row.items()) == row`."""
        for index, action in enumerate(self):
            # An overlap's second part is never joined itself, so it is passed over below.
            if self.joined[index]:
                yield Overlap(action, self[index + 1])
            elif index == 0 or not self.joined[index - 1]:
                yield action

    def __len__(self) -> int:
        return len(self.stage)

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> list[Action]: ...
    def __getitem__(self, index: int | slice) -> Action | list[Action]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        microbatch, peer = self.microbatch[index], self.peer[index]
        return Action(
            self.stage[index],
            OPS[self.op[index]],
            None if microbatch == _NONE else microbatch,
            None if peer == _NONE else peer,
        )

    def _columns(self) -> tuple[array[int], ...]:
        return (self.stage, self.op, self.microbatch, self.peer, self.joined)

    def __eq__(self, other: object) -> bool:
        return self._columns() == other._columns() if isinstance(other, Row) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(column.tobytes() for column in self._columns()))

    def __str__(self) -> str:
        return " ".join(map(str, self.items()))

    def __repr__(self) -> str:
        return f"Row.parse({str(self)!r})"

    @classmethod
    def parse(cls, text: str) -> Row:
        """The row that `str` wrote: items between spaces. Raises ScheduleError."""
        return cls(map(parse_item, text.split()))


@dataclass(frozen=True, slots=True, init=False)
class Schedule:
    """The order of work of a pipeline, for each rank.

    `str` gives a text, one line a rank, that `Schedule.parse` reads back. A schedule need not be legal: `check` says
    whether it is.

    Attributes:
        name: the schedule's name, one line.
        placement: which rank owns which stage.
        microbatches: how many microbatches each stage works on.
        rows: the actions of each rank.

    Raises:
        ArgumentError: not one row for each rank, no microbatch, or a name that is not one line.
    """

    name: str
    placement: Placement
    microbatches: int
    rows: tuple[Row, ...]

    def __init__(
        self, name: str, placement: Placement, microbatches: int, rows: Iterable[Iterable[Action | Overlap]]
    ) -> None:
        made = tuple(row if isinstance(row, Row) else Row(row) for row in rows)
        if len(made) != placement.ranks:
            raise ArgumentError(f"{len(made)} rows for {placement.ranks} ranks; give one row of actions for each rank")
        if microbatches < 1:
            raise ArgumentError(f"microbatches={microbatches}: a schedule needs at least 1")
        if len(name.splitlines()) != 1:
            raise ArgumentError(f"name={name!r}: a schedule's name is one line")
        for field, value in zip(self.__slots__, (name, placement, microbatches, made), strict=True):
            object.__setattr__(self, field, value)

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def stages(self) -> int:
        return self.placement.stages

    def with_rows(self, rows: Iterable[Iterable[Action | Overlap]]) -> Schedule:
        """The same schedule with other rows: how every pass ends."""
        return Schedule(self.name, self.placement, self.microbatches, rows)

    def __str__(self) -> str:
        plural = "" if self.microbatches == 1 else "es"
        ranks = " ".join(map(str, self.placement.rank_of))
        header = f"{self.name}: {self.microbatches} microbatch{plural}, stages on ranks {ranks}"
        return "\n".join([header, *(f"rank {rank}: {row}".rstrip() for rank, row in enumerate(self.rows))])

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule that `str` wrote as `text`. Raises ScheduleError if it is none."""
        header, *lines = text.strip("\n").splitlines() or [""]
        found = _HEADER.fullmatch(header)
        if found is None:
            raise ScheduleError(
                f"{header!r}: expected a first line as in '1f1b: 8 microbatches, stages on ranks 0 1 2 3'"
            )
        rows = []
        for rank, line in enumerate(lines):
            row = _ROW.fullmatch(line.strip())
            if row is None or int(row[1]) != rank:
                raise ScheduleError(f"{line[:60]!r}: expected the actions of rank {rank}, as in 'rank {rank}: 0F0 0B0'")
            rows.append(Row.parse(row[2]))
        rank_of = tuple(map(int, found[3].split()))
        try:
            return cls(found[1], Placement(max(rank_of, default=0) + 1, rank_of), int(found[2]), rows)
        except ArgumentError as error:
            raise ScheduleError(f"the text describes no schedule: {error}") from None
