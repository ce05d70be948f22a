"""Two machines with two ranks each, by torchrun: the same bits as one device, and a failure there is named here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

import nodes_job
import pytest
from nodes import Nodes, two_machines

from scaffolding.ranks import Ranks

JOB = Path(__file__).with_name("nodes_job.py")
SECONDS = 200.0

pytestmark = pytest.mark.distributed


def torchrun(nodes: Nodes, node: int, folder: Path, ends: Literal["well", "badly"]) -> subprocess.Popen[str]:
    """One machine's part of a job of two."""
    where = [f"--node-rank={node}", f"--master-addr={nodes.names[0]}", "--master-port=29500"]
    command = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", *where]
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
    assert shown.pop("neighbours") == [rank ^ 1], "shared memory ends at the machine's edge"
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


@pytest.mark.long  # cli/test_run_hosts.py kills a rank of two hosts, test_falling.py has what the others say
def test_rank_killed_on_one_machine_is_named_on_the_other(ended: Ended) -> None:
    assert ended.status != 0
    for rank in (0, 1):
        assert f"rank {rank} stops: rank 3 was lost" in ended.said, ended.said
