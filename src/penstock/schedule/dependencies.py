"""The only definition of what must come before an action. Checks, orders, simulations and passes derive from it.

An action waits for the action before it in its rank's row, and besides:

| action       | waits for                                                                                       |
|--------------|-------------------------------------------------------------------------------------------------|
| F(s,k)       | F(s-1,k); each RECV_F(s,k) that its rank posts, and the SEND_F that fills it                    |
| B(s,k)       | F(s,k); B or I of microbatch k on the next stage that has a backward; each RECV_B(s,k) that its |
|              | rank posts, and the SEND_B that fills it                                                        |
| I(s,k)       | the same as B(s,k)                                                                              |
| W(s,k)       | I(s,k)                                                                                          |
| SEND_F(s,k)  | F(s,k)                                                                                          |
| SEND_B(s,k)  | B or I (s,k)                                                                                    |
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

from penstock.schedule.action import Action, Op
from penstock.schedule.schedule import Schedule


def stages_with_backward(schedule: Schedule) -> frozenset[int]:
    """The stages that have any B, I or W in the schedule."""
    codes = {op.code for op in Op if op.is_backward}
    return frozenset(
        stage for row in schedule.rows for stage, code in zip(row.stage, row.op, strict=True) if code in codes
    )


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
        self._next_backward = _next_backward(schedule)
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
        op = Op.RECV_F if action.op is Op.F else Op.RECV_B
        return self._receives.get((op, action.stage, action.microbatch), [])

    def _needs(self, action: Action) -> Iterator[Action]:
        """The table above, a case a line."""
        stage, k = action.stage, action.microbatch
        match action.op:
            case Op.F:
                if stage > 0:
                    yield Action(stage - 1, Op.F, k)
                yield from self._arrivals(action)
            case Op.B | Op.I:
                yield Action(stage, Op.F, k)
                if (above := self._next_backward.get(stage)) is not None:
                    yield self._input_gradient(above, k)
                yield from self._arrivals(action)
            case Op.W:
                yield Action(stage, Op.I, k)
            case Op.SEND_F:
                yield Action(stage, Op.F, k)
            case Op.SEND_B:
                yield self._input_gradient(stage, k)
            case Op.REDUCE_GRAD:
                yield from self._gradients.get(stage, [])

    def _arrivals(self, action: Action) -> Iterator[Action]:
        for receive in self.receives(action):
            yield receive
            yield receive.other_end

    def _input_gradient(self, stage: int, microbatch: int | None) -> Action:
        """The action that makes the gradient of a stage's inputs: I where the backward is split, else B."""
        split = Action(stage, Op.I, microbatch)
        return split if split in self._nodes else Action(stage, Op.B, microbatch)


def _next_backward(schedule: Schedule) -> dict[int, int]:
    stages = sorted(stages_with_backward(schedule))
    return {stage: above for below, above in zip([-1, *stages], stages, strict=False) for stage in range(below, above)}
