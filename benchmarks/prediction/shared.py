"""The step of ranks that share cores, each of which stays on one: those that have something to run share it evenly, as
Linux shares a core between processes of the same priority. A waiting rank sleeps.

With a core for each rank this is `penstock.simulate.simulate`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from penstock.schedule import Schedule
from penstock.schedule.dependencies import Dependencies
from penstock.simulate import LinkCost, StageCost


def step_seconds(schedule: Schedule, costs: Sequence[StageCost], link: LinkCost, cores: int) -> float:
    """From the first forward to the last backward, if rank r is on core r % cores.

    Args:
        schedule: computations only.
        costs: of each stage.
    """
    needs = Dependencies(schedule)
    ended = [math.inf] * needs.first[-1]
    at, now = needs.first[:-1], 0.0
    left: dict[int, float] = {}  # of the action that each rank runs, the work
    while True:
        ready = {
            rank: _ready(needs, ended, at[rank], costs, link)
            for rank in range(len(schedule.rows))
            if rank not in left and at[rank] < needs.first[rank + 1]
        }
        for rank in [rank for rank, when in ready.items() if when <= now]:
            node = at[rank]
            left[rank] = costs[needs.actions.stage[node] % len(costs)].seconds(needs.actions[node].op)
            del ready[rank]
        if not left and not ready:
            return max(ended)
        sharing = Counter(rank % cores for rank in left)
        ends = {rank: now + work * sharing[rank % cores] for rank, work in left.items()}
        then = min([*ends.values(), *ready.values()])
        for rank, end in ends.items():
            if end <= then:
                ended[at[rank]] = then
                at[rank] += 1
                del left[rank]
            else:
                left[rank] = (end - then) / sharing[rank % cores]
        now = then


def _ready(needs: Dependencies, ended: Sequence[float], node: int, costs: Sequence[StageCost], link: LinkCost) -> float:
    """When everything that a node waits for is there; infinite if that is not known yet."""
    stage, rank = needs.actions.stage[node], needs.rank_of[node]
    own = ended[node - 1] if node > needs.first[rank] else 0.0
    arrivals = [own]
    for before in needs.before(node):
        remote = needs.rank_of[before] != rank
        crossing = costs[min(stage, needs.actions.stage[before]) % len(costs)].output_bytes
        arrivals.append(ended[before] + (link.seconds(crossing) if remote else 0.0))
    return max(arrivals)
