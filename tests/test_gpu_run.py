"""`make gpu` runs its cases on what stands in for a GPU, and no case takes the run or another case with it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.launch.agent import TAG
from scaffolding.warm_scripts import WarmScript, lines_of_script

FOLDER = Path(__file__).parents[1] / "benchmarks" / "gpu"
SECONDS = 280.0

pytestmark = pytest.mark.distributed


ENVIRONMENT = {name: value for name, value in os.environ.items() if name != TAG}


def rows(tmp_path: Path, device: str, *patterns: str, fails: bool = False) -> dict[str, dict[str, Any]]:
    """The rows of a run, by name; in an interpreter of its own."""
    file = tmp_path / "results.json"
    command = [sys.executable, str(FOLDER / "run.py"), "--device", device, "--jobs", "2", "--json", str(file)]
    done = subprocess.run(
        [*command, "--only", *patterns], env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == fails, done.stdout + done.stderr
    found = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert found.pop("environment")["status"] == "ok"
    return found


def assert_ok(found: dict[str, dict[str, Any]], number: int) -> None:
    assert len(found) == number
    for row in found.values():
        assert row["status"] == "ok", row


SHORT = [
    "verify/one process/mlp/float32/zb-h1",
    "verify/2 processes/mlp/float32/1f1b",
    "waits/2 processes/zb-h1",
    "falls/raise in backward",
]
LONG = [
    *("feature/one process/recompute", "feature/2 processes/offload", "checkpoint/*", "dropout/*"),
    *("waits/clip", "falls/kill", "falls/stop", "falls/out of memory", "figures/addmm_*"),
    *("figures/microseconds per action/zb-h1", "figures/a step with a timeline"),
]


def test_some_cases_on_the_stand_in(tmp_path: Path) -> None:
    assert_ok(rows(tmp_path, "standin", *SHORT), len(SHORT))


@pytest.mark.long  # as above, of the other kinds
@pytest.mark.parametrize("device", ["standin", "cpu"])
def test_a_case_of_each_kind(tmp_path: Path, device: str) -> None:
    found = rows(tmp_path, device, *LONG)
    statuses = {name: row["status"] for name, row in found.items() if row["status"] != "ok"}
    assert statuses == ({} if device == "standin" else {"waits/clip": "not here"}), found


ABSENT = [f"feature/{where}/recompute every layer" for where in ("one process", "2 processes")]


@pytest.mark.long  # test_a_case_that_hangs_or_dies_is_a_row_and_leaves_no_process has a row that is not here
def test_what_the_stand_in_has_no_kernels_for_is_not_here(tmp_path: Path) -> None:
    for row in rows(tmp_path, "standin", *ABSENT).values():
        assert row["status"] == "not here", row
        assert row["says"] == "the stand-in has no kernels of its own in half precision"


NO_TRANSFORMERS = """
import sys
sys.path[:0] = sys.argv[1:2]
from cases.case import NotHereError
from cases.models import llama

sys.modules["transformers"] = None
try:
    llama(True)
except NotHereError as reason:
    assert str(reason) == "transformers is not installed"
else:
    raise AssertionError
"""


def test_a_model_of_transformers_is_not_here_without_it() -> None:
    lines_of_script(NO_TRANSFORMERS, FOLDER)


PREDICTS = """
import sys
sys.path[:0] = sys.argv[1:2]
from cases.figures import against, predictions
from penstock.simulate import StageCost

costs = [StageCost(1.0, 1.0, 1.0, activation_bytes=10.0)] * 2
for schedule, expected in {"gpipe": [160, 160], "1f1b": [100, 90]}.items():
    assert predictions(schedule, costs, [100, 100]) == expected, (schedule, predictions(schedule, costs, [100, 100]))
assert against([100.0], [105], is_most=False)["ok"]
assert not against([100.0], [80], is_most=False)["ok"]
assert against([100.0], [80], is_most=True)["ok"]
assert not against([100.0], [120], is_most=True)["ok"]
"""


def test_peaks_are_predicted_from_those_of_gpipe() -> None:
    """Two microbatches take 20 of the 100; gpipe keeps all 8, 1f1b two on rank 0 and one on rank 1."""
    lines_of_script(PREDICTS, FOLDER)


WATCHED = """
import sys, warnings
sys.path[:0] = sys.argv[1:2]
from pathlib import Path
import torch
from cases import waits
from cases.case import Setting

notices = iter(["Synchronization debug mode is a prototype and does not yet detect all synchronizing operations"])

def set_sync_debug_mode(mode):  # as torch does: the notice comes once
    for notice in notices:
        warnings.warn(notice)

torch.cuda.set_sync_debug_mode = set_sync_debug_mode
for number in (0, 2):
    with waits._watched(Setting("cuda", Path("."))) as found:
        for _ in range(number):
            warnings.warn("called a synchronizing CUDA operation")
    assert found.total() == number, found
"""


def test_torchs_notice_is_no_synchronisation() -> None:
    lines_of_script(WATCHED, FOLDER)


JOBS = """
import sys
sys.path[:0] = sys.argv[1:2]
from running import usual_jobs
for cores, host, device, jobs in [(224, 2000, 80, 20), (224, 30, 80, 7), (16, 128, 139, 8), (2, 2, 8, 1), (1, 8, 8, 1)]:
    assert usual_jobs({"cores": cores, "host_memory_gib": host, "memory_gib": device}) == jobs
assert usual_jobs({"cores": 8, "host_memory_gib": 64}) == 4
"""


def test_as_many_cases_run_at_a_time_as_cores_and_memory_allow() -> None:
    lines_of_script(JOBS, FOLDER)


RESULTS = """
import json, sys
sys.path[:0] = sys.argv[1:2]
from pathlib import Path
import run

file = Path(sys.argv[2])
here = {"cores": 8, "code": "a"}
row = {"name": "x", "status": "ok"}
first = run.Results(file)
assert first.begin(here) == ""
first.add(row)
again = run.Results(file)
assert again.begin(here) == ""
assert again.rows == {"x": row}
for number, other in enumerate([{"cores": 8, "code": "b"}, {"cores": 4, "code": "b", "gpu": "H200"}], 1):
    later = run.Results(file)
    said = later.begin(other)
    aside = file.with_name(f"results-{number}.json")
    assert str(aside) in said, said
    assert later.rows == {}
    assert json.loads(aside.read_text())["rows"] == [row]
    later.add(row)
assert "cores was 8, is 4" in said, said
assert "gpu was None, is H200" in said, said
assert "code" not in said.partition(": ")[2], said
"""


def test_results_of_other_code_or_another_machine_are_moved_aside(tmp_path: Path) -> None:
    lines_of_script(RESULTS, FOLDER, tmp_path / "results.json")


def test_without_torch_it_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(name='torch')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(FOLDER / "run.py"), "--list"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"{sys.executable} has no torch; give a Python that has: make gpu PYTHON=/usr/bin/python3.12"
    ]


PLANTED = """
import json, os, signal, subprocess, sys, time
sys.path[:0] = sys.argv[1:2]
import running
from cases.case import Case, NotHereError


def leaves_and_hangs(setting):
    subprocess.Popen(["sleep", sys.argv[2]], start_new_session=True)
    if os.fork() == 0:
        time.sleep(600)
    time.sleep(600)

def leaves(setting):
    subprocess.Popen(["sleep", sys.argv[2]], start_new_session=True)
    return {"ok": True, "says": "done", "figure": 1}

def dies(setting):
    print("last words")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGSEGV)

def raises(setting):
    raise ValueError("the disk is\\nfull")

def absent(setting):
    raise NotHereError("no such thing")

cases = [
    Case("hangs", 1, leaves_and_hangs, seconds=2.0),
    Case("dies", 1, dies),
    Case("raises", 1, raises),
    Case("is wrong", 1, lambda setting: {"ok": False, "says": "5 of 6 are equal"}),
    Case("cannot be shown", 1, absent),
    Case("alone", 1, leaves, alone=True),
]
running.run(cases, "cpu", 3, time.monotonic() + 60, lambda row: print(json.dumps(row), flush=True))
late = [Case("cut", 1, leaves_and_hangs), Case("late", 1, leaves, alone=True)]
running.run(late, "cpu", 3, time.monotonic() + 1, lambda row: print(json.dumps(row), flush=True))
"""


def test_a_case_that_hangs_or_dies_is_a_row_and_leaves_no_process() -> None:
    number = f"{600 + os.getpid() / 1e7:.7f}"  # as no other process sleeps
    began = time.monotonic()
    lines = lines_of_script(PLANTED, FOLDER, number, environment=ENVIRONMENT)
    found = {row["name"]: row for row in map(json.loads, lines)}
    assert {name: row["status"] for name, row in found.items()} == {
        "hangs": "timed out",
        "dies": "crashed",
        "raises": "raised",
        "is wrong": "wrong",
        "cannot be shown": "not here",
        "alone": "ok",
        "cut": "not begun",
        "late": "not begun",
    }
    assert found["dies"]["says"] == "its process was killed by SIGSEGV"
    assert found["dies"]["log"] == "last words"
    assert found["raises"]["says"] == "ValueError: the disk is full"
    assert "in raises" in found["raises"]["log"]
    assert found["is wrong"]["says"] == "5 of 6 are equal"
    assert found["alone"]["found"]["figure"] == 1
    assert time.monotonic() - began < 30
    assert not sleeping(number), "left behind"


def sleeping(number: str) -> list[str]:
    """The processes that sleep for so long."""
    lines = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            lines.append((folder / "cmdline").read_bytes().decode())
        except OSError:
            continue
    return [line for line in lines if line == f"sleep\0{number}\0"]


def test_a_run_that_is_killed_keeps_its_rows_and_another_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    command = ("--device", "cpu", "--jobs", "1", "--json", file)
    names = [f"verify/one process/mlp/float32/{schedule}" for schedule in ("gpipe", "1f1b")]
    with WarmScript(FOLDER / "run.py", *command, "--only", *names) as process:
        line = next(line for line in process.out if names[0] in line)
        process.send_signal(signal.SIGKILL)
        assert process.status() == -signal.SIGKILL
    assert line.startswith("ok")
    before = {row["name"] for row in json.loads(file.read_text())["rows"]}
    assert before == {"environment", names[0]}
    lines = lines_of_script(FOLDER / "run.py", *command, "--missing", "--only", *names)
    assert not any(names[0] in line for line in lines)
    assert {row["name"] for row in json.loads(file.read_text())["rows"]} == {"environment", *names}


INTERRUPTED = """
import os, signal, sys, time
sys.path[:0] = sys.argv[1:2]
import running
from cases.case import Case

os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.SIGINT))
try:
    running.run([Case("long", 1, lambda setting: time.sleep(600))], "cpu", 1, time.monotonic() + 5, print)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_while_a_case_is_started_is_not_lost() -> None:
    assert lines_of_script(INTERRUPTED, FOLDER) == ["interrupted"]


def test_a_run_that_is_interrupted_shows_its_table(tmp_path: Path) -> None:
    file, name = tmp_path / "results.json", "verify/one process/mlp/float32/gpipe"
    command = ("--device", "cpu", "--jobs", "1", "--json", file)
    with WarmScript(FOLDER / "run.py", *command, "--only", "verify/one process/*/float32/*") as process:
        next(line for line in process.out if name in line)
        process.send_signal(signal.SIGINT)
        rest = process.out.read()
        assert process.status() == 130
    assert re.search(r"ok +verify/one process/mlp +\d+ cases", rest), rest
    assert rest.splitlines()[-1].endswith(f" ok: {file}"), rest
