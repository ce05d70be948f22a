"""The programs in `examples/` run, and give the same figures alone and in processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from scaffolding.ranks import Ranks
from scaffolding.scripts import lines_here, lines_of_rank

EXAMPLES = Path(__file__).parents[1] / "examples"
PENSTOCK = ["-c", "from penstock.cli import main; main()"]


def lines_of_ranks(script: Path, *arguments: str) -> list[str]:
    """What a program prints in two processes, on one thread each."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *PENSTOCK, "run", "--ranks", "2", str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_target_is_verified() -> None:
    done = CliRunner().invoke(app, ["verify", f"{EXAMPLES}/target_mlp.py:target", "--ranks", "3"])
    assert done.exit_code == 0, done.output
    assert "6 of 6 gradients are equal to the bit" in done.stdout


@pytest.mark.distributed
@pytest.mark.parametrize("launched", [False, pytest.param(True, marks=pytest.mark.long)])
def test_gpt_learns_the_same_alone_and_in_processes(
    capsys: pytest.CaptureFixture[str], ranks2: Ranks, launched: bool
) -> None:
    """By the ranks of a pool, or by those of `penstock run`."""
    script, steps = EXAMPLES / "train_gpt.py", ("--steps", "40")
    alone = lines_here(script, *steps)
    assert capsys.readouterr().err == ""
    assert [line.split()[1] for line in alone] == ["20", "40"]
    losses = [float(line.split()[3]) for line in alone]
    assert losses[1] < losses[0] < 2.0
    if launched:
        assert lines_of_ranks(script, *steps) == alone
    else:
        assert ranks2.run(lines_of_rank, script, *steps) == [alone, []]


def test_resumable_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, options = EXAMPLES / "train_resumable.py", ("--every", "4", "--steps", "8", "--folder", tmp_path / "whole")
    whole = lines_here(script, *options)
    assert [line.split()[1] for line in whole] == [str(step) for step in range(1, 9)]
    assert lines_here(script, *options) == [], "it was done"
    assert capsys.readouterr().err == ""
