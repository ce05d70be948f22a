"""`penstock draw`: draws a schedule in the terminal, or prints it as text."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from penstock._base.errors import ArgumentError
from penstock._base.files import write_text
from penstock.cli._cost_options import EPILOG as EPILOG
from penstock.cli._cost_options import CostOptions
from penstock.cli._options import JSON, check_suffix, output_option, print_json, screen
from penstock.cli._outcome import costs_of_stages
from penstock.cli._schedule_options import ScheduleOptions
from penstock.costs import Outcome, with_one_model
from penstock.report.svg import WIDTH, drawing_unit, make_panel
from penstock.report.svg import svg as drawing
from penstock.report.terminal import Palette, legend, on_one_axis, slots
from penstock.report.text import format_all
from penstock.report.web.screenshot import browser, write_drawing
from penstock.schedule import Schedule, add_communication
from penstock.schedule.grid import slot_timeline
from penstock.simulate.figures import chunks, title

Background = Literal["light", "dark"]
"""Background of a figure."""


def draw(
    requested: ScheduleOptions,
    costs: CostOptions,
    width: int | None = output_option(
        "Characters per line (default: the terminal's); of a file, pixels (default 960)."
    ),
    text: bool = output_option("Print the actions of each rank, as --csv reads them.", "--text", default=False),
    with_messages: bool = output_option("As --text, with messages.", "--with-messages", default=False),
    svg: Path | None = output_option("Draw to a file: for web pages, with names on hover.", metavar="FILE"),
    png: Path | None = output_option("The same for slides and chats; requires chromium.", metavar="FILE"),
    background: Background | None = output_option(
        "Background of a file. Default: an SVG follows the reader's system, a PNG is light."
    ),
    as_json: bool = JSON,
) -> None:
    """Draw a schedule: one line per rank, one color per op.

    Without costs, every F, B, I and W takes one slot. With costs, the figure is a
    timeline: lengths are proportional to time. Several schedules (--schedule
    gpipe,1f1b) share one time axis.
    """
    files = [option for option, file in (("--svg", svg), ("--png", png)) if file is not None]
    if background is not None and not files:
        raise ArgumentError("--background has no effect without --svg or --png; pass one of them")
    if not (text or with_messages or as_json):
        figure = _Figure.of(requested, costs)
        if files:
            figure.write(svg, png, background, WIDTH if width is None else width)
        else:
            figure.print(screen(), width, alone=not requested.is_many)
        return
    if files:
        raise ArgumentError(f"{files[0]}: a file shows the figure; omit --text, --with-messages and --json")
    schedule = requested.one()
    schedule_to_print = add_communication(schedule) if with_messages else schedule
    if as_json:
        print_json(_times(Outcome.simulated(schedule, costs.read(requested.count, requested.ranks)), schedule_to_print))
        return
    if costs != CostOptions() or width is not None:
        raise ArgumentError(
            f"{'--with-messages' if with_messages else '--text'}: the text has no times and no width; omit those "
            "options, or pass --json"
        )
    print(schedule_to_print)


@dataclass(frozen=True)
class _Figure:
    """Schedules to draw; their outcomes, if there are costs; and the reasons for omitting others."""

    schedules: list[Schedule]
    outcomes: list[Outcome] = field(default_factory=list)
    omitted: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, requested: ScheduleOptions, costs: CostOptions) -> _Figure:
        is_timed = costs != CostOptions()
        if not requested.is_many:
            schedule = requested.one()
            timed = [Outcome.simulated(schedule, costs.read(requested.count, requested.ranks))] if is_timed else []
            return cls([schedule], timed)
        schedules, refused = requested.all()
        outcomes = dict[Any, Outcome]()
        if is_timed:
            outcomes, refused = with_one_model(costs.read(requested.count, requested.ranks), schedules, refused)
        drawn = [schedules[key] for key in (outcomes or schedules)]
        return cls(drawn, [*outcomes.values()], {name: reason for (name, *_), reason in refused.items()})

    def write(self, svg: Path | None, png: Path | None, background: Background | None, width: int) -> None:
        """Draw to files: to scale if there are outcomes, else in slots."""
        check_suffix("--svg", svg, ".svg")
        check_suffix("--png", png, ".png")
        if png is not None:
            browser(png)  # before anything is written
        if self.outcomes:
            panels = [make_panel(outcome.schedule, outcome.timeline) for outcome in self.outcomes]
            unit = "s" if self.outcomes[0].costs.are_measured else "time"
        else:
            panels, unit = [make_panel(schedule) for schedule in self.schedules], drawing_unit(self.schedules[0])
        picture = drawing(panels, unit, background=background or "auto", width=width)
        if svg is not None:
            write_text(svg, picture, f"--svg {svg}")
            print(f"wrote {svg}")
        if png is not None:
            write_drawing(picture, png)
            print(f"wrote {png}")
        for name, reason in self.omitted.items():
            print(f"omitted: {name} {reason}")

    def print(self, console: Console, width: int | None, *, alone: bool) -> None:
        """Draw in the terminal, several on one axis. `alone`: only one schedule is requested."""
        palette, schedules = Palette.of(console), self.schedules
        width = console.width if width is None else width
        minimum = len(f"rank {schedules[0].ranks - 1}") + 10
        if width < minimum:
            raise ArgumentError(f"--width {width}: pass at least {minimum}")
        in_grid = alone and not self.outcomes
        timelines = [outcome.timeline for outcome in self.outcomes] or [*map(slot_timeline, schedules)]
        on_axis = [] if in_grid else on_one_axis(schedules, timelines, width, palette)
        pictures = on_axis or [slots(schedules[0], width, palette)]
        for schedule, timeline, picture in zip(schedules, timelines, pictures, strict=True):
            bubble = "" if in_grid else f"; bubble {timeline.bubble_rate:.1%}"  # slots of a grid are not times
            console.print(Text.assemble((title(schedule), "bold"), bubble))
            console.print(picture, soft_wrap=True, end="\n\n")
        console.print(legend(schedules, palette, fills=not in_grid))
        if self.outcomes:
            console.print(_note(max(self.outcomes, key=lambda outcome: outcome.timeline.makespan_seconds)), style="dim")
        elif not alone:
            console.print("Every action takes one slot; pass costs to compare times.", style="dim")
        for name, reason in self.omitted.items():
            console.print(f"omitted: {name} {reason}", style="dim")


def _note(outcome: Outcome) -> str:
    """Describe the costs and the makespan of a timeline."""
    (makespan,), origin = format_all([outcome.timeline.makespan_seconds]), costs_of_stages(outcome)
    lines = [
        f"Assumed: {outcome.costs.assumption}." if outcome.costs.assumed else "",
        f"Costs: {origin}." if origin else "",
        f"Makespan: {makespan}{' s' if outcome.costs.are_measured else ''}; time runs from left to right.",
    ]
    return "\n".join(filter(None, lines))


def _times(outcome: Outcome, schedule: Schedule) -> dict[str, Any]:
    """Return the times of each action, in the costs' unit, and the schedule's text, for JSON."""
    rows = [
        {"actions": [*map(str, track.actions)], "start": [*track.start], "end": [*track.end]}
        for track in outcome.timeline.tracks
    ]
    return {
        "name": schedule.name,
        "ranks": schedule.ranks,
        "microbatches": schedule.microbatches,
        "chunks": chunks(schedule),
        "makespan": outcome.timeline.makespan_seconds,
        "rows": rows,
        "text": str(schedule),
        **({"assumed": dict(outcome.costs.assumed)} if outcome.costs.assumed else {}),
    }
