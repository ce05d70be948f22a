"""A schedule slot by slot in plain words: what each rank does, with what, and what an idle one waits for.

A slot is the time of one F, B, I or W, as in `penstock.schedule.grid`: each action runs in its earliest possible slot,
and what it makes can be used from the next slot on.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock._base.formatting import pluralize
from penstock.schedule import Action, Dependencies, Op, Schedule
from penstock.schedule.describe import WORDS, Kind
from penstock.schedule.order import earliest_times
from penstock.schedule.passes import compute_only

_NOUN = {op: f"the {WORDS[Kind.of(op)]} of" for op in (Op.F, Op.B, Op.I, Op.W)}
WORK = {op: f"{'runs' if op in (Op.F, Op.B) else 'computes'} {noun}" for op, noun in _NOUN.items()}
"""The verb phrase for each op, before the microbatch and the stage."""


@dataclass(frozen=True, slots=True)
class Source:
    """Something that an action needs: the action that makes it, its rank and slot."""

    action: Action
    rank: int
    slot: int


@dataclass(frozen=True, slots=True)
class SlotActivity:
    """The activity of one rank in one slot.

    Attributes:
        action: what it runs; None: it is idle.
        needs: what the action works with or, while the rank is idle, what of that is still missing.
        text: the same as a sentence without its full stop.
    """

    rank: int
    slot: int
    action: Action | None
    needs: tuple[Source, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Walkthrough:
    """A schedule's slots, in words.

    Attributes:
        ranks: for each rank, its moments by slot.
    """

    schedule: Schedule
    ranks: tuple[tuple[SlotActivity, ...], ...]

    @property
    def slots(self) -> int:
        return len(self.ranks[0])

    def at(self, slot: int) -> tuple[SlotActivity, ...]:
        """Return what each rank does in a slot."""
        return tuple(moments[slot] for moments in self.ranks)

    def headline(self, slot: int) -> str:
        """Summarize one slot: how many ranks work."""
        busy = sum(moment.action is not None for moment in self.at(slot))
        return f"slot {slot} of {self.schedule.name}: {busy} of {pluralize(self.schedule.ranks, 'rank')} at work"


def walkthrough(schedule: Schedule) -> Walkthrough:
    """Go through a schedule, whose messages and reductions it leaves out.

    >>> from penstock.schedule import generate
    >>> walk = walkthrough(generate("1f1b", ranks=2, microbatches=2))
    >>> for moment in walk.at(1):
    ...     print(moment.text)
    rank 0 runs the forward of microbatch 1 on stage 0, on its piece of the batch
    rank 1 runs the forward of microbatch 0 on stage 1, with the output that rank 0 sent at the end of slot 0

    Raises:
        ScheduleError: the schedule cannot be run.
    """
    narrator = _Narrator(compute_only(schedule))
    slots = max((slot + 1 for slot in narrator.slots), default=0)
    return Walkthrough(schedule, tuple(tuple(narrator.describe_rank(rank, slots)) for rank in range(schedule.ranks)))


class _Narrator:
    """The sentences of one schedule, which has computations only.

    Attributes:
        slots: the slot of each node.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.dependencies = Dependencies(schedule)
        starts, _ = earliest_times(self.dependencies, lambda node: 1.0, lambda *_: 0.0)
        self.slots = [int(start) for start in starts]

    def describe_rank(self, rank: int, slots: int) -> list[SlotActivity]:
        """Return the rank's moments, one for each slot."""
        node, end = self.dependencies.first[rank : rank + 2]
        finished = f"rank {rank} has nothing to do in this schedule"
        if node < end:
            finished = f"rank {rank} has finished: its last work was in slot {self.slots[end - 1]}"
        moments = []
        for slot in range(slots):
            if node == end:
                moments.append(SlotActivity(rank, slot, None, (), finished))
            elif self.slots[node] == slot:
                moments.append(self._describe_action(rank, node))
                node += 1
            else:
                moments.append(self._describe_wait(rank, node, slot))
        return moments

    def _describe_action(self, rank: int, node: int) -> SlotActivity:
        action, needs = self.dependencies.actions[node], self._sources(node)
        text = f"rank {rank} {WORK[action.op]} {self._locate(action)}, {self._describe_inputs(rank, action, needs)}"
        if self.dependencies.actions.joined[node]:
            overlapped = self.dependencies.actions[node + 1]
            text += f"; {_NOUN[overlapped.op]} {self._locate(overlapped)} may run at the same time"
        return SlotActivity(rank, self.slots[node], action, needs, text)

    def _describe_wait(self, rank: int, node: int, slot: int) -> SlotActivity:
        action = self.dependencies.actions[node]
        missing = tuple(source for source in self._sources(node) if source.slot >= slot)
        reasons = " and ".join(
            f"{_NOUN[source.action.op]} {self._locate(source.action)}, which rank {source.rank} "
            + ("runs in this slot" if source.slot == slot else f"runs in slot {source.slot}")
            for source in missing
        )
        text = f"rank {rank} waits: {_NOUN[action.op]} {self._locate(action)} needs {reasons}"
        return SlotActivity(rank, slot, None, missing, text)

    def _sources(self, node: int) -> tuple[Source, ...]:
        deps = self.dependencies
        return tuple(Source(deps.actions[need], deps.rank_of[need], self.slots[need]) for need in deps.before(node))

    def _locate(self, action: Action) -> str:
        depth = self.schedule.placement.depth
        copy = "" if action.stage < depth else f", the copy of stage {action.stage % depth}"
        return f"microbatch {action.microbatch} on stage {action.stage}{copy}"

    def _describe_inputs(self, rank: int, action: Action, needs: tuple[Source, ...]) -> str:
        """Describe an action's inputs: each of its sources, and the batch or the loss at the model's ends."""
        parts = []
        if all(source.action.stage == action.stage for source in needs) and action.op is not Op.W:
            parts.append("on its piece of the batch" if action.op is Op.F else "from the loss")
        for source in needs:
            producer = source.action
            if producer.stage != action.stage:
                product = "output" if producer.op is Op.F else "gradient"
                origin = f"rank {source.rank} sent at the end of slot {source.slot}"
                if source.rank == rank:
                    origin = f"it made itself on stage {producer.stage} in slot {source.slot}"
                parts.append(f"with the {product} that {origin}")
            elif producer.op is Op.I:
                parts.append(f"with what its input gradient left in slot {source.slot}")
            else:
                parts.append(f"with what its forward kept in slot {source.slot}")
        return " and ".join(parts)
