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
_TIMEOUT_SECONDS = 120
_MAX_HEIGHT = 16_000
"""Maximum height in pixels that a browser can draw in one picture."""
_HEIGHT_SCRIPT = """<script>
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
    executable = next((executable for name in BROWSERS if (executable := shutil.which(name))), None)
    if executable is None:
        raise MissingExtraError(
            f"--png {path}: a browser draws the picture, and there is none of {', '.join(BROWSERS[:3])}: install "
            "chromium, or print the page from yours"
        )
    return executable


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
    executable = browser(path)
    with tempfile.TemporaryDirectory() as folder:
        html, png = Path(folder) / "page.html", Path(folder) / "page.png"
        before, end_tag, after = page.rpartition("</body>")
        marked = before.replace("<html", "<html data-picture", 1)
        html.write_text(marked + _HEIGHT_SCRIPT + end_tag + after, encoding="utf-8")
        command = (executable, *_FLAGS, f"--force-device-scale-factor={scale}", f"--user-data-dir={folder}/profile")
        dom = _run([*command, f"--window-size={width},900", "--dump-dom", html.as_uri()], path)
        height = re.search(r'data-height="(\d+)"', dom)
        if height is None:
            raise ArgumentError(f"--png {path}: {executable} did not report the height of the page")
        pixels = min(_MAX_HEIGHT, int(height[1]))
        _run([*command, f"--window-size={width},{pixels}", f"--screenshot={png}", html.as_uri()], path)
        if not png.exists():
            raise ArgumentError(f"--png {path}: {executable} wrote no picture")
        with replacing(path, f"--png {path}") as new:
            shutil.copyfile(png, new)


def write_drawing(svg: str, path: Path) -> None:
    """Draw an SVG, with two dots to each of its pixels. Raise as `write_picture`."""
    width = re.search(r' width="([\d.]+)"', svg)
    assert width is not None
    style = "<meta charset=utf-8><style>body{margin:0}svg{display:block}</style>"
    page = f"<!doctype html><html>{style}<body>{svg}</body></html>"
    write_picture(page, path, math.ceil(float(width[1])), 2)


def _run(command: list[str], path: Path) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ArgumentError(f"--png {path}: {command[0]} took more than {_TIMEOUT_SECONDS} s") from None
    if result.returncode:
        last = (result.stderr.strip().splitlines() or [""])[-1]
        raise ArgumentError(f"--png {path}: {command[0]} ended with status {result.returncode}: {last}")
    return result.stdout
