"""Our own processes import nothing from the current folder; the user's script sees what `python script.py` shows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.launch.agent import agent_command
from penstock.network.switch.client import PROGRAM

OWN = ["-m", "penstock.demo", "--steps", "2"]
USERS = [["train.py", "-m", "penstock.demo"], ["-m", "penstocks"], ["-m", "own.penstock", "x"]]


@pytest.mark.parametrize("options", [[], ["--standalone", "--nproc-per-node=2"]])
def test_ranks_of_ours_are_isolated_and_the_users_are_not(options: list[str]) -> None:
    start = agent_command(options)
    assert start[:4] == [sys.executable, "-P", "-m", "penstock.launch.agent"]
    assert agent_command([*options, *OWN]) == [*start, "--no-python", sys.executable, "-P", "-u", *OWN]
    for command in USERS:
        assert agent_command([*options, *command]) == [*start, *command]


def test_the_switch_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    for name in ("json", "select", "scipy", "numba"):
        (tmp_path / f"{name}.py").write_text("print('code of the current folder')")
    done = subprocess.run(
        [sys.executable, *PROGRAM], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert "current folder" not in done.stdout
