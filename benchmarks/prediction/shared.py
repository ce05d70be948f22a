"""The step of ranks that share cores, each of which stays on one: a rank keeps its core until it has to wait, then the
one that has been ready longest gets it. So does Linux with real-time priority (SCHED_FIFO); a waiting rank sleeps.

With a core for each rank this is `penstock.simulate.simulate`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

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
    at, ranks = needs.first[:-1], len(schedule.rows)
    free, holder = [0.0] * cores, [-1] * cores

    def turns() -> Iterator[tuple[float, bool, float, int]]:
        for rank in range(ranks):
            if at[rank] < needs.first[rank + 1]:
                ready = _ready(needs, ended, at[rank], costs, link)
                core = rank % cores
                keeps = holder[core] == rank and ready <= free[core]
                yield max(free[core], ready), not keeps, ready, rank

    while turn := min(turns(), default=None):
        start, _, _, rank = turn
        node = at[rank]
        ended[node] = start + costs[needs.actions.stage[node] % len(costs)].seconds(needs.actions[node].op)
        free[rank % cores], holder[rank % cores] = ended[node], rank
        at[rank] += 1
    return max(ended)


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
