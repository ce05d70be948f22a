"""Which rank failed first, and with which exit status, of all that ranks and agents left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock._base.errors import ArgumentError
from penstock.distributed.launch.agent import agent_command
from penstock.distributed.launch.endings import (
    FAILURES,
    RankFailure,
    await_culprit,
    describe_signal,
    exit_status,
    note_failure,
    register_run,
)
from penstock.distributed.launch.processes import Outcome, explain_end, temporary_file
from penstock.distributed.launch.step_file import read_step
from penstock.distributed.launch.user import User
from penstock.network.switch.client import PROGRAM

RAISED = "rank 1 failed at 1F2: ValueError: boom"

FAILED, STOPPED = Outcome(1, agent=0, exitcode=1), Outcome(130, received=2, agent=0, exitcode=1)


@pytest.mark.parametrize(
    ("left", "status", "message"),
    [
        ([(0, 1, 900, ""), (1, None, 500, RAISED), (0, None, 600, RAISED), (1, 1, 950, "")], 1, RAISED),
        ([(1, None, 500, RAISED), (1, 3, 600, "")], 3, RAISED),
        (
            [(0, -15, 700, ""), (1, -9, 100, ""), (0, None, 400, "rank 0 failed: lost")],
            137,
            "rank 1 was killed by SIGKILL",
        ),
        ([(1, None, 500, "rank 1 was lost: x"), (0, 1, 600, ""), (1, -15, 700, "")], 1, "rank 1 was lost: x"),
        ([(1, 7, 500, ""), (0, -15, 600, "")], 7, "rank 1 ended with exit status 7"),
    ],
)
def test_the_first_failure_names_the_rank_and_its_status_is_the_jobs(
    tmp_path: Path, left: list[tuple[int, int | None, int, str]], status: int, message: str
) -> None:
    path = tmp_path / "failures"
    for failure in left:
        RankFailure(*failure).write(str(path))
    ended = explain_end(FAILED, str(path), ["the agent"])
    assert (ended.status, ended.message) == (status, message)


def test_without_a_failed_rank_the_agent_is_named_and_after_a_signal_nobody(tmp_path: Path) -> None:
    path = tmp_path / "failures"
    path.touch()
    killed = Outcome(137, agent=0, exitcode=-9)
    assert explain_end(killed, str(path), ["the agent"]) == replace(killed, message="the agent was killed by SIGKILL")
    RankFailure(1, 1, 5).write(str(path))
    assert explain_end(STOPPED, str(path), ["the agent"]) == replace(STOPPED, message="stopped by Ctrl-C")
    assert [describe_signal(number) for number in (2, 15)] == ["stopped by Ctrl-C", "stopped by SIGTERM"]


def test_what_a_rank_says_is_one_printable_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "failures"
    monkeypatch.setenv(FAILURES, str(path))
    note_failure(2, "rank 2 failed: ValueError: a\n\nb \x1b[31mé\u202e" + "x" * 9999)
    first = RankFailure.first(path)
    assert first is not None
    assert str(first).startswith("rank 2 failed: ValueError: a b \N{REPLACEMENT CHARACTER}[31mé")
    assert str(first).isprintable()
    assert len(str(first)) == 500
    await_culprit(2)  # which is the culprit itself, and waits for nobody


def test_the_folder_of_a_run_has_the_same_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, ranks = tmp_path / "failures", tmp_path / "ranks"
    monkeypatch.setenv(FAILURES, str(path))
    ranks.mkdir()
    before = {0: (False, "rank 0 failed: pipe broke"), 1: (False, None), 2: (True, None), 3: (True, "rank 3 failed")}
    for rank, (ended, failure) in before.items():
        (ranks / f"{rank}.json").write_text(json.dumps({"state": {"ended": ended, "failure": failure}}))
    register_run(tmp_path)
    note_failure(1, RAISED)
    explain_end(FAILED, str(path), ["the agent"])
    after = [json.loads((ranks / f"{rank}.json").read_text())["state"]["failure"] for rank in before]
    assert after == [RAISED, RAISED, None, RAISED]
    explain_end(STOPPED, str(path), ["the agent"])  # a signal that came after a failure
    assert json.loads((ranks / "1.json").read_text())["state"]["failure"] == RAISED


def test_exit_status_of_an_exception() -> None:
    exits = [SystemExit(3), SystemExit(), SystemExit(-1), SystemExit("x")]
    assert [exit_status(error) for error in (ValueError(), *exits, KeyboardInterrupt())] == [1, 3, 0, 255, 1, 130]


# -- the step under way, for who looks on from outside ----------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_STEP_FILE", str(tmp_path / "step"))
    return tmp_path / "step"


def pipeline(path: Path, seen: list[int]) -> penstock.Pipeline:
    """Notes what the file says whenever the loss of a microbatch is computed."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(read_step(path))
        return F.mse_loss(output, target)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    return penstock.pipeline(model, (torch.randn(4, 4),), loss=loss, microbatches=2, ranks=2)


def test_training_steps_are_announced_when_they_begin_and_evaluations_are_not(path: Path) -> None:
    assert read_step(path) == -1
    seen: list[int] = []
    with pipeline(path, seen) as pipe:
        x, target = torch.randn(4, 4), torch.randn(4, 2)
        pipe.evaluate(x, target=target)
        for _ in range(2):
            pipe.step(x, target=target)
        pipe.evaluate(x, target=target)
        pipe.step_count = 1000  # as a checkpoint does
        pipe.step(x, target=target)
    assert seen == [-1, -1, 0, 0, 1, 1, 1, 1, 1000, 1000]
    assert path.read_bytes() == (1000).to_bytes(8, "little")


def test_only_rank_0_announces(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    seen: list[int] = []
    with pipeline(path, seen) as pipe:
        pipe.step(torch.randn(4, 4), target=torch.randn(4, 2))
    assert seen == [-1, -1]
    assert not path.exists()


def test_file_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "nowhere" / "step"
    monkeypatch.setenv("PENSTOCK_STEP_FILE", str(path))
    with pytest.raises(ArgumentError, match=f"PENSTOCK_STEP_FILE is '{path}', which cannot be written"):
        pipeline(path, [])


# -- our own processes import nothing from the current folder; a script sees what `python script.py` shows it ---------


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
