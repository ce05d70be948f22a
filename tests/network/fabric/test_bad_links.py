"""`penstock fabric` over links that are far and lossy, that change, and whose switch is killed.

In every run: test_switch_truth.py, test_scenario.py and, for the command, test_fabric_hosts.py.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from host_processes import abandoned

from cli.command_line import output
from network.makers import marked, wait_until
from penstock.network.namespaces import why_not
from penstock.network.shapers import why_no_switch

_MISSING = why_not() or why_no_switch()
pytestmark = [
    pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING)),
    pytest.mark.distributed,
    pytest.mark.alone,
    pytest.mark.long,
]

CHANGES = """
[[event]]
at = "step 2"
host = 1
gone = true
for = "700ms"

[[event]]
at = "0s"
link = "100mbit delay 6ms loss 1%"
"""


def _fabric(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "penstock", "fabric", "--hosts", "2", "--out", str(folder / "run"), *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _found(folder: Path, *arguments: str) -> dict[str, Any]:
    with _fabric(folder, "--json", *arguments) as process:
        printed, said = process.communicate(timeout=200)
        assert process.returncode == 0, said
        assert abandoned() == []
    results: dict[str, Any] = json.loads(printed)
    return results


def test_a_link_is_far_changes_and_comes_back(tmp_path: Path) -> None:
    (tmp_path / "changes.toml").write_text(CHANGES)
    asked = ["--sizes", "2600", "--trials", "8", "--warmup", "1", "--link", "100mbit delay 5ms"]
    asked += ["--background", "10mbit to 0", "--slow", "1=80%"]
    found = _found(tmp_path, *asked, "--scenario", "changes.toml", "--link-seed", "3")
    assert found["complete"]
    transfer = found["transfers"][0]
    assert transfer["time_s"]["min"] > 0.010, "two rounds of a ring, each 5 ms away"
    network = found["environment"]["network"]
    assert (network["shaper"], network["seed"], network["background"]) == ("switch", 3, ["10mbit to 0"])
    assert network["slow"] == {"1": 0.8}
    assert network["held_back_by"]
    happened = [(one["step"] >= 0, one["text"]) for one in found["environment"]["happened"]]
    assert happened == [
        (False, "link = 100mbit delay 6ms loss 1%"),
        (True, "host = 1, gone = True, for = 700ms"),
        (True, "over: host = 1, gone = True, for = 700ms"),
    ]
    links = found["environment"]["switch"]["links"]
    assert sum(links[host][way]["host_gone"] for host in (0, 1) for way in ("up", "down")) > 0
    assert links[0]["down"]["background_bytes"] > 100_000
    assert links[1]["down"]["background_bytes"] == 0
    shown = output("fabric", "show", str(tmp_path / "run"))
    assert "100mbit delay 5ms, by a switch in user space" in shown
    assert "gone = True" in shown
    assert "gone = True" in (tmp_path / "run" / "report.html").read_text()


def test_trials_that_met_a_stall_are_marked(tmp_path: Path) -> None:
    link = "100mbit delay 5ms stall 400ms every 900ms"
    # Four transfers per trial: hosts meet before each trial, too, and a stall that falls there hits none.
    asked = ["--sizes", "2600,2700,2800,2900", "--trials", "50", "--warmup", "1", "--link", link]
    found = _found(tmp_path, *asked)
    rows = (tmp_path / "run" / "samples.csv").read_text().splitlines()[1:]
    times: dict[int, list[int]] = {}
    for trial, _, _, start, end in (map(int, row.split(",")) for row in rows):
        times.setdefault(trial, []).extend((start, end))
    took = {trial: max(of_trial) - min(of_trial) for trial, of_trial in times.items()}
    met = found["stalled"]
    assert 1 < len(met) < 25, "they take 60 ms and more, so that some of them meet one"
    slowest = sorted(took, key=took.__getitem__)[-2:]
    assert {*slowest} <= {*met}, "stalls are longer than what a busy machine adds"
    others = [took[trial] for trial in took if trial not in met]
    assert median(took[trial] for trial in met) > 2 * median(others)
    assert [one["every_ns"] for one in found["environment"]["switch"]["stalls"]] == [900_000_000]


def test_the_end_of_the_switch_ends_the_run_by_its_name(tmp_path: Path) -> None:
    asked = ["--sizes", "2600", "--trials", "100000", "--link", "100mbit delay 1ms"]
    with _fabric(tmp_path, *asked) as process:
        samples = tmp_path / "run" / "samples.csv"
        wait_until(lambda: process.poll() is not None or (samples.exists() and samples.stat().st_size > 100), 120)
        of_run = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in marked(process.pid)}
        (switch,) = (pid for pid, line in of_run.items() if b"network.switch.serve" in line)
        os.kill(switch, signal.SIGKILL)
        _, said = process.communicate(timeout=100)
        assert process.returncode == 2
        assert "the switch has ended" in said
        assert abandoned() == []
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert not record["complete"]
