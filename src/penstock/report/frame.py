"""The frame of every page that Penstock writes: one file of HTML that needs nothing else."""

from __future__ import annotations

from functools import cache
from html import escape
from importlib.resources import files

from penstock.report.colors import LIGHT, css, variables

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="{generator}">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}{script}
</body>
</html>
"""


def frame(title: str, body: str, *, style: str = "", script: str = "", generator: str = "penstock report") -> str:
    """Return a page.

    Args:
        title: as plain text.
        body: markup, in which everything that came from elsewhere has been escaped.
        style: CSS in addition to that of all pages.
        script: a module of JavaScript; none by default.
        generator: the command that writes the page.
    """
    script_tag = f'<script type="module">\n{script}</script>' if script else ""
    return _PAGE.format(
        title=escape(title), generator=escape(generator), style=base_style() + style, body=body, script=script_tag
    )


@cache
def base_style() -> str:
    """Return the CSS of all pages, with the colors of light and dark backgrounds."""
    print_style = f"@media print {{ :root:root:root {{ color-scheme: light; {variables(LIGHT)} }} }}\n"
    return css() + print_style + files("penstock.report").joinpath("base.css").read_text(encoding="utf-8")
