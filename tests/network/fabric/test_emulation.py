"""A run on real processes: its samples agree with each other, and it ends as a whole whatever is killed."""

from __future__ import annotations

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import fabric_jobs as jobs
import numpy as np
import pytest
from host_processes import Seen, kill_rank, processes

from cli.command_line import as_json
from network.makers import wait_until
from penstock._base.errors import ArgumentError, FabricError
from penstock._base.files import validate
from penstock.network.fabric.algorithms import algorithms
from penstock.network.fabric.emulation import rendezvous
from penstock.network.fabric.emulation.coordinate import emulate
from penstock.network.fabric.emulation.rendezvous import Members, explain_failure, first_line, join
from penstock.network.fabric.emulation.spec import Spec, default_algorithm
from penstock.network.fabric.samples import HEAD, RUN, SAMPLES, STEPS, STEPS_HEAD, Run
from penstock.network.fabric.steps import Collective
from penstock.network.fabric.workload import Transfer, Workload
from scaffolding.ranks import Ranks

pytestmark = pytest.mark.distributed

ENDLESS = 10_000_000
SECONDS = 60.0


def _rows(path: Path, head: tuple[str, ...]) -> np.ndarray:
    with path.open(newline="") as file:
        first, *rows = list(csv.reader(file))
    assert tuple(first) == head
    return np.array(rows, dtype=np.int64)


def test_samples_and_rounds_agree(tmp_path: Path) -> None:
    hosts, trials, compute_ns = 2, 12, 2_000_000
    transfers = (Transfer("a", 400), Transfer("b", 36, compute_seconds=compute_ns / 1e9), Transfer("c", 40_000))
    spec = Spec(Workload("three", transfers), hosts, trials=trials, warmup=5, seed=5)
    seen = Seen()
    emulate(spec, tmp_path, watch=seen)

    samples = _rows(tmp_path / SAMPLES, HEAD)
    places = [(trial, place, rank) for trial in range(trials) for rank in range(hosts) for place in range(3)]
    assert [(t, p, r) for t, p, r, *_ in samples.tolist()] == sorted(places, key=lambda one: (one[0], one[2], one[1]))
    run = Run.read(tmp_path)
    start, end = run.start_ns, run.end_ns
    assert start.shape == end.shape == (trials, 3, hosts)
    assert (end > start).all()
    assert (start[1:].min((1, 2)) > end[:-1].max((1, 2))).all(), "a trial begins when the one before has ended"
    assert (start[:, 1:] >= end[:, :-1]).all()
    assert (start[:, 1] - end[:, 0] >= compute_ns).all()
    assert (end >= start.max(2, keepdims=True)).all(), "no rank has the sum before every rank has begun"
    assert seen.trials == [*range(trials)]

    steps = _rows(tmp_path / STEPS, STEPS_HEAD)
    took = end.max((1, 2)) - start.min((1, 2))
    records = [n for n in range(trials) if n == 0 or took[n] > took[:n].max()]
    assert sorted(set(steps[:, 0].tolist())) == records, "the first trial, and each that was slower than all before"
    for trial in records:
        for place in range(3):
            for rank in range(hosts):
                rounds = steps[(steps[:, :3] == (trial, place, rank)).all(1)]
                assert rounds[:, 3].tolist() == [0, 1]
                edges = [start[trial, place, rank], *rounds[:, 4:].ravel().tolist(), end[trial, place, rank]]
                assert edges == sorted(edges)

    record = json.loads((tmp_path / RUN).read_text())
    assert (record["complete"], record["missing"]) == (True, "")
    asked = {"algorithm": "ring", "hosts": 2, "trials": trials, "overlap": False, "seed": 5, "link": None}
    assert {key: record[key] for key in asked} == asked
    assert validate(Workload, record["workload"], "workload") == spec.workload
    assert (record["backend"], record["shared_machine"], record["machine_cores"]) == ("gloo", True, os.cpu_count())
    assert [len(record[key]) for key in ("clock", "cpu", "environment")] == [hosts] * 3
    assert [(link["from"], link["to"]) for link in record["links"]] == [(0, 1), (1, 0)]
    assert processes(str(tmp_path)) == {}


# -- overlap ----------------------------------------------------------------------------------------------------------

COMPUTE_SECONDS = 0.1


@pytest.mark.parametrize("overlap", [False, True])
def test_computing_goes_on_during_a_transfer_only_with_overlap(ranks2: Ranks, overlap: bool) -> None:
    # Over a link on which each transfer takes as long as the computing in front of it.
    transfers = tuple(Transfer(name, 4000, compute_seconds=COMPUTE_SECONDS) for name in "abc")
    spec = Spec(Workload("three", transfers), 2, trials=3, warmup=1, overlap=overlap, measures_links=False)
    began, _, trials, _ = ranks2.run(jobs.trials_of, spec, 3, jobs.Slow(2 * 4000 / COMPUTE_SECONDS))[0]
    stamps = np.stack(trials)  # trial, rank, transfer, start and end
    start, end, compute_ns = stamps[..., 0], stamps[..., 1], COMPUTE_SECONDS * 1e9
    assert (end - start >= compute_ns).all()
    between = start[:, :, 1:] - end[:, :, :-1]
    assert (between >= 0).all(), "one transfer after the other"
    assert (start[0] >= began + compute_ns * np.arange(1, 4)).all()
    if overlap:
        assert between.min() < compute_ns
    else:
        assert (between >= compute_ns).all()


# -- what goes wrong --------------------------------------------------------------------------------------------------


def _whole(folder: Path) -> int:
    """How many trials are there, each whole; and the file ends with a line's end."""
    text = (folder / SAMPLES).read_text()
    assert text.endswith("\n")
    run = Run.read(folder)
    assert (run.end_ns > run.start_ns).all()
    assert len(run.end_ns) * run.end_ns[0].size == len(text.splitlines()) - 1
    return len(run.end_ns)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])  # the one that writes, and another
def test_a_host_that_is_killed_is_named_and_its_samples_stay(tmp_path: Path, rank: int) -> None:
    spec = Spec(Workload.from_sizes([4000, 36]), 2, trials=ENDLESS, warmup=2, measures_links=False)
    with pytest.raises(FabricError, match=rf"host {rank} was killed by SIGKILL; [\d,]+ trials saved in ") as caught:
        emulate(spec, tmp_path, watch=Seen(kill_rank(rank, tmp_path, after=20)))
    trials = _whole(tmp_path)
    assert trials > 20
    assert f"; {trials:,} trials saved in {tmp_path}" in str(caught.value)
    record = json.loads((tmp_path / RUN).read_text())
    assert not record["complete"]
    assert str(rank) in record["missing"]
    assert processes(str(tmp_path)) == {}
    found = as_json("fabric", "show", str(tmp_path))
    assert (found["complete"], found["trials"]) == (False, trials)
    assert f"{ENDLESS - trials:,} of {ENDLESS:,} trials" in found["missing"]


def _started(folder: Path, *more: str) -> subprocess.Popen[str]:
    """An endless run on the command line, of which some trials have ended."""
    options = ["--sizes", "4000,36", "--hosts", "2", "--trials", str(ENDLESS), "--warmup", "2", *more]
    command = [sys.executable, "-m", "penstock", "fabric", *options, "--out", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    samples = folder / SAMPLES
    try:
        wait_until(lambda: process.poll() is not None or (samples.exists() and samples.stat().st_size > 2000))
    except BaseException:
        process.terminate()
        process.communicate()
        raise
    assert process.poll() is None, process.communicate()
    return process


@pytest.mark.alone
def test_ctrl_c_takes_everything_down_and_reports(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with _started(folder, "--json") as process:
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGINT
    assert errors.splitlines()[-1].startswith("penstock: error: stopped")
    assert "Traceback" not in errors
    assert processes(str(folder)) == {}
    found = json.loads(said)
    assert not found["complete"]
    assert "SIGINT" in found["missing"]
    assert found["trials"] == _whole(folder)
    assert not (folder / "report.html").exists(), "pictures take seconds, and whoever types Ctrl-C looks on"


def _torchruns(monkeypatch: pytest.MonkeyPatch, **environment: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def test_hosts_that_do_not_join_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    _torchruns(monkeypatch, RANK="0", WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    start = time.monotonic()
    said = r"rank 0 waited 2 s for ranks 1, 2, which have not called penstock fabric yet; with WORLD_SIZE=3 rank 0"
    with pytest.raises(FabricError, match=said):
        with join(Spec(Workload.from_sizes([4]), 3, join_seconds=2)):
            pass
    assert time.monotonic() - start >= 2


def test_another_number_of_hosts_than_was_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _torchruns(monkeypatch, RANK="0", WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT="1")
    with pytest.raises(ArgumentError, match="2 processes were started for 3 hosts"):
        with join(Spec(Workload.from_sizes([4]), 3)):
            pass


def test_what_gloo_says_is_one_line_without_its_source() -> None:
    said = "[/build/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:6352: Connection reset by peer"
    error = RuntimeError(f"{said}. This is typically caused by a remote worker hanging.\nmore")
    assert first_line(error) == "Read error [127.0.0.1]:6352: Connection reset by peer"
    assert first_line(RuntimeError("[rank1] is gone")) == "[rank1] is gone"


@pytest.mark.parametrize("collective", get_args(Collective))
def test_every_collective_has_a_usual_algorithm_for_any_hosts(collective: Collective) -> None:
    workload = Workload.from_sizes([4, 64], collective)
    spec = Spec(workload, 5, algorithm=default_algorithm(workload))
    assert [spec.algorithm_for(place) for place in range(2)] == [algorithms(collective)[0]] * 2


def test_the_usual_algorithm_of_a_mixture_is_the_ring_for_those_that_have_one() -> None:
    gathered = Transfer("c", 12, "gather")
    workload = Workload("mixed", (gathered, Transfer("b", 12), Transfer("a", 12, "all_to_all")))
    assert default_algorithm(workload) == "ring", "of which the report speaks"
    spec = Spec(workload, 3, algorithm=default_algorithm(workload))
    assert [spec.algorithm_for(place) for place in range(3)] == ["direct", "ring", "pairwise"], (
        "the first of the others"
    )


class _Shared:
    """What hosts share, of which some have said nothing."""

    def __init__(self, silent: tuple[int, ...] = ()) -> None:
        self.said: dict[str, str] = {}
        self._silent = silent

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self.said.setdefault(key, value).encode()

    def set(self, key: str, value: str) -> None:
        self.said[key] = value

    def check(self, keys: list[str]) -> bool:
        return int(keys[0].partition("/")[2]) not in self._silent


def test_the_host_that_failed_first_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER_SECONDS", 0.0)
    store = _Shared()
    first, other = (Members(rank, 3, store, None) for rank in (2, 0))
    assert explain_failure(first, "no memory") == "host 2: no memory"
    assert explain_failure(other, "Connection closed by peer") == "host 2: no memory"
    alone = Members(0, 3, _Shared(silent=(1, 2)), None)
    assert explain_failure(alone, "Connection closed") == "host 0: hosts 1, 2 do not answer; Connection closed"
    one = Members(0, 3, _Shared(silent=(1,)), None)
    assert explain_failure(one, "Connection closed") == "host 0: host 1 does not answer; Connection closed"
