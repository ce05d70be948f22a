"""`torchrun --max-restarts` and nothing else: a job that one rank is lost of goes on from its last checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_resumable.py"

FALLS = """
import os, runpy, signal, sys
import penstock

step = penstock.Pipeline.step

def fall_once(self, *args, **kwargs):
    if self.step_count == 7 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args, **kwargs)

penstock.Pipeline.step = fall_once
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def losses(done: subprocess.CompletedProcess[str]) -> list[tuple[int, str]]:
    """The printed steps, each with its loss."""
    words = [line.split() for line in done.stdout.splitlines() if line.startswith("step")]
    return [(int(step), loss) for _, step, _, loss in words]


@pytest.mark.distributed
def test_a_rank_that_is_killed_once_changes_no_loss(tmp_path: Path) -> None:
    (tmp_path / "falls.py").write_text(FALLS)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", "falls.py"]
    options = ["--steps", "10", "--every", "3", "--folder"]

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200,
            check=False,
        )  # fmt: skip

    whole = losses(run(str(EXAMPLE), *options, "whole"))
    assert [step for step, _ in whole] == list(range(1, 11))
    done = run(*torchrun, str(EXAMPLE), *options, "broken")
    assert done.returncode == 0, done.stderr
    seen = losses(done)
    assert [step for step, _ in seen] == [*range(1, 8), *range(7, 11)], "it went on from the checkpoint of step 6"
    assert set(seen) == set(whole)
    assert sorted(path.name for path in (tmp_path / "broken").iterdir()) == ["step-00000006", "step-00000009"]
