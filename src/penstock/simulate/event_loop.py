"""The simulation's inner loop: when each node ends if all of them start as early as they can.

Plain code on indexable columns, so that numba can compile it, which makes it more than ten times as fast. The results
are bitwise identical.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

LARGE = 50_000
"""From this many nodes on it pays to load numba, which takes half a second."""

NOT_RUN = -1.0
"""The end of a node that has not run. A lower number also names the rank that waits for it."""

_loaded = False


def compiled_run(nodes: int) -> Callable[..., int] | None:
    """Return the compiled `run` for this many nodes; None if plain Python is faster, or numba is missing."""
    global _loaded  # noqa: PLW0603  (once it has been loaded, it is always faster)
    if nodes < LARGE and not _loaded:
        return None
    compiled = _compiled()
    _loaded = compiled is not None
    return compiled


@cache
def _compiled() -> Callable[..., int] | None:
    try:
        from penstock._base.compiled import compiler
    except ImportError:
        return None
    return compiler((Path(__file__),))(run)


def run(
    first: Any, need: Any, entries: Any, seconds: Any, lag: Any, paired: Any, hold: Any,
    runnable: Any, position: Any, begin: Any, starts: Any, ends: Any,
) -> int:  # fmt: skip
    """Run each rank until it needs a node that has not run; the rank that runs that node resumes it.

    Args:
        first: the first node of each rank, then the number of nodes.
        need: for each node, the node on another rank that it waits for, or -1.
        entries: for each node, its index in the next four:
        seconds: how long it takes.
        lag: from when the output of what it needs leaves until that arrives.
        paired: whether it overlaps with the next node: both start when both can, and its output leaves when both end.
        hold: how long that next node takes.
        runnable, position: buffers with a number for each rank.
        begin: when each rank begins.
        starts: for each node.
        ends: for each node, `NOT_RUN` at first.

    Returns:
        How many ranks have not finished: they wait for each other in a circle.
    """
    ranks = len(first) - 1
    for rank in range(ranks):
        runnable[rank] = rank
        position[rank] = first[rank]
    num_runnable, unfinished = ranks, ranks
    while num_runnable > 0:
        num_runnable -= 1
        rank = runnable[num_runnable]
        node, end = position[rank], first[rank + 1]
        now = ends[node - 1] if node > first[rank] else begin[rank]
        while node < end:
            entry = entries[node]
            needed = need[node]
            if needed >= 0:
                arrival = ends[needed]
                if arrival < 0:
                    ends[needed] = NOT_RUN - 1 - rank
                    break
                arrival += lag[entry] + hold[entries[needed]]
                if arrival > now:
                    now = arrival
            if paired[entry]:
                needed = need[node + 1]
                if needed >= 0:
                    arrival = ends[needed]
                    if arrival < 0:
                        ends[needed] = NOT_RUN - 1 - rank
                        break
                    arrival += lag[entries[node + 1]] + hold[entries[needed]]
                    if arrival > now:
                        now = arrival
            starts[node] = now
            now += seconds[entry]
            sleeper = ends[node]
            ends[node] = now
            if sleeper < NOT_RUN:
                runnable[num_runnable] = int(NOT_RUN - 1 - sleeper)
                num_runnable += 1
            node += 1
        position[rank] = node
        if node == end:
            unfinished -= 1
    return unfinished
