"""Checks that a schedule is legal: each action occurs once and on its rank, in an order that works, without deadlock,
within a memory limit. Works on schedules with and without messages.
"""

from __future__ import annotations

import graphlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock._base.errors import ScheduleError
from penstock.schedule.action import OPS, SENDS, Action, Op
from penstock.schedule.dependencies import Dependencies, stages_with_backward
from penstock.schedule.order import Advance, advance, describe_cycle
from penstock.schedule.receives import early_receives
from penstock.schedule.row import Row
from penstock.schedule.schedule import Schedule

# The checks run on the columns of rows, which hold codes; an `Action` is made only for what is reported.
_F, _REDUCE = Op.F.code, Op.REDUCE_GRAD.code
_ADDS_WEIGHT_GRADIENTS = (Op.B.code, Op.W.code)
_MAX_MISSING = 10_000
"""Missing actions that are named: a single wrong number may say that there are a billion microbatches."""
_SHARDING = {Op.UNSHARD: Op.RESHARD, Op.RESHARD: Op.UNSHARD}


@dataclass(frozen=True, slots=True)
class Violation:
    """One way in which a schedule is wrong.

    Attributes:
        rank: where it is.
        action: which one; None if no single action is at fault.
        kind: "repeated", "missing", "out of range", "misplaced", "order", "unmatched", "message order",
            "reduction order", "deadlock", "early receive" or "inexact".
        text: what is wrong, with rank, action and reason.
        fatal: False if the schedule runs anyway, but its results differ in their bits from those of one device.
    """

    rank: int
    action: Action | None
    kind: str
    text: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def check(schedule: Schedule) -> list[Violation]:
    """Return everything that is wrong with a schedule; empty if nothing is.

    >>> from penstock.schedule import Schedule
    >>> late = Schedule.parse("mine: 2 microbatches, stages on ranks 0\\nrank 0: 0F0 0F1 0B0")
    >>> for violation in check(late):
    ...     print(violation)
    missing: rank 0 has no 0B1; each microbatch goes through stage 0 once

    Looks for deadlocks with buffered sends, and with sends that wait until their receive has been posted. Deadlocks and
    receives posted too early are reported only if nothing else is wrong: a missing or misplaced action is the cause, a
    deadlock only its consequence.

    Args:
        schedule: with or without messages.
    """
    dependencies = Dependencies(schedule)
    # A schedule that finishes when sends wait also finishes when they are buffered, and its rows are in order.
    unbuffered = advance(dependencies, rendezvous=True)
    violations = [
        *_index_problems(schedule),
        *_repeated(dependencies),
        *_sharding(schedule),
        *itertools.islice(_missing(schedule, dependencies), _MAX_MISSING),
        *_row_order(dependencies, unbuffered),
        *_unmatched(dependencies),
        *_message_order(schedule, dependencies),
        *_reduction_order(schedule),
    ]
    if not violations:
        violations += _deadlock(dependencies, unbuffered) if unbuffered.blocked else _early(dependencies, unbuffered)
    return [*violations, *_inexact(schedule)]


def require_legal(schedule: Schedule, file: str = "") -> Schedule:
    """Return the schedule. Raise ScheduleError: it is not legal; names the rules that it breaks; for a `file`, the
    first."""
    violations = [violation for violation in check(schedule) if violation.fatal]
    if violations and file:
        raise ScheduleError(f"{file} holds no legal schedule: {violations[0].kind}: {summary(violations, 1)}")
    if violations:
        raise ScheduleError(f"schedule {schedule.name!r} cannot be run: {summary(violations)}")
    return schedule


def summary(violations: Sequence[Violation], most: int = 3) -> str:
    """Summarize the first few violations, fatal ones first, and count the rest; empty if there are none.

    A single slip in a schedule may be wrong once for each microbatch.
    """
    ordered = sorted(violations, key=lambda violation: not violation.fatal)
    suffix = f" (and {len(violations) - most} more)" if len(violations) > most else ""
    return "; ".join(violation.text for violation in ordered[:most]) + suffix


def peak_activations(schedule: Schedule) -> list[int]:
    """Return the peak number of activations that each rank holds at once.

    The unit is what one microbatch keeps on one stage (with v chunks per rank, 1/v of a microbatch on a rank). It is
    held from F until B or W; on a stage without a backward, during F only.
    """
    with_backward = stages_with_backward(schedule)
    return [max(_held_activations(row, with_backward), default=0) for row in schedule.rows]


def in_flight_by_stage(schedule: Schedule, since: Op = Op.F) -> list[int]:
    """Return the peak number of microbatches in flight on each stage of the model, over all its copies: from their
    forward, or from their I, until their weight gradients are done."""
    with_backward, ends = stages_with_backward(schedule), _ADDS_WEIGHT_GRADIENTS if since is Op.F else (Op.W.code,)
    in_flight, peaks = [0] * schedule.stages, [0] * schedule.placement.depth
    for row in schedule.rows:
        for stage, op in zip(row.stage, row.op, strict=True):
            if op == since.code:
                in_flight[stage] += 1
                model_stage = stage % schedule.placement.depth
                peaks[model_stage] = max(peaks[model_stage], in_flight[stage])
            if op in ends or (op == _F and stage not in with_backward):
                in_flight[stage] -= 1
    return peaks


def _held_activations(row: Row, with_backward: frozenset[int]) -> Iterator[int]:
    """Yield the number of activations that a rank holds during each F."""
    activations: set[tuple[int, int]] = set()
    for stage, op, number in zip(row.stage, row.op, row.microbatch, strict=True):
        if op == _F:
            activations.add((stage, number))
            yield len(activations)
            if stage not in with_backward:
                activations.discard((stage, number))
        elif op in _ADDS_WEIGHT_GRADIENTS:
            activations.discard((stage, number))


def _index_problems(schedule: Schedule) -> Iterator[Violation]:
    """Yield numbers out of range, and actions on ranks that do not own their stage."""
    rank_of, stages = schedule.placement.rank_of, schedule.stages
    numbers_on = [schedule.numbers_on(stage) for stage in range(stages)]
    first, end = [numbers.start for numbers in numbers_on], [numbers.stop for numbers in numbers_on]
    for rank, row in enumerate(schedule.rows):
        columns = zip(row.stage, row.op, row.microbatch, row.peer, strict=True)
        for index, (stage, op, number, peer) in enumerate(columns):
            if stage >= stages or peer >= stages:
                kind, reason = "out of range", f"the stages are 0..{stages - 1}"
            elif not first[stage] <= number < end[stage] and number >= 0 and op != _REDUCE:
                suffix = "" if schedule.placement.pipelines == 1 else f" of stage {stage}"
                kind, reason = "out of range", f"the microbatches{suffix} are {first[stage]}..{end[stage] - 1}"
            elif rank_of[stage] != rank:
                kind, reason = "misplaced", f"stage {stage} is on rank {rank_of[stage]}"
            elif peer >= 0 and rank_of[peer] == rank:
                kind, reason = "misplaced", f"stage {peer} is on the same rank, which needs no message"
            else:
                continue
            yield Violation(rank, row[index], kind, f"rank {rank} has {row[index]}; {reason}")


def _repeated(dependencies: Dependencies) -> Iterator[Violation]:
    """Yield actions that occur twice, and microbatches with two backwards on a stage: B, and I or W as well."""
    actions, rank_of = dependencies.actions, dependencies.rank_of
    if sum(map(len, dependencies.kinds.values())) < len(actions):
        for node, action in enumerate(actions):
            first = dependencies.node(action)
            if first is not None and first != node and action.op not in _SHARDING:
                text = f"rank {rank_of[node]} has {action}, which rank {rank_of[first]} has already"
                yield Violation(rank_of[node], action, "repeated", text)
    for stage, op in itertools.product(sorted({stage for stage, *_ in dependencies.kinds}), (Op.I, Op.W)):
        nodes, full = dependencies.nodes(stage, op), dependencies.nodes(stage, Op.B)
        for number in sorted(nodes.keys() & full.keys()):
            action, full_action = actions[nodes[number]], actions[full[number]]
            rank = rank_of[nodes[number]]
            text = f"rank {rank} has {action} besides {full_action}, which includes it; keep one of the two"
            yield Violation(rank, action, "repeated", text)


def _sharding(schedule: Schedule) -> Iterator[Violation]:
    """Yield stages that are gathered, or freed, twice in a row, or that compute while they are not gathered."""
    codes = {op.code for op in _SHARDING}
    for rank, row in enumerate(schedule.rows):
        if codes.isdisjoint(row.op):
            continue
        sharded = {stage for stage, op in zip(row.stage, row.op, strict=True) if op in codes}
        latest: dict[int, Op] = {}
        for action in row:
            if action.op in _SHARDING:
                if latest.get(action.stage) is action.op:
                    counterpart = Action(action.stage, _SHARDING[action.op])
                    text = f"rank {rank} has {action} twice in succession; {counterpart} must come in between"
                    yield Violation(rank, action, "repeated", text)
                latest[action.stage] = action.op
            elif action.op.is_compute and action.stage in sharded and latest.get(action.stage) is not Op.UNSHARD:
                gather = Action(action.stage, Op.UNSHARD)
                text = f"rank {rank} has {action} while its parameters are not gathered; {gather} must come before"
                yield Violation(rank, action, "order", text)


def _missing(schedule: Schedule, dependencies: Dependencies) -> Iterator[Violation]:
    """Yield missing forwards and backwards, and missing messages on a link that other microbatches use."""
    with_backward = stages_with_backward(schedule)
    for stage, rank in enumerate(schedule.placement.rank_of):
        forward, full, split, weights = (dependencies.nodes(stage, op) for op in (Op.F, Op.B, Op.I, Op.W))
        backward = stage in with_backward
        for k in schedule.numbers_on(stage):
            if k in forward and (not backward or k in full or (k in split and k in weights)):
                continue
            expected = {Op.F: forward}
            if backward and k not in full:
                expected |= {Op.I: split, Op.W: weights} if k in split or k in weights else {Op.B: full}
            for action in (Action(stage, op, k) for op, nodes in expected.items() if k not in nodes):
                text = f"rank {rank} has no {action}; each microbatch goes through stage {stage} once"
                yield Violation(rank, action, "missing", text)
    for (stage, code, peer), nodes in dependencies.kinds.items():
        if code in SENDS and stage < schedule.stages:
            rank = schedule.placement.rank_of[stage]
            for k in sorted(set(schedule.numbers_on(stage)) - nodes.keys()):
                action = Action(stage, OPS[code], k, peer)
                text = f"rank {rank} has no {action}, though it sends other microbatches that way"
                yield Violation(rank, action, "missing", text)


def _row_order(dependencies: Dependencies, unbuffered: Advance) -> Iterator[Violation]:
    """Yield actions that come before one that they wait for in the same row. They block their rank."""
    actions, rank_of = dependencies.actions, dependencies.rank_of
    for node in range(len(actions)) if unbuffered.blocked else ():
        rank = rank_of[node]
        for need in dependencies.before(node):
            if rank_of[need] == rank and need >= node:
                text = f"rank {rank} has {actions[node]} before {actions[need]}, which it waits for"
                yield Violation(rank, actions[node], "order", text)


def _unmatched(dependencies: Dependencies) -> Iterator[Violation]:
    """Yield messages without their other end, and reductions with a single participant."""
    actions, rank_of = dependencies.actions, dependencies.rank_of
    reducing: defaultdict[int, list[int]] = defaultdict(list)
    for (_, code, _), nodes in dependencies.kinds.items():
        if OPS[code].is_communication:
            for node in nodes.values():
                if dependencies.other_end(node) is None:
                    rank, action = rank_of[node], actions[node]
                    text = f"rank {rank} has {action}, but no rank has {action.other_end}"
                    yield Violation(rank, action, "unmatched", text)
        elif code == _REDUCE:
            for group, node in nodes.items():
                reducing[group].append(node)
    for group, members in reducing.items():
        if len(members) == 1 and group >= 0:
            rank, action = rank_of[members[0]], actions[members[0]]
            text = f"rank {rank} has {action}, but no other rank reduces group {group}"
            yield Violation(rank, action, "unmatched", text)


def _message_order(schedule: Schedule, dependencies: Dependencies) -> Iterator[Violation]:
    """Yield pairs of ranks that post receives in a different order from the sends."""
    actions, rank_of = dependencies.actions, dependencies.rank_of
    sent: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    posted: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for node, (op, peer) in enumerate(zip(actions.op, actions.peer, strict=True)):
        if 0 <= peer < schedule.stages:
            peer_rank = schedule.placement.rank_of[peer]
            if op in SENDS:
                sent[rank_of[node], peer_rank].append(node)
            else:
                posted[peer_rank, rank_of[node]].append(node)
    for (source, target), sends in sorted(sent.items()):
        for send, receive in zip(sends, posted[source, target], strict=False):
            if dependencies.other_end(send) != receive:
                text = (
                    f"rank {target} posts {actions[receive]} where rank {source} sends {actions[send]}; "
                    "messages must match in order"
                )
                yield Violation(target, actions[receive], "message order", text)
                break


def _reduction_order(schedule: Schedule) -> Iterator[Violation]:
    """Yield groups that ranks reduce in different orders."""
    sorter: graphlib.TopologicalSorter[int] = graphlib.TopologicalSorter()
    rows = [[(k, i) for i, k in enumerate(row.microbatch) if row.op[i] == _REDUCE and k >= 0] for row in schedule.rows]
    for reductions in rows:
        for (earlier, _), (later, _) in itertools.pairwise(reductions):
            sorter.add(later, earlier)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        cycle = error.args[1]
        rank, index = next((r, i) for r, reductions in enumerate(rows) for k, i in reductions if k in cycle)
        action = schedule.rows[rank][index]
        text = (
            f"rank {rank} has {action}, but ranks start the groups {sorted(set(cycle))} in different orders; "
            "every rank must start them in the same one"
        )
        yield Violation(rank, action, "reduction order", text)


def _deadlock(dependencies: Dependencies, unbuffered: Advance) -> Iterator[Violation]:
    buffered = advance(dependencies).blocked
    blocked = buffered or unbuffered.blocked
    sends = "buffered sends" if buffered else "sends that wait for their receive"
    rank, text = describe_cycle(dependencies, blocked)
    yield Violation(rank, dependencies.actions[blocked[rank][0]], "deadlock", f"with {sends}, {text}")


def _early(dependencies: Dependencies, unbuffered: Advance) -> Iterator[Violation]:
    """Yield receives that are posted before an action of the same rank that their message depends on."""
    actions, rank_of = dependencies.actions, dependencies.rank_of
    for receive, last in early_receives(dependencies, unbuffered.order):
        text = (
            f"rank {rank_of[receive]} has {actions[receive]} before {actions[last]}, which its message depends on; "
            f"post it after {actions[last]}"
        )
        yield Violation(rank_of[receive], actions[receive], "early receive", text)


def _inexact(schedule: Schedule) -> Iterator[Violation]:
    """Yield weight gradients that are not added up in ascending order of microbatch, as they are on one device."""
    for rank, row in enumerate(schedule.rows):
        latest: dict[int, tuple[int, int]] = {}  # by stage, the last weight gradient: its microbatch and place
        for index, (stage, op, number) in enumerate(zip(row.stage, row.op, row.microbatch, strict=True)):
            if op not in _ADDS_WEIGHT_GRADIENTS:
                continue
            if stage in latest and latest[stage][0] > number:
                text = (
                    f"rank {rank} has {row[index]} after {row[latest[stage][1]]}: weight gradients that are not added "
                    "in ascending order of microbatch have other bits than those of one device"
                )
                yield Violation(rank, row[index], "inexact", text, fatal=False)
            latest[stage] = (number, index)
