"""A pipeline with `run_dir=` leaves a folder that says what happened; nothing that goes wrong with it ends a run."""

from __future__ import annotations

import gc
import io
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import penstock
from penstock import ArgumentError
from penstock.pipe import run_recorder
from penstock.plan import ParallelConfig, Plan
from penstock.trace.runs import RecordedRun, RunConfig, StepRecord, is_run, read_run
from penstock.trace.runs.writer import Writer, begin
from scaffolding.models import squared_error
from scaffolding.run_folders import about
from scaffolding.small import batch, mlp

X, Y = batch()


def train(run: Any, steps: int = 6, *, first: int = 0, **options: Any) -> list[penstock.StepResult]:
    given = {"ranks": 2, "microbatches": 2, "loss_fn": squared_error, **options}
    with penstock.pipeline(mlp(), (X,), run_dir=run, **given) as pipe:
        pipe.step_count = first
        return [pipe.step(X, target=Y) for _ in range(steps)]


def test_a_folder_says_what_happened(tmp_path: Path) -> None:
    train(tmp_path / "gpt", steps=0)
    assert not (tmp_path / "gpt").exists(), "without a step there is no folder"
    results = train(tmp_path / "gpt")
    assert is_run(tmp_path / "gpt")
    run = read_run(tmp_path / "gpt")
    assert (run.about.name, run.about.ranks, run.about.schedule, run.about.device) == ("gpt", 2, "1f1b", "cpu")
    assert len(run.about.cuts) == 1
    assert run.about.units[1][0] == run.about.cuts[0]
    steps = run.steps()
    assert [one.step for one in steps] == [1, 2, 3, 4, 5, 6]
    assert [one.loss for one in steps] == [float(result.loss) for result in results]
    assert all(one.rows == len(X) and one.seconds > 0 for one in steps)
    assert sorted(one.at_seconds for one in steps) == [one.at_seconds for one in steps]
    assert all(result.timeline is None for result in results)  # nobody asked for it
    assert run.traced_steps() == [5]
    assert run.timeline(5).ranks == 2
    assert [str(row) for row in run.schedule(5).rows] == [str(track.actions) for track in run.timeline(5).tracks]
    (state,) = run.ranks()
    assert (state.pid, state.ranks, state.step, state.ended, state.failure) == (os.getpid(), (0, 1), 6, True, None)
    assert state.rss_bytes
    assert not [file for file in (tmp_path / "gpt").rglob("*") if ".new" in file.name]


def test_a_relative_folder_is_that_of_when_the_pipeline_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra changes the working directory."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with penstock.pipeline(
        mlp(), (X,), run_dir="runs/one", ranks=2, microbatches=2, loss_fn=squared_error, balance="layers"
    ) as pipe:
        monkeypatch.chdir("elsewhere")
        pipe.step(X, target=Y)
    assert is_run(tmp_path / "runs" / "one")


def test_timelines_come_as_often_as_asked(tmp_path: Path) -> None:
    train(RunConfig(tmp_path / "a", trace_every=3), steps=9)
    assert read_run(tmp_path / "a").traced_steps() == [3, 5, 6, 9]
    train(RunConfig(tmp_path / "b", trace_every=0), steps=5)
    assert read_run(tmp_path / "b").traced_steps() == []


def test_a_resumed_run_goes_on_in_its_folder(tmp_path: Path) -> None:
    train(RunConfig(tmp_path, trace_every=1), steps=5)
    began = read_run(tmp_path).about.started
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # the process died here
    train(RunConfig(tmp_path, trace_every=3), steps=4, first=3)
    run = read_run(tmp_path)
    assert [one.step for one in run.steps()] == [1, 2, 3, 4, 5, 6, 7]
    times = [one.at_seconds for one in run.steps()]
    assert sorted(times) == times
    assert (run.about.started, len(run.about.resumed)) == (began, 1)
    assert run.traced_steps() == [1, 2, 3, 6]  # of the steps that ran again, only what is new
    assert not (tmp_path / "earlier").exists()


def test_another_layout_sets_the_timelines_aside_and_a_new_run_the_old_one(tmp_path: Path) -> None:
    train(tmp_path, steps=6)
    train(tmp_path, steps=1, first=6, microbatches=4)
    run = read_run(tmp_path)
    assert (run.traced_steps(), len(run.steps())) == ([], 7)
    assert [file.name for file in (tmp_path / "earlier" / "1" / "timelines").iterdir()] == ["5.json"]
    train(tmp_path, steps=2)  # a new run sets the old one aside
    assert len(read_run(tmp_path).steps()) == 2
    assert len(read_run(tmp_path / "earlier" / "2").steps()) == 7


def test_a_wrong_folder_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match=r"run_dir=.*file' is a file; expected a folder"):
        train(tmp_path / "file")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.json").write_text(json.dumps({"format": "penstock run", "version": 9, "penstock": "7.0"}))
    with pytest.raises(ArgumentError, match=r"is of version 9, and this penstock reads version 1: use .* \(7.0\)"):
        train(tmp_path / "old")
    (tmp_path / "mine" / "ranks").mkdir(parents=True)
    with pytest.raises(ArgumentError, match=r"this folder has ranks, but no run.json; pass another folder"):
        train(tmp_path / "mine")
    with pytest.raises(ArgumentError, match=r"RunConfig\(trace_every=-1\): expected an integer"):
        RunConfig("runs/x", trace_every=-1)


def no_folder_can_be_made(path: Path, patch: pytest.MonkeyPatch) -> None:
    (path / "in_the_way").write_text("")
    patch.setattr(Path, "exists", lambda self: False)


def the_disk_is_full(path: Path, patch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "steps.jsonl")

    patch.setattr("penstock.trace.runs.writer.append_lines", full)


def a_file_cannot_be_made(path: Path, patch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object) -> None:
        raise ZeroDivisionError

    patch.setattr("penstock.trace.runs.writer.Writer._beat", wrong)


@pytest.mark.parametrize("happens", [no_folder_can_be_made, the_disk_is_full, a_file_cannot_be_made])
def test_what_goes_wrong_with_files_warns_once(
    happens: Callable[[Path, pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happens(tmp_path, monkeypatch)
    folder = tmp_path / "in_the_way" / "run" if happens is no_folder_can_be_made else tmp_path / "run"
    with pytest.warns(UserWarning, match="the run is not recorded in full; training goes on: ") as seen:
        results = train(folder, steps=3)
    assert len(seen) == 1
    assert len(results) == 3


def test_nothing_is_lost_where_the_disk_was_full_or_grows_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = about(1, 1)
    writer = Writer(tmp_path, given.id, 0, dict)
    for number in range(1000):
        writer.file(f"timelines/{number}.json", dict)
    writer._beat(last=False)
    assert len(writer._files) < 100, "the folder was not made"
    begin(tmp_path, given, 1, None)
    writer.step(StepRecord(1, 0.5, 0.1, 8, 0.1))
    with monkeypatch.context() as patch:
        the_disk_is_full(tmp_path, patch)
        with pytest.raises(OSError, match="No space"):
            writer._beat(last=False)
    writer._beat(last=False)
    assert (tmp_path / "timelines" / "999.json").exists()
    (tmp_path / "run.json").unlink()
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(ArgumentError, match="is a pipe"):
        writer._beat(last=False)


def test_a_pipeline_that_is_dropped_leaves_no_thread(tmp_path: Path) -> None:
    pipe = penstock.pipeline(mlp(), (X,), microbatches=2, loss_fn=squared_error, run_dir=tmp_path)
    pipe.step(X, target=Y)
    del pipe
    gc.collect()
    assert "penstock-run-folder" not in [thread.name for thread in threading.enumerate()]
    assert len(read_run(tmp_path).steps()) == 1


def test_a_line_follows_the_run_on_a_terminal_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=90, highlight=False)
    monkeypatch.setattr("penstock.pipe.run_recorder.Console", lambda **_: console)
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    train(tmp_path / "quiet")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    train(RunConfig(tmp_path / "off", progress_bar=False))
    assert shown.getvalue() == ""
    train(RunConfig(tmp_path / "seen", total_steps=8))
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9?;]*[a-zA-Z]", "\n", shown.getvalue()).split("\n")]
    last = [line for line in lines if line][-1]
    loss = read_run(tmp_path / "seen").steps()[-1].loss
    assert re.fullmatch(rf"step 6 of 8, loss {loss:.4f}, [0-9,.]+ samples/s, .* left", last)


def test_memory_on_a_cpu_is_what_the_schedule_says(tmp_path: Path) -> None:
    train(tmp_path, microbatches=4)
    run = read_run(tmp_path)
    first, last = run.memory(5)
    assert not first.measured
    assert [len(one.bytes) for one in (first, last)] == [len(track) for track in run.timeline(5).tracks]
    sizes = zip(run.about.parameter_bytes, run.about.gradient_bytes, strict=True)
    always = [parameters + 3 * gradients for parameters, gradients in sizes]  # and Adam's two values for each
    kept = run.about.activation_bytes
    assert min(kept) > 0
    assert [max(one.bytes) for one in (first, last)] == [always[0] + 2 * kept[0], always[1] + kept[1]]
    assert [one.bytes[-1] for one in (first, last)] == always
    train(tmp_path / "again", recompute="always")
    assert read_run(tmp_path / "again").memory(5) == ()  # not known, so not said


@pytest.mark.parametrize("schedule", ["naive", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe", "hanayo"])
def test_a_schedule_of_each_family_is_recorded(tmp_path: Path, schedule: str) -> None:
    train(tmp_path, steps=5, schedule=schedule, microbatches=4)
    run = read_run(tmp_path)
    timeline, found = run.timeline(5), run.memory(5)
    assert [len(one.bytes) for one in found] == [len(track) for track in timeline.tracks]
    held = run.schedule(5).placement.by_rank
    for one, stages in zip(found, held, strict=True):
        most = sum(run.about.activation_bytes[stage] for stage in stages) * 4
        assert 0 < max(one.bytes) - one.bytes[-1] <= most


def test_memory_on_a_device_is_what_it_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = itertools.count(100)
    monkeypatch.setattr("penstock.runtime.execute.engine.counter", lambda device: lambda: next(sizes))
    train(tmp_path)
    run = read_run(tmp_path)
    found = run.memory(5)
    assert [one.measured for one in found] == [True, True]
    assert sorted(size for one in found for size in one.bytes) == list(range(100, 100 + len(run.timeline(5))))


def test_what_was_foreseen_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "unknown", steps=1)
    assert read_run(tmp_path / "unknown").predicted() is None
    profile = penstock.profile(mlp(), (X,), microbatches=2, budget_seconds=0)
    train(tmp_path / "profile", steps=1, balance=profile)
    seen = read_run(tmp_path / "profile").predicted()
    assert seen is not None
    assert (seen.source, seen.timeline.ranks) == ("the profile", 2)
    actions = 4 * (profile.action_seconds or 0.0)
    assert sum(seen.stage_seconds) == pytest.approx(sum(unit.seconds for unit in profile.units) + actions)
    assert seen.step_seconds == seen.timeline.makespan_seconds > max(seen.stage_seconds)
    monkeypatch.setattr("penstock.partition.choose_cuts.MIN_MEASURED_WORK", 0)
    train(tmp_path / "measured", steps=1)
    seen = read_run(tmp_path / "measured").predicted()
    assert seen is not None
    assert seen.source == "the times measured to cut the model"
    choice = ParallelConfig(1, 2, 1, "1f1b", 2, -(-len(X) // 2))
    plan = Plan(choice, ("1",), (), (1.0, 3.0), 9.0, 0.5, {}, (1.0, 1.0), (2.0, 2.0), optimizer_seconds=0.25)
    with penstock.pipeline(mlp(), (X,), ranks=2, plan=plan, loss_fn=squared_error, run_dir=tmp_path / "plan") as pipe:
        pipe.step(X, target=Y)
    seen = read_run(tmp_path / "plan").predicted()
    assert seen is not None
    assert (seen.source, seen.step_seconds, seen.stage_seconds) == ("the plan", 9.5, (1.0, 3.0))
    assert read_run(tmp_path / "plan").about.memory_limit == 2.0


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    def refused(match: str, path: Path) -> None:
        with pytest.raises(ArgumentError, match=match):
            read_run(path)

    refused(r"run '.*/none': no such folder; a training script records one", tmp_path / "none")
    refused("there is no run.json in this folder", tmp_path)
    (tmp_path / "run.json").write_text("{}")
    refused("is not of a run of penstock", tmp_path)
    (tmp_path / "run.json").write_text("{")
    refused("is not JSON", tmp_path)
    assert not is_run(tmp_path)
    train(tmp_path / "runs" / "gpt", steps=1)
    refused("it has runs in it: gpt", tmp_path / "runs")
    damaged: Callable[[RecordedRun], dict[str, Any]] = lambda run: {**run.about.to_dict(), "placement": "0 x"}  # noqa: E731
    (tmp_path / "run.json").write_text(json.dumps(damaged(read_run(tmp_path / "runs" / "gpt"))))
    refused("is damaged: placement='0 x'", tmp_path)


def test_a_first_step_that_is_refused_ends_no_recording(tmp_path: Path) -> None:
    train(tmp_path, steps=3)
    with penstock.pipeline(mlp(), (X,), ranks=2, microbatches=2, loss_fn=squared_error, run_dir=tmp_path) as pipe:
        for _ in range(2):
            with pytest.raises(ArgumentError, match="target"):
                pipe.step(X)
        for _ in range(3):
            pipe.step(X, target=Y)
    run = read_run(tmp_path)
    assert [one.step for one in run.steps()] == [1, 2, 3]
    assert (run.ranks()[0].ended, run.ranks()[0].failure) == (True, None)
    assert [one.name for one in (tmp_path / "earlier").iterdir()] == ["1"]


def test_what_ends_a_run_in_one_process_is_kept(tmp_path: Path) -> None:
    def crashes() -> None:
        with penstock.pipeline(mlp(), (X,), ranks=2, microbatches=2, loss_fn=squared_error, run_dir=tmp_path) as pipe:
            pipe.step(X, target=Y)
            raise ValueError("no batch")

    with pytest.raises(ValueError, match="no batch"):
        crashes()
    run = read_run(tmp_path)
    assert (len(run.steps()), run.ranks()[0].failure) == (1, "ValueError: no batch")


def test_two_runs_in_one_folder_are_not_mixed(tmp_path: Path) -> None:
    def begun() -> penstock.Pipeline:
        return penstock.pipeline(mlp(), (X,), ranks=2, microbatches=2, loss_fn=squared_error, run_dir=tmp_path)

    def train_both() -> None:
        with begun() as first, begun() as second:
            for _ in range(3):
                first.step(X, target=Y)
            second.step(X, target=Y)
            until = time.monotonic() + 30
            while time.monotonic() < until and not first.session.recorder._has_warned:  # type: ignore[union-attr]
                first.step(X, target=Y)
                time.sleep(0.05)

    with pytest.warns(UserWarning, match="another run has begun in this folder"):
        train_both()
    assert [one.step for one in read_run(tmp_path).steps()] == [1]


def test_steps_are_written_if_a_run_ends_while_they_are_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread meets the error of another rank, and hands over the last steps; another ends the process."""
    x, y = batch(8)
    folder = tmp_path / "run"
    with penstock.pipeline(
        mlp(), (x,), loss_fn=squared_error, ranks=2, microbatches=2, run_dir=RunConfig(str(folder), trace_every=100)
    ) as pipe:
        for _ in range(3):
            pipe.step(x, target=y)
        recorder = pipe.session.recorder
        assert recorder is not None
        hands_over = threading.Event()

        def late(pending: list[Any], losses: list[Any]) -> None:
            if pending:
                hands_over.set()
                time.sleep(0.3)  # the losses are on their way

        monkeypatch.setattr(run_recorder, "_read_quietly", late)
        failing = threading.Thread(target=recorder.fail, args=(None,))
        failing.start()
        assert hands_over.wait(5)
        recorder.end_now(2.0)
        failing.join()
        assert [step.step for step in read_run(folder).steps()] == [1, 2, 3]
