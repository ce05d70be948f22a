"""Kill or stop a rank at each kind of action of a real pipeline, or let it leave before the others: these end within
seconds and name it. Ranks that raise: test_raising.py."""

import json
import re
from pathlib import Path
from typing import Any

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
        *(case("kill", victim, op, transport="tcp") for victim, op in ((0, "F"), (1, "RECV_F"))),
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
