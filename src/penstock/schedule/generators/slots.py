"""Two ways to write rows: from actions with time slots, and from actions that are numbered as they are written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from penstock.schedule.action import Action, Op, Overlap
from penstock.schedule.placement import Placement


def rows_by_slot(placement: Placement, actions: Iterable[tuple[int, Action]]) -> list[list[Action]]:
    """Return each rank's row: its actions in the order of their slots."""
    rows: list[list[Action]] = [[] for _ in range(placement.ranks)]
    for _, action in sorted(actions, key=lambda pair: pair[0]):
        rows[placement.rank_of[action.stage]].append(action)
    return rows


class RowWriter:
    """Writes the row of one rank; each op of each stage takes its microbatches in ascending order.

    `weights` run in the order of their input gradients.
    """

    def __init__(self, first: dict[int, int] | None = None) -> None:
        """Start an empty row. `first`: the lowest microbatch of each stage for which that is not 0."""
        self.row: list[Action | Overlap] = []
        self._done: Counter[tuple[int, bool]] = Counter()
        self._first = first or {}
        self._pending: list[Action] = []

    def _next(self, stage: int, op: Op) -> Action:
        key = stage, op is Op.F
        self._done[key] += 1
        return Action(stage, op, self._first.get(stage, 0) + self._done[key] - 1)

    def forwards(self, stage: int) -> int:
        """Return how many forwards of a stage have been written."""
        return self._done[stage, True]

    def forward(self, stage: int) -> None:
        self.row.append(self._next(stage, Op.F))

    def backward(self, stage: int) -> None:
        """Write a full backward."""
        self.row.append(self._next(stage, Op.B))

    def input_gradient(self, stage: int) -> None:
        """Write the first half of a backward; its weight gradient is still due."""
        action = self._next(stage, Op.I)
        self.row.append(action)
        self._pending.append(Action(stage, Op.W, action.microbatch))

    def weight_gradient(self, stage: int | None = None) -> None:
        """Write the oldest weight gradient that is due, of any stage or of one."""
        action = next(action for action in self._pending if stage is None or action.stage == stage)
        self._pending.remove(action)
        self.row.append(action)

    def weight_gradients(self, stage: int | None = None) -> None:
        """Write all weight gradients that are due, of any stage or of one."""
        while any(stage is None or action.stage == stage for action in self._pending):
            self.weight_gradient(stage)

    def overlap(self, forward: int, backward: int) -> None:
        """Write a forward of one stage at the same time as a full backward of another."""
        self.row.append(Overlap(self._next(forward, Op.F), self._next(backward, Op.B)))

    def within(self, numbers: dict[int, range]) -> list[Action | Overlap]:
        """Restrict the row to these microbatches, by stage; an overlap that loses one part becomes the other."""
        items: list[Action | Overlap] = []
        for item in self.row:
            parts = [part for part in item.parts if part.microbatch in numbers[part.stage]]
            items += [item] if len(parts) == len(item.parts) else parts
        return items
