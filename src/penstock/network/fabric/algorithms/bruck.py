"""Bruck's algorithms: ceil(log2 n) rounds for any n; in round k, ranks at distance 2^k exchange data.

(Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in multiport
message-passing systems", 1997.) The original rotates each rank's data so that messages are contiguous, and rotates it
back at the end. Here, slots stay where they are, and a message may consist of several moves.
"""

from __future__ import annotations

from penstock.network.fabric.steps import Move, StepList, joined


def all_gather(ranks: int) -> StepList:
    """Rank r holds the parts r, r+1, ... r+2^k-1 and sends them to r-2^k: (n-1)/n of the size."""
    rounds, distance = [], 1
    while distance < ranks:
        held = min(distance, ranks - distance)  # the last round sends only what is still missing
        slots = [(rank, (rank + ahead) % ranks) for rank in range(ranks) for ahead in range(held)]
        rounds.append(joined(Move(rank, (rank - distance) % ranks, slot, 1, slot) for rank, slot in slots))
        distance *= 2
    return StepList("all_gather", "bruck", ranks, ranks, ranks, tuple(rounds))


def all_to_all(ranks: int) -> StepList:
    """A part with i ranks to go moves by one set bit of i at a time, lowest first: about half of the size per round.

    On its way, a part waits in slot i of the area after input and output.
    """
    output, waiting = ranks, 2 * ranks
    rounds, distance = [], 1
    while distance < ranks:
        moves = []
        for rank in range(ranks):
            target = (rank + distance) % ranks
            for ahead in range(ranks):
                if not ahead & distance:
                    continue
                starts, arrives = ahead % distance == 0, ahead < 2 * distance
                first = (rank + ahead) % ranks if starts else waiting + ahead
                into = output + (target - ahead) % ranks if arrives else waiting + ahead
                moves.append(Move(rank, target, first, 1, into))
        rounds.append(joined(moves))
        distance *= 2
    return StepList("all_to_all", "bruck", ranks, ranks, 3 * ranks, tuple(rounds), output)
