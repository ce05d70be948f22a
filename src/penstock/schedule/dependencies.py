"""The single definition of what must come before an action. Checks, orders, simulations and passes derive from it.

An action waits for the action before it in its rank's row, and for what `REQUIREMENTS` lists:

| action       | waits for                                                                                       |
|--------------|-------------------------------------------------------------------------------------------------|
| F(s,k)       | F(s-1,k) in the same pipeline                                                                   |
| B(s,k)       | F(s,k); B or I of microbatch k on the next stage that has a backward                            |
| I(s,k)       | the same as B(s,k)                                                                              |
| W(s,k)       | I(s,k)                                                                                          |
| SEND_F(s,k)  | F(s,k)                                                                                          |
| SEND_B(s,k)  | B or I (s,k)                                                                                    |

In addition, if the rows contain messages and reductions:

| F, B, I      | each RECV for (s,k) that its rank posts, and the SEND that fills it                             |
| RECV         | nothing: it only posts a receive, and the action that needs the data waits for them             |
| REDUCE_GRAD  | every B or W of its stage                                                                       |
| rendezvous:  | a SEND waits, besides, until the RECV that it fills has been posted                             |

A stage whose parameters and inputs are frozen has no backward in the schedule, so the gradient comes from the next
stage that has one. With skip connections, messages go between stages that are not neighbors; F(s-1,k) still comes
before F(s,k), so every producer comes first, transitively.
"""

from __future__ import annotations

import itertools
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from penstock.schedule.action import OPS, SENDS, Action, Op
from penstock.schedule.row import COLUMNS, Row
from penstock.schedule.schedule import Schedule


class Relation(Enum):
    """The stage of the awaited action, relative to the one that waits. Both are of one microbatch."""

    SAME = "the same stage"
    BELOW = "the stage below"
    ABOVE = "the next stage above that has a backward"


@dataclass(frozen=True, slots=True)
class Requirement:
    """One line of the table: the first of `ops` that the schedule has there."""

    relation: Relation
    ops: tuple[Op, ...]


_FORWARD, _GRADIENT = (Op.F,), (Op.I, Op.B)
_BACKWARD = (Requirement(Relation.SAME, _FORWARD), Requirement(Relation.ABOVE, _GRADIENT))

REQUIREMENTS: dict[Op, tuple[Requirement, ...]] = {
    Op.F: (Requirement(Relation.BELOW, _FORWARD),),
    Op.B: _BACKWARD,
    Op.I: _BACKWARD,
    Op.W: (Requirement(Relation.SAME, (Op.I,)),),
    Op.SEND_F: (Requirement(Relation.SAME, _FORWARD),),
    Op.SEND_B: (Requirement(Relation.SAME, _GRADIENT),),
}
"""What each op waits for, besides messages. All other code derives the order of actions from this table."""


class Neighbors:
    """Resolves each `Relation` to a stage; -1 if there is none.

    Attributes:
        below: by stage, the stage whose output it takes.
        above: by stage, the stage whose input gradient it takes: the next one that has a backward.
    """

    def __init__(self, schedule: Schedule) -> None:
        placement, with_backward = schedule.placement, stages_with_backward(schedule)
        stages = range(placement.stages)
        self.below = [-1 if placement.is_first(stage) else stage - 1 for stage in stages]
        self.above = [-1] * placement.stages
        for stage in reversed(stages):
            if not placement.is_last(stage):
                self.above[stage] = stage + 1 if stage + 1 in with_backward else self.above[stage + 1]

    def find(self, relation: Relation, stage: int) -> int:
        """Return the stage; -1 if there is none."""
        return {Relation.SAME: stage, Relation.BELOW: self.below[stage], Relation.ABOVE: self.above[stage]}[relation]


_MESSAGES = ((Op.SEND_F, Op.RECV_F), (Op.SEND_B, Op.RECV_B))
_OTHER_END = {op.code: other for pair in _MESSAGES for op, other in (pair, pair[::-1])}
_MESSAGE_OPS = {Op.F: _MESSAGES[0], Op.B: _MESSAGES[1], Op.I: _MESSAGES[1]}
_REDUCE = Op.REDUCE_GRAD.code
_NONE = -1

Kind = tuple[int, int, int]
"""The stage, `Op.code` and peer (or -1) of actions that differ only in their microbatch."""

Nodes = Mapping[int, int]
"""The node of each action, by the number of its microbatch."""


def stages_with_backward(schedule: Schedule) -> frozenset[int]:
    """Return the stages that have a B, I or W in the schedule."""
    codes = {op.code for op in Op if op.is_backward}
    return frozenset(stage for row in schedule.rows for stage, code in row.kinds if code in codes)


class Dependencies:
    """The dependencies of one schedule, legal or not. A node is an action's number, counted across all rows.

    If an action occurs several times, the first one counts.

    Attributes:
        actions: the action of each node: all rows, one after the other.
        rank_of: the rank of each node.
        first: the first node of each rank, then the number of nodes.
        kinds: the nodes of each kind of action, by microbatch.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.actions, self.rank_of, self.first = _concatenate(schedule.rows)
        self.kinds: defaultdict[Kind, dict[int, int]] = defaultdict(dict)
        for node, (kind, number) in enumerate(zip(self._kinds_by_node(), self.actions.microbatch, strict=True)):
            self.kinds[kind].setdefault(number, node)
        self._neighbors = Neighbors(schedule)
        self._peers: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for stage, code, peer in self.kinds:
            self._peers[stage, code].append(peer)
        # What a kind of action waits for is looked up once; the needs of a single action are then found by its number.
        self._needs = {kind: tuple(self._producers(*kind)) for kind in self.kinds}
        self._arrivals = {kind: tuple(self._arrivals_to(*kind)) for kind in self.kinds}
        needed = {
            kind: (*(nodes for _, nodes in self._needs[kind]), *itertools.chain(*self._arrivals[kind]))
            for kind in self.kinds
        }
        self._needed = [needed[kind] for kind in self._kinds_by_node()]

    def before(self, node: int) -> list[int]:
        """Return the nodes that a node waits for, except the one before it in its row."""
        if self.actions.op[node] == _REDUCE:
            stage = self.actions.stage[node]
            return sorted((*self.nodes(stage, Op.B).values(), *self.nodes(stage, Op.W).values()))
        number = self.actions.microbatch[node]
        return [nodes[number] for nodes in self._needed[node] if number in nodes]

    def missing(self) -> Iterator[tuple[int, Action]]:
        """Yield each node that waits for an action that no rank has, with that action."""
        for kind, waiting in self.kinds.items():
            for need, nodes in self._needs[kind]:
                stage = self._neighbors.find(need.relation, kind[0])
                for number in waiting.keys() - nodes.keys():
                    yield waiting[number], Action(stage, need.ops[-1], number)
            for posted, sent in self._arrivals[kind]:
                for number in (waiting.keys() & posted.keys()) - sent.keys():
                    yield waiting[number], self.actions[posted[number]].other_end

    def nodes(self, stage: int, op: Op, peer: int = _NONE) -> Nodes:
        """Return the nodes of one kind of action; empty if no rank has any."""
        return self.kinds.get((stage, op.code, peer), {})

    def node(self, action: Action) -> int | None:
        """Return the action's node, or None if no rank has it."""
        nodes = self.nodes(action.stage, action.op, _NONE if action.peer is None else action.peer)
        return nodes.get(_NONE if action.microbatch is None else action.microbatch)

    def other_end(self, node: int) -> int | None:
        """Return the receive of a send, or the send of a receive; None for all other actions, or if no rank has it."""
        actions = self.actions
        other_op = _OTHER_END.get(actions.op[node])
        if other_op is None:
            return None
        return self.nodes(actions.peer[node], other_op, actions.stage[node]).get(actions.microbatch[node])

    def rendezvous(self, node: int) -> int | None:
        """Return the receive that a send waits for if sends are not buffered; None for all other actions."""
        return self.other_end(node) if self.actions.op[node] in SENDS else None

    def _kinds_by_node(self) -> Iterator[Kind]:
        return zip(self.actions.stage, self.actions.op, self.actions.peer, strict=True)

    def _producers(self, stage: int, code: int, peer: int) -> Iterator[tuple[Requirement, Nodes]]:
        """Yield, for each need in the table, the nodes that fill it, keyed by the index of the waiting action."""
        if stage >= len(self._neighbors.below):
            return  # out of range: `check` reports it
        for need in REQUIREMENTS.get(OPS[code], ()):
            if (producer_stage := self._neighbors.find(need.relation, stage)) < 0:
                continue
            tables = [nodes for op in need.ops if (nodes := self.nodes(producer_stage, op))] or [{}]
            yield need, tables[0] if len(tables) == 1 else dict(itertools.chain(*(t.items() for t in reversed(tables))))

    def _arrivals_to(self, stage: int, code: int, peer: int) -> Iterator[tuple[Nodes, Nodes]]:
        """Yield, for each link to this kind of action, the receives and the sends that fill them."""
        if OPS[code] in _MESSAGE_OPS:
            send, receive = _MESSAGE_OPS[OPS[code]]
            for source in self._peers.get((stage, receive.code), ()):
                yield self.nodes(stage, receive, source), self.nodes(source, send, stage)


def _concatenate(rows: Sequence[Row]) -> tuple[Row, array[int], list[int]]:
    """Concatenate all rows; return the result, the rank of each action in it, and where each rank's actions begin."""
    actions, rank_of, first = Row(), array("i"), [0]
    for rank, row in enumerate(rows):
        for name in COLUMNS:
            getattr(actions, name).extend(getattr(row, name))
        rank_of.extend(array("i", [rank]) * len(row))
        first.append(len(actions))
    return actions, rank_of, first
