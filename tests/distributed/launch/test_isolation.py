"""Our own processes import nothing from the current folder; the user's script sees what `python script.py` shows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.distributed.launch.agent import agent_command
from penstock.network.switch.client import PROGRAM

SEEN = """
import json, os, sys
import __main__
print(json.dumps([sys.argv, sys.path[0], __name__, __file__, __main__.SEEN, sys.path.count(os.getcwd())]))
"""
RANK = [sys.executable, "-P", "-m", "penstock.distributed.launch.rank"]


def test_agents_are_isolated_and_see_no_argument_of_the_script() -> None:
    start = agent_command(["--standalone", "train.py", "--run", "x"])
    assert start[:4] == [sys.executable, "-P", "-m", "penstock.distributed.launch.agent"]
    assert start[-4:] == ["--standalone", "train.py", "--run", "x"]


@pytest.mark.parametrize("command", [["own/train.py", "--run", "x"], ["-m", "own.train", "-m"], ["own", "y"]])
def test_a_script_sees_what_python_shows_it(tmp_path: Path, command: list[str]) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for name in ("train.py", "__main__.py"):
        (own / name).write_text(f"SEEN = 1\n{SEEN}")
    environment = {**os.environ, "RANK": "0"}
    shown = [
        json.loads(
            subprocess.run([*start, *command], cwd=tmp_path, env=environment, capture_output=True, check=True).stdout
        )
        for start in ([sys.executable], RANK)
    ]
    assert shown[0] == shown[1]


def test_what_is_ours_sees_nothing_of_the_current_folder(tmp_path: Path) -> None:
    for name in ("typer", "json", "select", "scipy", "numba"):
        (tmp_path / f"{name}.py").write_text("print('code of the current folder')")
    environment = {**os.environ, "RANK": "0"}
    for command, says in (([*RANK, "-m", "penstock", "--version"], b"penstock "), ([sys.executable, *PROGRAM], b"")):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        assert done.stdout.startswith(says)
        assert b"current folder" not in done.stdout
