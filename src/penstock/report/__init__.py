"""A timeline for people: as text, and as a trace for Perfetto. A schedule in words, slot by slot."""

from penstock.report.perfetto import to_perfetto, write_perfetto
from penstock.report.text import summary
from penstock.report.walkthrough import Moment, Source, Walkthrough, walkthrough

__all__ = ["Moment", "Source", "Walkthrough", "summary", "to_perfetto", "walkthrough", "write_perfetto"]
