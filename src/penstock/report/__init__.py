"""A timeline for people: as text, as a picture, and as a trace for Perfetto. A schedule in words, slot by slot.

>>> from penstock.schedule import generate
>>> from penstock.simulate import StageCost, simulate
>>> print(summary(simulate(generate("1f1b", ranks=2, microbatches=4), [StageCost(1.0, 1.0, 1.0)] * 2)))
rank  busy (s)  waiting (s)  bubble
   0    12.000        3.000   20.0%
   1    12.000        1.000   20.0%
makespan 15.000 s, bubble 20.0%
"""

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
