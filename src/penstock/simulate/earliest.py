"""The simulation's inner loop: when each node ends if all of them start as early as they can.

Plain code on indexable columns, so that numba can compile it: it is then more than ten times as quick. The results are
the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

LARGE = 50_000
"""From this many nodes on it pays to load numba, which takes half a second."""

NOT_RUN = -1.0
"""Instead of the time when a node ended: it has not run. Anything lower: the same, and a rank sleeps on it."""

_loaded = False


def loop(nodes: int) -> Callable[..., int] | None:
    """Return the compiled `run` for this many nodes; None if plain Python is quicker, or numba is missing."""
    global _loaded  # noqa: PLW0603  (once it has been loaded, it is always quicker)
    if nodes < LARGE and not _loaded:
        return None
    made = _compiled()
    _loaded = made is not None
    return made


@cache
def _compiled() -> Callable[..., int] | None:
    try:
        from penstock._base.compiled import compiler
    except ImportError:
        return None
    return compiler((Path(__file__),))(run)


def run(
    first: Any, need: Any, work: Any, seconds: Any, lag: Any, paired: Any, hold: Any,
    turns: Any, at: Any, begin: Any, starts: Any, ends: Any,
) -> int:  # fmt: skip
    """Run every rank ahead until it needs what has not run, and resume it from the rank that runs that.

    Args:
        first: the first node of each rank, then the number of nodes.
        need: for each node, the node on another rank that it waits for, or -1.
        work: for each node, its place in the next four:
        seconds: how long it takes.
        lag: from when the output of what it needs leaves until that arrives.
        paired: whether it overlaps with the next node: both start when both can, and its output leaves when both end.
        hold: how long that next node takes.
        turns: room for a number for each rank; so is `at`.
        begin: when each rank begins.
        starts: for each node.
        ends: for each node, `NOT_RUN` at first.

    Returns:
        How many ranks have not finished: they wait for each other in a circle.
    """
    ranks = len(first) - 1
    for rank in range(ranks):
        turns[rank] = rank
        at[rank] = first[rank]
    waiting, unfinished = ranks, ranks
    while waiting > 0:
        waiting -= 1
        rank = turns[waiting]
        node, end = at[rank], first[rank + 1]
        now = ends[node - 1] if node > first[rank] else begin[rank]
        while node < end:
            entry = work[node]
            made = need[node]
            if made >= 0:
                sent = ends[made]
                if sent < 0:
                    ends[made] = NOT_RUN - 1 - rank
                    break
                sent += lag[entry] + hold[work[made]]
                if sent > now:
                    now = sent
            if paired[entry]:
                made = need[node + 1]
                if made >= 0:
                    sent = ends[made]
                    if sent < 0:
                        ends[made] = NOT_RUN - 1 - rank
                        break
                    sent += lag[work[node + 1]] + hold[work[made]]
                    if sent > now:
                        now = sent
            starts[node] = now
            now += seconds[entry]
            woken = ends[node]
            ends[node] = now
            if woken < NOT_RUN:
                turns[waiting] = int(NOT_RUN - 1 - woken)
                waiting += 1
            node += 1
        at[rank] = node
        if node == end:
            unfinished -= 1
    return unfinished
