"""The command on hosts that are machines to each other: made by itself, and started by torchrun on each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from host_processes import abandoned

from penstock.network.fabric.samples import Run
from penstock.network.fabric.workload import mlp
from penstock.network.machines import Machines
from penstock.network.namespaces import why_not
from penstock.network.parse import parse_link

_MISSING = why_not()
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.alone,
    pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING)),
]


def test_the_json_of_a_run_on_shaped_hosts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock", "fabric", "--preset", "mlp", "--hosts", "2", "--link", "1gbit"]
    process = subprocess.Popen(
        [*command, "--trials", "3", "--warmup", "2", "--json", "--out", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said, errors = process.communicate(timeout=200)
    assert (process.returncode, errors) == (0, "")
    found = json.loads(said, parse_constant=pytest.fail)
    assert {"transfers", "step", "environment"} <= set(found)
    assert [(t["name"], t["bytes"]) for t in found["transfers"]] == [(t.name, t.bytes) for t in mlp().transfers]
    for transfer in found["transfers"]:
        assert (transfer["collective"], transfer["algorithm"], transfer["trials"]) == ("all_reduce", "ring", 3)
        assert 0 < transfer["time_s"]["min"] <= transfer["time_s"]["mean"] <= transfer["time_s"]["max"]
    # No ring is faster than the bytes that each host has to send.
    assert found["transfers"][-1]["time_s"]["min"] > 803840 / 125e6 * 0.9
    assert [host["host"] for host in found["environment"]["hosts"]] == ["host 0", "host 1"]
    assert {host["qdiscs"] != "" for host in found["environment"]["hosts"]} == {True}
    assert found["environment"]["link"] == "1gbit"
    assert abandoned() == []


@pytest.mark.long  # ranks of one host: test_emulation.py and test_fabric_collectives.py
def test_torchrun_on_each_host(tmp_path: Path) -> None:
    out = tmp_path / "run"
    job = ["penstock", "fabric", "--sizes", "1000,2600", "--collective", "all_gather", "--trials", "8", "--warmup", "2"]
    with Machines(2, parse_link("100mbit")) as made:
        torchruns = []
        for host in range(2):
            where = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={host}", f"--master-addr={made.addresses[0]}"]
            command = [sys.executable, "-m", "torch.distributed.run", *where, "-m", *job, "--out", str(out)]
            torchruns.append(
                subprocess.Popen(
                    made.command(host, command, {"OMP_NUM_THREADS": "1"}),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        said = [torchrun.communicate(timeout=200)[0] for torchrun in torchruns]
    assert [torchrun.returncode for torchrun in torchruns] == [0, 0], said
    assert "2 hosts, ring all_gather, 8 trials, gloo" in said[0]
    assert "hosts" not in said[1], "host 0 reports"
    run = Run.read(out)
    assert run.end_ns.shape == (8, 2, 2)
    assert run.record.complete
    assert (run.record.link, run.record.hosts) == (None, 2)
    assert (out / "results.json").exists()
    assert os.listdir(tmp_path) == ["run"]
