"""Kill, stop or fail a rank of a real pipeline, or let it leave before the others: these end soon and name it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from scaffolding.forked import answer_of, log_of

SECONDS = 10.0
FALLEN = {"kill": "its process is gone", "stop": "its process is stopped"}

pytestmark = pytest.mark.distributed


def case(how: str, victim: int, op: str, **options: Any) -> dict[str, Any]:
    name = "-".join([how, str(victim), op, *map(str, options.values())])
    return {"name": name, "victim": victim, "op": op, "how": how, **options}


SHORT = [
    *(case("kill", 1, "RECV_F"), case("stop", 2, "B"), case("leave", 1, "RECV_F")),
    *(case("kill", 0, "F", transport="distributed"), case("kill", 4, "F", replicas=2)),
]
"""Each way to fall; over another transport, and beside a replica."""
OPS = [(0, "F"), (0, "SEND_F"), (0, "RECV_B"), (1, "SEND_B"), (2, "B"), (2, "REDUCE_GRAD")]
LONG = {
    "each kind of action": [case("kill", victim, op) for victim, op in OPS],
    "other ways": [
        *(case("stop", 1, "RECV_F"), case("leave", 2, "B"), case("kill", 4, "REDUCE_GRAD", replicas=2)),
        *(case("stop", victim, op, schedule="zb-h1") for victim, op in ((0, "W"), (1, "I"))),
    ],
}


@pytest.mark.parametrize(
    "planned",
    [
        pytest.param(SHORT, id="each way"),
        *(pytest.param(planned, id=name, marks=pytest.mark.long) for name, planned in LONG.items()),
    ],
)
def test_trap_11_the_others_end_and_name_the_rank_that_fell(tmp_path: Path, planned: list[dict[str, Any]]) -> None:
    ends = answer_of(Path(__file__).with_name("falling.py"), tmp_path, json.dumps(planned))
    for case, end in zip(planned, ends, strict=True):
        victim, how = case["victim"], case["how"]
        for rank in set(range(3 * case.get("replicas", 1))) - {victim}:
            log = log_of(tmp_path, case["name"], rank).read_text()
            about = f"{case['name']}, rank {rank}, after {end['seconds'][str(rank)]} s: {log}"
            assert end["status"][str(rank)] not in (0, -9), about
            assert end["seconds"][str(rank)] < SECONDS, about
            if how == "leave":
                words = rf"{victim} has exited: its program ended while rank \d waits for .+ from rank {victim}"
            else:
                words = rf"{victim} was lost, last seen at \d*{case['op']}\d*: {FALLEN[how]}"
            assert re.search(f"rank {rank} stops: rank {words}", log), about
        if how == "leave":
            assert end["status"][str(victim)] == 0, case["name"]


# -- ranks that raise -------------------------------------------------------------------------------------------------


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
