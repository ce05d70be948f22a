"""Pictures of a schedule as files, for `penstock show`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from penstock.cli._outcome import Outcome
from penstock.errors import ArgumentError
from penstock.files import replacing
from penstock.report.plot import write_png
from penstock.report.svg import WIDTH, panel_of, svg, unit_of
from penstock.schedule import Schedule


class Background(Enum):
    """What a picture is for."""

    LIGHT = "light"
    DARK = "dark"


@dataclass(frozen=True, slots=True)
class Files:
    """Where to draw, and how wide in pixels."""

    svg: Path | None
    png: Path | None
    background: Background | None
    width: int | None

    def write(self, schedules: Sequence[Schedule], outcomes: Sequence[Outcome]) -> None:
        """Writes what was asked for, under each other: in proportion to time if there are outcomes, else in slots."""
        refuse_other("--svg", self.svg, ".svg")
        refuse_other("--png", self.png, ".png")
        if outcomes:
            panels = [panel_of(one.schedule, one.timeline) for one in outcomes]
            unit = "s" if outcomes[0].costs.are_measured else "time"
        else:
            panels = [panel_of(schedule) for schedule in schedules]
            unit = unit_of(schedules[0])
        width = WIDTH if self.width is None else self.width
        drawn = svg(panels, unit, background="auto" if self.background is None else self.background.value, width=width)
        dark = self.background is Background.DARK
        if self.svg is not None:
            self._write("--svg", self.svg, lambda file: file.write_text(drawn, encoding="utf-8"))
        if self.png is not None:
            self._write("--png", self.png, lambda file: write_png(panels, file, unit=unit, dark=dark, width=width))

    @staticmethod
    def _write(option: str, file: Path, write: Callable[[Path], object]) -> None:
        with replacing(file, f"{option} {file}") as new:
            write(new)
        print(f"wrote {file}")


def refuse_other(option: str, file: Path | None, *suffixes: str) -> None:
    """Refuses a file whose name promises something else than what is written into it; one without suffix may be."""
    if file is not None and file.suffix and file.suffix.lower() not in suffixes:
        better = file.with_suffix(suffixes[0])
        raise ArgumentError(f"{option} {file}: expected a name that ends in {' or '.join(suffixes)}, such as {better}")
