"""Pages and drawings as PNG, made by a browser without a window."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from penstock._base.errors import ArgumentError, MissingExtraError
from penstock._base.files import replacing

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--virtual-time-budget=4000",
)  # fmt: skip
_SECONDS = 120
_HIGHEST = 16_000
"""Pixels: what a browser can draw in one picture."""
_TELLS_HEIGHT = """<script>
addEventListener("load", () => {
  document.documentElement.dataset.height = String(Math.ceil(document.body.getBoundingClientRect().height));
});
</script>
"""
"""Added to the page: a picture is as high as its window, which has to be known before the picture is made."""


def browser(path: Path) -> str:
    """Return the path of a browser that can draw pages. Raise MissingExtraError if there is none.

    Args:
        path: of the picture that it is to make.
    """
    found = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if found is None:
        raise MissingExtraError(
            f"--png {path}: a browser draws the picture, and there is none of {', '.join(BROWSERS[:3])}: install "
            "chromium, or print the page from yours"
        )
    return found


def write_picture(page: str, path: Path, width: int = 1280, scale: int = 1) -> None:
    """Draw a page, as high as it is.

    Args:
        page: its HTML.
        path: of the PNG.
        width: of the window, in pixels.
        scale: how many dots the picture has to each of these.

    Raises:
        MissingExtraError: there is no browser.
        ArgumentError: the picture could not be made or written.
    """
    found = browser(path)
    with tempfile.TemporaryDirectory() as folder:
        source, drawn = Path(folder) / "page.html", Path(folder) / "page.png"
        head, end, rest = page.rpartition("</body>")
        whole = head.replace("<html", "<html data-picture", 1)
        source.write_text(whole + _TELLS_HEIGHT + end + rest, encoding="utf-8")
        own = (found, *_FLAGS, f"--force-device-scale-factor={scale}", f"--user-data-dir={folder}/profile")
        text = _run([*own, f"--window-size={width},900", "--dump-dom", source.as_uri()], path)
        height = re.search(r'data-height="(\d+)"', text)
        if height is None:
            raise ArgumentError(f"--png {path}: {found} did not tell how high the page is")
        high = min(_HIGHEST, int(height[1]))
        _run([*own, f"--window-size={width},{high}", f"--screenshot={drawn}", source.as_uri()], path)
        if not drawn.exists():
            raise ArgumentError(f"--png {path}: {found} made no picture")
        with replacing(path, f"--png {path}") as new:
            shutil.copyfile(drawn, new)


def write_drawing(svg: str, path: Path) -> None:
    """Draw an SVG, with two dots to each of its pixels. Raise as `write_picture`."""
    width = re.search(r' width="([\d.]+)"', svg)
    assert width is not None
    style = "<meta charset=utf-8><style>body{margin:0}svg{display:block}</style>"
    page = f"<!doctype html><html>{style}<body>{svg}</body></html>"
    write_picture(page, path, math.ceil(float(width[1])), 2)


def _run(command: list[str], path: Path) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ArgumentError(f"--png {path}: {command[0]} took more than {_SECONDS} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise ArgumentError(f"--png {path}: {command[0]} ended with status {done.returncode}: {last}")
    return done.stdout
