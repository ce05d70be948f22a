"""Two machines with two ranks each, by torchrun: the same bits as one device, and a failure there is named here."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import nodes_job
import pytest
from nodes import Nodes, two_machines

from scaffolding.ranks import Ranks

JOB = Path(__file__).with_name("nodes_job.py")
SECONDS = 100.0
AGENT = "torch.distributed.run"

pytestmark = pytest.mark.distributed


def torchrun(nodes: Nodes, node: int, folder: Path, ends: Literal["well", "badly", "not"]) -> subprocess.Popen[str]:
    """One machine's part of a job of two."""
    where = [f"--node-rank={node}", f"--master-addr={nodes.names[0]}", "--master-port=29500"]
    command = ["-m", AGENT, "--nnodes=2", "--nproc-per-node=2", *where]
    job = [str(JOB), str(folder), nodes.names[1], ends]
    return nodes.start(node, [sys.executable, *command, *job], folder, {**os.environ, "OMP_NUM_THREADS": "1"})


class Ended(NamedTuple):
    """The job on the first machine, and where the ranks left what they saw."""

    folder: Path
    status: int
    said: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("nodes")
    with two_machines(folder) as nodes:
        first, _ = [torchrun(nodes, node, folder, "badly") for node in range(2)]
        said, _ = first.communicate(timeout=SECONDS)
    return Ended(folder, first.returncode, said)


def assert_proven(shown: dict[str, Any], rank: int) -> None:
    assert shown.pop("neighbors") == [rank ^ 1], "shared memory ends at the machine's edge"
    assert sorted(shown) == ["auto", "distributed"]
    assert all(said[:2] == [4, True] for said in shown.values()), shown


def test_ranks_that_are_told_apart_give_the_bits_of_one_device(ranks4: Ranks) -> None:
    for rank, shown in enumerate(ranks4.run(nodes_job.as_on_two_machines)):
        assert_proven(shown, rank)


@pytest.mark.long
def test_two_machines_give_the_bits_of_one_device(ended: Ended) -> None:
    for rank in range(4):
        file = ended.folder / f"shown.{rank}"
        assert file.exists(), ended.said
        assert_proven(json.loads(file.read_text()), rank)


@pytest.mark.long
def test_a_job_that_ends_well_exits_with_0_on_both_machines(tmp_path: Path) -> None:
    with two_machines(tmp_path) as nodes:
        for job in [torchrun(nodes, node, tmp_path, "well") for node in range(2)]:
            said, _ = job.communicate(timeout=SECONDS)
            assert job.returncode == 0, said


@pytest.fixture
def training(tmp_path: Path) -> Iterator[tuple[Nodes, list[subprocess.Popen[str]]]]:
    """A job of two machines that trains without end, and the agent of each."""
    with two_machines(tmp_path) as nodes:
        agents = [torchrun(nodes, node, tmp_path, "not") for node in range(2)]
        until = time.monotonic() + SECONDS
        while len(list(tmp_path.glob("trains.*"))) < 4:
            assert time.monotonic() < until
            assert all(agent.poll() is None for agent in agents), agents[0].communicate()
            time.sleep(0.1)
        yield nodes, agents


def processes(nodes: Nodes, node: int, *, agents: bool) -> list[int]:
    """The ids, as this machine counts them, of the job's processes on a node: torchrun's agent, or the ranks."""
    space = os.stat(f"/proc/{nodes.pids[node]}/ns/pid").st_ino
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_text().split("\0")
            here = os.stat(folder / "ns" / "pid").st_ino == space
            if here and str(JOB) in words and (AGENT in words) == agents:
                found.append(int(folder.name))
    return found


@pytest.mark.long  # runtime/processes/test_failure.py has what a rank does whose agent is gone
@pytest.mark.parametrize("node", [0, 1])
def test_an_agent_that_is_killed_takes_its_ranks_with_it_and_is_named(
    training: tuple[Nodes, list[subprocess.Popen[str]]], node: int
) -> None:
    """The first machine's agent has the job's store, too."""
    nodes, agents = training
    ranks = [2 * node, 2 * node + 1]
    (agent,) = processes(nodes, node, agents=True)
    began = time.monotonic()
    os.kill(agent, signal.SIGKILL)
    said, _ = agents[1 - node].communicate(timeout=SECONDS)
    assert agents[1 - node].returncode != 0
    assert time.monotonic() - began < 60
    there = f"rank [{ranks[0]}{ranks[1]}]"
    assert re.search(rf"rank \d stops: {there} was lost.*: its torchrun agent \(process \d+\) is gone", said), said
    assert not processes(nodes, node, agents=False), "ranks live on"


@pytest.mark.long
def test_a_machine_whose_cable_is_cut_is_fatal_and_named_in_time(
    training: tuple[Nodes, list[subprocess.Popen[str]]],
) -> None:
    nodes, agents = training
    began = time.monotonic()
    nodes.cut()
    said, _ = agents[0].communicate(timeout=SECONDS)
    seconds = time.monotonic() - began
    assert agents[0].returncode != 0
    assert re.search(r"rank [01] stops: rank [23] was lost, .*: no sign of life for \d+ s", said), said
    assert nodes_job.LOST_AFTER <= seconds < 60, seconds
    while processes(nodes, 1, agents=False):
        assert time.monotonic() - began < 60
        time.sleep(0.1)
    for agent in processes(nodes, 1, agents=True):
        os.kill(agent, signal.SIGKILL)  # its ranks have ended; it waits for the job's store, on the first machine
    said, _ = agents[1].communicate(timeout=SECONDS)
    assert re.search(r"rank [23] stops: rank [01] was lost, .*: no sign of life for \d+ s", said), said


@pytest.mark.long  # cli/test_run_hosts.py kills a rank of two hosts, test_falling.py has what the others say
def test_rank_killed_on_one_machine_is_named_on_the_other(ended: Ended) -> None:
    assert ended.status != 0
    for rank in (0, 1):
        assert f"rank {rank} stops: rank 3 was lost" in ended.said, ended.said
