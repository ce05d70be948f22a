"""Predict how long a run's own algorithm takes on given ports with free processors: step by step, rank by rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

from penstock.fabric.algorithms import algorithms, generate
from penstock.fabric.ports import Ports
from penstock.fabric.steps import StepList


def predicted_seconds(
    ports: Ports,
    collective: str,
    algorithm: str,
    members: Sequence[int],
    size_bytes: int,
    shares: Sequence[int] = (),
    iterations: int = 1,
) -> float:
    """Returns the predicted seconds of one collective.

    A message leaves only after its receiver has signalled that it is ready. Receivers signal one round ahead, so this
    delays only the first message. Shapers' token buckets are taken as empty.

    Args:
        ports: of all hosts.
        collective, algorithm: by name; for an algorithm without a step list (the engine's own), our default stands in.
        members: the participating ranks, with the root or sender first.
        size_bytes: the size as nccl-tests defines it.
        shares: for an uneven all_to_all.
        iterations: the number of back-to-back iterations that the time is averaged over; they share one ready signal.
    """
    known = algorithms(collective)
    steps = _steps(collective, algorithm if algorithm in known else known[0], len(members), tuple(shares))
    slot = steps.slot_bytes(size_bytes)
    ready = [0.0] * len(members)
    for moves in steps.rounds:
        out: dict[int, float] = defaultdict(float)
        into: dict[int, float] = defaultdict(float)
        leaves = list(ready)
        for move in moves:
            out[move.source] += move.count * slot
            into[move.target] += move.count * slot
            word = ports.latency(members[move.target], members[move.source]) / iterations
            leaves[move.source] = max(leaves[move.source], word)
        sending = {place: _seconds(size, ports.up[members[place]].bytes_per_second) for place, size in out.items()}
        receiving = {place: _seconds(size, ports.down[members[place]].bytes_per_second) for place, size in into.items()}
        for place, took in sending.items():
            ready[place] = max(ready[place], leaves[place] + took)
        for move in moves:
            source, target = move.source, move.target
            way = ports.latency(members[source], members[target])
            ready[target] = max(ready[target], leaves[source] + way + max(sending[source], receiving[target]))
    return max(ready)


def _seconds(size: float, rate: float) -> float:
    return 0.0 if math.isinf(rate) else size / rate


@lru_cache(maxsize=64)
def _steps(collective: str, algorithm: str, ranks: int, shares: tuple[int, ...]) -> StepList:
    return generate(collective, algorithm, ranks, **({"shares": shares} if shares else {}))
