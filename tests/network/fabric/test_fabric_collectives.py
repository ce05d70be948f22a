"""Collectives on real ranks: right in every size and type, checked so that a fault is found; delays and clocks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, get_args

import fabric_jobs as jobs
import pytest
import torch

from penstock.network.fabric.algorithms import ENGINE, algorithms
from penstock.network.fabric.emulation import clock, payload
from penstock.network.fabric.emulation.spec import Spec
from penstock.network.fabric.steps import Collective
from penstock.network.fabric.workload import DEFAULT_DTYPES, Op, Transfer, Workload
from scaffolding.ranks import Ranks

SIZES = (1, 1001, 7)
"""In elements: fewer than there are ranks, and no multiple of anything."""


def _cases(ranks: int) -> Iterator[jobs.Case]:
    """Every collective by every algorithm, in every size, and one of them in every default type; every op on every type
    that has it; and shares."""
    for collective in get_args(Collective):
        for algorithm in (*algorithms(collective), ENGINE):
            yield from ((collective, algorithm, size, "float32", "sum", ()) for size in SIZES)
            yield from ((collective, algorithm, 7, name, "sum", ()) for name in DEFAULT_DTYPES.values())
    reduces: Any = (("all_reduce", "ring"), ("all_reduce", ENGINE), ("reduce_scatter", "pairwise"), ("reduce", ENGINE))
    for (name, dtype), op, (collective, algorithm) in product(payload.TYPES.items(), get_args(Op), reduces):
        if op != "avg" or (algorithm != ENGINE and dtype.is_floating_point):
            yield collective, algorithm, 29, name, op, ()
    for name, algorithm in product(payload.TYPES, ("pairwise", ENGINE)):
        yield "all_to_all", algorithm, 29, name, "sum", ()
    for shares, size in product([(5, 2, 1, 0), (0, 1, 3, 3), (1, 1, 2, 1)], (1, 64, 1001)):
        yield from (
            ("all_to_all", name, size, "float32", "sum", shares[:ranks]) for name in ("pairwise", "direct", ENGINE)
        )


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_algorithm_gives_the_right_result(ranks: int, request: pytest.FixtureRequest) -> None:
    pool: Ranks = request.getfixturevalue(f"ranks{ranks}")
    assert [fault for faults in pool.run(jobs.everything, [*_cases(ranks)]) for fault in faults] == []


@pytest.mark.distributed
def test_iterations_are_done_in_a_row(ranks2: Ranks) -> None:
    slow = jobs.Slow(20 / 0.01)  # in a ring of two, each sends and receives 20 bytes twice
    *_, (stamps,), rows = ranks2.run(jobs.trials_of, _spec(Workload.from_sizes([40]), 2, iterations=7), 1, slow)[0]
    assert (stamps[..., 1] - stamps[..., 0]).min() >= 7 * 0.04 * 1e9
    assert len(rows) == 2 * 2, "rounds are those of the last"


def _first(ranks: int, dtype: torch.dtype, op: Op) -> payload.Participant:
    return payload.Participant(Transfer("sum", 4), tuple(range(ranks)), 0, 1, 5, dtype, op)


def test_an_average_and_a_product_are_exact_in_any_type_and_differ_from_a_sum() -> None:
    for ranks in (2, 3, 16, 200):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            numbers = [payload.contribution(rank, ranks, 600, 5, dtype, "avg") for rank in range(ranks)]
            right = torch.stack(numbers).double().mean(0)
            assert torch.equal(_first(ranks, dtype, "avg").expected(600).double(), right)
            assert len(right.unique()) == 3
    numbers = [payload.contribution(rank, 3, 60, 5, torch.int8, "prod") for rank in range(3)]
    assert torch.equal(_first(3, torch.int8, "prod").expected(60), torch.stack(numbers).prod(0))


_BY = {
    "sum": lambda given: given.sum(0), "avg": lambda given: given.mean(0), "prod": lambda given: given.prod(0),
    "min": lambda given: given.amin(0), "max": lambda given: given.amax(0),
}  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3, 7, 13, 14, 19, 20, 21, 64])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bfloat16, torch.float32])
def test_a_rank_that_is_dropped_or_mixed_up_with_another_is_seen_whatever_the_op(
    ranks: int, dtype: torch.dtype
) -> None:
    for op in get_args(Op)[: 5 if dtype.is_floating_point else 4]:
        gave = [payload.contribution(rank, ranks, 4 * ranks, 0, dtype, op).double() for rank in range(ranks)]
        total, neutral = _BY[op](torch.stack(gave)), {"prod": 1.0, "min": 99.0}.get(op, 0.0)
        for rank in range(ranks):
            others = gave[:rank] + gave[rank + 1 :]
            own, nothing = gave[rank], torch.full_like(total, neutral)
            for instead in (nothing, gave[rank - 1], own.roll(1), own.roll(ranks)):
                assert not torch.equal(_BY[op](torch.stack([*others, instead])), total), (op, rank)
        for shift in range(1, ranks):
            assert not torch.equal(total.roll(shift), total), "places that are mixed up"
            assert not torch.equal(gave[0], gave[shift])


def test_of_a_single_number_a_rank_that_is_dropped_from_a_sum_is_seen() -> None:
    for dtype in (torch.int8, torch.bfloat16, torch.float32):
        gave = [int(payload.contribution(rank, 60, 1, 3, dtype)[0]) for rank in range(60)]
        assert min(gave) > 0
        assert dtype != torch.int8 or sum(gave) <= 127, "or it is not exact"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [
        ("all_reduce", "ring"),
        ("all_to_all", "pairwise"),
        ("gather", "binomial"),
        ("broadcast", "chain"),
    ],
)
def test_a_lost_move_is_found(ranks3: Ranks, collective: str, algorithm: str) -> None:
    by_rank = ranks3.run(jobs.without_each_move, collective, algorithm)
    cases = list(zip(*by_rank, strict=True))
    assert cases
    for of_move in cases:
        for moment, name in enumerate(("at once", "after a right result")):
            assert any(found[moment] is not None for found in of_move), (name, of_move)


# -- clocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.distributed
@pytest.mark.parametrize("ahead_ns", [0, 1_000_000_007, -5_000_000_000])
def test_the_offset_of_a_clock_is_within_its_uncertainty(ranks3: Ranks, ahead_ns: int) -> None:
    found = ranks3.run(jobs.clocks, ahead_ns, False)
    assert found[0] == {"offset_ns": 0, "uncertainty_ns": 0}
    for rank, offset in enumerate(found[1:], start=1):
        assert offset["uncertainty_ns"] > clock.DRIFT * clock.CLOCK_SECONDS * 1e9, "what it may drift is in it"
        assert abs(offset["offset_ns"] + rank * ahead_ns) <= offset["uncertainty_ns"] + 1


@pytest.mark.alone
@pytest.mark.distributed
def test_hosts_of_one_kernel_have_one_clock(ranks2: Ranks) -> None:
    for offset in ranks2.run(jobs.clocks, 0, True):
        assert offset == {"offset_ns": 0, "uncertainty_ns": 0}


# -- trials -----------------------------------------------------------------------------------------------------------


def _spec(workload: Workload, hosts: int, **more: Any) -> Spec:
    return Spec(workload, hosts, trials=3, measures_links=False, **more)


@pytest.mark.alone
@pytest.mark.distributed
@pytest.mark.parametrize("algorithm", ["ring", ENGINE])
def test_pipelines_of_subsets_do_not_wait_for_each_other(ranks4: Ranks, algorithm: str) -> None:
    workload = jobs.pipeline(4)
    answers = ranks4.run(jobs.trials_of, _spec(workload, 4, algorithm=algorithm), 3)
    assert not any(isinstance(answer, str) for answer in answers), answers
    began, ended, stamps, rows = answers[0]
    for trial in stamps:
        taking = trial[:, :, 0] >= 0
        assert taking.T.tolist() == [[rank in t.ranks for rank in range(4)] for t in workload.transfers]
        assert (trial[taking] > began).all()
        assert (trial[taking] < ended).all()
        assert (trial[..., 1] > trial[..., 0])[taking].all()
    assert bool(rows) == (algorithm != ENGINE)


@pytest.mark.distributed
def test_each_rank_has_its_own_stamps(ranks3: Ranks) -> None:
    by_rank = (0.0, 0.02, 0.05)
    workload = Workload("one", (Transfer("x", 4, ranks=(0, 1, 2), compute_by_rank=by_rank),), 3)
    *_, stamps, rows = ranks3.run(jobs.trials_of, _spec(workload, 3), 2)[0]
    for trial in stamps:
        starts, ends = trial[:, 0, 0], trial[:, 0, 1]
        # All begin to compute at one moment, which the slowest one's start bounds; none has the sum before it.
        assert starts.argsort().tolist() == [0, 1, 2]
        assert (ends >= starts[2]).all()
    assert {row[2] for row in rows} == {0, 1, 2}


@pytest.mark.distributed
def test_the_warm_up_finds_a_wrong_result(ranks3: Ranks) -> None:
    spec = _spec(Workload.from_sizes([48], "scatter"), 3, algorithm="direct")  # nobody passes on what it gets
    found: list[str] = ranks3.run(jobs.trials_of, spec, 1, jobs.Spoiling(1))
    assert len(set(found)) == 1
    assert "1 of 4 numbers of rank 1 are wrong after scatter" in found[0]
