"""A timeline for people: as text, as a picture, and as a trace for Perfetto. A schedule in words, slot by slot."""

from penstock.report.perfetto import to_perfetto, write_perfetto
from penstock.report.svg import Panel, panel_of, schedule_svg, svg
from penstock.report.text import summary
from penstock.report.walkthrough import Moment, Source, Walkthrough, walkthrough

__all__ = [
    "Moment",
    "Panel",
    "Source",
    "Walkthrough",
    "panel_of",
    "schedule_svg",
    "summary",
    "svg",
    "to_perfetto",
    "walkthrough",
    "write_perfetto",
]
