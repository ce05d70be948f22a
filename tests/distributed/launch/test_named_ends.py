"""Which rank failed first, and with which exit status, of all that ranks and agents left."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock._base.errors import ArgumentError
from penstock.distributed.launch.endings import (
    FAILURES,
    RankFailure,
    await_culprit,
    describe_signal,
    exit_status,
    note_failure,
    register_run,
)
from penstock.distributed.launch.processes import Outcome, explain_end
from penstock.distributed.launch.step_file import read_step

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
