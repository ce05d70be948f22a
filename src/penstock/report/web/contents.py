"""The contents of a report: metrics, a timeline, idle time by cause, memory, and metrics over training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.report.web.idle_table import Idle
from penstock.trace.runs.about import moment

if TYPE_CHECKING:
    from penstock.plan import Plan
    from penstock.plan.explain import Change, Explanation


class Metric(NamedTuple):
    """A number that is shown large: its name, its value with unit, and a detail."""

    name: str
    value: str
    detail: str = ""


class PeakMemory(NamedTuple):
    """The peak memory of a rank in bytes, its limit if it has one, and the source of the number."""

    rank: int
    peak: float
    limit: float | None
    source: str


@dataclass(frozen=True, slots=True)
class Series:
    """A metric over the steps of training, in order: x are steps; None leaves a gap."""

    name: str
    x: list[int]
    y: list[float | None]
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page, of which what is empty is left out.

    Attributes:
        rows: of a table: its heads first.
        left: how many of its columns are texts.
        has_total: whether its last row is a total.
        pictures: a caption and an SVG each.
        details: titles, and texts that are shown on demand.
    """

    heading: str
    rows: Sequence[Sequence[str]] = ()
    left: int = 1
    has_total: bool = False
    facts: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    pictures: Sequence[tuple[str, str]] = ()
    details: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Contents:
    """Everything that a page shows of a run, a trace, a plan or a network.

    Attributes:
        title: the subject of the page.
        headings: its main facts, in short.
        failures: one message per failed, dead or unresponsive rank.
        warnings: what a reader has to know to read it right.
        metrics: the summary.
        bands: the timelines, as `penstock.report.web.timeline_data.band` makes them.
        idle: why ranks are idle; None: unknown.
        improvements: what to change first; `no_suggestion_reason` is shown if there is nothing.
        memory: of each rank, if known; `memory_note` describes what is counted.
        series: the loss and the like.
        sections: the rest, such as what was run, and where.
        numbers: the metrics as numbers, for programs that read the page.
        explanation, plan: the source of the page, if it is a step that can be explained, or a plan.
    """

    title: str
    headings: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    metrics: tuple[Metric, ...] = ()
    bands: tuple[dict[str, Any], ...] = ()
    idle: Idle | None = None
    improvements: tuple[Change, ...] = ()
    no_suggestion_reason: str = ""
    memory: tuple[PeakMemory, ...] = ()
    memory_note: str = ""
    series: tuple[Series, ...] = ()
    sections: tuple[Section, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)
    explanation: Explanation | None = None
    plan: Plan | None = None


def date_text(iso: str) -> str:
    """`23 November 2026, 20:02 UTC`, from ISO 8601."""
    time = moment(iso)
    return f"{time.day} {time:%B %Y, %H:%M} UTC"
