"""A recorded run that crashes: its folder has every step that ended, and says which rank ended it, where and how.

Ranks that leave while others wait: tests/distributed/test_falling.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import as_json, output

from penstock.trace.runs import read_run

pytestmark = pytest.mark.distributed

LAST = 12
"""The steps that end."""
LAST_WORDS = {
    "between steps": "failed outside of a step: ValueError: no batch",
    "killed": "was killed by SIGKILL",
}

SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
import penstock

how, last = sys.argv[1], int(sys.argv[2])


def tell_what_listens():
    job, owners = f"PENSTOCK_JOB={os.environ['PENSTOCK_JOB']}".encode(), {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if job in open(f"/proc/{pid}/environ", "rb").read():
                for name in os.listdir(f"/proc/{pid}/fd"):
                    owners[os.readlink(f"/proc/{pid}/fd/{name}")] = pid
        except OSError:
            pass
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in open(f"/proc/net/{kind}").read().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if f"socket:[{inode}]" in owners and (state == "0A" or kind.startswith("udp")):
                print(kind, owners[f"socket:[{inode}]"], address.split(":")[0])


torch.manual_seed(0)
layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
x = torch.randn(8, 8)


def loss(output, target):
    if pipe.step_count == last and how == "killed":
        time.sleep(3)  # longer than from one word of a rank to the next
        os.kill(os.getpid(), signal.SIGKILL)
    return (output - target).square().mean()


transport = "distributed" if how == "between steps" else "auto"
with penstock.pipeline(layers, (x,), microbatches=2, loss_fn=loss, run_dir="run", transport=transport) as pipe:
    while True:
        if pipe.step_count == 1 and how == "between steps" and pipe.is_main_process:
            tell_what_listens()
        if pipe.step_count == last and how == "between steps" and not pipe.is_main_process:
            time.sleep(3)
            raise ValueError("no batch")
        pipe.step(x, target=x)
"""


def crashed(folder: Path, how: str) -> tuple[Path, str]:
    """The folder of a run on two ranks, of which rank 1 ends so; and what the other has printed."""
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-c", "from penstock.cli import main; main()", "run", "-n", "2", "train.py", how]
    done = subprocess.run([*command, str(LAST)], cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == (137 if how == "killed" else 1), done.stderr
    assert done.stderr.splitlines()[-1] == f"penstock: rank 1 {LAST_WORDS[how]}"
    assert done.stderr.count("Traceback") == (how != "killed")
    return folder / "run", done.stdout


def check_steps(run: Path) -> None:
    steps = read_run(run).steps()
    assert [one.step for one in steps] == list(range(1, LAST + 1))
    assert None not in [one.loss for one in steps]


@pytest.fixture(scope="module")
def between_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return crashed(tmp_path_factory.mktemp("crashed"), "between steps")


def test_on_one_machine_everything_listens_on_loopback(between_steps: tuple[Path, str]) -> None:
    """The launcher's agent with torch's store, the ranks with gloo's sockets, and rank 0 with the failure detector."""
    found = [line.split() for line in between_steps[1].splitlines()]
    assert len({pid for _, pid, _ in found}) == 3
    assert {(kind, address) for kind, _, address in found} == {("tcp", "0100007F")}


def test_all_steps_before_an_error_are_there(between_steps: tuple[Path, str]) -> None:
    run, _ = between_steps
    check_steps(run)
    assert [one["health"] for one in as_json("top", str(run))["ranks"]] == ["failed", "failed"]
    assert "rank 1 failed outside of a step: ValueError: no batch" in output("top", str(run), columns=200)


@pytest.mark.long
def test_a_killed_rank_is_named_with_its_step_and_action(tmp_path: Path) -> None:
    run, _ = crashed(tmp_path, "killed")
    check_steps(run)
    first, second = as_json("top", str(run))["ranks"]
    assert (first["health"], first["step"]) == ("failed", LAST + 1)
    assert (second["health"], second["step"], second["action"]) == ("failed", LAST + 1, "1F0")
    killed = f"ended at step {LAST + 1}: rank 1 was killed by SIGKILL"
    assert killed in output("top", str(run), columns=200)
    output("report", str(run), "--out", str(tmp_path / "run.html"))
    assert json.dumps(killed)[1:-1] in (tmp_path / "run.html").read_text()
