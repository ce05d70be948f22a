"""Runs in the studio: what lives is shown as it goes, and what-ifs are those of `penstock explain`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock._base.errors import ArgumentError
from penstock._base.files import write_json_line
from penstock.plan.explain import explain, load_trace
from penstock.report import write_perfetto
from penstock.report.studio.app import Server
from penstock.report.studio.live import describe_state, live
from penstock.report.studio.open_view import open_view
from penstock.schedule import generate, write_csv
from penstock.trace.runs import RankState, StepRecord
from scaffolding.run_folders import ABOUT, a_run, says, steps, timeline

Start = Callable[..., Server]


def test_a_live_run_is_read_by_pieces(tmp_path: Path) -> None:
    run = a_run(tmp_path / "gpt")
    first = live(run)
    assert [one["step"] for one in first["steps"]] == list(range(1, 10))
    assert first["progress"]["step"] == 9
    assert first["progress"]["left_seconds"] == pytest.approx(91 * 0.25)
    assert [one["doing"] for one in first["states"]] == [
        "runs the forward of microbatch 3 on stage 0",
        "waits for a message of rank 0 (1F2)",
    ]
    steps(run, 10, 12)
    second = live(run, first["place"])
    assert [one["step"] for one in second["steps"]] == [10, 11]
    assert second["progress"]["step"] == 11
    assert live(run, 10**9)["steps"] == []
    with pytest.raises(ArgumentError, match=r"no run\.json"):
        live(tmp_path)


def test_ranks_in_words() -> None:
    state = RankState(0, 0, (0,), action="2W1", failure="out of memory")
    assert describe_state(state, "failed") == "failed: out of memory"
    assert describe_state(state, "computes") == "computes the weight gradient of microbatch 1 on stage 2"
    assert describe_state(state, "silent") == "no heartbeat; last action: 2W1"
    assert describe_state(state, "between steps") == "is between steps"


def test_a_run_in_the_page(open_page: Any, studio: Start, tmp_path: Path) -> None:
    run = a_run(tmp_path / "gpt")
    page = open_page(f"{studio(tmp_path).link}&view=runs&run=gpt")
    page.wait_for_selector("[data-live=steps]")
    assert page.inner_text("[data-live=steps]") == "9 of 100"
    assert page.inner_text("[data-live=bubble]") == "20.0%"
    assert page.inner_text(".ranks tr[data-rank='1'] .does") == "waits for a message of rank 0 (1F2)"
    steps(run, 10, 12)
    says(run, RankState(1, 0, (1,), "elsewhere", 8, step=11, action="1B2", since=time.time()))
    page.wait_for_function("() => document.querySelector('[data-live=steps]')?.textContent === '11 of 100'")
    page.wait_for_function(
        "() => document.querySelector(\".ranks tr[data-rank='1'] .does\")?.textContent ==="
        " 'runs the backward of microbatch 2 on stage 1'"
    )
    page.wait_for_selector(".outcome")
    page.focus("[data-cut='2']")
    for _ in range(4):  # stage 2 begins earlier: it takes a fifth of stage 1
        page.keyboard.press("ArrowLeft")
    text = "cut=2:-0.20"
    page.wait_for_function("() => document.querySelector(\"[data-cut='2']\")?.getAttribute('aria-valuenow') === '-20'")
    (said,) = explain(load_trace([run]), what_ifs=[text]).what_ifs
    page.wait_for_function(
        "want => Number(document.querySelector('.outcome')?.dataset.seconds) === want", arg=said.step_seconds
    )
    assert said.gain > 0.05
    assert said.step_seconds == pytest.approx(timeline(1.0, 1.28, 1.32).makespan_seconds)
    assert "cut%3D2%3A-0.20" in page.url or "cut=2:-0.20" in page.url
    page.click("text=no stragglers")
    page.wait_for_function("() => document.querySelector('.outcome')?.textContent.includes('instead of')")


@pytest.mark.long
def test_a_cut_is_dragged(open_page: Any, studio: Start, tmp_path: Path) -> None:
    a_run(tmp_path / "gpt")
    page = open_page(f"{studio(tmp_path).link}&view=runs&run=gpt")
    box = page.wait_for_selector("[data-cut='1']").bounding_box()
    bar = page.query_selector(".stages").bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + 5 + 0.1 * bar["width"], box["y"] + 10, steps=5)
    page.mouse.up()
    page.wait_for_function(
        "() => Number(document.querySelector(\"[data-cut='1']\").getAttribute('aria-valuenow')) > 20"
    )
    moved = int(page.get_attribute("[data-cut='1']", "aria-valuenow")) / 100
    assert moved == pytest.approx(0.1 * 3.6 / 1.6, abs=0.011)  # a tenth of all work, of which stage 1 has 1.6 of 3.6


def test_plans_traces_and_schedules_open(tmp_path: Path) -> None:
    write_perfetto(timeline(1.0, 1.0, 1.5), tmp_path / "trace.json")
    found = open_view(tmp_path / "trace.json", "trace.json", what_ifs=["cut=even"])
    assert found["explanation"]["schedule"] == "1f1b"
    assert found["explanation"]["what_ifs"][0]["gain"] > 0
    assert [one["name"] for one in found["timeline"]["bands"]] == ["simulated", "what if cut=even"]
    assert found["timeline"]["bands"][1]["note"].startswith("simulated; the step at most -")
    write_csv(generate("zb-v", 3, 6), tmp_path / "mine.csv")
    assert open_view(tmp_path / "mine.csv", "mine.csv")["bubble"] < 0.2
    (tmp_path / "plan.json").write_text(json.dumps({"choice": {}, "version": 1}))
    with pytest.raises(ArgumentError, match="expected a plan of version 2"):
        open_view(tmp_path / "plan.json", "plan.json")
    with pytest.raises(ArgumentError, match="8 at once"):
        open_view(tmp_path / "trace.json", "trace.json", what_ifs=["cut=even"] * 9)
    with pytest.raises(ArgumentError, match="1000000 chunks: the studio tries up to 8"):
        open_view(tmp_path / "trace.json", "trace.json", what_ifs=["cut=even,schedule=interleaved-1f1b/1000000"])
    (tmp_path / "folder").mkdir()
    with pytest.raises(ArgumentError, match="a folder without a run"):
        open_view(tmp_path / "folder", "folder")


def test_runs_are_a_table_to_sort_and_filter(open_page: Any, studio: Start, tmp_path: Path) -> None:
    for name, schedule in (("b", "gpipe"), ("a", "zb-h1")):
        write_json_line(a_run(tmp_path / name) / "run.json", {**ABOUT.to_dict(), "name": name, "schedule": schedule})
    page = open_page(f"{studio(tmp_path).link}&view=runs")
    page.wait_for_selector(".entries tbody tr")
    names = page.locator(".entries tbody th")
    page.click(".entries thead button:text('Schedule')")
    assert names.all_inner_texts() == ["b", "a"]
    page.click(".entries thead button:text('Schedule')")
    assert names.all_inner_texts() == ["a", "b"]
    assert page.get_attribute(".entries thead th:has-text('Schedule')", "aria-sort") == "descending"
    assert "250 ms" in page.inner_text(".entries tbody tr"), "from one step's end to the next"
    page.fill("input[type=search]", "gpipe training")
    assert names.all_inner_texts() == ["b"]


def test_runs_lie_over_each_other(open_page: Any, studio: Start, tmp_path: Path) -> None:
    for name, schedule, speed in (("a", "gpipe", 0.25), ("b", "1f1b", 0.2)):
        folder = a_run(tmp_path / name)
        write_json_line(folder / "run.json", {**ABOUT.to_dict(), "name": name, "schedule": schedule})
        records = [StepRecord(step, 3.0 - step * speed, speed, 64, speed * step) for step in range(1, 10)]
        (folder / "steps.jsonl").write_text("".join(one.to_line() for one in records))
    page = open_page(f"{studio(tmp_path).link}&view=runs")
    page.wait_for_selector(".entries tbody tr")
    for name in "ab":
        with page.expect_response("**/api/library*"):
            page.click(f"[data-compare={name}]")
        page.wait_for_selector(f"[data-compare={name}]:checked")
    page.wait_for_selector(".compared canvas")
    assert page.locator(".compared thead th").all_inner_texts() == ["a", "b"]
    assert page.locator("[data-fact=schedule]").all_inner_texts() == ["gpipe", "1f1b"]
    assert page.locator("[data-fact='step time']").all_inner_texts() == ["250 ms", "200 ms (\u221220.0%)"]
    assert page.locator("[data-fact='loss']").all_inner_texts() == ["0.75", "1.2"]
    assert page.locator(".compared polyline").count() == 4, "loss and step time of each"
    computes = page.locator("[data-fact='computes, of a rank on average']").all_inner_texts()
    assert computes[0] == f"{1000 * sum(timeline(1.0, 1.6, 1.0).busy_seconds(rank) for rank in range(3)) / 3:.0f} ms"
    assert "compare=a%7Cb" in page.url
    page.click("[data-compare=a]")
    page.wait_for_function("() => !document.querySelector('.compared table')")
