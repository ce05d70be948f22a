"""The pool of processes itself: results by rank, errors with their traceback, and a new start after a hang."""

import os
import signal
import sys

import pytest
import torch
import torch.distributed as dist

from scaffolding import warm
from scaffolding.ranks import Ranks, RanksError

pytestmark = pytest.mark.distributed


def add_up(rank: int, value: torch.Tensor) -> tuple[int, torch.Tensor, int]:
    total = value * (rank + 1)
    dist.all_reduce(total)
    return rank, total, os.getpid()


def fall(rank: int, how: str) -> None:
    if rank == 1:
        if how == "raise":
            raise ValueError("a reason")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()


def missing(rank: int) -> list[str]:
    return [name for name in warm.MODULES if name not in sys.modules]


def draw(rank: int) -> list[float]:
    return torch.rand(3).tolist()


def test_results_come_by_rank_and_processes_are_kept(ranks2: Ranks) -> None:
    first = ranks2.run(add_up, torch.ones(2))
    assert [rank for rank, _, _ in first] == [0, 1]
    assert all(torch.equal(total, torch.full((2,), 3.0)) for _, total, _ in first)
    again = ranks2.run(add_up, torch.ones(2))
    assert [pid for _, _, pid in again] == [pid for _, _, pid in first]


@pytest.mark.parametrize(
    ("how", "seconds", "says"),
    [
        ("raise", 60, "rank 1: Traceback"),
        ("die", 60, "rank 1: its process ended with -9"),
        ("hang", 0.2, "rank 1: did"),
    ],
)
def test_failed_job_says_why_and_the_pool_starts_anew(ranks2: Ranks, how: str, seconds: float, says: str) -> None:
    before = ranks2.run(add_up, torch.ones(1))
    with pytest.raises(RanksError, match=says):
        ranks2.run(fall, how, seconds=seconds)
    for _, _, pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert ranks2.run(add_up, torch.ones(1))[0][1] == 3.0


def test_ranks_start_with_what_a_step_imports(ranks2: Ranks) -> None:
    assert ranks2.run(missing) == [[], []]


def test_seed_is_the_same_for_each_job(ranks2: Ranks) -> None:
    assert ranks2.run(draw) == ranks2.run(draw)


def test_groups_of_three_and_four(ranks3: Ranks, ranks4: Ranks) -> None:
    assert ranks3.run(add_up, torch.ones(1))[2][1] == 6.0
    assert ranks4.run(add_up, torch.ones(1))[3][1] == 10.0
