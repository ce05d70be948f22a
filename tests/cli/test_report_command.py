"""`penstock report`: one page of what explain, a plan or the fabric found, with their numbers, for any browser."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import as_json, output, refusal
from test_explain import measured

from penstock.costs import Profile, UnitCost
from penstock.report.frame import frame
from penstock.report.web.screenshot import write_picture
from penstock.schedule import Op, generate
from penstock.simulate import StageCost, simulate
from scaffolding.nanoseconds import merged


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(measured().to_dict()))
    return path


def report(*arguments: str | Path) -> Path:
    """The page that the command writes."""
    *_, said = output("report", *map(str, arguments), columns=200).splitlines()[:1]
    return Path(said.removeprefix("wrote "))


def numbers(page: Any) -> Any:
    return json.loads(page.locator("#numbers").text_content())


def seconds(text: str) -> float:
    value, unit = re.fullmatch(r"([\d.,]+) (s|ms|µs)", text.strip()).groups()
    return float(value.replace(",", "")) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit]


def test_its_numbers_and_its_timeline_are_those_of_explain(trace: Path, open_page: Any) -> None:
    made = report(trace)
    assert made == trace.with_suffix(".html")
    assert not re.search(r'(?:src|href)="', made.read_text()), "it names no other file"
    for option, name in (("--out", "x.json"), ("--png", "x.svg")):
        assert "expected a name that ends in" in refusal("report", str(trace), option, str(trace.with_name(name)))
    page, found = open_page(made), as_json("explain", str(trace))
    assert numbers(page) == found
    cards = dict(
        zip(page.locator(".figures dt").all_inner_texts(), page.locator(".value").all_inner_texts(), strict=True)
    )
    assert seconds(cards["a step takes"]) == pytest.approx(found["step_seconds"], rel=1e-3)
    assert seconds(cards["if perfectly balanced"]) == pytest.approx(found["even_seconds"], rel=1e-3)
    shares = page.locator(".shares").first
    column = shares.locator("th").all_inner_texts().index("computes")
    for rank, line in enumerate(found["by_rank"]):
        computes = shares.locator("tr").nth(rank + 1).locator("td").nth(column).inner_text()
        assert seconds(computes) == pytest.approx(line["compute_seconds"], rel=1e-3)
    compute = sum(line["compute_seconds"] for line in found["by_rank"])
    idle = sum(sum(line["idle_seconds"].values()) for line in found["by_rank"])
    assert cards["idle"] == f"{idle / (compute + idle):.1%}"
    assert page.locator(".changes tr").count() == min(6, len(found["changes"]))
    for change in found["changes"][:1]:
        assert change["text"] in page.inner_text(".changes")
    assert page.evaluate("timeline.bands.map((band) => band.name)") == ["simulated", "if perfectly balanced"]
    spans = list(measured())
    ends = page.evaluate("timeline.bands[0].lanes.flatMap((lane) => [...lane.end])")
    assert ends == pytest.approx([span.end_seconds for span in spans])
    assert page.evaluate("timeline.bands[1].end") == pytest.approx(found["even_seconds"])
    page.click("#actions summary")
    page.select_option("#actions select", label="simulated: rank 2")
    rows = page.locator("#actions tr").all_inner_texts()
    mine = [span for span in spans if span.rank == 2]
    assert len(rows) == 1 + len(mine)
    assert rows[1].split()[0] == str(mine[0].action)


def test_ranks_that_took_turns_are_shown_and_not_compared(tmp_path: Path, open_page: Any) -> None:
    path = tmp_path / "turns.json"
    path.write_text(json.dumps({**measured().to_dict(), "in_turns": True}))
    page = open_page(report(path))
    assert "One process ran all ranks in turn" in page.inner_text(".warning")
    assert "bubble" not in page.inner_text(".figures")
    assert page.evaluate("timeline.bands[0].hasCritical") is False


def test_a_plan_is_shown_as_a_prediction(tmp_path: Path, open_page: Any) -> None:
    path = tmp_path / "plan.json"
    plan = {**_plan(), "held_bytes": [2e9, 3e9]}
    path.write_text(json.dumps(plan))
    page = open_page(report(path))
    text = page.inner_text(".figures")
    curves = page.evaluate(
        "timeline.bands[0].lanes.map(({memory: {bytes, peak, limit}}) => [Math.min(...bytes), peak, limit])"
    )
    assert curves == [[2e9, 5e9, 8e9], [3e9, 4e9, 8e9]]
    assert "prediction only" in page.inner_text("header")
    assert f"{plan['step_seconds'] * 1000:.4g}"[:4] in text
    assert "8.0 GB" in page.inner_text("main"), "the limit"
    assert page.evaluate("timeline.bands.map((band) => band.name)") == ["predicted"]


def test_a_profile_gives_a_trace_memory(trace: Path, tmp_path: Path, open_page: Any) -> None:
    kept = [3 * 10**6, 10**6, 10**6, 10**6]
    units = [UnitCost(f"layers.{n}", 0.01, 0.01, 0.01, activation_bytes=one) for n, one in enumerate(kept)]
    Profile(tuple(units), "cpu", "float32", {"layers.0.weight": (1, 1)}).save(tmp_path / "profile.json")
    cuts = ("--cuts", "layers.1,layers.2,layers.3")
    page = open_page(report(trace, "--profile", tmp_path / "profile.json", *cuts))
    peaks = page.evaluate("timeline.bands[0].lanes.map((lane) => lane.memory.peak)")
    assert peaks == [4 * kept[0], 3 * kept[1], 2 * kept[2], kept[3]], "1F1B holds fewer from rank to rank"
    assert "12.0 MB" in page.locator(".shares").last.inner_text()


def _plan() -> dict[str, Any]:
    from penstock.plan import ParallelConfig, Plan

    made = Plan(
        ParallelConfig(2, 2, 1, "1f1b", 4, 8), ("layer2",), (), (0.03, 0.03), 0.15, 0.01,
        {"warm-up": 0.1, "cool-down": 0.1},
        (5e9, 4e9), (8e9, 8e9),
    )  # fmt: skip
    return made.to_dict()


def test_nothing_in_a_file_becomes_markup(tmp_path: Path, open_page: Any) -> None:
    evil = "<img src=x onerror=alert(1)></script><script>window.ran=1<"
    folder = tmp_path / evil.replace("/", "_")
    folder.mkdir()
    path = folder / (evil.replace("/", "_") + ".json")
    path.write_text(json.dumps({**measured().to_dict(), "in_turns": True}))
    page = open_page(report(path, "--out", tmp_path / "page.html"))
    assert "onerror" in page.inner_text("h1")
    assert page.evaluate("[window.ran, document.querySelectorAll('img').length]") == [None, 0]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    forwards = [[span for span in measured().spans(rank) if span.action.op is Op.F] for rank in range(4)]
    for content, said in (("{}", str(path)), (json.dumps(merged(forwards).to_dict()), "32 actions, and no backward")):
        path.write_text(content)
        assert said in refusal("report", str(path))
    assert not path.with_suffix(".html").exists()


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium")
def test_a_picture_shows_all_ranks(tmp_path: Path, open_page: Any) -> None:
    file = tmp_path / "many.json"
    file.write_text(json.dumps(simulate(generate("1f1b", 100, 4), StageCost(1.0, 1.0, 1.0)).to_dict()))
    output("report", str(file), "--png", str(tmp_path / "many.png"))
    page = open_page(tmp_path / "many.html")
    hidden = page.evaluate("timeline.total - timeline.shown")
    high = page.evaluate("document.body.getBoundingClientRect().height")
    assert hidden > 1000
    data = (tmp_path / "many.png").read_bytes()
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert (data[:4], width) == (b"\x89PNG", 1280)
    assert height >= high + hidden - 1


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium")
def test_a_picture_of_a_page_without_scripts_is_as_high_as_the_page(tmp_path: Path) -> None:
    write_picture(frame("high", '<div style="height: 2000px">&lt;/body></div>'), tmp_path / "page.png")
    height = int.from_bytes((tmp_path / "page.png").read_bytes()[20:24], "big")
    assert 2000 <= height < 2200
