"""The studio in a browser: sliders change the numbers to those of the command line, words are the schedule's, files
open again, links reproduce the view, and nothing is on the console."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from cli.command_line import as_json
from penstock.plan.explain import explain, load_trace
from penstock.report import walkthrough
from penstock.report.studio.app import Server
from penstock.schedule import generate, read_csv
from scaffolding.browser import barriers
from scaffolding.run_folders import a_run

Start = Callable[..., Server]


def ready(open_page: Any, server: Server, view: str = "", **more: Any) -> Any:
    page = open_page(f"{server.link}&{view}", **more)
    page.wait_for_selector("html[data-ready]")
    return page


def slide(page: Any, name: str, value: float) -> None:
    page.evaluate(
        "([name, value]) => { const input = document.getElementById(`in-${name}`);"
        " input.value = value; input.dispatchEvent(new Event('input')); }",
        [name, value],
    )


def figure(page: Any, schedule: str, name: str) -> float:
    return float(page.get_attribute(f"tr[data-schedule='{schedule}'] [data-figure={name}]", "data-value"))


def test_sliders_change_the_numbers_to_those_of_simulate(open_page: Any, studio: Start) -> None:
    page = ready(open_page, studio())
    page.wait_for_selector("tr[data-schedule=zb-h1]")
    moves = {"ranks": 3, "microbatches": 12, "forward": 1.5, "backward_input": 0.75, "backward_weight": 2, "comm": 0.25}
    for name, value in moves.items():
        slide(page, name, value)
    found = as_json(
        *("simulate", "--schedule", "gpipe,1f1b,zb-h1", "--ranks", "3", "--microbatches", "12", "--forward", "1.5"),
        *("--backward-input", "0.75", "--backward-weight", "2", "--link-latency", "0.25"),
    )
    said = {one["name"]: one for one in found["schedules"]}
    want = said["1f1b"]["span"]
    page.wait_for_function(
        "([where, want]) => Number(document.querySelector(where)?.dataset.value) === want",
        arg=["tr[data-schedule='1f1b'] [data-figure=span]", want],
    )
    for name, one in said.items():
        assert figure(page, name, "span") == one["span"]
        assert figure(page, name, "makespan") == one["makespan"]
        assert figure(page, name, "bubble_rate") == one["bubble_rate"]
        assert figure(page, name, "peak_activations") == max(one["peak_activations"])
        shown = page.inner_text(f"tr[data-schedule='{name}'] [data-figure=bubble_rate]")
        assert shown == f"{100 * one['bubble_rate']:.1f}%"
    assert len(page.query_selector_all(".picture canvas")) == 1


def test_numbers_can_be_typed(open_page: Any, studio: Start) -> None:
    page = ready(open_page, studio())
    page.wait_for_selector("tr[data-schedule=zb-h1]")
    page.fill("[aria-label='Last stage heavier, %, typed']", "35")
    page.keyboard.press("Tab")
    page.fill("[aria-label='Ranks, typed']", "99")  # more than there may be
    page.keyboard.press("Tab")
    page.wait_for_function("location.hash.includes('ranks=64') && location.hash.includes('head=0.35')")
    assert page.input_value("#in-ranks") == page.input_value("[aria-label='Ranks, typed']") == "64"


@pytest.mark.long
def test_a_memory_limit_and_a_search(open_page: Any, studio: Start) -> None:
    page = ready(open_page, studio(), "schedules=1f1b,zb-h2&memory_limit=4")
    page.wait_for_selector("tr[data-schedule=zb-h2] td.over")
    assert not page.query_selector_all("tr[data-schedule='1f1b'] td.over")
    assert page.query_selector("tr[data-schedule='1f1b'] td.best")  # of those that fit
    assert not page.query_selector("tr[data-schedule=zb-h2] td.best")
    page.check("#searched")
    page.wait_for_selector("tr[data-schedule=search]")
    assert figure(page, "search", "span") <= figure(page, "1f1b", "span")
    assert figure(page, "search", "peak_activations") <= 4
    assert "best" in page.inner_text("tr[data-schedule=search] th")


@pytest.mark.long
def test_what_numbers_do_not_allow_is_said(open_page: Any, studio: Start) -> None:
    server = studio()
    page = ready(open_page, server, "schedules=1f1b,chimera&ranks=3")
    page.wait_for_selector("tr[data-schedule='1f1b']")
    assert "chimera works with an even number of ranks" in page.inner_text("#play")
    page = ready(open_page, server, "schedules=gpipe,1f1b,zb-h1,zb-h2&ranks=64&microbatches=512")
    page.wait_for_selector("#trouble:not([hidden])")
    assert "the studio shows 300,000; take fewer" in page.inner_text("#trouble")
    slide(page, "ranks", 2)
    slide(page, "microbatches", 8)
    page.wait_for_selector("#play:not(.stale) tr[data-schedule='1f1b']")
    slide(page, "ranks", 64)
    slide(page, "microbatches", 512)
    page.wait_for_selector("#play.stale")  # figures of other numbers are gray


@pytest.mark.parametrize("name", ["1f1b", pytest.param("zb-v", marks=pytest.mark.long)])
def test_words_are_right_in_every_slot(open_page: Any, studio: Start, name: str) -> None:
    page = ready(open_page, studio(), f"view=walk&ranks=3&microbatches=4&right={name}")
    walks = {"left": walkthrough(generate("naive", 3, 4)), "right": walkthrough(generate(name, 3, 4))}
    page.wait_for_selector("[data-side=right] .words li")
    for slot in range(max(walk.slots for walk in walks.values())):
        for side, walk in walks.items():
            lines = page.locator(f"[data-side={side}] .words li span").all_inner_texts()
            head = page.inner_text(f"[data-side={side}] h2")
            if slot < walk.slots:
                assert lines == [f"{moment.text}." for moment in walk.at(slot)]
                assert head == walk.headline(slot)
            else:
                assert (lines, head) == ([], f"{walk.schedule.name} has finished: it took {walk.slots} slots")
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Home")
    assert page.inner_text("#slot-number").startswith("slot 0 of")
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    last = max(walk.slots for walk in walks.values()) - 1
    assert page.inner_text("#slot-number") == f"slot {last - 1} of 0 to {last}"


@pytest.mark.long
def test_a_link_reproduces_the_view(open_page: Any, studio: Start) -> None:
    server = studio()
    page = ready(open_page, server)
    slide(page, "ranks", 5)
    slide(page, "head", 0.5)
    page.uncheck("input[value=gpipe]")
    page.check("input[value=zb-v]")
    page.wait_for_selector("tr[data-schedule=zb-v]")
    again = ready(open_page, server, page.url.partition("#")[2])
    again.wait_for_selector("tr[data-schedule=zb-v]")
    page.wait_for_function("() => document.querySelectorAll('tr[data-schedule]').length === 3")
    for name in ("1f1b", "zb-h1", "zb-v"):
        assert figure(again, name, "span") == figure(page, name, "span")
    assert not again.query_selector_all("tr[data-schedule=gpipe]")
    assert again.input_value("#in-ranks") == "5"
    walk = ready(open_page, server, "view=walk&slot=7&left=gpipe")
    walk.wait_for_selector("[data-side=left] .words li")
    assert walk.inner_text("#slot-number").startswith("slot 7 of")
    assert walk.input_value("[data-side=left] select") == "gpipe"
    for slot, shown in (("1.5", "1"), ("x", "0"), ("-3", "0")):
        walk = ready(open_page, server, f"view=walk&slot={slot}")
        walk.wait_for_selector("[data-side=left] .words li")
        assert walk.inner_text("#slot-number").startswith(f"slot {shown} of")


def test_files_open_again(open_page: Any, studio: Start, tmp_path: Path) -> None:
    page = ready(open_page, studio(), "ranks=3&microbatches=5&schedules=zb-h1,interleaved-1f1b&searched=0.1")
    page.wait_for_selector("[data-files=search]")
    for name, chunks in (("zb-h1", None), ("interleaved-1f1b", 2)):
        with page.expect_download() as download:
            page.click(f"[data-files={name}] [data-kind=csv]")
        file = tmp_path / f"{name}.csv"
        download.value.save_as(file)
        assert read_csv(file).rows == generate(name, 3, 5, chunks).rows
    with page.expect_download() as download:
        page.click("[data-files=search] [data-kind=csv]")
    assert download.value.suggested_filename == "search-p3-m5.csv"
    download.value.save_as(tmp_path / "search.csv")
    assert read_csv(io.StringIO((tmp_path / "search.csv").read_text())).microbatches == 5
    with page.expect_download() as download:
        page.click("[data-files=zb-h1] [data-kind=svg]")
    drawn = ElementTree.fromstring(Path(download.value.path()).read_text())
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
    with page.expect_download() as download:
        page.click("[data-files=zb-h1] [data-kind=png]")
    assert download.value.suggested_filename == "zb-h1-p3-m5.png"
    picture = Path(download.value.path()).read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(picture[16:20], "big") == pytest.approx(2 * float(drawn.attrib["width"]), abs=2)
    with page.expect_download() as download:
        page.click("[data-files=zb-h1] [data-kind=perfetto]")
    file = tmp_path / download.value.suggested_filename
    download.value.save_as(file)
    found = explain(load_trace([file]))
    assert found.step.slowest.schedule.name == "zb-h1"
    assert found.step.seconds == pytest.approx(figure(page, "zb-h1", "makespan"))


def test_a_token_opens_the_page_and_leaves_the_address(open_page: Any, studio: Start) -> None:
    server = studio()
    page = ready(open_page, server, "ranks=2")
    assert "token" not in page.url
    assert page.url.endswith("#ranks=2")
    page.wait_for_selector("tr[data-schedule='1f1b']")
    other = open_page(server.address)
    other.get_by_text("the token is missing or wrong").wait_for()
    other.errors.clear()
    other.evaluate("address => { location = address; }", server.link)  # into the page that is open
    other.reload()
    other.wait_for_selector("html[data-ready]")


# -- with a keyboard or a screen reader: axe-core finds nothing, in either theme and size ------------------------------

VIEWS = {
    "view=play&schedules=1f1b,zb-h1": "tr[data-schedule=zb-h1]",
    "view=runs&run=a&what_if=schedule%3Dgpipe": ".outcome",
}
MORE = {
    "view=walk&slot=3": ".slots",
    "view=runs": ".entries tbody tr",
    "view=runs&compare=a|b": ".compared table",
}


@pytest.mark.parametrize("views", [VIEWS, pytest.param(MORE, marks=pytest.mark.long)], ids=["some", "others"])
def test_axe_finds_nothing_in_any_view(open_page: Any, studio: Start, tmp_path: Path, views: dict[str, str]) -> None:
    for name in "ab":
        a_run(tmp_path / name)
    link, found = studio(tmp_path).link, {}
    for number, (view, there) in enumerate(views.items()):
        page = open_page(f"{link}&{view}", size=("wide", "phone")[number % 2], dark=number % 2 == 1)
        page.wait_for_selector("html[data-ready]")
        page.wait_for_selector(there)
        found[view] = barriers(page)
        page.goto("about:blank")  # it asks nothing more
    page.goto(f"{link.partition('#')[0]}report?name=a")
    page.wait_for_selector("#timeline canvas")
    found["report"] = barriers(page)
    assert not any(found.values()), found


def test_tabs_by_keyboard_and_a_theme_that_stays(open_page: Any, studio: Start) -> None:
    page = open_page(studio().link)
    page.wait_for_selector("html[data-ready]")
    page.focus("#tab-play")
    seen = []
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "End", "ArrowLeft", "Home", "ArrowLeft"):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"
        seen.append(page.evaluate("document.activeElement.dataset.view"))
    assert seen == ["walk", "runs", "play", "runs", "walk", "play", "runs"]
    page.click("#theme")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.get_attribute("html", "data-theme") == "dark"
    page.click("#tab-play")
    page.wait_for_selector("#in-forward")
    assert page.get_attribute("#in-forward", "aria-valuetext") == "1 units of time"
