"""Pages as people meet them who use a keyboard or a screen reader: axe-core finds nothing, in either theme and size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.report.studio.app import Server
from scaffolding.browser import barriers
from scaffolding.run_folders import a_run

Start = Callable[..., Server]
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
def test_axe_finds_nothing(open_page: Any, studio: Start, tmp_path: Path, views: dict[str, str]) -> None:
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
