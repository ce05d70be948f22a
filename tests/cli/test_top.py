"""`penstock top`, `runs` and `compare`: what a run's folder says of its ranks, and runs in a list and side by side."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import as_json, output, refusal

from penstock._base.files import write_json_line
from penstock._base.formatting import short_duration
from penstock.trace.runs import RankState, StepRecord, read_run
from penstock.trace.runs.folder import append_lines
from penstock.trace.runs.progress import Progress
from penstock.trace.runs.summary import RunSnapshot, failure_messages, health
from scaffolding.run_folders import about, says, steps

ABOUT = about(2, 4)
NOW = 1_000_000.0
STATE = RankState(0, 0, (0,), "node", 7, NOW, step=9, action="0F3", since=NOW - 2, rss_bytes=10**9)


def a_run(folder: Path, *states: RankState, written: float | None = None, heard: tuple[RankState, ...] = ()) -> str:
    for name in ("ranks", "timelines"):
        (folder / name).mkdir(parents=True)
    write_json_line(folder / "run.json", ABOUT.to_dict())
    steps(folder, 1, 10)
    for state in states:
        says(folder, state, at=written, heard=heard)
    return str(folder)


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a busy machine takes, a rank has just spoken."""
    monkeypatch.setattr(time, "time", lambda: NOW)


def test_a_rank_is_judged_by_what_it_said_and_whether_its_process_lives(stopped_clock: None) -> None:
    def judged(state: RankState, now: float = NOW + 1, *, lives: bool = True, host: str = "node") -> str:
        return health(state, now, host, lambda pid: lives)

    assert judged(STATE) == "computes"
    assert judged(replace(STATE, waits_for=(1,))) == "waits"
    assert judged(replace(STATE, action="")) == "between steps"
    assert judged(STATE, NOW + 6) == "silent"
    assert judged(STATE, lives=False) == "gone"
    assert judged(STATE, lives=False, host="elsewhere") == "computes"  # nobody here can tell
    assert judged(replace(STATE, ended=True), NOW + 60, lives=False) == "ended"
    assert judged(replace(STATE, failure="rank 1 failed"), NOW + 60, lives=False) == "failed"
    for how in ("rank 1 failed at 1B2: KeyboardInterrupt", "stopped by SIGTERM", "stopped by Ctrl-C"):
        assert judged(replace(STATE, failure=how), NOW + 60, lives=False) == "interrupted"
    for how in ("rank 1 failed at 1B2: ValueError: signal SIGINT has no handler", "a KeyboardInterrupt in a worker"):
        assert judged(replace(STATE, failure=how), NOW + 60, lives=False) == "failed"
        assert how in failure_messages([(replace(STATE, failure=how), "failed")])[0]
    assert health(replace(STATE, host=socket.gethostname(), pid=os.getpid())) == "computes"
    assert health(replace(STATE, host=socket.gethostname(), pid=2**22 + 1)) == "gone"


def test_progress_is_that_of_the_last_steps() -> None:
    steps = [StepRecord(step, None if step == 9 else 1.0 / step, 0.2, 64, 0.25 * step) for step in range(1, 10)]
    found = Progress.of(steps, 100)
    assert found is not None
    assert (found.step, found.loss, found.seconds, found.rows_per_second) == (9, 0.125, 0.25, 256)
    assert found.left_seconds == pytest.approx(91 * 0.25)
    assert str(found) == "step 9 of 100, loss 0.1250, 256 samples/s, 22.8 s left"
    assert found.format(over=True) == "step 9 of 100, loss 0.1250, 256 samples/s"
    smaller = Progress.of([*steps[:-1], replace(steps[-1], rows=10)])
    assert smaller is not None
    assert smaller.rows_per_second == 256, "the last batch of an epoch is often smaller"
    assert Progress.of([]) is None
    assert str(Progress.of(steps[:1])) == "step 1, loss 1.0000"
    said = [short_duration(seconds) for seconds in (0, 0.0394, 2.5, 99.6, 600, 12_000, 360_000)]
    assert said == ["0 s", "39.4 ms", "2.5 s", "2 min", "10 min", "3 h 20 min", "4 d 4 h"]


def test_what_another_run_left_is_not_shown(tmp_path: Path) -> None:
    """Its process may not have seen that the folder is no longer its own."""
    run = a_run(tmp_path / "run", STATE)
    assert RunSnapshot.of(read_run(Path(run))).progress is not None
    write_json_line(
        tmp_path / "run/ranks/1.json", {"run": "older", "at": NOW, "state": replace(STATE, number=1).to_dict()}
    )
    assert [rank["number"] for rank in as_json("top", run)["ranks"]] == [0]
    (tmp_path / "run/steps.jsonl").unlink()
    write_json_line(tmp_path / "run/run.json", replace(ABOUT, id="another").to_dict())
    assert RunSnapshot.of(read_run(Path(run))).progress is None


def test_top_shows_each_rank(tmp_path: Path, stopped_clock: None) -> None:
    other = replace(STATE, number=1, ranks=(1,), action="1RECV_F4", waits_for=(0,), since=NOW - 3)
    run = a_run(tmp_path / "gpt", STATE, other)
    said = output("top", run, "--once", columns=120)
    assert f"{run}  GPT: 1f1b, 2 ranks, 4 microbatches, cpu" in said
    assert "step 9 of 100, loss 2.1000, 256 samples/s, bubble 20%, 22.8 s left" in said
    lines = [line.split() for line in said.splitlines() if line[:1].isdigit()]
    assert [line[:4] for line in lines] == [["0", "computes", "0F3", "2.0"], ["1", "waits", "1RECV_F4", "3.0"]]
    assert lines[1][5:9] == ["rank", "0", "9", "1.0"]
    found = as_json("top", run)
    assert [one["health"] for one in found["ranks"]] == ["computes", "waits"]
    assert found["progress"]["step"] == 9


def test_top_says_who_is_silent_and_who_was_only_heard_of(tmp_path: Path) -> None:
    heard = RankState(1, 0, (1,), action="1B2", since=NOW)
    found = as_json("top", a_run(tmp_path / "gpt", STATE, written=NOW, heard=(heard,)))
    assert [(one["number"], one["health"], one["heard"]) for one in found["ranks"]] == [
        (0, "silent", False),
        (1, "silent", True),
    ]
    assert "has no timeline: the first is of step 5" in refusal("explain", str(tmp_path / "gpt"))
    fresh = as_json("top", a_run(tmp_path / "other", STATE, replace(STATE, number=1, ranks=(1,)), heard=(heard,)))
    assert [one["heard"] for one in fresh["ranks"]] == [False, False]  # its own word counts


def test_top_is_never_broken_by_what_it_finds(tmp_path: Path) -> None:
    run = a_run(tmp_path / "gpt", STATE)
    (tmp_path / "gpt" / "ranks" / "1.json").write_text('{"run": "abc", "at"')
    (tmp_path / "gpt" / "ranks" / "2.json").write_text(json.dumps({"run": "older", "at": 1, "state": {}}))
    (tmp_path / "gpt" / "steps.jsonl").write_text(StepRecord(1, float("nan"), 0.1, 8, 0.1).to_line())
    found: Any = as_json("top", run)
    assert ([one["number"] for one in found["ranks"]], found["progress"]["loss"]) == ([0], "nan")
    assert "no such folder" in refusal("top", str(tmp_path / "none"))


def test_a_terminal_obeys_nothing_in_a_folder(tmp_path: Path) -> None:
    run = a_run(tmp_path / "gpt", replace(STATE, failure="\x1b[31mboom\x07", action="\x1b]0;x"))
    write_json_line(tmp_path / "gpt" / "run.json", {**ABOUT.to_dict(), "model": "\x1b]0;pwned\x07"})
    said = output("top", run, "--once", columns=120)
    assert "pwned" in said
    assert "boom" in said
    assert not set(said) & {"\x1b", "\x07"}


# -- recorded runs in a list and side by side -------------------------------------------------------------------------


def ended_run(folder: Path, schedule: str, seconds: float, losses: list[float | None], *, ended: bool = True) -> Path:
    given = replace(ABOUT, name=folder.name, schedule=schedule, started=f"2026-01-0{len(losses)}T00:00:00+00:00")
    (folder / "ranks").mkdir(parents=True)
    write_json_line(folder / "run.json", given.to_dict())
    steps = [StepRecord(n, loss, seconds, 8, n * seconds, 0.25) for n, loss in enumerate(losses, 1)]
    append_lines(folder / "steps.jsonl", [step.to_line() for step in steps])
    says(folder, replace(STATE, ended=ended, host="another"), at=1.0)
    return folder


@pytest.fixture
def two(tmp_path: Path) -> Path:
    ended_run(tmp_path / "first", "1f1b", 0.5, [4.0, 3.0, 2.0])
    ended_run(tmp_path / "sweep" / "second", "zb-h1", 0.4, [4.0, 3.0, 2.0, 1.5])
    return tmp_path


def test_runs_are_listed_with_their_figures(two: Path) -> None:
    found = as_json("runs", str(two))
    assert [(run["name"], run["state"]) for run in found["runs"]] == [("first", "ended"), ("second", "ended")]
    assert [run["progress"]["seconds"] for run in found["runs"]] == pytest.approx([0.5, 0.4])
    rows = [line.split() for line in output("runs", str(two), columns=200).splitlines()]
    assert rows[2][:10] == ["first", "GPT", "1f1b", "2", "4", "3", "500", "ms", "2.000", "25%"]
    assert rows[3][0] == "sweep/second"
    for by, first in (("seconds", "second"), ("loss", "second"), ("schedule", "first"), ("name", "first")):
        assert as_json("runs", str(two), "--sort", by)["runs"][0]["name"] == first, by


def test_a_loss_that_is_no_number_is_listed_last_and_null_in_json(two: Path) -> None:
    for name in ("diverged", "other"):
        ended_run(two / name, "1f1b", 0.5, [1.0] * 8 + [float("nan")], ended=name == "other")
    found = as_json("runs", str(two), "--sort", "loss")["runs"]
    assert [run["name"] for run in found][:2] == ["second", "first"]
    assert {run["name"]: run["state"] for run in found}["diverged"] == "silent", "and no training"
    compared = as_json("compare", str(two / "diverged"), str(two / "other"))
    assert compared["steps"] == [1, 3, 5, 7, 9], "some of many, and the last"
    assert compared["losses"] == [[1.0] * 4 + [None]] * 2


def test_runs_are_filtered_by_the_words_of_their_line(two: Path) -> None:
    assert [run["name"] for run in as_json("runs", str(two), "--filter", "ZB-h1 ended")["runs"]] == ["second"]
    assert as_json("runs", str(two), "--filter", "zb-h1 failed")["runs"] == []
    assert output("runs", str(two), "--filter", "none", columns=400).endswith("matches --filter 'none'\n")


def test_a_damaged_run_is_named_beside_the_others(two: Path) -> None:
    text = (two / "first" / "run.json").read_text()
    (two / "first" / "run.json").write_text(text.replace('"ranks": 2', '"ranks": 0'))
    found = as_json("runs", str(two))
    assert [run["name"] for run in found["runs"]] == ["second"]
    assert "first" in found["damaged"][0]
    assert "ranks=0" in found["damaged"][0]


def test_a_folder_without_runs_says_how_one_is_made(tmp_path: Path) -> None:
    assert "penstock.pipeline(..., run_dir=" in output("runs", str(tmp_path), columns=400)
    assert "there is no folder" in refusal("runs", str(tmp_path / "none"))


def test_runs_are_compared_where_they_differ_and_at_the_same_steps(two: Path) -> None:
    paths = [str(two / "first"), str(two / "sweep" / "second")]
    found = as_json("compare", *paths)
    assert found["differ"] == {"schedule": ["1f1b", "zb-h1"]}
    assert (found["steps"], found["losses"]) == ([1, 2, 3], [[4.0, 3.0, 2.0]] * 2)
    assert [one["name"] for one in found["runs"]] == ["first", "second"]
    text = output("compare", *paths, columns=200)
    assert "400 ms (-20.0%)" in text
    assert "loss at step 3" in text
    assert "expected two runs or more" in refusal("compare", paths[0])


def test_ctrl_c_is_no_failure(tmp_path: Path) -> None:
    for name, why in (("stopped", "KeyboardInterrupt"), ("broken", "ValueError: x")):
        says(ended_run(tmp_path / name, "1f1b", 0.5, [1.0]), replace(STATE, failure=why), at=1.0)
    states = {run["name"]: run["state"] for run in as_json("runs", str(tmp_path))["runs"]}
    assert states == {"stopped": "interrupted", "broken": "failed"}
    assert "stopped by Ctrl-C" in output("top", str(tmp_path / "stopped"), "--once")
