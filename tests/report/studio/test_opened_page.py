"""What the studio opens shows the figures of `penstock plan` and `penstock explain`, and the report of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_guard import client

from cli.command_line import as_json
from penstock._base.files import write_json_line
from penstock.costs import Profile, UnitCost
from penstock.report.studio import background
from penstock.report.studio.app import Server
from penstock.report.studio.app import policy as policy_of
from penstock.report.studio.library import Library
from penstock.report.web.page import page as report_page
from penstock.report.web.sources import load_contents
from scaffolding.run_folders import ABOUT, a_run

Start = Callable[..., Server]


def fact(page: Any, name: str) -> float:
    return float(page.get_attribute(f"[data-fact='{name}']", "data-value"))


def a_plan(folder: Path) -> Any:
    """A plan for two devices, as `penstock plan` writes it to plan.json; its first row."""
    units = tuple(UnitCost(f"layers.{i}", s, 2 * s, 100, 10, 20) for i, s in enumerate([0.010, 0.014, 0.010, 0.012]))
    file = folder.parent / "profile.json"
    shapes = {"layers.0.weight": (1, 1)}
    Profile(units, "cpu", "float32", shapes, inputs={"args[0]": "float32[2, 8]"}, rows=2).save(file)
    options = ("--profile", str(file), "--devices", "2", "--global-batch-size", "8", "--search-time", "0")
    return as_json("plan", *options, "--out", str(folder / "plan.json"))


@pytest.mark.long
def test_a_plan_opens_with_the_plans_figures(open_page: Any, studio: Start, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    best = a_plan(folder)["plans"][0]
    page = open_page(f"{studio(folder).link}&view=runs")
    page.click("[data-entry='plan.json']")
    page.wait_for_selector("#runs canvas")
    assert fact(page, "step_seconds") == best["step_seconds"]
    assert fact(page, "memory_bytes") == max(best["memory_bytes"])
    assert fact(page, "bubble") == pytest.approx(sum(best["idle"].values()))
    assert fact(page, "rows_per_second") == pytest.approx(8 / best["step_seconds"])
    assert page.inner_text("[data-fact=schedule]") == best["choice"]["schedule"]
    assert "its cuts cannot be dragged" in page.inner_text("#runs .facts + .notes")
    page.goto(page.evaluate("document.querySelector('[data-report]').href"))  # in this browser, which has the cookie
    assert "plan (prediction only)" in page.inner_text("header")


def test_a_run_opens_with_the_figures_of_explain_and_its_report(open_page: Any, studio: Start, tmp_path: Path) -> None:
    folder = a_run(tmp_path / "gpt")
    server = studio(tmp_path)
    page = open_page(f"{server.link}&view=runs&run=gpt&step=2")
    page.wait_for_selector("#runs canvas")
    found = as_json("explain", str(folder), "--step", "2")
    assert float(page.get_attribute(".outcome", "data-seconds")) == found["step_seconds"]
    with page.context.expect_page() as opening:
        page.click("[data-report]")
    report = opening.value
    report.on("console", lambda one: page.errors.append(one.text) if one.type == "error" else None)
    report.wait_for_selector("#timeline canvas")
    assert report.content().count("measured, step 2") > 0
    (width,) = {one.evaluate("one => one.style.width") for one in report.query_selector_all("i.computes >> nth=1")}
    assert width.endswith("%")


def test_a_report_is_that_of_the_command_and_runs_nothing_else(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "gpt")
    answer = client(tmp_path).get("/report", params={"name": "gpt"})
    assert answer.text == report_page(load_contents([folder])) == background.report(folder)
    policy = answer.headers["content-security-policy"]
    scripts = next(part for part in policy.split(";") if "script-src" in part)
    assert scripts.count("'sha256-") == 1
    assert "unsafe" not in scripts
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy
    refused = client(tmp_path).get("/report", params={"name": "gpt", "step": "3"}).json()
    assert "no timeline of step 3" in refused["error"]
    injected = answer.text.replace("<main>", '<main><script type="module">steal()</script><style>i {}</style>')
    assert policy_of(injected) == policy  # only the page's own are let run


def test_what_a_run_adds_is_in_the_next_report(tmp_path: Path) -> None:
    steps = a_run(tmp_path / "gpt") / "steps.jsonl"
    before = client(tmp_path).get("/report", params={"name": "gpt"}).text
    last = json.loads(steps.read_text().splitlines()[-1])
    slow = [{**last, "step": last["step"] + n, "seconds": 30 * last["seconds"]} for n in range(1, 31)]
    with steps.open("a") as file:
        file.writelines(f"{json.dumps(one)}\n" for one in slow)
    after = client(tmp_path).get("/report", params={"name": "gpt"}).text
    took = re.compile(r"the last \d+ steps took ([\d.]+) times as long as those with a timeline")
    assert [one[1] for one in took.finditer(before)] != [one[1] for one in took.finditer(after)] != []


def test_a_damaged_run_is_one_entry_with_its_reason(open_page: Any, studio: Start, tmp_path: Path) -> None:
    folder = a_run(tmp_path / "gpt")
    (folder / "run.json").write_text((folder / "run.json").read_text()[:100])  # a disk that was full
    (entry,) = Library(tmp_path).entries()
    assert (entry["name"], entry["kind"]) == ("gpt", "run")
    assert entry["damage"].startswith("run.json is not JSON")
    page = open_page(f"{studio(tmp_path).link}&view=runs")
    page.wait_for_selector(".damage")
    (text,) = page.locator(".library tbody tr").all_inner_texts()
    assert "damaged run" in text
    assert "run.json is not JSON" in text
    write_json_line(folder / "run.json", {**ABOUT.to_dict(), "version": 99})
    (entry,) = Library(tmp_path).entries()
    assert "99" in entry["damage"]
    assert str(tmp_path) not in entry["damage"]
    (folder / "run.json").write_text('{"workload": "all-reduce", "hosts": 2}')  # another tool's
    kinds = {(entry["name"], entry["kind"], entry["damage"]) for entry in Library(tmp_path).entries()}
    assert ("gpt/run.json", "file", "") in kinds
