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


def test_all_end_with_the_rank_that_raised_and_its_cause(tmp_path: Path) -> None:
    statuses = answer_of(Path(__file__).with_name("raising.py"), tmp_path, str(RANKS), *CASES)
    for case, (victim, own, cause) in CASES.items():
        for rank, status in enumerate(statuses[case]):
            log = log_of(tmp_path, case, rank).read_text()
            about = f"{case}, rank {rank}: {log}"
            if rank == victim:
                assert status == 1, about
                assert f"raised {own}" in log, about
                if case != "user":
                    assert f"penstock: on rank {rank}" in log, about
                    assert "again RankFailedError" in log, "the pipeline cannot be used any more"
            else:
                assert status not in (0, -9), about
                assert cause in log, about
                assert f"rank {victim}" in log, about
    log = log_of(tmp_path, "dtype", 0).read_text()
    assert "float64[2, 4] with strides [4, 1]; float32[2, 4] with strides [4, 1] was agreed on in the first step" in log
    assert "Nothing was sent" in log
