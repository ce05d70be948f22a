"""A rank that ends before it builds the pipeline, with success even, ends the run of those that wait for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.long]

LEAVES = """
import os, sys, torch, penstock
from torch import nn
if os.environ["RANK"] == "1":
    sys.exit(0)
penstock.pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.randn(8, 4),), loss_fn=nn.MSELoss())
"""


def test_a_rank_that_left_with_success_is_named(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    command = [sys.executable, "-m", "penstock", "run", "--ranks", "2", "leaves.py"]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "rank 0 stops: rank 1 has ended before all ranks had called penstock.pipeline, as each has to" in done.stderr


def test_a_slow_rank_is_waited_for(tmp_path: Path) -> None:
    slow = LEAVES.replace("sys.exit(0)", "__import__('time').sleep(12)")
    (tmp_path / "slow.py").write_text(slow)
    command = [sys.executable, "-m", "penstock", "run", "--ranks", "2", "slow.py"]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
