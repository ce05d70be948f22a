"""A timeline for people: as text, and as a trace for Perfetto."""

from penstock.report.perfetto import to_perfetto, write_perfetto
from penstock.report.text import summary

__all__ = ["summary", "to_perfetto", "write_perfetto"]
