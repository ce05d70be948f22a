"""Every algorithm does what its collective is defined to do, in whatever order its ranks and messages come.

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
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock._base.errors import ArgumentError
from penstock.network.fabric.algorithms import algorithms, generate, generators
from penstock.network.fabric.algorithms.generators import double_tree
from penstock.network.fabric.steps import Collective, Move, StepList, cost, rank_rounds

EVERY = [(collective, algorithm) for collective in get_args(Collective) for algorithm in algorithms(collective)]


def part(steps: StepList, rank: int) -> range:
    """The chunks that belong to a rank in a buffer divided among the ranks."""
    shares = steps.shares or (steps.chunks // steps.ranks,) * steps.ranks
    first = sum(shares[:rank])
    return range(first, first + shares[rank])


def starts_with(collective: str, steps: StepList, rank: int) -> dict[int, int]:
    """Which slots of a rank hold which chunk of its own input before the first round."""
    every, own = {chunk: chunk for chunk in range(steps.chunks)}, part(steps, rank)
    match collective:
        case "all_reduce" | "reduce_scatter" | "reduce" | "sendrecv":
            return every
        case "all_gather" | "gather":
            return {chunk: chunk for chunk in own}
        case "broadcast" | "scatter" | "send":
            return every if rank == 0 else {}
        case "all_to_all":
            return every | {steps.output + rank * len(own) + place: chunk for place, chunk in enumerate(own)}


def ends_with(collective: str, steps: StepList, rank: int) -> list[tuple[int, range, int]]:
    """(slot of the output, ranks, chunk): the sum over these ranks of what each had in that chunk of its input."""
    every, own, everybody = range(steps.chunks), part(steps, rank), range(steps.ranks)
    match collective:
        case "all_reduce":
            return [(chunk, everybody, chunk) for chunk in every]
        case "reduce":
            return [(chunk, everybody, chunk) for chunk in every] if rank == 0 else []
        case "reduce_scatter":
            return [(chunk, everybody, chunk) for chunk in own]
        case "all_gather" | "gather":
            named = [(chunk, range(owner, owner + 1), chunk) for owner in everybody for chunk in part(steps, owner)]
            return named if collective == "all_gather" or rank == 0 else []
        case "all_to_all":
            pairs = [(other, place) for other in everybody for place in range(len(own))]
            return [(other * len(own) + place, range(other, other + 1), own[place]) for other, place in pairs]
        case "broadcast":
            return [(chunk, range(1), chunk) for chunk in every]
        case "scatter":
            return [(chunk, range(1), chunk) for chunk in own]
        case "sendrecv":
            before = (rank - 1) % steps.ranks
            return [(chunk, range(before, before + 1), chunk) for chunk in every]
        case "send":
            return [(chunk, range(1), chunk) for chunk in every] if rank == 1 else []


def executed(collective: str, steps: StepList, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Each rank's input by chunk, and its memory in the end.

    Ranks run their own rounds, as far ahead as messages let them, in a random order, and what arrives from several
    ranks arrives in any order, too. The numbers are so large that no two sums of them are equal by chance.
    """
    draw = np.random.default_rng(seed)
    inputs = [draw.integers(1, 2**40, steps.chunks) for _ in range(steps.ranks)]
    memory = [np.full(steps.chunks + steps.more_slots, -(2**50)) for _ in range(steps.ranks)]
    for rank, held in enumerate(memory):
        for slot, chunk in starts_with(collective, steps, rank).items():
            held[slot] = inputs[rank][chunk]
    queues: dict[tuple[int, int], list[np.ndarray]] = defaultdict(list)
    left = {rank: list(rank_rounds(steps, rank)) for rank in range(steps.ranks)}
    posted: set[int] = set()
    while any(left.values()):
        moved = False
        for rank in draw.permutation([rank for rank in left if left[rank]]):
            now = left[rank][0]
            if rank not in posted:
                posted.add(rank)
                moved = True
                for move in now.sends:
                    content = memory[rank][move.first : move.first + move.count].copy()
                    queues[move.source, move.target].append(content)
            sources = [move.source for move in now.receives]
            if all(len(queues[source, rank]) >= sources.count(source) for source in {*sources}):
                coming = {source: [move for move in now.receives if move.source == source] for source in sources}
                for source in draw.permutation(sources):
                    move = coming[source].pop(0)
                    into = memory[rank][move.into : move.into + move.count]
                    into[:] = queues[source, rank].pop(0) + (into if move.adds else 0)
                left[rank].pop(0)
                posted.discard(rank)
                moved = True
        assert moved, "all wait"
    assert not any(queues.values()), "a message is left"
    return inputs, memory


def check(collective: str, steps: StepList, seed: int = 0) -> None:
    inputs, memory = executed(collective, steps, seed)
    for rank in range(steps.ranks):
        for slot, ranks, chunk in ends_with(collective, steps, rank):
            assert memory[rank][steps.output + slot] == sum(inputs[other][chunk] for other in ranks), (rank, slot)


@pytest.mark.parametrize(("collective", "algorithm"), EVERY)
def test_every_rank_ends_with_what_the_table_says(collective: str, algorithm: str) -> None:
    for ranks in (*range(2, 18), 32):
        steps = generate(collective, algorithm, ranks)
        assert steps.ranks == ranks
        check(collective, steps, seed=ranks)


@settings(max_examples=60)
@given(st.sampled_from(EVERY), st.integers(2, 40), st.integers(1, 12))
def test_for_any_number_of_ranks_and_pieces(named: tuple[str, str], ranks: int, pieces: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generators, "PIECES", pieces)
        check(named[0], generate(*named, ranks))


@pytest.mark.parametrize("algorithm", ["pairwise", "direct"])
@pytest.mark.parametrize("shares", [(3, 1), (1, 0, 2), (4, 2, 1, 1), (0, 0, 0, 0, 7)])
def test_an_uneven_all_to_all_gives_each_rank_its_share_of_everyone(algorithm: str, shares: tuple[int, ...]) -> None:
    check("all_to_all", generate("all_to_all", algorithm, len(shares), shares))


def test_equal_shares_are_none() -> None:
    assert generate("all_to_all", "direct", 3, shares=(2, 2, 2)).shares == (), "an even one"


@given(st.integers(2, 130))
def test_who_passes_data_on_in_one_tree_is_a_leaf_of_the_other(ranks: int) -> None:
    trees = double_tree(ranks)
    inner = []
    for tree in trees:
        children = [[r for r in range(ranks) if tree[r] == rank and r != rank] for rank in range(ranks)]
        assert max(map(len, children)) <= 2
        assert sum(tree[rank] == rank for rank in range(ranks)) == 1
        inner.append({rank for rank in range(ranks) if children[rank]})
    assert not inner[0] & inner[1]


@pytest.mark.parametrize("turned", [False, True])
def test_the_busier_direction_of_a_port_counts(turned: bool) -> None:
    """Rank 0 sends three slots, no more than two to the same rank, and receives one; or the other way round."""
    moves = [Move(0, 1, 0, 2, 0), Move(0, 2, 0, 1, 0), Move(1, 0, 0, 1, 0)]
    if turned:
        moves = [replace(move, source=move.target, target=move.source) for move in moves]
    assert cost(StepList(3, 3, (tuple(moves),))) == (1, 1.0)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (("all_reduce", "zzz", 4), "'zzz' is not an algorithm for all_reduce: expected one of ring"),
        (
            ("allreduce", "ring", 4),
            r"'allreduce' is not a collective: did you mean 'all_reduce'\? expected one of all_reduce, all_g",
        ),
        (("send", "direct", 0), "send among 0 ranks: pass 2 or more"),
    ],
)
def test_bad_names_and_numbers(asked: tuple[str, str, int], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        generate(*asked)
