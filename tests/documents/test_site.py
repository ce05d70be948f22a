"""The site builds without a warning, loads nothing from elsewhere, lacks no page. Its sources: test_documents.py."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from urllib.parse import unquote

import pytest
from blocks import ROOT, spoken_names

import penstock
from penstock.cli import VERBS
from penstock.schedule import generate
from penstock.simulate import StageCost, simulate
from scaffolding.browser import Opener, barriers

pytestmark = pytest.mark.long

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` builds it: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html", str(DOCS), str(folder)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def pages() -> list[Path]:
    return sorted(DOCS.rglob("*.md"))


def test_it_has_every_page(site: Path) -> None:
    for page in pages():
        assert (site / page.relative_to(DOCS)).with_suffix(".html").exists(), page


def test_links_within_it_lead_somewhere(site: Path) -> None:
    known = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html") if "_static" not in page.parts}
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in known.items()}
    for page, text in known.items():
        for link in re.findall(r'<a\b[^>]*\bhref="([^":]*)"', text):
            path, _, anchor = unquote(link).partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), (page, link)
            assert not anchor or target not in anchors or anchor in anchors[target], (page, link)


@pytest.mark.parametrize("old", ["proving", "watching", "trouble", "hosts", "bad-network"])
def test_old_addresses_lead_to_the_new_pages(site: Path, old: str) -> None:
    text = (site / "guides" / f"{old}.html").read_text(encoding="utf-8")
    assert (site / "guides" / re.findall(r'content="0; url=([^"]+)"', text)[0]).exists()


def test_the_reference_has_every_public_name(site: Path) -> None:
    everything = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html"))
    inside = {"penstock.partition", "penstock.runtime.transport"}  # of those only Extending Penstock speaks
    parts = [name.split(".") for name in spoken_names()]
    spoken = {".".join(each[:depth]) for each in parts for depth in (2, 3)} - inside
    packages = [found for name in spoken if (found := _package(name)) is not None]
    assert len(packages) > 10
    for package in [penstock, *packages]:
        for name in package.__all__:
            if isinstance(getattr(package, name), type | FunctionType):
                assert re.search(rf'id="penstock[\w.]*\.{name}"', everything), (package, name)


def _package(name: str) -> ModuleType | None:
    """The package of that name, if it has an interface."""
    with suppress(ModuleNotFoundError):  # a name inside a function or class
        if find_spec(name) is not None and hasattr(found := import_module(name), "__all__"):
            return found
    return None


def test_the_reference_has_every_command(site: Path) -> None:
    commands = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    for verb in (*VERBS, "fabric compare"):
        assert f'<section id="penstock-{verb.replace(" ", "-")}">' in commands
    names = re.findall(r'id="(penstock\.[\w.]+)"', (site / "reference" / "api.html").read_text())
    assert names[0] == "penstock.pipeline", "the API opens with it"


def test_it_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="([^"]+)"', page.read_text(encoding="utf-8"))
        assert loaded or page.parent.name == "_static", "which need nothing else"
        assert not [address for address in loaded if re.match(r"\w+:|//", address)], page


def test_its_figures_are_drawn_from_schedules(site: Path) -> None:
    drawn = (site / "concepts" / "zero-bubble.html").read_text(encoding="utf-8")
    assert drawn.count('class="penstock-light"') == drawn.count('class="penstock-dark"') > 0  # the theme shows one
    live = (site / "_static" / "live-schedule.html").read_text(encoding="utf-8")
    assert "zb-h1: 27 slots" in live  # (m + p - 1) * 3 less what W fills: 24 + 3


@pytest.mark.parametrize(("size", "dark"), [("wide", False), ("phone", True)])
def test_its_pages_fit_any_screen_and_show_the_figure_for_it(
    site: Path, open_page: Opener, size: str, dark: bool
) -> None:
    page = open_page(site / "concepts" / "zero-bubble.html", size, dark=dark)
    for picture in page.locator("figure svg").all():
        assert picture.is_visible() is (f"penstock-{'dark' if dark else 'light'}" in picture.get_attribute("class"))
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    heights = page.locator(".formula math").evaluate_all("all => all.map(one => one.getBoundingClientRect().height)")
    assert 0 < max(heights) < 60, "177 if each letter of a formula begins a line"


def test_names_in_tables_stay_whole_on_a_phone(site: Path, open_page: Opener) -> None:
    page = open_page(site / "guides" / "migrating.html", "phone")
    lines = "all => all.map((one) => [one.textContent, one.getClientRects().length])"
    names = page.locator("td code .pre").evaluate_all(lines)
    assert len(names) > 50
    assert [name for name, count in names if count > 1] == []


def test_without_scripts_the_home_page_has_a_picture(site: Path, chromium: Any) -> None:
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((site / "index.html").as_uri())
    assert page.locator(".live-schedule svg >> visible=true").count() == 1
    assert not page.locator(".live-schedule iframe").is_visible()
    context.close()


def test_search_works_from_disk(site: Path, open_page: Opener) -> None:
    page = open_page(site / "index.html")
    page.locator("input[name=q]").first.fill("zero bubble")
    page.locator("input[name=q]").first.press("Enter")
    found = page.locator("#search-results li a")
    found.first.wait_for()
    assert "Zero bubble" in " ".join(found.all_inner_texts())


def test_the_live_schedule_follows_what_is_chosen(site: Path, open_page: Opener) -> None:
    page = open_page(site / "index.html", dark=True)
    page.locator(".live-schedule").scroll_into_view_if_needed()
    live = page.frame_locator(".live-schedule iframe")
    live.locator("html[data-theme=dark]").wait_for()
    live.locator("select[name=ranks]").select_option("8")
    live.locator("input[value=gpipe]").uncheck()
    shown = "() => view.bands.map((band) => [band.name, band.lanes.length])"
    timeline = simulate(generate("1f1b", 8, 8), StageCost(1.0, 1.0, 1.0))
    (one, two) = page.frames[1].evaluate(shown)
    assert one == [f"1f1b: {timeline.makespan_seconds:g} slots, bubble {timeline.bubble_rate:.0%}", 8]
    assert two[0].startswith("zb-h1: ")


@pytest.mark.timeout(900)  # with the site, if this is the first test that needs it
@pytest.mark.parametrize(
    ("name", "size", "dark"),
    [("index", "phone", True), ("guides/monitoring", "wide", False)],
)
def test_axe_finds_nothing(site: Path, open_page: Opener, name: str, size: str, dark: bool) -> None:
    page = open_page(site / f"{name}.html", size=size, dark=dark)
    page.wait_for_load_state()
    assert barriers(page) == []
