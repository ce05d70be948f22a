"""Our own processes import nothing from the current folder; the user's script sees what `python script.py` shows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock._base.errors import ArgumentError
from penstock.distributed.launch.agent import agent_command
from penstock.distributed.launch.endings import RankFailure, register_run
from penstock.distributed.launch.processes import Outcome, explain_end, temporary_file
from penstock.distributed.launch.user import User
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


# -- `penstock run --user`: the rights of another user, and what root does on that user's behalf ----------------------


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> User:
    if os.geteuid() != 0:
        pytest.skip("only root can become others")
    monkeypatch.setattr(sys, "executable", "/bin/true")  # the tests' own may be in root's home
    return User("nobody")


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that everybody can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.usefixtures("nobody")  # skips where there can be none
def test_a_user_that_does_not_exist_and_a_python_that_it_cannot_run_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ArgumentError, match=r"user 'no\\nsuch' does not exist: pass the name of a user"):
        User("no\nsuch")
    program = folder / "python"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(ArgumentError, match=r"user 'nobody' cannot run .*python with Penstock \(.*Permission denied\)"):
        User("nobody")


def test_commands_run_with_the_rights_and_the_home_of_the_user(nobody: User) -> None:
    done = subprocess.run(
        nobody.command(["sh", "-c", 'id -u; id -g; id -G; echo "$USER $HOME"; grep CapEff /proc/self/status']),
        capture_output=True,
        text=True,
        check=True,
    )
    *ids, home, capabilities = done.stdout.splitlines()
    account = nobody._account
    assert ids == [str(account.pw_uid), *[str(account.pw_gid)] * 2]
    assert home == f"nobody {account.pw_dir}"
    assert int(capabilities.split()[1], 16) == 0


def test_what_ranks_leave_is_theirs_to_write_and_not_to_replace(nobody: User) -> None:
    with temporary_file("failures", nobody) as path:
        with nobody.acting():
            RankFailure(1, 3, 7, "why").write(path)
            with pytest.raises(PermissionError):
                Path(path).unlink()
        assert RankFailure.first(path) == RankFailure(1, 3, 7, "why")
    assert not Path(path).parent.exists()


def test_root_tells_no_folder_that_the_user_could_not(
    nobody: User, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_root, own = folder / "root", folder / "own"
    record = json.dumps({"state": {"failure": None, "ended": False}})
    for run in (of_root, own):
        (run / "ranks").mkdir(parents=True)
        (run / "ranks/0.json").write_text(record)
    os.mkfifo(own / "ranks/1.json")
    os.chown(own / "ranks", nobody._account.pw_uid, -1)
    with temporary_file("failures", nobody) as path, monkeypatch.context() as patched:
        patched.setenv("PENSTOCK_FAILURES", path)
        for run in (of_root, own):
            register_run(run)
        RankFailure(1, 3, 7, "why").write(path)
        ended = explain_end(Outcome(1, agent=0, exitcode=1), path, ["the agent"], nobody)
        assert (ended.status, ended.message) == (3, "why")
    assert (of_root / "ranks/0.json").read_text() == record
    assert json.loads((own / "ranks/0.json").read_text())["state"]["failure"] == "why"
    assert os.geteuid() == os.getegid() == 0
