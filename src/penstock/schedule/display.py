"""How schedules and timelines draw themselves.

`penstock.report` draws them, and imports schedules, not the other way round: it is borrowed from the top-level package
and loaded with the first picture, so that schedules need only the standard library.
"""

from __future__ import annotations

from penstock._base.errors import ScheduleError
from penstock._base.lazy import load_provider


class Displayable:
    """An object that `penstock.report.make_panel` can draw."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        """Return the picture for a notebook, or None if the schedule cannot be run, so that the notebook shows the
        text."""
        try:
            return str(load_provider("drawing").picture(self))
        except ScheduleError:
            return None
