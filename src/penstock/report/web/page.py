"""A report as one page of HTML that needs nothing else: no other file, no server, no network."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import Any

from markupsafe import Markup

from penstock._base.errors import require
from penstock._base.files import finite
from penstock._base.formatting import duration, format_bytes
from penstock.report.frame import frame
from penstock.report.web.contents import Contents
from penstock.report.web.timeline_data import timeline_data

STATIC = files("penstock.report.web").joinpath("static")
"""The folder of modules and style sheets; modules import each other by `./name.js`."""

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w.]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const|let) )", re.MULTILINE)


@cache
def asset(name: str) -> str:
    """Return the text of a file in `STATIC`."""
    return STATIC.joinpath(name).read_text(encoding="utf-8")


@cache
def bundle(name: str) -> str:
    """Bundle a module and all its imports into one module without imports. Names at the top of modules are unique."""
    return "".join(_EXPORT.sub("", _IMPORT.sub("", asset(module))) for module in _order_modules(name, []))


def _order_modules(name: str, ordered: list[str]) -> list[str]:
    """Return the modules that a module needs, each after those that it needs itself, and the module last."""
    for _, imported in _IMPORT.findall(asset(name)):
        if imported not in ordered:
            _order_modules(imported, ordered)
    ordered.append(name)
    return ordered


def embedded(name: str, value: Any) -> Markup:
    """Embed a value as JSON in an element of a page, by id. Nothing in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json" id="{name}">{text}</script>')


_MAX_RANKS = 32
"""Maximum number of ranks that all have a line."""


def page(contents: Contents) -> str:
    """Render the report.

    Raises:
        MissingExtraError: jinja2 is not installed.
    """
    require("report", "jinja2", for_what="a report")
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("penstock.report.web")
    templates = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    body = templates.get_template("report.html").render(
        contents=contents,
        duration=duration,
        sized=format_bytes,
        percent=_percent,
        ranks_shown=_ranks,
        data=embedded("timeline-data", timeline_data(contents.bands)),
        numbers=embedded("numbers", finite(dict(contents.numbers))),
        series_data=embedded("course-data", [asdict(series) for series in contents.series]),
    )
    style = asset("timeline.css") + asset("report.css")
    script = bundle("report.js") if contents.bands or contents.series else ""
    return frame(f"{contents.title} - Penstock", body, style=style, script=script)


def _percent(value: float, total: float) -> str:
    return f"{100 * min(1.0, value / total):.3f}%" if total > 0 else "0%"


def _ranks(count: int) -> list[int]:
    """Return the ranks that have a line: all, or the first and the last."""
    return [*range(count)] if count <= _MAX_RANKS else [*range(_MAX_RANKS // 2), *range(count - _MAX_RANKS // 2, count)]
