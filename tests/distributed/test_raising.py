"""Traps 5 and 11: a rank that raises in the middle of a step ends all ranks, and each names it and its cause."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from scaffolding.forked import answer_of, log_of

pytestmark = pytest.mark.distributed

RANKS = 3


class Raised(NamedTuple):
    rank: int
    own: str
    """What the rank itself raises."""
    cause: str
    """What the others say."""


CASES = {
    "loss": Raised(2, "ValueError: the loss is", "rank 2 failed at 2F1: ValueError: the loss is not a number"),
    "evaluates": Raised(
        2, "ArgumentError: this pipeline was asked for a step or an evaluation within its own", "rank 2 failed at 2F1"
    ),
    "rows": Raised(2, "ShapeError: target", "ShapeError: target has 6 rows"),
    "dtype": Raised(0, "ShapeError: value", "rank 0 failed at 0SEND_F0"),
    "target": Raised(2, "ArgumentError: target=None", "ArgumentError: target=None"),
    "finite": Raised(
        1,
        "NonFiniteError: rank 1, action 1F0, microbatch 0: value",
        "rank 1 failed at 1F0: NonFiniteError: rank 1, action 1F0",
    ),
    "device": Raised(
        2, "RuntimeError: an illegal memory access", "rank 2 failed at the loss: RuntimeError: an illegal memory access"
    ),
    "user": Raised(1, "ZeroDivisionError", "rank 1"),
}


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, str]]]:
    """For each case and rank: exit status and output."""
    folder = tmp_path_factory.mktemp("raising")
    statuses = answer_of(Path(__file__).with_name("raising.py"), folder, str(RANKS), *CASES)
    return {
        case: [(status, log_of(folder, case, rank).read_text()) for rank, status in enumerate(statuses[case])]
        for case in CASES
    }


@pytest.mark.parametrize("case", CASES)
def test_the_rank_that_raised_raises_its_own_error(logs: dict[str, list[tuple[int, str]]], case: str) -> None:
    status, log = logs[case][CASES[case].rank]
    assert status == 1, log
    assert f"raised {CASES[case].own}" in log
    if case != "user":
        assert f"penstock: on rank {CASES[case].rank}" in log
        assert "again RankFailedError" in log  # and the pipeline cannot be used any more


@pytest.mark.parametrize("case", CASES)
def test_the_others_end_with_the_rank_and_the_cause(logs: dict[str, list[tuple[int, str]]], case: str) -> None:
    for rank, (status, log) in enumerate(logs[case]):
        if rank != CASES[case].rank:
            assert status not in (0, -9), f"{case}, rank {rank}: {log}"
            assert CASES[case].cause in log, f"{case}, rank {rank}: {log}"
            assert f"rank {CASES[case].rank}" in log, f"{case}, rank {rank}: {log}"


def test_nothing_is_sent_of_what_was_refused(logs: dict[str, list[tuple[int, str]]]) -> None:
    _, log = logs["dtype"][0]
    assert "float64[2, 4] with strides [4, 1]; float32[2, 4] with strides [4, 1] was agreed on in the first step" in log
    assert "Nothing was sent" in log
