"""Kill, stop or fail a rank at each kind of action of a real pipeline, or let it leave before the others: these end
within seconds and name it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from scaffolding.forked import answer_of, log_of

OPS = {0: ["F", "SEND_F", "RECV_B"], 1: ["RECV_F", "SEND_B"], 2: ["B", "REDUCE_GRAD"]}
"""Every kind of action, on one rank or another."""
SPLIT_OPS = {0: ["W"], 1: ["I"]}
"""Those of a schedule that splits the backward."""
SECONDS = 10.0
FALLEN = {"kill": "its process is gone", "stop": "its process is stopped"}

pytestmark = pytest.mark.distributed


MESH_OPS = {4: ["F", "REDUCE_GRAD"]}
"""Of two replicas of three ranks: the fall of a rank ends both."""


def cases(how: str, every: bool, **options: Any) -> list[dict[str, Any]]:
    """One for each kind of action, or, where not `every`, for one kind on each rank."""
    return [
        {"name": f"{how}-{victim}-{op}", "victim": victim, "op": op, "how": how, **options}
        for victim, ops in (SPLIT_OPS if "schedule" in options else MESH_OPS if "replicas" in options else OPS).items()
        for op in (ops if every else ops[:1])
    ]


def run(folder: Path, planned: list[dict[str, Any]]) -> dict[str, Any]:
    """How each case ended, by name."""
    ends = answer_of(Path(__file__).with_name("falling.py"), folder, json.dumps(planned))
    return {end["name"]: end for end in ends}


def one(how: str, victim: int, op: str, **options: Any) -> dict[str, Any]:
    name = "-".join([how, str(victim), op, *map(str, options.values())])
    return {"name": name, "victim": victim, "op": op, "how": how, **options}


SHORT = [
    *(one("kill", 1, "RECV_F"), one("stop", 2, "B"), one("raise", 0, "F"), one("leave", 1, "RECV_F")),
    *(one("kill", 0, "F", transport="distributed"), one("kill", 4, "F", replicas=2)),
]
"""Each way to fall; over another transport, and beside a replica."""
LONG = {
    "kill-every": cases("kill", True),
    "stop": cases("stop", False),
    "raise": cases("raise", False),
    "leave": cases("leave", False),
    "kill-own": cases("kill", False, transport="tcp"),
    "stop-split": cases("stop", True, schedule="zb-h1"),
    "raise-mesh": cases("raise", True, replicas=2),
}


@pytest.mark.parametrize(
    "planned",
    [
        pytest.param(SHORT, id="each way"),
        *(pytest.param(planned, id=name, marks=pytest.mark.long) for name, planned in LONG.items()),
    ],
)
def test_trap_11_the_others_end_and_name_the_rank_that_fell(tmp_path: Path, planned: list[dict[str, Any]]) -> None:
    ends = run(tmp_path, planned)
    for case in planned:
        end, victim, how = ends[case["name"]], case["victim"], case["how"]
        for rank in set(range(3 * case.get("replicas", 1))) - {victim}:
            log = log_of(tmp_path, case["name"], rank).read_text()
            about = f"{case['name']}, rank {rank}, after {end['seconds'][str(rank)]} s: {log}"
            assert end["status"][str(rank)] not in (0, -9), about
            assert end["seconds"][str(rank)] < SECONDS, about
            assert f"rank {victim} " in log, about
            if how in FALLEN:
                lost = rf"rank {rank} stops: rank {victim} was lost, last seen at \d*{case['op']}\d*: {FALLEN[how]}"
                assert re.search(lost, log), about
            if how == "leave":
                left = rf"rank {victim} has exited: its program ended while rank \d waits for .+ from rank {victim}"
                assert re.search(f"rank {rank} stops: {left}", log), about
            if how == "raise":
                assert "the loss is not a number" in log, about
                assert case["op"] in log, about
        if how in ("raise", "leave"):
            assert end["status"][str(victim)] == (how == "raise"), case["name"]
