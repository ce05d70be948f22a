"""A schedule as a picture in text: one line per rank, one column per time slot."""

from __future__ import annotations

from penstock.errors import ArgumentError
from penstock.schedule.dependencies import Dependencies
from penstock.schedule.order import earliest_times
from penstock.schedule.passes import drop_communication
from penstock.schedule.schedule import Schedule


def grid(schedule: Schedule, width: int = 120) -> str:
    """The schedule with every F, B, I and W in its earliest possible slot, each one slot long.

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
    compute = drop_communication(schedule)
    dependencies = Dependencies(compute)
    actions = dependencies.actions
    starts, _ = earliest_times(dependencies, lambda node: float(actions[node].op.is_compute), lambda *_: 0.0)
    bare = schedule.stages == schedule.ranks
    lines: list[dict[int, str]] = [{} for _ in compute.rows]
    for node, action in enumerate(actions):
        if action.op.is_compute:
            text = f"{action.op.value}{action.microbatch}" if bare else str(action)
            lines[dependencies.rank_of[node]][int(starts[node])] = text
    slots = max((slot + 1 for line in lines for slot in line), default=0)
    cell = max((len(text) for line in lines for text in line.values()), default=1)
    label = len(f"rank {schedule.ranks - 1}")
    columns = (width - label - 2) // (cell + 1)
    if columns < 1:
        raise ArgumentError(f"width={width}: a column takes {label + cell + 3} characters; give at least as many")
    blocks = []
    for first in range(0, max(slots, 1), columns):
        shown = range(first, min(first + columns, slots))
        blocks.append(
            "\n".join(
                f"{f'rank {rank}':<{label}} | {' '.join(line.get(slot, '.').ljust(cell) for slot in shown)}".rstrip()
                for rank, line in enumerate(lines)
            )
        )
    return "\n\n".join(blocks)
