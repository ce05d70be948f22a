"""A timeline for people: as a picture, and as a trace for Perfetto. A schedule in words, slot by slot.

>>> from penstock.schedule import generate
>>> panel = panel_of(generate("1f1b", ranks=2, microbatches=4))
>>> panel.title
'1f1b: 2 ranks, 4 microbatches; bubble 20.0%'
>>> svg([panel], "slots")[:4]
'<svg'
"""

from penstock.report.perfetto import to_perfetto, write_perfetto
from penstock.report.svg import Panel, panel_of, svg
from penstock.report.walkthrough import Moment, Source, Walkthrough, walkthrough

__all__ = [
    "Moment",
    "Panel",
    "Source",
    "Walkthrough",
    "panel_of",
    "svg",
    "to_perfetto",
    "walkthrough",
    "write_perfetto",
]
