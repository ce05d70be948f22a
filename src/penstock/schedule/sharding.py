"""Passes for stages whose parameters are sharded over replicas (`fully_shard`): when they are gathered, and freed.

`UNSHARD` starts to gather a stage's parameters, and the stage's next computation waits for them; `RESHARD` frees them.
Without a window a stage stays gathered from its first computation to its last:

    0UNSHARD 0F0 0F1 2UNSHARD 2F0 2F1 2B0 2B1 2RESHARD 0B0 0B1 0RESHARD

With a window of one, it makes room for the other in between:

    0UNSHARD 0F0 0F1 0RESHARD 2UNSHARD 2F0 2F1 2B0 2B1 2RESHARD 0UNSHARD 0B0 0B1 0RESHARD

Where the window has room, a stage is gathered one action ahead, so that its parameters travel while the rank computes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from penstock._base.errors import ArgumentError, check_counts
from penstock.schedule.action import Action, Op, Overlap
from penstock.schedule.row import Row
from penstock.schedule.schedule import Schedule

SHARDING = (Op.UNSHARD, Op.RESHARD)


def merge_last_backward(schedule: Schedule, stages: Set[int]) -> Schedule:
    """Make the last backward of each of these stages whole, after all the stage's other weight gradients.

    For stages whose gradients are reduced within their last backward (`fully_shard`).
    """

    def rewrite(row: Row) -> Iterable[Action | Overlap]:
        items = list(row.items())
        for stage in stages:
            split = [i for i, item in enumerate(items) if any(p.stage == stage and p.op is Op.I for p in item.parts)]
            full = [i for i, item in enumerate(items) if any(p.stage == stage and p.op is Op.B for p in item.parts)]
            if split and (not full or split[-1] > full[-1]):
                items = _merge_backward_at(items, stage, split[-1])
        return items

    return schedule.with_rows([rewrite(row) for row in schedule.rows])


def _merge_backward_at(items: list[Action | Overlap], stage: int, last: int) -> list[Action | Overlap]:
    """Make the stage's I at `last` whole in these items; the Ws that followed, except its own, move before it."""
    (number,) = [part.microbatch for part in items[last].parts if part.stage == stage and part.op is Op.I]
    weight_gradients = [i for i in items[last:] if isinstance(i, Action) and i.stage == stage and i.op is Op.W]
    full = Action(stage, Op.B, number)
    item = items[last]
    merged = Overlap(item.forward, full) if isinstance(item, Overlap) else full
    earlier = [w for w in weight_gradients if w.microbatch != number]
    return [*items[:last], *earlier, merged, *(i for i in items[last + 1 :] if i not in weight_gradients)]


def add_sharding(schedule: Schedule, stages: Set[int], window: int | None = None) -> Schedule:
    """Add `UNSHARD` and `RESHARD` for each of these stages; any that it has already are placed anew.

    `UNSHARD` comes before the first computation that needs the stage, one computation earlier if the window has room;
    `RESHARD` comes after the last, and after the stage's sends. If another stage needs the room, the one that is needed
    again last is freed. Messages are ignored for `UNSHARD`: how far ahead they are posted depends on the number of
    microbatches, and replicas must gather in the same order though one may have fewer.

    >>> from penstock.schedule import generate
    >>> print(add_sharding(generate("gpipe", ranks=1, microbatches=1, stages_per_rank=3), {0, 1, 2}, window=2))
    gpipe: 1 microbatch, stages on ranks 0 0 0
    rank 0: 0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 1F0 2F0 2B0 2RESHARD 0UNSHARD 1B0 1RESHARD 0B0 0RESHARD

    Args:
        schedule: with or without messages.
        stages: the stages that are sharded.
        window: how many of a rank's stages may be gathered at once, including any whose parameters are still under
            way. None, or as many as a rank has: each stays gathered from its first computation to its last.

    Raises:
        ArgumentError: the window is less than 1, or less than what two overlapping actions need.
    """
    check_counts(required=False, unshard_window=window)
    return schedule.with_rows([_with_gathers(rank, row, stages, window) for rank, row in enumerate(schedule.rows)])


class _Step(NamedTuple):
    """A computation: its place among the items of the row, and the sharded stages that it needs."""

    position: int
    stages: frozenset[int]


def _with_gathers(rank: int, row: Row, stages: Set[int], window: int | None) -> Iterator[Action | Overlap]:
    items = [item for item in row.items() if not (item.parts[0].op in SHARDING and item.parts[0].stage in stages)]
    steps = [
        _Step(position, frozenset(part.stage for part in item.parts) & stages)
        for position, item in enumerate(items)
        if item.parts[0].op.is_compute
    ]
    num_sharded = len(frozenset().union(*(step.stages for step in steps)))
    room = num_sharded if window is None else window
    wide = next((step for step in steps if len(step.stages) > room), None)
    if wide is not None:
        raise ArgumentError(
            f"unshard_window={window}: rank {rank} has {items[wide.position]}, which needs {len(wide.stages)} stages "
            f"at once; pass at least {len(wide.stages)}"
        )
    before, after = defaultdict(list), defaultdict(list)
    gathers, releases = _plan([step.stages for step in steps], room, ahead=room < num_sharded)
    for stage, gather_step in gathers:
        before[steps[gather_step].position].append(Action(stage, Op.UNSHARD))
    by_stage = defaultdict(list)
    for index, item in enumerate(items):
        for part in item.parts:
            by_stage[part.stage].append(index)
    for stage, until in releases:
        end = bisect_left(by_stage[stage], steps[until].position) if until < len(steps) else len(by_stage[stage])
        after[by_stage[stage][end - 1]].append(Action(stage, Op.RESHARD))
    for index, item in enumerate(items):
        yield from before[index]
        yield item
        yield from after[index]


def _plan(needs: Sequence[Set[int]], room: int, *, ahead: bool) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Decide which stages to gather before which step, and which to free before which step; both in order.

    Args:
        needs: the stages that each step needs.
        room: how many may be gathered at once.
        ahead: whether to gather one step ahead.
    """
    steps_by_stage: defaultdict[int, list[int]] = defaultdict(list)
    for step, needed in enumerate(needs):
        for stage in needed:
            steps_by_stage[stage].append(step)
    gathers, releases = [], []
    gathered: set[int] = set()
    for step, needed in enumerate(needs):
        for upcoming in needs[step : step + 2] if ahead else (needed,):
            for stage in sorted(upcoming - gathered):
                if len(gathered) == room:
                    evictable = gathered - needed - upcoming
                    if not evictable:
                        break  # nothing can be freed before this step has run
                    evicted = max(evictable, key=lambda stage: (_next_use(steps_by_stage[stage], step), stage))
                    gathered.remove(evicted)
                    releases.append((evicted, step))
                gathered.add(stage)
                gathers.append((stage, step))
    releases += [(stage, len(needs)) for stage in sorted(gathered)]
    return gathers, releases


def _next_use(steps: Sequence[int], step: int) -> float:
    """Return the first of the steps after `step`; infinity if there is none."""
    index = bisect_right(steps, step)
    return steps[index] if index < len(steps) else math.inf
