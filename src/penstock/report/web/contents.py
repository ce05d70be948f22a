"""What a report shows of anything: figures, a timeline, why ranks are idle, memory, and the course of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.report.web.idle import Idle
from penstock.trace.runs.about import moment

if TYPE_CHECKING:
    from penstock.plan import Plan
    from penstock.plan.explain import Change, Explanation

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


class Figure(NamedTuple):
    """A number that is shown large: what it is, its value with unit, and what else is to be said of it."""

    name: str
    value: str
    of: str = ""


class Held(NamedTuple):
    """The most that a rank holds, in bytes, its limit if it has one, and where the number is from."""

    rank: int
    peak: float
    limit: float | None
    source: str


@dataclass(frozen=True, slots=True)
class Course:
    """A figure over the steps of training, in order: x are steps; a value that is no number leaves a gap."""

    name: str
    x: list[int]
    y: list[float | None]
    unit: str = ""


@dataclass(frozen=True)
class Contents:
    """Everything that a page shows of a run, a trace or a plan.

    Attributes:
        title: what it is of.
        headings: what else there is to know of it, in short.
        troubles: what ended the run before its time, or seems to have.
        warnings: what a reader has to know to read it right.
        figures: the summary.
        bands: the timelines, as `penstock.report.web.timeline_data.band` makes them.
        idle: None: nothing is known of why ranks are idle.
        improvements: what to change first; `nothing_better` is said if there is nothing.
        memory: of each rank, if it is known; `memory_note` says what is counted.
        courses: the loss and the like.
        facts: what was run, and where; `facts_head` stands above them.
        numbers: the figures as numbers, for those who read the page by program.
        explanation, plan: what it is made of, if it is of a step that can be explained, or a plan.
    """

    title: str
    headings: tuple[str, ...] = ()
    troubles: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    bands: tuple[dict[str, Any], ...] = ()
    idle: Idle | None = None
    improvements: tuple[Change, ...] = ()
    nothing_better: str = ""
    memory: tuple[Held, ...] = ()
    memory_note: str = ""
    courses: tuple[Course, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    facts_head: str = "What was run"
    numbers: Mapping[str, Any] = field(default_factory=dict)
    unit: str = "s"
    explanation: Explanation | None = None
    plan: Plan | None = None


def duration(seconds: float) -> str:
    """Format a duration with four digits and a unit: 1.234 ms."""
    scale, unit = next(((s, u) for s, u in _UNITS if abs(seconds) >= s * 0.99995), _UNITS[-1 if seconds else 0])
    value = seconds / scale
    places = max(0, 3 - len(str(int(abs(value)))) + 1)
    return f"{value:,.{places}f} {unit}"


def date_text(iso: str) -> str:
    """`23 November 2026, 20:02 UTC`, from ISO 8601."""
    at = moment(iso)
    return f"{at.day} {at:%B %Y, %H:%M} UTC"
