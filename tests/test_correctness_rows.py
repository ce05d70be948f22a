"""The rows of `benchmarks/correctness` run, and Penstock is right where torch is not."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "benchmarks" / "correctness" / "bench.py"
pytestmark = [pytest.mark.long, pytest.mark.distributed]


def rows(*names: str) -> list[tuple[str, str]]:
    """For each row, what torch and Penstock do."""
    command = [sys.executable, "-W", "ignore", str(BENCH), "--rows", *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    lines = done.stdout.splitlines()
    sides = [
        [line.split(maxsplit=1)[1] for line in lines if line.startswith(f"   {side} ")]
        for side in ("torch", "penstock")
    ]
    found = list(zip(*sides, strict=True))
    assert len(found) == len(names)
    return found


def test_penstock_is_right_where_torch_is_not() -> None:
    right = {"tied": "right", "evaluated": "1.00 times", "normed": "4 batches", "masked": "right"}
    for (theirs, ours), wanted in zip(rows(*right), right.values(), strict=True):
        assert ours.startswith(wanted)
        assert not theirs.startswith(wanted)


def test_penstock_runs_what_torch_refuses() -> None:
    for theirs, ours in rows("few", "structured", "in_place", "bare"):
        assert ours == "runs"
        assert "raises" in theirs
