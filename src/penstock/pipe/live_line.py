"""A line in the terminal that follows a training: step, loss, speed, bubble, time left."""

from __future__ import annotations

import sys
from dataclasses import replace

from rich.console import Console
from rich.live import Live
from rich.text import Text

from penstock.runs.progress import RECENT, Progress
from penstock.runs.records import StepRecord


class LiveLine:
    """Drawn by the thread that writes the run's folder; what the program prints appears above it.

    Args:
        total_steps: how many there will be, if that is known.
        console: where to draw; None: on stderr.
    """

    def __init__(self, total_steps: int | None, console: Console | None = None) -> None:
        self._total = total_steps
        self._console = console or Console(stderr=True, highlight=False)
        self._recent: list[StepRecord] = []
        self._bubble: float | None = None
        self._live: Live | None = None
        self._drawn: StepRecord | None = None

    def add(self, record: StepRecord) -> None:
        """Takes a step. Called by the main thread; draws nothing."""
        self._bubble = self._bubble if record.bubble is None else record.bubble
        self._recent = [*self._recent[-RECENT:], record]

    def draw(self) -> None:
        """Draws the line, if there is something new to say."""
        recent = self._recent
        progress = Progress.of(recent, self._total)
        if progress is None or self._drawn is recent[-1]:
            return
        self._drawn = recent[-1]
        line = Text(str(replace(progress, bubble=self._bubble)), no_wrap=True, overflow="ellipsis", end="")
        if self._live is None:
            # A stdout that goes elsewhere stays there.
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())
            self._live.start()
        self._live.update(line, refresh=True)

    def close(self) -> None:
        """Leaves the last line on the screen."""
        self.draw()
        if self._live is not None:
            self._live.stop()
            self._live = None


def line_for(wanted: bool, total_steps: int | None) -> LiveLine | None:
    """A line, if one is wanted and there is a terminal to draw it on."""
    return LiveLine(total_steps) if wanted and sys.stderr.isatty() else None
