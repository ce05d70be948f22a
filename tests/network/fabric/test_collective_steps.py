"""Every algorithm does what its collective is defined to do, at the cost that the textbook states."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import step_proof as proof
from hypothesis import given, settings
from hypothesis import strategies as st
from step_proof import prove, wanted

from penstock._base.errors import ArgumentError
from penstock.network.fabric.algorithms import algorithms, generate, generators
from penstock.network.fabric.algorithms.generators import double_tree
from penstock.network.fabric.steps import Collective, Move, StepList, cost, rank_rounds

EVERY = [(collective, algorithm) for collective in get_args(Collective) for algorithm in algorithms(collective)]
SIZES = (*range(2, 18), 32)


@pytest.mark.parametrize(("collective", "algorithm"), EVERY)
def test_every_rank_ends_with_what_the_table_says(collective: str, algorithm: str) -> None:
    for ranks in SIZES:
        steps = generate(collective, algorithm, ranks)
        assert (steps.collective, steps.algorithm, steps.ranks) == (collective, algorithm, ranks)
        assert prove(steps) == [], ranks


@settings(max_examples=60)
@given(st.sampled_from(EVERY), st.integers(2, 40), st.integers(1, 12))
def test_for_any_number_of_ranks_and_pieces(named: tuple[str, str], ranks: int, pieces: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generators, "PIECES", pieces)
        assert prove(generate(*named, ranks)) == []


def one_after_the_other(steps: StepList, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Numbers instead of symbols: ranks run their own rounds, as far ahead as messages let them, in a random order.

    Returns:
        each rank's input by chunk, and its memory in the end.
    """
    draw = np.random.default_rng(seed)
    inputs = [draw.integers(1, 2**40, steps.chunks) for _ in range(steps.ranks)]
    memory = [np.full(steps.slots, -(2**50)) for _ in range(steps.ranks)]
    for rank, held in enumerate(memory):
        for slot, chunk in proof.given(steps, rank).items():
            held[slot] = inputs[rank][chunk]
    queues: dict[tuple[int, int], list[np.ndarray]] = {}
    left = {rank: list(rank_rounds(steps, rank)) for rank in range(steps.ranks)}
    posted: set[int] = set()
    while any(left.values()):
        moved = False
        for rank in draw.permutation(steps.ranks):
            if not left[rank]:
                continue
            now = left[rank][0]
            if rank not in posted:
                posted.add(rank)
                moved = True
                for move in now.sends:
                    content = memory[rank][move.first : move.first + move.count].copy()
                    queues.setdefault((move.source, move.target), []).append(content)
            waits = {move.source: sum(m.source == move.source for m in now.receives) for move in now.receives}
            if all(len(queues.get((source, rank), ())) >= count for source, count in waits.items()):
                for move in now.receives:
                    into = memory[rank][move.into : move.into + move.count]
                    into[:] = queues[move.source, rank].pop(0) + (into if move.adds else 0)
                left[rank].pop(0)
                posted.discard(rank)
                moved = True
        assert moved, "all wait"
    assert not any(queues.values()), "a message is left"
    return inputs, memory


@pytest.mark.parametrize(("collective", "algorithm"), EVERY)
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 7, 8])
def test_ranks_need_no_barrier_between_rounds(collective: str, algorithm: str, ranks: int) -> None:
    steps = generate(collective, algorithm, ranks)
    inputs, memory = one_after_the_other(steps, seed=ranks)
    for rank in range(ranks):
        for slot, ranks_of, chunk in wanted(steps, rank):
            assert memory[rank][slot] == sum(inputs[other][chunk] for other in ranks_of), (rank, slot)


def test_the_table_is_that_of_torch_distributed() -> None:
    """Spelled out for three ranks, so that table and algorithms cannot be wrong together."""

    def ends(collective: str, rank: int) -> list[tuple[list[int], int]]:
        steps = generate(collective, algorithms(collective)[0], 3)
        size = steps.chunks // 3 or 1
        results = wanted(steps, rank)
        assert [slot for slot, _, _ in results] == sorted(slot for slot, _, _ in results)
        return [(list(ranks), chunk // size) for _, ranks, chunk in results]

    every = [0, 1, 2]
    assert ends("all_reduce", 1) == [(every, 0), (every, 1), (every, 2)]
    assert ends("reduce_scatter", 1) == [(every, 1)]
    assert ends("all_gather", 1) == [([0], 0), ([1], 1), ([2], 2)]
    assert ends("gather", 0) == [([0], 0), ([1], 1), ([2], 2)]
    assert ends("gather", 1) == []
    assert ends("all_to_all", 1) == [([0], 1), ([1], 1), ([2], 1)]
    assert ends("broadcast", 2) == [([0], 0)]
    assert [ends("send", rank) for rank in range(3)] == [[], [([0], 0)], []]
    assert [ends("reduce", rank) for rank in range(3)] == [[(every, 0)], [], []]
    assert ends("scatter", 1) == [([0], 1)]
    assert [ends("sendrecv", rank) for rank in range(3)] == [[([2], 0)], [([0], 0)], [([1], 0)]]


@pytest.mark.parametrize("algorithm", ["pairwise", "direct"])
@pytest.mark.parametrize("shares", [(3, 1), (1, 0, 2), (4, 2, 1, 1), (0, 0, 0, 0, 7)])
def test_an_uneven_all_to_all_gives_each_rank_its_share_of_everyone(algorithm: str, shares: tuple[int, ...]) -> None:
    steps = generate("all_to_all", algorithm, len(shares), shares=shares)
    assert prove(steps) == []
    lost = replace(steps, rounds=(steps.rounds[0][1:], *steps.rounds[1:]))
    assert prove(lost) != []


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
    assert cost(StepList("send", "made up", 3, 3, (tuple(moves),), 3)) == (1, 1.0)


def test_what_each_rank_starts_with() -> None:
    def starts(collective: str) -> list[dict[int, int]]:
        steps = generate(collective, algorithms(collective)[0], 3)
        return [proof.given(steps, rank) for rank in range(3)]

    every = {0: 0, 1: 1, 2: 2}
    assert starts("all_reduce") == starts("reduce_scatter") == [every] * 3
    assert starts("all_gather") == starts("gather") == [{0: 0}, {1: 1}, {2: 2}]
    assert starts("broadcast") == starts("send") == [{0: 0}, {}, {}]
    assert starts("all_to_all") == [{**every, 3: 0}, {**every, 4: 1}, {**every, 5: 2}]


RING = generate("all_reduce", "ring", 4)


def with_round(number: int, moves: tuple[Move, ...], steps: StepList = RING) -> StepList:
    return replace(steps, rounds=(*steps.rounds[:number], moves, *steps.rounds[number + 1 :]))


@settings(max_examples=80)
@given(st.data())
def test_no_message_can_be_left_out_or_changed(data: st.DataObject) -> None:
    """Of a ring, where every message is needed: without it, doubled, from elsewhere, or with its kind swapped."""
    named = data.draw(
        st.sampled_from([("all_reduce", "ring"), ("all_reduce", "halving-doubling"), ("all_gather", "ring")])
    )
    steps = generate(*named, data.draw(st.sampled_from([3, 4, 5])))
    number = data.draw(st.integers(0, len(steps.rounds) - 1))
    moves = steps.rounds[number]
    place = data.draw(st.integers(0, len(moves) - 1))
    move = moves[place]
    changed = data.draw(
        st.sampled_from(
            [
                (),
                (move, move),
                (replace(move, adds=not move.adds),),
                (replace(move, first=(move.first + 1) % (steps.slots - move.count + 1)),)
                if steps.slots > move.count
                else (),
            ]
        )
    )
    assert prove(with_round(number, (*moves[:place], *changed, *moves[place + 1 :]), steps))


@pytest.mark.parametrize(
    ("given_", "says"),
    [
        (
            ("all_reduce", "rign", 4),
            r"'rign' is not an algorithm for all_reduce: did you mean 'ring'\? expected one of ring, ring2",
        ),
        (("all_reduce", "zzz", 4), "'zzz' is not an algorithm for all_reduce: expected one of ring"),
        (
            ("allreduce", "ring", 4),
            r"'allreduce' is not a collective: did you mean 'all_reduce'\? expected one of all_reduce, all_g",
        ),
        (("all_reduce", "ring", 1), "all_reduce among 1 ranks: pass 2 or more"),
        (("send", "direct", 0), "send among 0 ranks: pass 2 or more"),
    ],
)
def test_bad_names_and_numbers(given_: tuple[str, str, int], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        generate(*given_)
