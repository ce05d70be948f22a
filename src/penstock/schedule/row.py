"""The actions of one rank as columns of integers, so that schedules of millions of actions stay small.

`Action`s are views on them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import overload

from penstock._base.errors import ArgumentError
from penstock.schedule.action import OPS, Action, Op, Overlap, parse_item

_NONE = -1

COLUMNS = ("stage", "op", "microbatch", "peer", "joined")
"""The names of a row's columns."""


class Row(Sequence[Action]):
    """The actions of one rank, in order. Immutable; the columns are for code that cannot afford views.

    Attributes:
        stage, op, microbatch, peer: one entry per action; -1 stands for None, and `op` holds `Op.code`.
        joined: 1 if an action overlaps with the next one.

    Raises:
        ArgumentError: something is not an action.
    """

    __slots__ = ("_kinds", "joined", "microbatch", "op", "peer", "stage")

    def __init__(self, items: Iterable[Action | Overlap] = ()) -> None:
        self.stage, self.op = array("i"), array("b")
        self.microbatch, self.peer, self.joined = array("i"), array("i"), array("b")
        self._kinds: frozenset[tuple[int, int]] | None = None
        if not is_list(items):
            raise _type_error("row", items, "actions")
        for item in items:
            try:
                for part in item.parts:
                    self.stage.append(part.stage)
                    self.op.append(part.op.code)
                    self.microbatch.append(_NONE if part.microbatch is None else part.microbatch)
                    self.peer.append(_NONE if part.peer is None else part.peer)
                    self.joined.append(isinstance(item, Overlap) and part is item.parts[0])
            except (AttributeError, TypeError, OverflowError):
                raise _type_error("action", item, "an Action, as in Action(0, Op.F, 0), or an Overlap of two") from None

    def items(self) -> Iterator[Action | Overlap]:
        """Yield the actions, with two that overlap as one `Overlap`. `Row(row.items()) == row`."""
        for index, action in enumerate(self):
            # An overlap's second part is never joined itself, so it is skipped below.
            if self.joined[index]:
                yield Overlap(action, self[index + 1])
            elif index == 0 or not self.joined[index - 1]:
                yield action

    def __len__(self) -> int:
        return len(self.stage)

    @classmethod
    def of(cls, op: Op, stage: int, microbatches: Sequence[int]) -> Row:
        """Return one compute op of one stage, for each of the microbatches."""
        return cls.from_columns(
            array("i", [stage]) * len(microbatches), array("b", [op.code]) * len(microbatches), array("i", microbatches)
        )

    @classmethod
    def from_columns(
        cls, stage: array[int], op: array[int], microbatch: array[int], joined: array[int] | None = None
    ) -> Row:
        """Build a row of compute actions from columns of equal length, without copying them."""
        row = cls()
        row.stage, row.op, row.microbatch = stage, op, microbatch
        row.peer = _constant("i", _NONE, len(stage))
        row.joined = _constant("b", 0, len(stage)) if joined is None else joined
        return row

    @property
    def kinds(self) -> frozenset[tuple[int, int]]:
        """The stage and `Op.code` of each kind of action in the row."""
        if self._kinds is None:
            if len(self) and self.stage.count(self.stage[0]) == len(self):  # quick, and the rule without chunks
                self._kinds = frozenset((self.stage[0], code) for code in set(self.op))
            else:
                self._kinds = frozenset(zip(self.stage, self.op, strict=True))
        return self._kinds

    @classmethod
    def alternate(cls, *rows: Row) -> Row:
        """Interleave rows of equal length: the first action of each row, then the second of each, and so on."""
        result = cls()
        for name in COLUMNS:
            columns = [getattr(row, name) for row in rows]
            column = array(columns[0].typecode, bytes(columns[0].itemsize * sum(map(len, columns))))
            for offset, part in enumerate(columns):
                column[offset :: len(rows)] = part
            setattr(result, name, column)
        return result

    def part(self, start: int | None, stop: int | None) -> Row:
        """Return the actions from `start` up to but excluding `stop`: a slice that is again a row."""
        result = Row()
        for name in COLUMNS:
            setattr(result, name, getattr(self, name)[start:stop])
        return result

    def __add__(self, other: Row) -> Row:
        result = Row()
        for name in COLUMNS:
            setattr(result, name, getattr(self, name) + getattr(other, name))
        return result

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
        return tuple(getattr(self, name) for name in COLUMNS)

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
        """Parse what `str` wrote for a row: items separated by spaces. Raise ScheduleError if it is not a row."""
        return cls(map(parse_item, text.split()))


@lru_cache(maxsize=8)
def _constant(typecode: str, value: int, length: int) -> array[int]:
    """Return a constant column. All rows that have it share it: rows never change, and there may be thousands."""
    return array(typecode, [value]) * length


def is_list(value: object) -> bool:
    """Whether something has items; text does not count."""
    return isinstance(value, Iterable) and not isinstance(value, str)


def _type_error(kind: str, value: object, expected: str) -> ArgumentError:
    text = "; Row.parse reads a row from text, as in Row.parse('0F0 0B0')" if isinstance(value, str) else ""
    return ArgumentError(f"{kind} {value!r:.80}: expected {expected}{text}")
