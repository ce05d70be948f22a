"""In every phase of a run, ranks that wait long say for whom, and ranks that wait for one that has ended name it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scaffolding.forked import answer_of, log_of

pytestmark = pytest.mark.distributed

RANKS = 3
RAISED = "failed .*: ValueError: the disk is full"
NEVER_CAME = r"has waited \d+ s for rank {victim}, which has not called penstock\.pipeline yet"

SAID = {
    "init-sleep-1": NEVER_CAME,
    "join-sleep-1": NEVER_CAME,
    "groups-kill-1": "rank 1 was lost, .*: its process is gone",
    "groups-raise-1": f"rank 1 {RAISED}",
    "ties-sleep-2": "equal tied parameters from rank 2",
    "materialize-sleep-1": r"rank 1 runs the making of its weights \(\d+ s so far\)",
    "device-hang-1": r"the device of rank 1 runs 1F1 \(\d+ s so far; it has finished 1RECV_F1; the host waits for "
    r"1SEND_F1 from rank 2\)",
    "collective-sleep-2": r"rank 1 runs 1F0 \(\d+ s so far",
    "sharded-sleep-1": r"has waited \d+ s for 0UNSHARD from ranks .*; rank 1 runs 0UNSHARD",
    "closing-sleep-1": r"rank 0 has reached the end of its program, and has waited \d+ s for rank 1 to close the",
}
"""By phase, how a rank falls, and its number: what the others say."""

LONG = {
    "init-sleep-0": r"has waited \d+ s for rank 0 at 127.0.0.1:\d+ .*, where nothing answers",  # it keeps the store
    "join-sleep-0": NEVER_CAME,
    "groups-stop-0": "rank 0 was lost, .*: its process is stopped",
    "example-sleep-2": r"its example from .*; rank 2 runs the building of the pipeline",
    "recording-sleep-0": "agreement from .*; rank 0 runs the building of the pipeline",
    "parallelize-sleep-1": r"agreement from .*; rank 1 runs parallelize= \(",
    "neighbors-sleep-1": "rank 1 has waited .* for a connection from",
    "connecting-sleep-1": "a connection from rank 1; rank 1 runs the building of the pipeline",
    "stepping-sleep-1": "RECV_.0 from rank 1; rank 1 is not running a step",
    "saving-sleep-1": "a checkpoint from .*rank 1",
    "materialize-kill-1": "rank 1 was lost, last seen at .*: its process is gone",
    "neighbors-kill-2": "rank 2 was lost, .*: its process is gone",
}


def check(folder: Path, expected: dict[str, str]) -> None:
    """Asserts what the ranks that did not fall wrote. Those of a case that raises or dies have ended."""
    (folder / "expected.json").write_text(json.dumps(expected))
    statuses = answer_of(Path(__file__).with_name("waiting.py"), folder, *expected)
    for case, words in expected.items():
        phase, how, victim = case.split("-")
        assert (folder / f"{case}.fell").exists(), case
        others = (
            {0} if phase == "closing" else {*range(RANKS)} - {int(victim)}
        )  # only rank 0 serves others to their end
        for rank in others:
            log = log_of(folder, case, rank).read_text()
            assert re.search(words.format(victim=victim), log), f"{case}, rank {rank}: {log}"
            assert how in ("sleep", "hang") or statuses[case][str(rank)] == 1, f"{case}, rank {rank}: {log}"


def test_a_rank_that_waits_names_the_one_that_does_not_come(tmp_path: Path) -> None:
    check(tmp_path, SAID)


@pytest.mark.long
def test_so_it_does_in_every_phase_and_however_a_rank_falls(tmp_path: Path) -> None:
    cases = list(LONG.items())
    for start in range(0, len(cases), 4):
        check(tmp_path, dict(cases[start : start + 4]))
