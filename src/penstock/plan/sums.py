"""When a step's gradients are summed: as the runtime does it, stage by stage, beside the work that is left.

A rank's sums follow one another. A stage's begins when its last backward has ended; that of a stage with copies when
the copies' have, too, and its sum over replicas comes after the whole pipeline's work.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.plan.cluster import Cluster
from penstock.schedule import Op, Schedule
from penstock.schedule.timeline import Timeline


def sums_end(
    schedule: Schedule,
    timeline: Timeline,
    gradient_bytes: Sequence[float],
    cluster: Cluster,
    crossed: Sequence[bool],
    replicas: int,
) -> float:
    """When the last sum has ended; the makespan if there is nothing to sum.

    Args:
        gradient_bytes: of each stage of one copy.
        crossed: for each rank, whether its replicas are on several hosts.
        replicas: how many there are.
    """
    place = schedule.placement
    last = _last_backwards(timeline)
    free = [0.0] * place.ranks
    if place.pipelines > 1:
        for stage in range(place.depth):
            holders = sorted({place.rank_of[copy] for copy in range(stage, place.stages, place.depth)})
            if len(holders) > 1:
                ends = [last.get(copy, 0.0) for copy in range(stage, place.stages, place.depth)]
                begin = max(*ends, *(free[rank] for rank in holders))
                seconds = cluster.ring_seconds(gradient_bytes[stage], len(holders), crosses=False)
                for rank in holders:
                    free[rank] = begin + seconds
        last = dict.fromkeys(last, timeline.makespan_seconds)
    for stage, end in sorted(last.items(), key=lambda one: one[1]):
        rank = place.rank_of[stage]
        size = gradient_bytes[stage % place.depth]
        free[rank] = max(free[rank], end) + cluster.ring_seconds(size, replicas, crosses=crossed[rank])
    return max(timeline.makespan_seconds, *free)


def _last_backwards(timeline: Timeline) -> dict[int, float]:
    """When each stage's last B or W ends."""
    found: dict[int, float] = {}
    for track in timeline.tracks:
        for op, stage, end in zip(track.actions.op, track.actions.stage, track.end, strict=True):
            if op in (Op.B.code, Op.W.code):
                found[stage] = max(found.get(stage, 0.0), end)
    return found
