"""Whatever is in a file from outside, its reader says in one line what is wrong, at once and within its memory."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import re
import shutil
import socket
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from network.fabric.made_runs import made_run, write_run
from penstock._base import files
from penstock._base.errors import ArgumentError, PenstockError
from penstock.cli import app
from penstock.costs import MeasuredLink, Profile, Tied, UnitCost, read_costs, read_links, read_profile
from penstock.costs.hardware.device_spec import device
from penstock.network.fabric.compare import compare
from penstock.network.fabric.results import results
from penstock.network.fabric.samples import RUN, SAMPLES, Run
from penstock.network.fabric.views import nccl, page
from penstock.network.fabric.views.text import show
from penstock.network.parse import parse_link
from penstock.network.scenario import read_scenario
from penstock.network.topology import Topology
from penstock.plan import ParallelConfig, Plan, read_plan
from penstock.plan.explain import explain, load_trace, steps_of_trace
from penstock.schedule import Schedule, check, generate
from penstock.schedule.csv import read_csv, to_csv, write_csv
from penstock.schedule.timeline import Timeline
from penstock.simulate import StageCost, simulate
from penstock.trace.runs import RecordedRun, reader
from penstock.trace.runs.records import StepRecord
from scaffolding.run_folders import ABOUT, a_run

SCHEDULE = generate("1f1b", 2, 3)
STEP = StepRecord(1, 0.5, 0.1, 8, 0.1)
TIMELINE = simulate(SCHEDULE, StageCost(1.0, 1.0, 1.0))


def profile() -> dict[str, Any]:
    units = tuple(
        UnitCost(name, 1e-3, 1e-3, 1e-3, parameter_bytes=64, gradient_bytes=64, tied=(Tied("w", 32, 32),))
        for name in ("a", "b")
    )
    return Profile(units, "cpu", "float32", {"w": (4, 4)}, links=(MeasuredLink(0, 1, 1e-5, 1e9),)).to_dict()


def plan() -> dict[str, Any]:
    choice = ParallelConfig(1, 2, 1, "1f1b", 3, 4)
    numbers = (1.0, 1.0)
    return Plan(choice, ("b",), (), numbers, 5.0, 0.0, {"warm-up": 0.1}, numbers, (8.0, float("inf"))).to_dict()


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


CHROME = {
    "traceEvents": [
        {"ph": "X", "name": str(s.action), "ts": s.start_seconds, "dur": 1.0, "pid": s.rank, "tid": 0} for s in TIMELINE
    ]
}
STAGE = {"forward": 1.0, "backward_input": 1.0, "backward_weight": 1.0, "activation": 8, "output_bytes": 8}
READERS: dict[str, tuple[Callable[[], Any], Callable[[Path], object]]] = {
    "profile": (profile, read_profile),
    "plan": (plan, read_plan),
    "trace": (lambda: CHROME, lambda file: explain(steps_of_trace(load_trace([file])))),
    "costs": (lambda: {"stages": [STAGE, STAGE], "links": {"latency": 1e-4, "bandwidth": 1e9}}, read_costs),
    "links": (lambda: {"links": [{"from": 0, "to": 1, "latency": 1e-4, "bandwidth": 1e8}]}, read_links),
}
"""Of files that commands read alone; those of a folder are below."""

ODD = [
    None,
    True,
    -1,
    0,
    1.5,
    10**30,
    10**400,
    1e308,
    "",
    "x" * 500,
    "\x1b[31m",
    "NaN",
    [],
    {},
    [1],
    {"a": 1},
    [[[[]]]],
]
TOKENS = ["NaN", "Infinity", "1e999", "[" * 5000, '"' + "y" * 5000 + '"', "1" * 5000, "}", ""]
NUMBERS = ["-1", "9" * 9, "9" * 5000, "nan", "1e999", "0F999999999"]
PIECES = ["", *NUMBERS, "\x1b[31m", "\udcff", "\0", '"', "[" * 5000, "x" * 500, "\n"]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of each value in a file of JSON."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return [path, *(place for key, one in inside for place in places(one, (*path, key)))]


def changed(whole: Any, path: tuple[Any, ...], value: Any, *, gone: bool) -> Any:
    """A copy with one value replaced, or without it."""
    if not path:
        return value
    made = dict(whole) if isinstance(whole, dict) else list(whole)
    if len(path) == 1 and gone:
        del made[path[0]]
    else:
        made[path[0]] = changed(made[path[0]], path[1:], value, gone=gone)
    return made


@st.composite
def mutations(draw: st.DrawFn, whole: Any) -> str:
    path = draw(st.sampled_from(places(whole)))
    how = draw(st.sampled_from(["odd", "odd", "gone", "token", "cut"]))
    if how == "cut":
        text = json.dumps(whole)
        return text[: draw(st.integers(0, len(text) - 1))]
    if how == "token":
        return json.dumps(changed(whole, path, "@", gone=False)).replace('"@"', draw(st.sampled_from(TOKENS)))
    return json.dumps(changed(whole, path, draw(st.sampled_from(ODD)), gone=how == "gone"))


@st.composite
def spoiled(draw: st.DrawFn, text: str) -> str:
    """A text with some of its words, numbers and separators replaced."""
    parts = re.split(r"([,\n= ]|\d+)", text)
    for _ in range(draw(st.integers(0, 2))):
        parts[draw(st.integers(0, len(parts) - 1))] = draw(st.sampled_from(PIECES))
    return "".join(parts)


RUN_COMMANDS = ["top RUN --once", "top RUN --json", "runs RUNS", "runs RUNS --json", "compare RUN OTHER"]
RUN_COMMANDS += ["compare RUN OTHER --json", "explain RUN", "explain RUN --json", "report RUN"]
FABRIC_COMMANDS = ["fabric show RUN", "fabric show RUN --json", "fabric show RUN --nccl", "fabric show RUN --chakra"]
FABRIC_COMMANDS += ["fabric compare RUN OTHER", "fabric compare OTHER RUN --json", "report RUN"]
FOLDERS: dict[str, tuple[Callable[[Path], Path], list[str], list[str]]] = {
    "run": (
        lambda folder: with_all_files(a_run(folder)),
        ["run.json", "steps.jsonl", "ranks/0.json", "timelines/2.json", "predicted.json", "memory/2.0.json"],
        RUN_COMMANDS,
    ),
    "fabric": (lambda folder: write_run(made_run(3), folder), ["run.json"], FABRIC_COMMANDS),
}


def with_all_files(folder: Path) -> Path:
    """The folder of a run with what one has that follows a plan on a device."""
    timeline = json.loads((folder / "timelines" / "2.json").read_text())
    predicted = {"source": "a plan", "step_seconds": 1.0, "stage_seconds": [0.1, 0.2, 0.1], "timeline": timeline}
    write(folder / "predicted.json", json.dumps(predicted))
    for rank, track in enumerate(timeline["ranks"]):
        write(folder / "memory" / f"2.{rank}.json", json.dumps([1 << 20] * len(track["actions"])))
    return folder


@pytest.fixture(scope="module")
def whole_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    there = tmp_path_factory.mktemp("whole")
    for kind, (make, *_) in FOLDERS.items():
        make(there / kind)
    return there


def assert_done_or_refused(*arguments: str) -> None:
    """The command says what it found, or in one line why it cannot, and nothing that a terminal obeys."""
    began = time.process_time()
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments))
    assert time.process_time() - began < 10
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code in (0, 2), done.output
    assert not set(done.output) & {"\x1b", "\x07", "\x9b"}
    if done.exit_code:
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1
        assert len(done.stderr) < 1000
    elif "--json" in arguments:
        json.loads(done.stdout, parse_constant=pytest.fail)


@pytest.mark.parametrize("kind", FOLDERS)
@settings(max_examples=int(os.environ.get("PENSTOCK_FUZZ", "40")), suppress_health_check=[*HealthCheck], deadline=None)
@given(data=st.data())
def test_commands_read_a_damaged_folder_or_refuse_it_in_one_line(
    kind: str, data: st.DataObject, whole_folders: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, files, commands = FOLDERS[kind]
    here = Path(shutil.copytree(whole_folders / kind, tmp_path_factory.mktemp("fuzz") / "runs" / "x"))
    file = here / data.draw(st.sampled_from(files))
    if file.name == "steps.jsonl":
        lines = file.read_text().splitlines()
        file.write_text("\n".join([*lines[:-1], data.draw(mutations(json.loads(lines[-1]))), ""]))
    else:
        file.write_text(data.draw(mutations(json.loads(file.read_text()))))
    command = data.draw(st.sampled_from(commands)).split()
    places = {"RUN": here, "RUNS": here.parent, "OTHER": whole_folders / kind}
    with mock.patch.dict(vars(page), {} if "PENSTOCK_FUZZ" in os.environ else {"draw": lambda *_: {}}):  # takes seconds
        assert_done_or_refused(*(str(places.get(word, word)) for word in command))


RECORD = asdict(made_run(3).record)


def read_samples(file: Path) -> None:
    """As `fabric show` and its pages do."""
    write(file.parent / RUN, json.dumps(RECORD))
    file.replace(file.parent / SAMPLES)
    run = Run.read(file.parent)
    found = results(run)
    show(run, found, Console(file=io.StringIO()))
    nccl.text(run, found)
    compare(run, run)
    with mock.patch.object(page, "draw", return_value={}):  # pictures take seconds
        page.page(run, found)


COLUMNS = "op,microbatch,start_us,duration_us,pp_rank\n" + "".join(
    f"{s.action.op.value},{s.action.microbatch},{s.start_seconds},1,{s.rank}\n" for s in TIMELINE
)
DEVICE = "[mine]\ntflops = {float32 = 10.0}\nmemory_gb = 16\nbandwidth_gbps = 500\n"
DEVICE += 'link = {name = "x", gbps = 50.0, devices = 8, latency_us = 5}\n'
EVENT = '[[event]]\nat = "2s"\nhost = 1\nlink = "10mbit"\nfor = "3s"\n'
TEXTS: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "schedule": ("s.csv", str(to_csv(SCHEDULE)), lambda file: check(read_csv(file))),
    "columns": ("c.csv", COLUMNS, lambda file: explain(steps_of_trace(load_trace([file])))),
    "samples": ("x.csv", "trial,transfer,rank,start_ns,end_ns\n0,0,0,1,2\n0,0,1,1,2\n", read_samples),
    "device": ("d.toml", DEVICE, device),
    "scenario": ("s.toml", EVENT, lambda file: read_scenario(file, Topology(parse_link("1gbit")), 2)),
    "steps": ("steps.jsonl", STEP.to_line() * 2, lambda file: RecordedRun(file.parent, ABOUT).steps()),
}


@pytest.mark.parametrize("kind", [*READERS, *TEXTS])
@settings(max_examples=int(os.environ.get("PENSTOCK_FUZZ", "40")), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_in_one_line(
    kind: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """And a whole one is read."""
    folder = tmp_path_factory.mktemp("fuzz")
    if kind in READERS:
        make, read = READERS[kind]
        name, whole = "file.json", json.dumps(make())
        text = data.draw(mutations(make()))
    else:
        name, whole, read = TEXTS[kind]
        text = data.draw(spoiled(whole))
    read(write(folder / name, whole))
    file, said = folder / name, ""
    file.write_bytes(text.encode(errors="surrogateescape"))
    try:
        read(file)
    except PenstockError as error:
        said = str(error)
    assert "\n" not in said
    assert len(said) < 1000


def test_small_files_cause_no_large_work(tmp_path: Path) -> None:
    billion = read_csv(write(tmp_path / "s.csv", "0F999999999,0B999999999"))
    assert len(check(billion)) == 10_000, "of a billion that are missing"
    processes = [{"ph": "X", "name": "0B0", "ts": 1, "dur": 1, "pid": pid, "tid": 0} for pid in range(10_001)]
    with pytest.raises(ArgumentError, match="10,001 processes; expected at most 10,000"):
        steps_of_trace(load_trace([write(tmp_path / "processes.json", json.dumps(processes))]))
    transfer = RECORD["workload"]["transfers"][0]
    workload = {**RECORD["workload"], "transfers": [{**transfer, "name": str(number)} for number in range(500)]}
    write(tmp_path / RUN, json.dumps({**RECORD, "hosts": 10_000, "network": None, "workload": workload}))
    with pytest.raises(ArgumentError, match="500 transfers of 10,000 hosts are too many"):
        Run.read(tmp_path)
    write(tmp_path / RUN, json.dumps({**RECORD, "hosts": 10_000}))  # of whose pairs there are tables
    with pytest.raises(ArgumentError, match=r"hosts=10,000, but network\.hosts=4"):
        Run.read(tmp_path)


def test_what_is_wrong_a_million_times_is_named_once(tmp_path: Path) -> None:
    timeline = {"ranks": [{"actions": [1] * 100_000}]}
    profile_of_keys = {**profile(), **{f"k{number}": 1 for number in range(100_000)}}
    tracemalloc.start()
    with pytest.raises(ArgumentError, match=r"ranks\[0\].actions\[0\]=1: expected a valid string"):
        Timeline.from_dict(timeline)
    with pytest.raises(ArgumentError, match=r"it has 100,0\d\d entries; expected at most 1,000"):
        Profile.from_dict(profile_of_keys)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20


def test_steps_are_read_from_regular_files_and_by_lines_of_a_limited_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecordedRun(tmp_path, ABOUT)
    line = STEP.to_line()
    write(tmp_path / "steps.jsonl", line + "[" * 100_000 + "\n" + line.replace("}", " " * 1000 + "}"))
    assert run.steps() == [STEP]
    monkeypatch.setattr(reader, "MAX_BYTES", 3 * len(line))
    (tmp_path / "steps.jsonl").write_text("".join(replace(STEP, step=n).to_line() for n in range(1, 10)))
    assert [one.step for one in run.steps()] == [7, 8, 9]
    (tmp_path / "steps.jsonl").unlink()
    (tmp_path / "steps.jsonl").symlink_to("/dev/zero")
    with pytest.raises(ArgumentError, match="is a device; expected a regular file"):
        run.steps()


@pytest.fixture
def odd_files(tmp_path: Path) -> dict[str, Path]:
    """Files that are not regular, by what they are."""
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
    return {
        "a device": Path("/dev/zero"),
        "a pipe": tmp_path / "pipe",
        "a folder": tmp_path,
        "a socket": tmp_path / "socket",
    }


def test_only_regular_files_are_read_or_replaced_and_none_is_waited_for(odd_files: dict[str, Path]) -> None:
    for kind, file in odd_files.items():
        with pytest.raises(ArgumentError, match=f"cannot be written: it is {kind}; expected a regular file"):
            files.write_text(file, "text")
        by_open = {"a socket": "cannot be read: No such device", "a folder": "cannot be read: Is a directory"}
        expected = by_open.get(kind, f"is {kind}; expected a regular file")
        for read in (read_profile, read_plan, read_costs, read_links, read_csv, lambda f: read_scenario(f, None, 2)):  # type: ignore[arg-type]
            with pytest.raises(ArgumentError, match=expected):
                read(file)
    with pytest.raises(ArgumentError, match="is a device; expected a regular file"):
        load_trace([Path("/dev/zero")])
    assert Path("/dev/zero").is_char_device()


def test_what_unpacks_or_parses_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = tmp_path / "many.json.gz"
    many.write_bytes(gzip.compress(b"[" + b"{}," * 2_000_000 + b"{}]", 1))
    monkeypatch.setattr(files, "MAX_VALUES", 1_000_000)
    with pytest.raises(ArgumentError, match=r"many.json.gz has more than 1,000,000 values"):
        load_trace([many])
    with pytest.raises(ArgumentError, match="unpacks to more than 1 MiB"):
        files.read_bytes(many, max_bytes=1 << 20)
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(many.read_bytes()[:2000])
    with pytest.raises(ArgumentError, match="cannot be unpacked: it is cut off"):
        load_trace([cut])


def test_what_is_written_takes_the_place_of_the_old_file_only_once_it_is_whole(tmp_path: Path) -> None:
    file = write(tmp_path / "out.csv", "old")
    file.chmod(0o640)

    def fill() -> None:
        with files.replacing(file) as new:
            new.write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(ArgumentError, match=r"out.csv cannot be written: No space left"):
        fill()
    assert (file.read_text(), os.listdir(tmp_path)) == ("old", ["out.csv"])
    write_csv(SCHEDULE, file)
    assert Schedule.parse(str(read_csv(file))).rows == SCHEDULE.rows
    assert (os.listdir(tmp_path), file.stat().st_mode & 0o777) == (["out.csv"], 0o640)
    (tmp_path / "link.csv").symlink_to(file)
    files.write_json(tmp_path / "link.csv", [2])
    assert (tmp_path / "link.csv").is_symlink()
    assert files.read_json(file) == [2]


def test_a_new_file_is_made_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may write into the folder can guess its name."""
    victim, file = write(tmp_path / "victim", "precious"), write(tmp_path / "secret.csv", "")
    file.chmod(0o600)
    monkeypatch.setattr(files, "_numbers", itertools.count())
    (tmp_path / f".{os.getpid()}-0.new.csv").symlink_to(victim)
    with files.replacing(file) as new:
        assert new.stat().st_mode & 0o777 == 0o600
        new.write_text("text")
    assert (victim.read_text(), file.read_text()) == ("precious", "text")
    files.remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["secret.csv", "victim"]
