"""`penstock report` of the folder of a training run: its speed, loss and memory, and a step of it explained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest
from command_line import as_json, output, refusal
from test_explain import measured, profile
from test_report_command import numbers, report, seconds
from test_top import ABOUT, STATE

from penstock.costs import ModelFingerprint
from penstock.plan import ParallelConfig, Plan
from penstock.schedule import generate
from penstock.schedule.timeline import Timeline
from penstock.simulate import StageCost, simulate
from penstock.trace.runs import StepRecord
from scaffolding.nanoseconds import merged

LOSSES = [2.5, 2.0, float("nan"), 1.5, 1.25]


def a_run(folder: Path, timeline: Timeline) -> Path:
    """A run of four ranks, of whose five steps the last was timed."""
    about = replace(
        ABOUT, name="gpt", ranks=4, chunks=1, replicas=1, schedule="1f1b", microbatches=8, placement="0 1 2 3", rows=64,
        cuts=("a", "b", "c"), units=(("0.0", "0.1", "1.0", "1.1"), ("a",), ("b",), ("c",)), memory_limit=1000.0,
    )  # fmt: skip
    for part in ("timelines", "memory", "ranks"):
        (folder / part).mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(about.to_dict()))
    steps = [StepRecord(1 + n, loss, 0.5 + n / 10, 64, 1.0 + n) for n, loss in enumerate(LOSSES)]
    (folder / "steps.jsonl").write_text("\n".join(step.to_line().rstrip("\n") for step in steps) + "\n")
    (folder / "timelines" / "5.json").write_text(json.dumps(timeline.to_dict()))
    held = [100 * (1 + place % 4) for place in range(len(timeline.tracks[1]))]
    (folder / "memory" / "5.1.json").write_text(json.dumps(held))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run in the folder `run`, which is explained there."""
    return report(a_run(tmp_path_factory.mktemp("runs") / "run", measured()))


def test_a_run_is_shown_with_its_loss_speed_and_memory_and_explained(made: Path, open_page: Any) -> None:
    assert (made.parent.name, made.name) == ("run", "report.html")
    page = open_page(made)
    assert "started 1 January 2026, 00:00 UTC" in page.inner_text("header")
    found = as_json("explain", str(made.parent))
    assert numbers(page)["explained"] == found
    assert "the last 5 steps took 0.78 times as long as those with a timeline" in found["notes"]
    names, values = (page.locator(f".figures {part}").all_inner_texts() for part in ("dt", ".value"))
    cards = dict(zip(names, values, strict=True))
    assert page.inner_text("h1") == "gpt"
    assert cards["loss"] == "1.25"
    assert seconds(cards["step time"]) == pytest.approx(1.0), "from end to end, as penstock runs says"
    assert seconds(cards["in Pipeline.step"]) == pytest.approx(0.75)
    assert cards["memory"] == "400 B"
    assert page.evaluate("timeline.bands[0].name") == "measured, step 5"
    peaks = page.evaluate("timeline.bands[0].lanes.map((lane) => lane.memory && lane.memory.peak)")
    assert peaks == [None, 400, None, None]
    assert "0.0 to 1.1, 4 modules" in page.inner_text(".facts")
    line = page.locator(".course").first
    assert line.locator("path.line").get_attribute("d").count("M") == 2, "a loss that is no number leaves a gap"
    line.locator("svg").focus()
    page.keyboard.press("ArrowRight")
    assert "step 1: 2.5" in line.inner_text()


def test_a_failure_and_ranks_that_are_gone_stand_under_the_title(tmp_path: Path, open_page: Any) -> None:
    folder = a_run(tmp_path / "run", measured())
    failed = replace(STATE, step=13, failure="rank 0 failed outside of a step: RuntimeError: boom")
    states = [failed, replace(failed, number=1, step=14), replace(STATE, number=2, host=gethostname(), pid=2**22 + 1)]
    for state in states:
        said = {"run": ABOUT.id, "at": 0.0, "state": state.to_dict(), "heard": []}
        (folder / "ranks" / f"{state.number}.json").write_text(json.dumps(said))
    header = open_page(report(folder)).inner_text("header")
    assert "ended at step 14: rank 0 failed outside of a step: RuntimeError: boom" in header
    assert "rank 2: process exited without closing the pipeline" in header
    assert header.count("boom") == 1
    seen = " ".join(output("top", str(folder), "--once", columns=200).split())
    assert all(" ".join(line.split()) in seen for line in header.splitlines() if ": " in line), "top says the same"


def test_what_was_predicted_lies_under_what_was_measured(tmp_path: Path, open_page: Any) -> None:
    """A profile that is given counts for more than what was recorded."""
    folder = a_run(tmp_path / "run", measured())
    predicted = simulate(generate("1f1b", 4, 8), StageCost(0.01, 0.01, 0.01))
    times = {"step_seconds": predicted.makespan_seconds, "stage_seconds": [0.03] * 4}
    (folder / "predicted.json").write_text(json.dumps({"source": "a plan", "timeline": predicted.to_dict(), **times}))
    page = open_page(report(folder))
    assert page.evaluate("timeline.bands.map((band) => band.name)") == ["measured, step 5", "predicted"]
    assert page.evaluate("timeline.bands[1].hasCritical")
    pipeline = as_json("explain", str(folder))["pipeline_seconds"]
    assert f"{predicted.makespan_seconds / pipeline - 1:+.1%}" in page.inner_text(".figures")
    about = json.loads((folder / "run.json").read_text()) | {"cuts": ["layers.1", "layers.2", "layers.3"]}
    (folder / "run.json").write_text(json.dumps(about))
    given = profile(tmp_path, [0.02] * 4)
    page = open_page(report(folder, "--profile", given))
    explained = as_json("explain", str(folder), "--profile", given)
    assert explained["predicted_seconds"] > 1.5 * predicted.makespan_seconds
    assert page.evaluate("timeline.bands[1].end") == pytest.approx(explained["predicted_seconds"])


def test_runs_are_explained_one_at_a_time(tmp_path: Path) -> None:
    folder = str(a_run(tmp_path / "run", measured()))
    assert all("one at a time" in refusal(verb, folder, folder) for verb in ("explain", "report"))
    assert "has no timeline of step 3; there are: 5" in refusal("report", folder, "--step", "3")
    assert "this step has 4 stages on 4 ranks" in refusal("explain", folder, "--what-if", "cut=7:0.1")


def test_a_plan_is_compared_with_the_run_that_followed_it(tmp_path: Path) -> None:
    """The figure is the plan's own; with a plan of other cuts or microbatches the run has nothing to do."""
    folder, file = a_run(tmp_path / "run", measured()), tmp_path / "plan.json"
    choice = ParallelConfig(1, 4, 1, "1f1b", 8, 8)
    plan = Plan(choice, ("a", "b", "c"), (), (0.03,) * 4, 0.5, 0.0, {}, (1.0,) * 4, (2.0,) * 4)
    file.write_text(json.dumps(plan.to_dict()))
    assert as_json("explain", str(folder), "--plan", str(file))["predicted_seconds"] == 0.5
    others = replace(choice, microbatches=4), replace(choice, schedule="gpipe")
    for other in (replace(plan, cuts=("a", "b", "x")), *(replace(plan, choice=one) for one in others)):
        file.write_text(json.dumps(other.to_dict()))
        assert "did not follow it" in refusal("explain", str(folder), "--plan", str(file))
    about = json.loads((folder / "run.json").read_text()) | {"parameters": 72}
    (folder / "run.json").write_text(json.dumps(about))
    file.write_text(
        json.dumps(replace(plan, made_for=ModelFingerprint({"a.weight": (8, 8)}, "cpu", "float32")).to_dict())
    )
    assert "of 64 parameters, and the run's, GPT, has 72" in refusal("explain", str(folder), "--plan", str(file))
    assert "is a plan" in refusal("explain", str(file))
    given = profile(tmp_path, [0.01] * 4)
    assert "was cut at a,b,c" in refusal("explain", str(folder), "--profile", given, "--cuts", "a,b,x")


def test_peaks_that_devices_measured_are_shown_over_steps(tmp_path: Path, open_page: Any) -> None:
    folder = a_run(tmp_path / "run", measured())
    for step in (2, 5):
        (folder / "timelines" / f"{step}.json").write_text(json.dumps(measured().to_dict()))
        held = [step * 10**6] * len(measured().tracks[0])
        (folder / "memory" / f"{step}.0.json").write_text(json.dumps(held))
    page = open_page(report(folder))
    course = page.locator("section", has_text="Peak memory")
    assert "from 2 MB to 5 MB" in course.locator("svg").get_attribute("aria-label")


def test_a_step_that_lacks_actions_is_shown_and_not_explained(tmp_path: Path, open_page: Any) -> None:
    whole = measured()
    partial = Timeline((merged([[*whole.spans(0)][:5]]).tracks[0], *whole.tracks[1:]))
    folder = a_run(tmp_path / "run", partial)
    page = open_page(report(folder))
    assert "no complete step" in page.inner_text(".warning")
    assert page.evaluate("timeline.bands[0].length") == len(partial)
    (folder / "timelines" / "5.json").unlink()
    (folder / "steps.jsonl").write_text("")
    page = open_page(report(folder))
    assert "No timeline was recorded" in page.inner_text(".warning"), "the run has only begun"


def test_all_ranks_are_printed_and_nothing_is_cut_off(made: Path, open_page: Any) -> None:
    page = open_page(made, "phone")
    before = page.evaluate("[timeline.shown, timeline.width]")
    page.evaluate("innerHeight = 100; timeline._layout(); dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("[timeline.shown === timeline.total, timeline.width > 600]") == [True, True]
    page.evaluate("innerHeight = 844; dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("[timeline.shown, timeline.width]") == before
    assert page.evaluate("document.documentElement.dataset.theme") is None
    for each in (page, open_page(made)):
        assert each.evaluate("document.documentElement.scrollWidth <= innerWidth")
        wide = each.evaluate("[...document.querySelectorAll('.wide')].map((one) => [one.scrollWidth, one.clientWidth])")
        assert all(needed <= there for needed, there in wide), wide
    page.set_viewport_size({"width": 718, "height": 1000})  # a sheet of A4
    page.emulate_media(media="print")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not page.locator(".tl-buttons").is_visible()
    dark = open_page(made, dark=True)
    dark.emulate_media(media="print")
    dark.wait_for_function("timeline.colors.page === '#ffffff'")
    assert dark.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
