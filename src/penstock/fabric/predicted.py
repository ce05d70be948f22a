"""What a run's own algorithm takes on given ports, if processors cost nothing: step by step, rank by rank."""

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
    """Of a collective.

    A message leaves once its receiver's word that it is ready has come. Receivers give it a round ahead, so that it
    costs time before the first message alone. Buckets of shapers are taken as empty.

    Args:
        ports: of all hosts.
        collective, algorithm: by name; one that is no step list (the engine's own) is taken for the first of ours.
        members: the ranks that take part, the root or the sender first.
        size_bytes: nccl-tests' size.
        shares: of an uneven all_to_all.
        iterations: in a row, of which this is one: the word of being ready is given once for all.
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
