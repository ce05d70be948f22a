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


def torchrun(nodes: Nodes, node: int, folder: Path, ends: Literal["well", "not"]) -> subprocess.Popen[str]:
    """One machine's part of a job of two."""
    where = [f"--node-rank={node}", f"--master-addr={nodes.names[0]}", "--master-port=29500"]
    command = ["-m", AGENT, "--nnodes=2", "--nproc-per-node=2", *where]
    job = [str(JOB), str(folder), nodes.names[1], ends]
    return nodes.start(node, [sys.executable, *command, *job], folder, {**os.environ, "OMP_NUM_THREADS": "1"})


class Ended(NamedTuple):
    """How the job ended on each machine, and where the ranks left what they saw."""

    folder: Path
    statuses: list[int]
    said: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("nodes")
    with two_machines(folder) as nodes:
        agents = [torchrun(nodes, node, folder, "well") for node in range(2)]
        said = "".join(agent.communicate(timeout=SECONDS)[0] for agent in agents)
    return Ended(folder, [agent.returncode for agent in agents], said)


def assert_proven(shown: dict[str, Any], rank: int) -> None:
    assert shown.pop("neighbors") == [rank ^ 1], "shared memory ends at the machine's edge"
    assert sorted(shown) == ["auto", "distributed"]
    assert all(said[:2] == [4, True] for said in shown.values()), shown


def test_ranks_that_are_told_apart_give_the_bits_of_one_device(ranks4: Ranks) -> None:
    for rank, shown in enumerate(ranks4.run(nodes_job.as_on_two_machines)):
        assert_proven(shown, rank)


@pytest.mark.long
def test_two_machines_give_the_bits_of_one_device(ended: Ended) -> None:
    assert ended.statuses == [0, 0], ended.said
    for rank in range(4):
        file = ended.folder / f"shown.{rank}"
        assert file.exists(), ended.said
        assert_proven(json.loads(file.read_text()), rank)


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
