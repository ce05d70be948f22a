"""How schedules and timelines draw themselves.

What draws them, `penstock.report`, knows schedules, not the other way round: the face lends it (`lent`), and it is
loaded when a picture is asked for, so that schedules need the standard library only.
"""

from __future__ import annotations

from typing import Any

from penstock._base.errors import ScheduleError
from penstock._base.lazy import borrowed


class Drawn:
    """Something that `penstock.report.make_panel` makes a panel of."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        """Return the picture for a notebook, or None if the schedule cannot be run, so that the notebook shows the
        text."""
        try:
            return str(borrowed("drawing").picture(self))
        except ScheduleError:
            return None

    def plot(self, axes: Any = None) -> Any:
        """Draw it by matplotlib: `pip install 'penstock[plot]'`.

        Args:
            axes: matplotlib's Axes to draw into; new ones by default.

        Returns:
            The Axes, to be changed or saved: `schedule.plot().figure.savefig("mine.pdf")`.

        Raises:
            MissingExtraError: matplotlib is not installed.
            ScheduleError: the schedule cannot be run.
        """
        return borrowed("drawing").plot(self, axes)
