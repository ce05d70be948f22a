"""`penstock runs` and `penstock compare`: recorded runs in a list and side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from command_line import as_json, output, refusal
from test_top import STATE

from penstock._base.files import write_json_line
from penstock.trace.runs import StepRecord
from penstock.trace.runs.folder import append_lines
from scaffolding.run_folders import about, says


def a_run(folder: Path, schedule: str, seconds: float, losses: list[float | None], *, ended: bool = True) -> Path:
    given = replace(about(2, 4), name=folder.name, schedule=schedule, started=f"2026-01-0{len(losses)}T00:00:00+00:00")
    (folder / "ranks").mkdir(parents=True)
    write_json_line(folder / "run.json", given.to_dict())
    steps = [StepRecord(n, loss, seconds, 8, n * seconds, 0.25) for n, loss in enumerate(losses, 1)]
    append_lines(folder / "steps.jsonl", [step.to_line() for step in steps])
    says(folder, replace(STATE, ended=ended, host="another"), at=1.0)
    return folder


@pytest.fixture
def two(tmp_path: Path) -> Path:
    a_run(tmp_path / "first", "1f1b", 0.5, [4.0, 3.0, 2.0])
    a_run(tmp_path / "sweep" / "second", "zb-h1", 0.4, [4.0, 3.0, 2.0, 1.5])
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


def test_a_run_whose_loss_is_no_number_is_listed_last(two: Path) -> None:
    a_run(two / "diverged", "1f1b", 0.5, [1.0, float("nan")])
    names = [run["name"] for run in as_json("runs", str(two), "--sort", "loss")["runs"]]
    assert names == ["second", "first", "diverged"]


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


def test_of_many_steps_some_are_compared_and_the_last(tmp_path: Path) -> None:
    paths = [str(a_run(tmp_path / name, "1f1b", 0.5, [1.0] * 9)) for name in "ab"]
    assert as_json("compare", *paths)["steps"] == [1, 3, 5, 7, 9]
    for path in paths:
        append_lines(Path(path) / "steps.jsonl", [StepRecord(10, 1.0, 0.5, 8, 5.0).to_line()])
    assert as_json("compare", *paths)["steps"] == [2, 4, 6, 8, 10]


def test_a_loss_that_is_no_number_is_null_in_json(tmp_path: Path) -> None:
    for name in "ab":
        a_run(tmp_path / name, "1f1b", 0.5, [1.0, float("nan")])
    assert as_json("compare", str(tmp_path / "a"), str(tmp_path / "b"))["losses"] == [[1.0, None]] * 2


def test_ctrl_c_is_no_failure(tmp_path: Path) -> None:
    for name, why in (("stopped", "KeyboardInterrupt"), ("broken", "ValueError: x")):
        says(a_run(tmp_path / name, "1f1b", 0.5, [1.0]), replace(STATE, failure=why), at=1.0)
    states = {run["name"]: run["state"] for run in as_json("runs", str(tmp_path))["runs"]}
    assert states == {"stopped": "interrupted", "broken": "failed"}
    assert "stopped by Ctrl-C" in output("top", str(tmp_path / "stopped"), "--once")


def test_a_run_of_silent_ranks_is_no_training(tmp_path: Path) -> None:
    a_run(tmp_path / "run", "1f1b", 0.5, [1.0], ended=False)
    assert as_json("runs", str(tmp_path))["runs"][0]["state"] == "silent"
