"""A timeline for people: as text, as a picture, and as a trace for Perfetto."""

from penstock.report.perfetto import to_perfetto, write_perfetto
from penstock.report.svg import Panel, panel_of, schedule_svg, svg, timeline_svg
from penstock.report.text import summary

__all__ = [
    "Panel",
    "panel_of",
    "schedule_svg",
    "summary",
    "svg",
    "timeline_svg",
    "to_perfetto",
    "write_perfetto",
]
