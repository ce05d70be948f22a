"""The folder that a run leaves, written without running it: what it is, its steps, and what its ranks say."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from penstock._base.files import write_json_line
from penstock.schedule import generate
from penstock.schedule.timeline import Timeline
from penstock.simulate import StageCost, simulate
from penstock.trace.runs import RankState, RunInfo, StepRecord
from penstock.trace.runs.folder import append_lines


def about(ranks: int, microbatches: int) -> RunInfo:
    """A run of as many stages, each of one layer: a, b, c."""
    layers = "abcdefgh"[:ranks]
    return RunInfo(
        name="gpt",
        id="abc",
        started="2026-01-01T00:00:00.000+00:00",
        resumed=(),
        penstock="0.1.0",
        torch="2.13.0",
        host="node",
        device="cpu",
        model="GPT",
        ranks=ranks,
        replicas=1,
        processes=ranks,
        chunks=1,
        schedule="1f1b",
        microbatches=microbatches,
        rows=64,
        placement=" ".join(map(str, range(ranks))),
        cuts=tuple(layers[1:]),
        units=tuple((layer,) for layer in layers),
        parameter_bytes=(4,) * ranks,
        gradient_bytes=(4,) * ranks,
        activation_bytes=(),
        memory_limit=None,
        total_steps=100,
    )


ABOUT = about(3, 6)


def timeline(*stages: float) -> Timeline:
    """A step whose stages take so many hundredths of a second forward, and twice that backward."""
    costs = [StageCost(one / 100, one / 100, one / 100) for one in stages]
    return simulate(generate("1f1b", 3, 6), costs)


def a_run(folder: Path) -> Path:
    """Two recorded steps of three stages, of which one is heavy, and two ranks that say something."""
    for name in ("ranks", "timelines", "memory"):
        (folder / name).mkdir(parents=True)
    write_json_line(folder / "run.json", ABOUT.to_dict())
    steps(folder, 1, 10)
    for step in (2, 5):
        write_json_line(folder / "timelines" / f"{step}.json", timeline(1.0, 1.6, 1.0).to_dict())
    now = time.time()
    says(folder, RankState(0, 0, (0,), "elsewhere", 7, step=9, action="0F3", since=now - 2, rss_bytes=10**9))
    says(
        folder, RankState(1, 0, (1,), "elsewhere", 8, step=9, action="1F2", waits_for=(0,), since=now, rss_bytes=10**8)
    )
    return folder


def steps(folder: Path, first: int, end: int) -> None:
    """Adds steps."""
    made = [
        StepRecord(step, 3.0 - step / 10, 0.2, 64, 0.25 * step, 0.2 if step == 5 else None)
        for step in range(first, end)
    ]
    append_lines(folder / "steps.jsonl", [step.to_line() for step in made])


def says(folder: Path, state: RankState, *, at: float | None = None, heard: Sequence[RankState] = ()) -> None:
    """What a process says of itself, and what it has heard from others."""
    value = {"run": "abc", "at": time.time() if at is None else at, "state": state.to_dict()}
    value["heard"] = [one.to_dict() for one in heard]
    write_json_line(folder / "ranks" / f"{state.number}.json", value)
