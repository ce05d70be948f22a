"""Figures of timelines, traces for Perfetto, and schedules in words, slot by slot.

>>> from penstock.schedule import generate
>>> panel = make_panel(generate("1f1b", ranks=2, microbatches=4))
>>> panel.title
'1f1b: 2 ranks, 4 microbatches; bubble 20.0%'
>>> svg([panel], "slots")[:4]
'<svg'
"""

from penstock._base.lazy import find_old_names
from penstock.report.perfetto import to_perfetto, write_perfetto
from penstock.report.svg import Panel, make_panel, svg
from penstock.report.walkthrough import SlotActivity, Source, Walkthrough, walkthrough

__all__ = [
    "Panel",
    "SlotActivity",
    "Source",
    "Walkthrough",
    "make_panel",
    "svg",
    "to_perfetto",
    "walkthrough",
    "write_perfetto",
]

__getattr__ = find_old_names(__name__)
