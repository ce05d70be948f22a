"""Ranks that torchrun restarts, and nothing else: the job goes on from its last checkpoint. Ranks that never come."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from penstock.distributed.launch.agent import TAG, kill_remaining
from scaffolding.warm_scripts import lines_of_script

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_resumable.py"
OPTIONS = ["--steps", "10", "--every", "3", "--folder"]

FALLS = """
import os, runpy, signal, sys
import penstock

step = penstock.Pipeline.step
rank = os.environ.get("RANK", "0")

def fall_once(self, *args, **kwargs):
    if self.step_count == 7 and rank == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    result = step(self, *args, **kwargs)
    if rank == "0":
        print("bits", self.step_count, float(result.loss).hex(), flush=True)
    return result

penstock.Pipeline.step = fall_once
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def losses(printed: Iterable[str]) -> list[tuple[int, str]]:
    """The steps, each with its loss to the bit."""
    words = [line.split() for line in printed if line.startswith("bits")]
    return [(int(step), loss) for _, step, loss in words]


@pytest.mark.long  # test_saving.py kills a rank and goes on, test_failure.py restarts a job
@pytest.mark.distributed
def test_a_rank_that_is_killed_once_changes_no_loss(tmp_path: Path) -> None:
    (tmp_path / "falls.py").write_text(FALLS)
    whole = losses(lines_of_script(tmp_path / "falls.py", EXAMPLE, *OPTIONS, tmp_path / "whole"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", TAG: str(tmp_path)}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command = [sys.executable, *torchrun, "falls.py", str(EXAMPLE), *OPTIONS, "broken"]
    assert [step for step, _ in whole] == list(range(1, 11))
    try:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
        )
    finally:
        kill_remaining(str(tmp_path))
    assert done.returncode == 0, done.stderr
    seen = losses(done.stdout.splitlines())
    again = seen[7][0]
    assert again in (4, 7), "that of step 6 may not have been whole"
    assert [step for step, _ in seen] == [*range(1, 8), *range(again, 11)]
    assert set(seen) == set(whole)
    assert sorted(path.name for path in (tmp_path / "broken").iterdir()) == ["step-00000006", "step-00000009"]


# -- ranks that never come --------------------------------------------------------------------------------------------


LEAVES = """
import os, sys, torch, penstock
from torch import nn
if os.environ["RANK"] == "1":
    sys.exit(0)
penstock.pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.randn(8, 4),), loss_fn=nn.MSELoss())
"""


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize("leaves", [True, False])
def test_a_rank_that_left_with_success_is_named_and_a_slow_one_is_waited_for(tmp_path: Path, leaves: bool) -> None:
    text = LEAVES if leaves else LEAVES.replace("sys.exit(0)", "__import__('time').sleep(12)")
    (tmp_path / "leaves.py").write_text(text)
    command = [sys.executable, "-m", "penstock", "run", "--ranks", "2", "leaves.py"]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    if leaves:
        words = "rank 0 stops: rank 1 has ended before all ranks had called penstock.pipeline, as each has to"
        assert done.returncode == 1
        assert words in done.stderr
    else:
        assert (done.returncode, done.stderr) == (0, "")
