"""How schedules and timelines draw themselves.

What draws them, `penstock.report`, knows schedules, not the other way round: it is loaded by name when a picture is
asked for, so that schedules need the standard library only.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from penstock.errors import ScheduleError


class Drawn:
    """Something that `penstock.report.svg.panel_of` makes a panel of."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        """The picture in a notebook; None, which shows the text, if the schedule cannot be run."""
        report = import_module("penstock.report.svg")
        try:
            return str(report.picture(self))
        except ScheduleError:
            return None

    def plot(self, axes: Any = None) -> Any:
        """Draws it by matplotlib: `pip install 'penstock[plot]'`.

        Args:
            axes: matplotlib's Axes to draw into; new ones by default.

        Returns:
            The Axes, to be changed or saved: `schedule.plot().figure.savefig("mine.pdf")`.

        Raises:
            MissingExtraError: matplotlib is not installed.
            ScheduleError: the schedule cannot be run.
        """
        report = import_module("penstock.report.svg")
        return import_module("penstock.report.plot").plot(report.panel_of(self), axes, unit=report.unit_of(self))
