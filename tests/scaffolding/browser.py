"""A real browser for tests of pages: one Chromium per test session, without a network, in which console errors fail."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SIZES = {"wide": (1280, 800), "phone": (390, 844)}
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Playwright's handle of a running Chromium; skips the test, with the reason, where there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("there is no chromium: apt-get install chromium, and pages are tested in it")
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[test]'")
    with sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=[*FLAGS])
        yield browser
        browser.close()


Opener = Callable[..., Any]


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Opener]:
    """Opens a file or an address of this machine in a page of its own, as `open_page(where, size="wide", dark=False)`.

    `touch=True` makes it a touch screen. Whatever else a page asks for is refused; an error on its console, or in a
    script, fails the test at its end, unless the test takes it out of `page.errors`.
    """
    contexts, errors = [], []

    def opened(where: Path | str, size: str = "wide", *, dark: bool = False, touch: bool = False) -> Any:
        width, height = SIZES[size]
        context = chromium.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            has_touch=touch,
            accept_downloads=True,
        )
        contexts.append(context)
        context.set_default_timeout(60_000)  # of waits; a busy machine needs it
        context.route("**/*", lambda route: _local(route, errors))
        page = context.new_page()
        page.errors = errors
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(where.as_uri() if isinstance(where, Path) else where)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not errors, errors


def barriers(page: Any) -> list[str]:
    """What axe-core finds on a page, a line for each element."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install '.[test]'").Axe()
    options = {"resultTypes": ["violations"], "preload": False}  # which would fetch style sheets
    found = axe.run(page, options=options).response["violations"]
    return [f"{one['id']}: {node['html'][:160]} {node['failureSummary']}" for one in found for node in one["nodes"]]


def _local(route: Any, errors: list[str]) -> None:
    url = route.request.url
    if url.startswith(("file:", "data:", "blob:", "http://127.0.0.1:", "http://localhost:", "http://[::1]:")):
        route.continue_()
    else:
        errors.append(f"the page asks for {url}")
        route.abort()
