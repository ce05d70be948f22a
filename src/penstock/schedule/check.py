"""Whether a schedule is legal: each action there once and on its rank, in an order that works, without a deadlock,
within a memory limit. Works on schedules with and without messages.
"""

from __future__ import annotations

import graphlib
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.schedule.action import Action, Op
from penstock.schedule.dependencies import Dependencies, stages_with_backward
from penstock.schedule.order import advance, describe_cycle
from penstock.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Violation:
    """One way in which a schedule is wrong.

    Attributes:
        rank: where.
        action: which; None if there is no one action.
        kind: "repeated", "missing", "out of range", "misplaced", "order", "unmatched", "message order",
            "reduction order", "deadlock", "memory" or "inexact".
        text: what is wrong, with rank, action and reason.
        fatal: False if the schedule can be run all the same, but gives other bits than one device.
    """

    rank: int
    action: Action | None
    kind: str
    text: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def check(schedule: Schedule, memory_limit: int | None = None) -> list[Violation]:
    """What is wrong with a schedule; empty if nothing is.

    Deadlocks are looked for with buffered sends, and with sends that wait until their receive has been posted; only
    where nothing else is wrong, since a missing or misplaced action is the cause and a deadlock its consequence.

    Args:
        schedule: with or without messages.
        memory_limit: the most activations that a rank may hold at a time, as `peak_activations` counts them.
    """
    dependencies = Dependencies(schedule)
    found = [
        *_places(schedule),
        *_repeated(dependencies),
        *_missing(schedule, dependencies),
        *_row_order(dependencies),
        *_unmatched(schedule, dependencies),
        *_message_order(schedule),
        *_reduction_order(schedule),
    ]
    if not found:
        found += _deadlock(dependencies)
    found += _inexact(schedule)
    if memory_limit is not None:
        found += _memory(schedule, memory_limit)
    return found


def peak_activations(schedule: Schedule) -> list[int]:
    """For each rank, the most activations that it holds at a time.

    The unit is what one microbatch keeps on one stage (with v chunks a rank, 1/v of a rank's microbatch). It is held
    from F until B or W; on a stage without backward, during F only.
    """
    return [max((held for held, _ in held_by), default=0) for held_by in _held_activations(schedule)]


def _held_activations(schedule: Schedule) -> Iterator[list[tuple[int, Action]]]:
    """For each rank, how many activations it holds during each F."""
    kept = stages_with_backward(schedule)
    for row in schedule.rows:
        held: set[tuple[int, int | None]] = set()
        course = []
        for action in row:
            if action.op is Op.F:
                held.add((action.stage, action.microbatch))
                course.append((len(held), action))
            if action.op in (Op.B, Op.W) or (action.op is Op.F and action.stage not in kept):
                held.discard((action.stage, action.microbatch))
        yield course


def _places(schedule: Schedule) -> Iterator[Violation]:
    """Numbers out of range, and actions on a rank that does not own their stage."""
    rank_of, stages = schedule.placement.rank_of, schedule.stages
    for rank, row in enumerate(schedule.rows):
        for action in row:
            where = f"rank {rank} has {action}"
            k = None if action.op is Op.REDUCE_GRAD else action.microbatch
            if action.stage >= stages or (action.peer is not None and action.peer >= stages):
                yield Violation(rank, action, "out of range", f"{where}; the stages are 0..{stages - 1}")
            elif k is not None and k not in (numbers := schedule.numbers_on(action.stage)):
                what = "the microbatches" if schedule.slices == 1 else "the slices"
                of = "" if schedule.placement.pipelines == 1 else f" of stage {action.stage}"
                text = f"{where}; {what}{of} are {numbers.start}..{numbers.stop - 1}"
                yield Violation(rank, action, "out of range", text)
            elif (owner := rank_of[action.stage]) != rank:
                yield Violation(rank, action, "misplaced", f"{where}; stage {action.stage} is on rank {owner}")
            elif action.peer is not None and rank_of[action.peer] == rank:
                text = f"{where}; stage {action.peer} is on the same rank, which needs no message"
                yield Violation(rank, action, "misplaced", text)


def _repeated(dependencies: Dependencies) -> Iterator[Violation]:
    """Actions that occur twice, and microbatches that go back twice on a stage, as B and as I or W."""
    for node, action in enumerate(dependencies.actions):
        rank, first = dependencies.rank_of[node], dependencies.node(action)
        if first is not None and first != node:
            text = f"rank {rank} has {action}, which rank {dependencies.rank_of[first]} has already"
            yield Violation(rank, action, "repeated", text)
        elif action.op in (Op.I, Op.W):
            whole = Action(action.stage, Op.B, action.microbatch)
            if dependencies.node(whole) is not None:
                text = f"rank {rank} has {action} besides {whole}, which includes it; keep one of the two"
                yield Violation(rank, action, "repeated", text)


def _missing(schedule: Schedule, dependencies: Dependencies) -> Iterator[Violation]:
    """Forwards, backwards, and messages of a link that other microbatches use."""
    with_backward = stages_with_backward(schedule)
    for stage, rank in enumerate(schedule.placement.rank_of):
        for k in schedule.numbers_on(stage):
            forward, whole, split, weights = (Action(stage, op, k) for op in (Op.F, Op.B, Op.I, Op.W))
            there = {a for a in (forward, whole, split, weights) if dependencies.node(a) is not None}
            wanted = [forward]
            if stage in with_backward and whole not in there:
                wanted += [split, weights] if there & {split, weights} else [whole]
            for action in wanted:
                if action not in there:
                    text = f"rank {rank} has no {action}; each microbatch goes through stage {stage} once"
                    yield Violation(rank, action, "missing", text)
    links: defaultdict[Action, set[int | None]] = defaultdict(set)
    for action in dependencies.actions:
        if action.op.is_send:
            links[Action(action.stage, action.op, 0, action.peer)].add(action.microbatch)
    for link, used in links.items():
        if link.stage >= schedule.stages:
            continue
        for k in schedule.numbers_on(link.stage):
            if k not in used:
                rank, action = schedule.placement.rank_of[link.stage], Action(link.stage, link.op, k, link.peer)
                text = f"rank {rank} has no {action}, though it sends other microbatches that way"
                yield Violation(rank, action, "missing", text)


def _row_order(dependencies: Dependencies) -> Iterator[Violation]:
    """Actions that come before one that they wait for, in the same row."""
    for node, action in enumerate(dependencies.actions):
        rank = dependencies.rank_of[node]
        for need in dependencies.before[node]:
            if dependencies.rank_of[need] == rank and need >= node:
                text = f"rank {rank} has {action} before {dependencies.actions[need]}, which it waits for"
                yield Violation(rank, action, "order", text)


def _unmatched(schedule: Schedule, dependencies: Dependencies) -> Iterator[Violation]:
    """Messages without their other end, and reductions with nobody else."""
    reducing: defaultdict[int, list[tuple[int, Action]]] = defaultdict(list)
    for node, action in enumerate(dependencies.actions):
        rank = dependencies.rank_of[node]
        if action.op.is_communication and dependencies.node(action.other_end) is None:
            text = f"rank {rank} has {action}, but no rank has {action.other_end}"
            yield Violation(rank, action, "unmatched", text)
        elif action.op is Op.REDUCE_GRAD and action.microbatch is not None:
            reducing[action.microbatch].append((rank, action))
    for group, members in reducing.items():
        if len(members) == 1:
            rank, action = members[0]
            text = f"rank {rank} has {action}, but no other rank reduces group {group}"
            yield Violation(rank, action, "unmatched", text)


def _message_order(schedule: Schedule) -> Iterator[Violation]:
    """Pairs of ranks where receives are posted in another order than messages are sent."""
    rank_of = schedule.placement.rank_of
    sent: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    posted: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if action.peer is not None and action.peer < schedule.stages:
                if action.op.is_send:
                    sent[rank, rank_of[action.peer]].append(action)
                else:
                    posted[rank_of[action.peer], rank].append(action)
    for (source, target), sends in sorted(sent.items()):
        for send, receive in zip(sends, posted[source, target], strict=False):
            if send.other_end != receive:
                text = f"rank {target} posts {receive} where rank {source} sends {send}; messages must match in order"
                yield Violation(target, receive, "message order", text)
                break


def _reduction_order(schedule: Schedule) -> Iterator[Violation]:
    """Groups that ranks reduce in different orders."""
    sorter: graphlib.TopologicalSorter[int] = graphlib.TopologicalSorter()
    rows = [[a for a in row if a.op is Op.REDUCE_GRAD and a.microbatch is not None] for row in schedule.rows]
    for reductions in rows:
        groups = [a.microbatch for a in reductions if a.microbatch is not None]
        for earlier, later in itertools.pairwise(groups):
            sorter.add(later, earlier)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        cycle = error.args[1]
        rank, action = next((r, a) for r, reductions in enumerate(rows) for a in reductions if a.microbatch in cycle)
        text = (
            f"rank {rank} has {action}, but ranks start the groups {sorted(set(cycle))} in different orders; "
            "every rank must start them in the same one"
        )
        yield Violation(rank, action, "reduction order", text)


def _deadlock(dependencies: Dependencies) -> Iterator[Violation]:
    for sends, rendezvous in (("buffered sends", False), ("sends that wait for their receive", True)):
        blocked = advance(dependencies, rendezvous).blocked
        if blocked:
            rank, text = describe_cycle(dependencies, blocked)
            yield Violation(rank, dependencies.actions[blocked[rank][0]], "deadlock", f"with {sends}, {text}")
            return


def _inexact(schedule: Schedule) -> Iterator[Violation]:
    """Weight gradients that are not added up in ascending order of microbatch, as one device does."""
    for rank, row in enumerate(schedule.rows):
        latest: dict[int, Action] = {}
        for action in row:
            if action.op not in (Op.B, Op.W):
                continue
            before = latest.get(action.stage)
            if before is not None and (before.microbatch or 0) > (action.microbatch or 0):
                text = (
                    f"rank {rank} has {action} after {before}: weight gradients that are not added in ascending order "
                    "of microbatch have other bits than those of one device"
                )
                yield Violation(rank, action, "inexact", text, fatal=False)
            latest[action.stage] = action


def _memory(schedule: Schedule, limit: int) -> Iterator[Violation]:
    for rank, course in enumerate(_held_activations(schedule)):
        over = next(((held, action) for held, action in course if held > limit), None)
        if over is not None:
            text = f"rank {rank} holds {over[0]} activations at {over[1]}; the limit is {limit}"
            yield Violation(rank, over[1], "memory", text)
