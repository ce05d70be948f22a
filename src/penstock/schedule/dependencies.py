"""The only definition of what must come before an action. Checks, orders, simulations and passes derive from it.

An action waits for the action before it in its rank's row, and for what `NEEDS` says of it:

| action       | waits for                                                                                       |
|--------------|-------------------------------------------------------------------------------------------------|
| F(s,k)       | F(s-1,k) in the same pipeline; where microbatches are sliced, F of the slice before             |
| B(s,k)       | F(s,k); B or I of microbatch k on the next stage that has a backward; where microbatches are    |
|              | sliced, B or I of the slice after                                                               |
| I(s,k)       | the same as B(s,k)                                                                              |
| W(s,k)       | I(s,k)                                                                                          |
| SEND_F(s,k)  | F(s,k)                                                                                          |
| SEND_B(s,k)  | B or I (s,k)                                                                                    |

Besides, with messages and reductions in the rows:

| F, B, I      | each RECV for (s,k) that its rank posts, and the SEND that fills it                             |
| RECV         | nothing: it only posts a receive, and the action that needs the data waits for them             |
| REDUCE_GRAD  | every B or W of its stage                                                                       |
| rendezvous:  | a SEND waits, besides, until the RECV that it fills has been posted                             |

A stage whose parameters and inputs are frozen has no backward in the schedule, so the gradient comes from the next
stage that has one. With skip connections messages go between stages that are not neighbours; F(s-1,k) before F(s,k)
stays, and makes every producer come first, transitively.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from penstock.schedule.action import Action, Op
from penstock.schedule.schedule import Schedule


class Where(Enum):
    """Where an action that is waited for is, as seen from the one that waits: of which stage and which slice."""

    SAME = "the same stage and microbatch"
    BELOW = "the stage below"
    ABOVE = "the next stage above that has a backward"
    EARLIER = "the slice before, of the same microbatch"
    LATER = "the slice after, of the same microbatch"


@dataclass(frozen=True, slots=True)
class Need:
    """One line of the table: the first of `ops` that the schedule has there."""

    where: Where
    ops: tuple[Op, ...]


_FORWARD, _GRADIENT = (Op.F,), (Op.I, Op.B)
_BACKWARD = (Need(Where.SAME, _FORWARD), Need(Where.ABOVE, _GRADIENT), Need(Where.LATER, _GRADIENT))

NEEDS: dict[Op, tuple[Need, ...]] = {
    Op.F: (Need(Where.BELOW, _FORWARD), Need(Where.EARLIER, _FORWARD)),
    Op.B: _BACKWARD,
    Op.I: _BACKWARD,
    Op.W: (Need(Where.SAME, (Op.I,)),),
    Op.SEND_F: (Need(Where.SAME, _FORWARD),),
    Op.SEND_B: (Need(Where.SAME, _GRADIENT),),
}
"""What each op waits for, besides messages. All that asks what comes before what reads it here."""


class Neighbours:
    """For each `Where`, which stage and which slice that is; -1 if there is none.

    Attributes:
        below: by stage, the stage whose output it takes.
        above: by stage, the stage whose input gradient it takes: the next one that has a backward.
    """

    def __init__(self, schedule: Schedule) -> None:
        placement, with_backward = schedule.placement, stages_with_backward(schedule)
        stages = range(placement.stages)
        self.slices = schedule.slices
        self.below = [-1 if placement.is_first(stage) else stage - 1 for stage in stages]
        self.above = [-1] * placement.stages
        for stage in reversed(stages):
            if not placement.is_last(stage):
                self.above[stage] = stage + 1 if stage + 1 in with_backward else self.above[stage + 1]

    def find(self, where: Where, stage: int, number: int) -> tuple[int, int]:
        """The stage and the microbatch (or slice), either -1 if there is none."""
        match where:
            case Where.SAME:
                return stage, number
            case Where.BELOW:
                return self.below[stage], number
            case Where.ABOVE:
                return self.above[stage], number
            case Where.EARLIER:
                return stage, number - 1 if number % self.slices else -1
            case Where.LATER:
                return stage, number + 1 if (number + 1) % self.slices else -1


_RECEIVE = {Op.F: Op.RECV_F, Op.B: Op.RECV_B, Op.I: Op.RECV_B}


def stages_with_backward(schedule: Schedule) -> frozenset[int]:
    """The stages that have any B, I or W in the schedule."""
    codes = {op.code for op in Op if op.is_backward}
    found = {pair for row in schedule.rows for pair in set(zip(row.stage, row.op, strict=True))}
    return frozenset(stage for stage, code in found if code in codes)


class Dependencies:
    """The dependencies of one schedule, legal or not. A node is an action's number, counted through the rows.

    Attributes:
        actions: the action of each node.
        rank_of: the rank of each node.
        first: the first node of each rank, and the number of nodes at the end.
        before: for each node, the nodes that it waits for, besides the one before it in its row. Of an action that
            occurs several times, the first counts.
        missing: by node, the actions that it waits for and that no rank has.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.actions = [action for row in schedule.rows for action in row]
        self.rank_of = [rank for rank, row in enumerate(schedule.rows) for _ in row]
        self.first = [0]
        for row in schedule.rows:
            self.first.append(self.first[-1] + len(row))
        self._nodes: dict[Action, int] = {}
        self._receives: defaultdict[tuple[Op, int, int | None], list[Action]] = defaultdict(list)
        self._gradients: defaultdict[int, list[Action]] = defaultdict(list)
        for node, action in enumerate(self.actions):
            if self._nodes.setdefault(action, node) != node:
                continue
            if action.op.is_receive:
                self._receives[action.op, action.stage, action.microbatch].append(action)
            elif action.op in (Op.B, Op.W):
                self._gradients[action.stage].append(action)
        self._neighbours = Neighbours(schedule)
        self._stages = schedule.stages
        self.before: list[list[int]] = []
        self.missing: dict[int, list[Action]] = {}
        for node, action in enumerate(self.actions):
            needed = {need: self._nodes.get(need) for need in self._needs(action)}
            self.before.append([found for found in needed.values() if found is not None])
            if len(self.before[-1]) < len(needed):
                self.missing[node] = [need for need, found in needed.items() if found is None]

    def node(self, action: Action) -> int | None:
        """The action's first node, or None if no rank has it."""
        return self._nodes.get(action)

    def rendezvous(self, node: int) -> int | None:
        """The receive that a send waits for where sends are not buffered; None for all else."""
        action = self.actions[node]
        return self._nodes.get(action.other_end) if action.op.is_send else None

    def receives(self, action: Action) -> list[Action]:
        """The receives that are posted for a compute action."""
        op = _RECEIVE.get(action.op)
        return [] if op is None else self._receives.get((op, action.stage, action.microbatch), [])

    def _needs(self, action: Action) -> Iterator[Action]:
        if action.stage >= self._stages:
            return  # out of range: `check` says so
        for need in NEEDS.get(action.op, ()):
            assert action.microbatch is not None
            stage, number = self._neighbours.find(need.where, action.stage, action.microbatch)
            if stage >= 0 and number >= 0:
                yield self._first_of(need.ops, stage, number)
        if action.op is Op.REDUCE_GRAD:
            yield from self._gradients.get(action.stage, [])
        else:
            yield from self._arrivals(action)

    def _arrivals(self, action: Action) -> Iterator[Action]:
        for receive in self.receives(action):
            yield receive
            yield receive.other_end

    def _first_of(self, ops: tuple[Op, ...], stage: int, number: int) -> Action:
        """The action that the schedule has; if none, the one that is missing."""
        made = [Action(stage, op, number) for op in ops]
        return next((action for action in made if action in self._nodes), made[-1])
