"""A schedule in time slots, and as a picture in text: one line per rank, one column per slot."""

from __future__ import annotations

from itertools import pairwise

from penstock._base.errors import ArgumentError
from penstock.schedule.dependencies import Dependencies
from penstock.schedule.order import earliest_times
from penstock.schedule.passes import drop_communication
from penstock.schedule.row import Row
from penstock.schedule.schedule import Schedule
from penstock.schedule.timeline import Timeline


def slot_timeline(schedule: Schedule) -> Timeline:
    """Time each F, B, I and W as if it took one slot, as early as possible; a slot is a second of the timeline.

    Messages and reductions take no slot and are left out.

    Raises:
        ScheduleError: the schedule cannot be run.
    """
    dependencies = Dependencies(drop_communication(schedule))
    actions = dependencies.actions
    starts, _ = earliest_times(dependencies, lambda node: float(actions[node].op.is_compute), lambda *_: 0.0)
    rows: list[Row] = []
    times: list[list[tuple[int, int, int]]] = []
    for first, end in pairwise(dependencies.first):
        nodes = [node for node in range(first, end) if actions[node].op.is_compute]
        rows.append(Row([actions[node] for node in nodes]))
        begins = (int(starts[node]) * _SECOND for node in nodes)
        times.append([(start, start, start + _SECOND) for start in begins])
    return Timeline.from_rows(rows, times)


_SECOND = 10**9


def grid(schedule: Schedule, width: int = 120) -> str:
    """Draw the schedule with every F, B, I and W in its earliest possible slot, each one slot long.

    >>> from penstock.schedule import generate
    >>> print(grid(generate("gpipe", ranks=2, microbatches=2)))
    rank 0 | F0 F1 .  .  B0 B1
    rank 1 | .  F0 F1 B0 B1 .

    Stages are named if a rank has several (`2F0`). Messages and reductions take no slot and are left out. A picture
    wider than `width` characters continues below.

    Raises:
        ScheduleError: the schedule cannot be run.
        ArgumentError: `width` has no room for a single column.
    """
    timeline = slot_timeline(schedule)
    one_stage_per_rank = schedule.stages == schedule.ranks
    lines: list[dict[int, str]] = [{} for _ in timeline.tracks]
    for span in timeline:
        text = f"{span.action.op.value}{span.action.microbatch}" if one_stage_per_rank else str(span.action)
        lines[span.rank][round(span.start_seconds)] = text
    slots = max((slot + 1 for line in lines for slot in line), default=0)
    cell = max((len(text) for line in lines for text in line.values()), default=1)
    label = len(f"rank {schedule.ranks - 1}")
    columns = (width - label - 2) // (cell + 1)
    if columns < 1:
        raise ArgumentError(f"width={width}: a column takes {label + cell + 3} characters; pass at least as many")
    blocks = []
    for first in range(0, max(slots, 1), columns):
        drawn = range(first, min(first + columns, slots))
        blocks.append(
            "\n".join(
                f"{f'rank {rank}':<{label}} | {' '.join(line.get(slot, '.').ljust(cell) for slot in drawn)}".rstrip()
                for rank, line in enumerate(lines)
            )
        )
    return "\n\n".join(blocks)
