"""Proves that a list of steps does what its collective is defined to do, by executing it on symbols.

The definition of each collective, the only one; n ranks, chunk = slot of the input, part r = the r-th n-th of them:

    collective       rank r starts with      rank r ends with (from slot `output` on)         at
    all_reduce       all chunks              each chunk's sum over all ranks                  every rank
    reduce_scatter   all chunks              its part's sums, in the place of part r          every rank
    all_gather       part r, in its place    all parts, each from its rank                    every rank
    gather           part r, in its place    all parts, each from its rank                    rank 0
    all_to_all       all chunks              one after the other: each rank's part r          every rank
    broadcast        rank 0: all chunks      rank 0's chunks                                  every rank
    reduce           all chunks              each chunk's sum over all ranks                  rank 0
    scatter          rank 0: all chunks      rank 0's part r, in the place of part r          every rank
    sendrecv         all chunks              the chunks of rank r-1 (the last one's at 0)     every rank
    send             rank 0: all chunks      rank 0's chunks                                  rank 1

What a rank gives to itself needs no network: where the output has slots of its own (all_to_all), rank r has put its
own part r there before the first round.

A slot holds a sum of terms "chunk c of rank r". Deadlock needs no proof: in each round a rank posts all that it sends
and receives before it waits, so the first round that is not done has all its messages posted, and will be done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from penstock.network.fabric.steps import Collective, Move, StepList

_PARTED: frozenset[Collective] = frozenset({"reduce_scatter", "all_gather", "gather", "scatter", "all_to_all"})
"""Those whose chunks belong to ranks, so that n has to divide their number."""


class Result(NamedTuple):
    """A slot that a rank has to end with: the sum over `ranks` of what each had in `chunk` of its input."""

    slot: int
    ranks: range
    chunk: int


class _Sum(NamedTuple):
    """Terms as bits, chunk * n + rank: those that are in it, and those that are in it more than once."""

    once: int
    twice: int = 0

    def plus(self, other: _Sum) -> _Sum:
        return _Sum(self.once | other.once, self.twice | other.twice | (self.once & other.once))


def part(steps: StepList, rank: int) -> range:
    """The chunks that belong to a rank in a buffer divided among the ranks."""
    shares = steps.shares or (steps.chunks // steps.ranks,) * steps.ranks
    first = sum(shares[:rank])
    return range(first, first + shares[rank])


def given(steps: StepList, rank: int) -> dict[int, int]:
    """Which slots of a rank hold which chunk of its own input before the first round."""
    every, own = range(steps.chunks), part(steps, rank)
    match steps.collective:
        case "all_reduce" | "reduce_scatter" | "reduce" | "sendrecv":
            return {chunk: chunk for chunk in every}
        case "all_gather" | "gather":
            return {chunk: chunk for chunk in own}
        case "broadcast" | "scatter" | "send":
            return {chunk: chunk for chunk in every} if rank == 0 else {}
        case "all_to_all":
            return {chunk: chunk for chunk in every} | {
                steps.output + rank * len(own) + place: chunk for place, chunk in enumerate(own)
            }


def wanted(steps: StepList, rank: int) -> tuple[Result, ...]:
    """What a rank has to end with, by slot."""
    n, first, every, own = steps.ranks, steps.output, range(steps.chunks), part(steps, rank)
    match steps.collective:
        case "all_reduce":
            return tuple(Result(first + chunk, range(n), chunk) for chunk in every)
        case "reduce":
            return tuple(Result(first + chunk, range(n), chunk) for chunk in every) if rank == 0 else ()
        case "reduce_scatter":
            return tuple(Result(first + chunk, range(n), chunk) for chunk in own)
        case "all_gather":
            return _from_owners(steps)
        case "gather":
            return _from_owners(steps) if rank == 0 else ()
        case "all_to_all":
            return tuple(
                Result(first + other * len(own) + place, range(other, other + 1), chunk)
                for other in range(n)
                for place, chunk in enumerate(own)
            )
        case "broadcast":
            return tuple(Result(first + chunk, range(1), chunk) for chunk in every)
        case "scatter":
            return tuple(Result(first + chunk, range(1), chunk) for chunk in own)
        case "sendrecv":
            before = (rank - 1) % n
            return tuple(Result(first + chunk, range(before, before + 1), chunk) for chunk in every)
        case "send":
            return tuple(Result(first + chunk, range(1), chunk) for chunk in every) if rank == 1 else ()


def prove(steps: StepList, most: int = 20) -> list[str]:
    """What is wrong with a list of steps; empty: every rank ends with exactly what the table says.

    Found are terms that are missing, doubled or in another's slot, slots that are sent or added to while they hold
    nothing, and slots that are replaced in a round in which another message arrives there too.

    Args:
        steps: of any algorithm.
        most: how many lines at most, and one that counts the rest.
    """
    if steps.collective in _PARTED and not steps.shares and steps.chunks % steps.ranks:
        return [f"{steps.chunks} chunks are not a multiple of {steps.ranks} ranks, so the parts are not equal"]
    needed = steps.ranks * max(steps.shares) if steps.shares else steps.chunks
    if not 0 <= steps.output <= steps.slots - needed:
        return [f"{steps.slots} slots have no room for {needed} chunks of output from slot {steps.output} on"]
    wrong: list[str] = []
    memory: list[list[_Sum | None]] = [[None] * steps.slots for _ in range(steps.ranks)]
    for rank, held in enumerate(memory):
        for slot, chunk in given(steps, rank).items():
            held[slot] = _Sum(1 << (chunk * steps.ranks + rank))
    for number, moves in enumerate(steps.rounds):
        wrong += (f"round {number}: {text}" for text in _clashes(moves))
        wrong += (f"round {number}: {text}" for text in _play(moves, memory))
    for rank, held in enumerate(memory):
        wrong += _differences(steps, rank, held)
    return wrong if len(wrong) <= most else [*wrong[:most], f"and {len(wrong) - most} more"]


def _from_owners(steps: StepList) -> tuple[Result, ...]:
    return tuple(
        Result(steps.output + chunk, range(owner, owner + 1), chunk)
        for owner in range(steps.ranks)
        for chunk in part(steps, owner)
    )


def _clashes(moves: tuple[Move, ...]) -> Iterator[str]:
    """Two may add to a slot in one round, but if one replaces it, the outcome depends on who comes first."""
    arrivals: Counter[tuple[int, int]] = Counter()
    replaced: set[tuple[int, int]] = set()
    for move in moves:
        slots = [(move.target, move.into + offset) for offset in range(move.count)]
        arrivals.update(slots)
        if not move.adds:
            replaced.update(slots)
    for rank, slot in sorted(replaced):
        if arrivals[rank, slot] > 1:
            yield f"{arrivals[rank, slot]} messages arrive in slot {slot} of rank {rank}, and one or more replaces it"


def _play(moves: tuple[Move, ...], memory: list[list[_Sum | None]]) -> Iterator[str]:
    """All leave, then all arrive."""
    sent = [memory[move.source][move.first : move.first + move.count] for move in moves]
    for move, content in zip(moves, sent, strict=True):
        held = memory[move.target]
        for offset, term in enumerate(content):
            slot = move.into + offset
            before = held[slot]
            if term is None:
                yield f"rank {move.source} sends slot {move.first + offset} to {move.target}, but nothing is in it"
            elif not move.adds:
                held[slot] = term
            elif before is None:
                yield f"rank {move.target} adds to slot {slot} what {move.source} sends, but nothing is in it"
            else:
                held[slot] = before.plus(term)


def _differences(steps: StepList, rank: int, held: list[_Sum | None]) -> Iterator[str]:
    for slot, ranks, chunk in wanted(steps, rank):
        want = ((1 << len(ranks)) - 1) << (chunk * steps.ranks + ranks.start)
        where, has = f"rank {rank} ends with slot {slot}", held[slot]
        if has is None:
            yield f"{where} empty: wanted is {_terms(want, steps.ranks)}"
        elif has != (want, 0):
            kinds = (("without", want & ~has.once), ("with a foreign", has.once & ~want), ("with a doubled", has.twice))
            yield f"{where} " + ", ".join(f"{kind} {_terms(bits, steps.ranks)}" for kind, bits in kinds if bits)


def _terms(bits: int, ranks: int) -> str:
    """Chunk c of rank r, the first few."""
    places = [place for place in range(bits.bit_length()) if bits >> place & 1]
    text = ", ".join(f"chunk {place // ranks} of rank {place % ranks}" for place in places[:4])
    return text if len(places) <= 4 else f"{text} and {len(places) - 4} more"
