"""A report as one page of HTML that needs nothing else: no other file, no server, no network."""

from __future__ import annotations

from dataclasses import asdict
from importlib.resources import files

from penstock._base.errors import require
from penstock._base.files import finite
from penstock._base.words import sized
from penstock.report.frame import frame
from penstock.report.web.assets import asset, bundle, embedded
from penstock.report.web.contents import Contents, duration
from penstock.report.web.timeline_data import timeline_data

_MAX_RANKS = 32
"""Ranks of which each has a line."""


def page(contents: Contents) -> str:
    """The report of what was found.

    Raises:
        MissingExtraError: jinja2 is not installed.
    """
    require("report", "jinja2", for_what="a report")
    from jinja2 import Environment, StrictUndefined

    templates = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = templates.from_string(files("penstock.report.web").joinpath("templates/report.html").read_text("utf-8"))
    body = template.render(
        contents=contents,
        duration=duration,
        sized=sized,
        percent=_percent,
        ranks_shown=_ranks,
        data=embedded("timeline-data", timeline_data(contents.bands, unit=contents.unit)),
        numbers=embedded("numbers", finite(dict(contents.numbers))),
        courses=embedded("course-data", [asdict(one) for one in contents.courses]),
    )
    style = asset("timeline.css") + asset("report.css")
    return frame(f"{contents.title} - Penstock", body, style=style, script=bundle("report.js"))


def _percent(value: float, whole: float) -> str:
    return f"{100 * min(1.0, value / whole):.3f}%" if whole > 0 else "0%"


def _ranks(count: int) -> list[int]:
    """Those that have a line: all, or the first and the last."""
    return [*range(count)] if count <= _MAX_RANKS else [*range(_MAX_RANKS // 2), *range(count - _MAX_RANKS // 2, count)]
