"""`penstock fabric` over links that are far and lossy, that change, and whose switch is killed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from host_processes import abandoned

from penstock.network.checks import why_not
from penstock.network.shapers import why_no_switch

_MISSING = why_not() or why_no_switch()
pytestmark = [
    pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING)),
    pytest.mark.distributed,
    pytest.mark.alone,
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
    asked = ["--sizes", "2600", "--trials", "8", "--link", "100mbit delay 5ms", "--background", "10mbit to 0"]
    asked += ["--slow", "1=80%"]
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
    show = [sys.executable, "-m", "penstock", "fabric", "show", str(tmp_path / "run")]
    shown = subprocess.run(show, capture_output=True, text=True, check=True)
    assert "100mbit delay 5ms, by a switch in user space" in shown.stdout
    assert "gone = True" in shown.stdout
    assert "gone = True" in (tmp_path / "run" / "report.html").read_text()
