"""A simulated schedule as a file: CSV for torch, SVG (of which the page makes a PNG), and a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.errors import ArgumentError
from penstock.report import schedule_svg, to_perfetto
from penstock.schedule import to_csv
from penstock.simulate.figures import Figures


@dataclass(frozen=True, slots=True)
class File:
    """A file to be saved."""

    name: str
    media_type: str
    content: bytes


def export(figures: Figures, kind: str) -> File:
    """The file of that kind.

    Raises:
        ArgumentError: there is no such kind.
        ScheduleError: a CSV cannot say what the schedule has.
    """
    made = _KINDS.get(kind)
    if made is None:
        raise ArgumentError(f"export {kind[:20]!r}: expected {', '.join(_KINDS)}")
    ending, media_type, write = made
    schedule = figures.schedule
    name = f"{schedule.name}-p{schedule.ranks}-m{schedule.microbatches}.{ending}"
    return File(name, media_type, write(figures))


_KINDS: Mapping[str, tuple[str, str, Callable[[Figures], bytes]]] = {
    "csv": ("csv", "text/csv", lambda one: to_csv(one.schedule).encode()),
    "svg": ("svg", "image/svg+xml", lambda one: schedule_svg(one.schedule, one.timeline, unit="units").encode()),
    "perfetto": (
        "perfetto.json",
        "application/json",
        lambda one: json.dumps(to_perfetto(one.timeline, slices=one.schedule.slices)).encode(),
    ),
}
