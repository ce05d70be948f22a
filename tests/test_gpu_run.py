"""`make gpu` runs its cases on what stands in for a GPU, and no case takes the run or another case with it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.distributed.launch.agent import TAG
from penstock.schedule import names
from scaffolding.warm_scripts import WarmScript, lines_of_script

FOLDER = Path(__file__).parents[1] / "benchmarks" / "gpu"
SECONDS = 280.0

pytestmark = pytest.mark.distributed


ENVIRONMENT = {name: value for name, value in os.environ.items() if name != TAG}


def rows(tmp_path: Path, device: str, *patterns: str, more: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """The rows of a run, by name; in an interpreter of its own."""
    file = tmp_path / "results.json"
    command = [sys.executable, str(FOLDER / "run.py"), "--device", device, "--jobs", "2", "--json", str(file), *more]
    done = subprocess.run(
        [*command, "--only", *patterns], env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert found.pop("environment")["status"] == "ok"
    return found


KINDS = [
    *("verify/one process/mlp/float32/zb-h1", "waits/2 processes/zb-h1", "figures/addmm_*/bfloat16"),
    "feature/one process/check_finite finds an infinite value",
    *("feature/one process/recompute", "feature/2 processes/offload", "checkpoint/*", "dropout/*"),
    *("waits/read", "waits/clip", "falls/kill", "falls/stop", "falls/raise in backward", "falls/out of memory"),
    "verify/2 processes/gpt/float32/1f1b",
    *("figures/microseconds per action/zb-h1", "figures/a step with a timeline"),
]
ON_CPU = [
    *("verify/one process/convnet/*/1f1b", "verify/2 processes/gpt/*/zb-h1", "verify/2 processes/gpt/fp16/*"),
    *("verify/one process/gpt/*/chimera", "feature/one process/compile*", "figures/microseconds*/beside torch's"),
]
"""The stand-in has no kernels for these, or takes no part."""


@pytest.mark.long
@pytest.mark.parametrize("device", ["standin", "cpu"])
def test_a_case_of_each_kind(tmp_path: Path, device: str) -> None:
    found = rows(tmp_path, device, *KINDS, *(ON_CPU if device == "cpu" else ()))
    statuses = {name: row["status"] for name, row in found.items() if row["status"] not in ("ok", "measured")}
    waits = ("waits/2 processes/zb-h1", "waits/read", "waits/clip")
    assert statuses == ({} if device == "standin" else dict.fromkeys(waits, "skipped")), found


def test_every_case_is_collected() -> None:
    listed = [line.partition(" ")[::2] for line in lines_of_script(FOLDER / "run.py", "--list", "--part", *"12345")]
    parts = {name: int(part) for part, name in listed}
    assert len(parts) == len(listed), "two of one name"
    assert set(parts.values()) == {1, 2, 3, 4, 5}
    for ranks in (2, 3, 4):
        first = next(name for name in parts if name.startswith(f"ranks/{ranks}/"))
        assert first == f"ranks/{ranks}/nccl by itself"
    for schedule in names():
        assert parts[f"verify/one process/gpt/float32/{schedule}"] == 2
        assert parts[f"verify/2 processes/gpt/float32/{schedule}"] == 3
        assert parts[f"verify/2 processes/convnet/float32/{schedule}"] == 3
        assert parts[f"ranks/2/verify/{schedule}"] == parts[f"ranks/4/verify/{schedule}"] == 5


def test_the_page_counts_the_rows_of_the_file() -> None:
    page = (FOLDER.parents[1] / "docs" / "guides" / "on-gpus.md").read_text()
    counts = lines_of_script(FOLDER / "run.py", "--counts", "--json", FOLDER / "results-h100.json")
    table = re.findall(r"^\| \d .*", page, re.MULTILINE)
    assert [re.sub(r"^(\| \d) [^|]*", r"\1 ", line) for line in table] == counts[:-1]
    assert counts[-1] in page


RANKS = ["ranks/4/verify/zb-v", "ranks/4/replicas, 2 x 2/1f1b", "ranks/falls/kill"]
BY_TORCHRUN = [
    *("ranks/2*", "ranks/3/nccl by itself", "ranks/3/verify/interleaved-1f1b", "ranks/4/a checkpoint*"),
    *("ranks/4/*/interleaved-1f1b", "ranks/4/messages*/dualpipe", "ranks/penstock verify*", "ranks/falls/*"),
]


@pytest.mark.long  # NCCL's rules: distributed/test_nccl_rules.py
@pytest.mark.parametrize(("names", "more"), [(RANKS, ["--forks"]), (BY_TORCHRUN, [])], ids=["forked", "by torchrun"])
def test_ranks_over_nccl_are_rehearsed(tmp_path: Path, names: list[str], more: list[str]) -> None:
    found = rows(tmp_path, "cpu", *names, more=more)
    found.pop("ranks/2/waits/1f1b", None)  # nothing waits for a CPU
    assert {row["status"] for row in found.values()} <= {"ok", "measured"}, found
    each = found["ranks/4/verify/zb-v" if more else "ranks/4/verify/interleaved-1f1b"]["found"]["each"]
    assert [rank["messages"] > 0 for rank in each] == [True] * 4


BROKEN = """
import dataclasses, json, sys
sys.path[:0] = sys.argv[1:2]
from collections import Counter
from functools import partial
from pathlib import Path
from unittest import mock
import torch
import torch.distributed as dist
import penstock
from cases import nccl, over_nccl, ranks, synchronizations, verification
from cases.case import Setting

setting = Setting("cpu", Path(sys.argv[2]))

def dropped():
    recv, irecv = dist.recv, dist.irecv
    lost = lambda call: lambda tensor, *more, **options: call(torch.empty_like(tensor), *more, **options)
    return mock.patch.multiple(dist, recv=lost(recv), irecv=lost(irecv))

def training():
    return mock.patch("penstock.pipe.pipeline.evaluating", lambda *args: mock.MagicMock())

def nearly():
    step = penstock.Pipeline.step
    def inexact(pipe, *args, **options):
        result = step(pipe, *args, **options)
        for parameter in pipe.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 + 1e-6)
        return result
    return mock.patch.object(penstock.Pipeline, "step", inexact)

def exchanges(setting):
    return nccl.exchanges(setting, dist.get_rank())

CASES = [
    (exchanges, dropped), (partial(over_nccl.steps, "1f1b"), nearly), (partial(over_nccl.evaluation, "1f1b"), training)
]

def job(setting, rank):
    found = []
    for run, broken in CASES:
        with nccl.rules(setting):
            fine = run(setting)
        with nccl.rules(setting), broken():
            found.append([broken.__name__, fine["ok"], run(setting)["ok"]])
    return found

print(json.dumps(ranks.on_ranks(setting, 2, job)))
print(json.dumps([synchronizations.judged(Counter(seen), 1)["ok"] for seen in ({}, {"here": 1}, {"here": 2})]))

def uncompared(*args, verify=penstock.verify, **options):
    report = verify(*args, **options)
    return dataclasses.replace(report, full_batch=dataclasses.replace(report.full_batch, verdict="missing"))

with mock.patch.object(penstock, "verify", uncompared):
    found = verification.prove(setting, "mlp", "float32", "gpipe", ranks=2)
    print(json.dumps([found["ok"], found["says"]]))
"""


@pytest.mark.long
def test_each_case_sees_what_is_broken(tmp_path: Path) -> None:
    lines = lines_of_script(BROKEN, FOLDER, tmp_path, seconds=120)
    by_rank, watched, uncompared = (json.loads(line) for line in lines if line.startswith("["))
    expected = [[name, True, False] for name in ("dropped", "nearly", "training")]
    assert by_rank == [expected] * 2
    assert watched == [False, True, False]
    assert not uncompared[0]
    assert "the comparison with the whole batch is missing" in uncompared[1]


CHOSEN = """
import json, sys, time
sys.path[:0] = sys.argv[1:2]
from pathlib import Path
import run
from cases import TABLE

folder = Path(sys.argv[2])

def main(*given):
    try:
        print(given[-1], run.main(["--device", "cpu", *given]))
    except run.RefusedError as reason:
        print(str(reason).replace(str(folder), ""))

main("--only", "rank/2/*")
main("--part", "1", "--only", "ranks/*")
main("--json", str(folder / "none" / "x.json"))
main("--counts", "--json", str(folder / "x.json"))
run.SHOWN = folder / "shown.json"
rows = [{"name": name, "status": "ok"} for name in TABLE if name != "waits/1f1b"]
run.SHOWN.write_text(json.dumps({"environments": [{"code": "a"}], "rows": rows}))
main("--list")
main("--json", str(folder / "y.json"), "--only", "waits/1f1b")
run.LACKS = [run.needs.Lack("dropout/*", "no dice")]
main("--json", str(folder / "y.json"), "--only", "dropout/*")
run.BEGAN = time.monotonic() - 100
main("--json", str(folder / "y.json"), "--total", "104")
"""


def test_a_choice_of_nothing_is_refused_and_one_of_which_nothing_is_shown_fails(tmp_path: Path) -> None:
    lines = lines_of_script(CHOSEN, FOLDER, tmp_path)
    assert re.match(r"no case is called 'rank/2/\*'; did you mean 'ranks/2/.* --list names them", lines[0])
    assert lines[1:6] == [
        "no case is chosen: --part and --only have none in common",
        "/none/x.json cannot be written: No such file or directory",
        "/x.json cannot be read: No such file or directory",
        "1 waits/1f1b",
        "--list 0",
    ]
    assert "waits/1f1b 1" in lines
    assert "1 cases (dropout/*) are skipped: no dice" in lines
    assert "dropout/* 1" in lines
    assert lines[-1] == "104 2", "the time is over before the first case"


RESULTS = """
import json, sys
sys.path[:0] = sys.argv[1:2]
from pathlib import Path
import run

file = Path(sys.argv[2])
here, other = {"cores": 8, "code": "a", "device": "cpu"}, {"cores": 4, "code": "b", "device": "cuda", "gpu": "H200"}

def begun(environment, **more):
    results = run.Results(file)
    said = results.begin(environment, **more)
    return results, said

first, said = begun(here)
assert said == ""
first.add({"name": "x", "status": "ok"})
again, said = begun(here)
assert (said, [*again.rows]) == ("", ["x"])
later, said = begun(other)
aside = file.with_name("results-1.json")
for words in (str(aside), "cores was 8, is 4", "gpu was None, is H200"):
    assert words in said, said
assert later.rows == {}
assert [row["name"] for row in json.loads(aside.read_text())["rows"]] == ["x"]
later.add({"name": "x", "status": "ok"})
mixed, said = begun({**other, "code": "c"}, any_code=True)
mixed.add({"name": "y", "status": "ok"})
mixed.add({"name": "x", "status": "cut off"})
assert {name: (row["code"], row["status"]) for name, row in mixed.rows.items()} == {"x": ("b", "ok"), "y": ("c", "ok")}
for number, text in enumerate(["", "{", '{"environments": [], "rows": []}'], 2):
    file.write_text(text)
    aside = file.with_name(f"results-{number}.json")
    assert begun(here)[1] == f"{file} is no file of results; it is now {aside}"
    assert aside.read_text() == text
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
        f"{sys.executable} lacks torch; give another: make gpu PYTHON=/usr/bin/python3.12"
    ]


PLANTED = """
import json, os, signal, subprocess, sys, time
sys.path[:0] = sys.argv[1:2]
import running, worlds
from cases import TABLE, case
from cases.case import Case, UnsupportedError, World

case.CPU_TIMEOUT_FACTOR, worlds.GRACE_SECONDS = 1.0, 0.5

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
    raise UnsupportedError("no such thing")

def fine(setting):
    time.sleep(0.0 if int(os.environ["RANK"]) else 0.1)  # the other rank does not fail in the next case meanwhile
    return {"ok": True, "says": "fine", "each": os.getpid()}

def hangs(setting):
    return fine(setting) if os.environ["RANK"] == "0" else time.sleep(600)

def falls(setting):
    return time.sleep(600) if os.environ["RANK"] == "0" else dies(setting)

def run(cases, seconds, **options):
    running.run(cases, "cpu", 3, time.monotonic() + seconds, lambda row: print(json.dumps(row), flush=True), **options)

cases = [
    Case("hangs", 1, leaves_and_hangs, seconds=2.0),
    Case("dies", 1, dies),
    Case("raises", 1, raises),
    Case("is wrong", 1, lambda setting: {"ok": False, "says": "5 of 6 are equal"}),
    Case("cannot be shown", 1, absent),
    Case("alone", 1, leaves, alone=True),
]
run(cases, 200)
run([Case("cut", 1, leaves_and_hangs), Case("late", 1, leaves, alone=True)], 1)
of_worlds = [("two", fine), ("again", fine), ("one hangs", hangs), ("then", fine), ("one falls", falls), ("last", fine)]
cases = [Case(name, 5, kind, 3.0 if kind is hangs else 30.0, world=World(2)) for name, kind in of_worlds]
TABLE.update({case.name: case for case in cases})
run(cases, 200, forks=True)
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
        "is wrong": "failed",
        "cannot be shown": "skipped",
        "alone": "ok",
        "cut": "cut off",
        "late": "not run",
        **dict.fromkeys(["two", "again", "then", "last"], "ok"),
        "one hangs": "timed out",
        "one falls": "crashed",
    }
    two, again, then = (found[name]["found"]["each"] for name in ("two", "again", "then"))
    assert two == again, "a world goes on"
    assert len({*two, *then}) == 4, "on each rank, in a process of its own, until one takes it down"
    assert found["one hangs"]["says"] == "ranks [1] still ran after 3 s"
    assert "in hangs" in found["one hangs"]["log"]["log.1"]
    assert found["one falls"]["says"] == "a rank was killed by SIGSEGV"
    assert "in leaves_and_hangs" in found["hangs"]["log"]
    assert "in leaves_and_hangs" in found["cut"]["log"]
    assert found["dies"]["says"] == "its process was killed by SIGSEGV"
    assert found["dies"]["log"] == "last words"
    assert found["raises"]["says"] == "ValueError: the disk is full"
    assert "in raises" in found["raises"]["log"]
    assert found["is wrong"]["says"] == "5 of 6 are equal"
    assert found["alone"]["found"]["figure"] == 1
    assert time.monotonic() - began < 60
    assert not sleeping(number), "left behind"


def sleeping(number: str) -> list[str]:
    """The processes that sleep for so long."""
    lines = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            lines.append((folder / "cmdline").read_bytes().decode())
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
    before = json.loads(file.read_text())
    assert {row["name"] for row in before["rows"]} == {"environment", names[0]}
    before["environments"][0] |= {"code": "of another", "date": "yesterday", "commit": "another"}
    file.write_text(json.dumps(before))
    lines = lines_of_script(FOLDER / "run.py", *command, "--missing", "--any-code", "--only", *names)
    assert not any(names[0] in line for line in lines)
    assert {row["name"] for row in json.loads(file.read_text())["rows"]} == {"environment", *names}
