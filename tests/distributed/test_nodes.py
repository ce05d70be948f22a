"""Two machines with two ranks each, by torchrun: the same bits as one device, and a failure there is named here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from nodes import Nodes, two_machines

JOB = Path(__file__).with_name("nodes_job.py")
SECONDS = 200.0

pytestmark = pytest.mark.distributed


def torchrun(nodes: Nodes, node: int, folder: Path, *what: str) -> subprocess.Popen[str]:
    """One machine's part of a job of two."""
    where = [f"--node-rank={node}", f"--master-addr={nodes.names[0]}", "--master-port=29500"]
    command = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", *where, str(JOB), str(folder), *what]
    return nodes.start(node, [sys.executable, *command], folder, {**os.environ, "OMP_NUM_THREADS": "1"})


def test_two_machines_give_the_bits_of_one_device(tmp_path: Path) -> None:
    with two_machines(tmp_path) as nodes:
        jobs = [torchrun(nodes, node, tmp_path, "prove", nodes.names[1]) for node in range(2)]
        for job in jobs:
            said, _ = job.communicate(timeout=SECONDS)
            assert job.returncode == 0, said
    for rank in range(4):
        shown = json.loads((tmp_path / f"shown.{rank}").read_text())
        assert shown.pop("neighbours") == [rank ^ 1], "shared memory ends at the machine's edge"
        assert sorted(shown) == ["auto", "distributed"]
        assert all(said[:2] == [4, True] for said in shown.values()), shown


def test_rank_killed_on_one_machine_is_named_on_the_other(tmp_path: Path) -> None:
    with two_machines(tmp_path) as nodes:
        jobs = [torchrun(nodes, node, tmp_path, "fall") for node in range(2)]
        said, _ = jobs[0].communicate(timeout=SECONDS)
    assert jobs[0].returncode != 0
    for rank in (0, 1):
        assert f"rank {rank} stops: rank 3 was lost" in said, said
