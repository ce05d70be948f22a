"""What offloading does not do, as notes: which activations travel is a rule of the schedule (`schedule/kept.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedule import Schedule
from penstock.schedule.kept import NEAR, trips
from penstock.words import in_ranges


def notes(offload: Sequence[bool], order: Schedule, on_host: Sequence[bool]) -> list[str]:
    """Notes on what offload does not do.

    Args:
        offload: one per stage of the model.
        order: the schedule, with or without communication.
        on_host: for each rank, whether it computes on the CPU.
    """
    rank_of = order.placement.rank_of
    asked = [stage for stage in range(len(rank_of)) if offload[stage % len(offload)]]
    idle = [stage for stage in asked if not trips(order.rows[rank_of[stage]], stage).any]
    there = [stage for stage in asked if on_host[rank_of[stage]] and stage not in idle]
    found = []
    if idle:
        found.append(
            f"offload: nothing goes to the host on {_stages(idle)}, where each backward comes within {NEAR} "
            "computations of its forward: what travels meanwhile makes no room"
        )
    if there:
        found.append(f"offload: {_stages(there)} on the CPU: the copies are made, and save no memory")
    return found


def _stages(numbers: Sequence[int]) -> str:
    return f"{'stage' if len(numbers) == 1 else 'stages'} {', '.join(in_ranges(map(str, numbers)))}"
