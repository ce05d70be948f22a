"""`penstock show`: draws a schedule in the terminal, or prints it as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.text import Text

from penstock._base.errors import ArgumentError
from penstock._base.files import write_text
from penstock.cli._cost_options import EPILOG as EPILOG
from penstock.cli._cost_options import CostOptions
from penstock.cli._options import Json, output_option, spread
from penstock.cli._order import OrderOptions
from penstock.cli._outcome import format_of
from penstock.cli._picture import Palette, legend, on_one_axis, slots
from penstock.costs import Outcome, with_one_model
from penstock.report.svg import WIDTH, panel_of, unit_of
from penstock.report.svg import svg as draw
from penstock.report.web.picture import browser, write_drawing
from penstock.schedule import Schedule, add_communication
from penstock.schedule.grid import in_slots
from penstock.simulate.figures import chunks, title

Background = Literal["light", "dark"]
"""What a picture is for."""


def refuse_other(option: str, file: Path | None, *suffixes: str) -> None:
    """Refuses a file whose name promises something else than what is written into it; one without suffix may be."""
    if file is not None and file.suffix and file.suffix.lower() not in suffixes:
        better = file.with_suffix(suffixes[0])
        raise ArgumentError(f"{option} {file}: expected a name that ends in {' or '.join(suffixes)}, such as {better}")


@spread
def show(
    order: OrderOptions,
    costs: CostOptions,
    width: Annotated[
        int | None, output_option("Characters per line; default the terminal's. Of a file: pixels, 960 by default.")
    ] = None,
    text: Annotated[bool, output_option("Print each rank's actions, as --csv reads them.", "--text")] = False,
    comms: Annotated[bool, output_option("Like --text, with messages.", "--comms")] = False,
    svg: Annotated[
        Path | None, output_option("Draw into a file: for pages, with names on hover.", "--svg", metavar="FILE")
    ] = None,
    png: Annotated[
        Path | None, output_option("The same for slides and chats; needs chromium.", "--png", metavar="FILE")
    ] = None,
    background: Annotated[
        Background | None, output_option("Of a file. By default an SVG follows the reader's system, a PNG is light.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw a schedule: one line per rank, one color per op.

    Without costs, every F, B, I and W takes one slot. With costs, the picture is
    a timeline: lengths are proportional to time. Several schedules (--schedule
    gpipe,1f1b) lie under each other on one axis.
    """  # fmt: skip
    files = [option for option, file in (("--svg", svg), ("--png", png)) if file is not None]
    if background is not None and not files:
        raise ArgumentError("--background: only files have one; pass --svg or --png")
    if text or comms or as_json:
        if files:
            raise ArgumentError(f"{files[0]}: a file shows the whole picture; leave out --text, --comms and --json")
        schedule = order.one()
        written = add_communication(schedule) if comms else schedule
        if as_json:
            print(json.dumps(describe(Outcome.simulated(schedule, costs.read(order.count, order.ranks)), written)))
            return
        if costs != CostOptions() or width is not None:
            raise ArgumentError(
                f"{'--comms' if comms else '--text'}: the text has no times and no width; leave those options out, or "
                "pass --json"
            )
        print(written)
        return
    drawn = _drawn(order, costs)
    if files:
        _write(drawn, svg, png, background, WIDTH if width is None else width)
        return
    console = Console(highlight=False)
    _print(drawn, console.width if width is None else width, console, alone=not order.is_many)


_Drawn = tuple[Sequence[Schedule], Sequence[Outcome], Mapping[str, str]]
"""Schedules under each other; their outcomes, if there are costs; and why others were left out."""


def _drawn(order: OrderOptions, costs: CostOptions) -> _Drawn:
    is_timed, outcomes = costs != CostOptions(), list[Outcome]()
    if not order.is_many:
        schedule = order.one()
        if is_timed:
            outcomes = [Outcome.simulated(schedule, costs.read(order.count, order.ranks))]
        return [schedule], outcomes, {}
    made, refused = order.all()
    if is_timed:
        found, refused = with_one_model(costs.read(order.count, order.ranks), made, refused)
        made, outcomes = {key: made[key] for key in found}, [*found.values()]
    return [*made.values()], outcomes, {name: reason for (name, *_), reason in refused.items()}


def _write(drawn: _Drawn, svg: Path | None, png: Path | None, background: Background | None, width: int) -> None:
    """Draws schedules into files, under each other: in proportion to time if there are outcomes, else in slots."""
    refuse_other("--svg", svg, ".svg")
    refuse_other("--png", png, ".png")
    if png is not None:
        browser(png)  # before anything is written
    schedules, outcomes, left_out = drawn
    panels = [panel_of(one.schedule, one.timeline) for one in outcomes]
    unit = unit_of(schedules[0]) if not panels else "s" if outcomes[0].costs.are_measured else "time"
    panels = panels or [panel_of(schedule) for schedule in schedules]
    picture = draw(panels, unit, background=background or "auto", width=width)
    if svg is not None:
        write_text(svg, picture, f"--svg {svg}")
        print(f"wrote {svg}")
    if png is not None:
        write_drawing(picture, png)
        print(f"wrote {png}")
    for name, reason in left_out.items():
        print(f"left out: {name} {reason}")


def _print(drawn: _Drawn, width: int, console: Console, *, alone: bool) -> None:
    """Draws schedules in the terminal, several of them on one axis. `alone`: one was asked for."""
    palette, (schedules, outcomes, left_out) = Palette.of(console), drawn
    least = len(f"rank {schedules[0].ranks - 1}") + 10
    if width < least:
        raise ArgumentError(f"--width {width}: pass at least {least}")
    in_grid = alone and not outcomes
    timelines = [one.timeline for one in outcomes] or [in_slots(schedule) for schedule in schedules]
    pictures = [slots(schedules[0], width, palette)] if in_grid else on_one_axis(schedules, timelines, width, palette)
    for schedule, timeline, picture in zip(schedules, timelines, pictures, strict=True):
        bubble = "" if in_grid else f"; bubble {timeline.bubble_rate:.1%}"  # a grid's slots are no times
        console.print(Text.assemble((title(schedule), "bold"), bubble))
        console.print(picture, soft_wrap=True, end="\n\n")
    console.print(legend(schedules, palette, fills=not in_grid))
    if outcomes:
        longest = max(outcomes, key=lambda one: one.timeline.makespan_seconds)
        console.print(_note(longest.schedule, longest), style="dim")
    elif not alone:
        console.print("Every action takes one slot, whatever it does: pass costs to compare times.", style="dim")
    for name, reason in left_out.items():
        console.print(f"left out: {name} {reason}", style="dim", markup=False)


def _note(schedule: Schedule, outcome: Outcome) -> str:
    """What is said of the costs of a timeline, and how long the whole takes."""
    known, makespan_seconds = outcome.costs, outcome.timeline.makespan_seconds
    whole = format_of([makespan_seconds])(makespan_seconds)
    assumption = f"Assumed: {known.assumption}.\n" if known.assumed else ""
    each = chunks(schedule)
    whose = f"Costs are per stage; a rank has {each} stages.\n" if each > 1 and known.are_alike else ""
    if origin := known.origin(schedule.placement):
        whose, whole = f"Costs: {origin}.\n", f"{whole} s"
    return f"{assumption}{whose}The whole takes {whole}; time goes from left to right."


def describe(outcome: Outcome, written: Schedule) -> dict[str, Any]:
    """When each action runs, in the costs' unit, and the schedule's text, for JSON."""
    rows = [
        {"actions": [*map(str, track.actions)], "start": [*track.start], "end": [*track.end]}
        for track in outcome.timeline.tracks
    ]
    assumed = {"assumed": dict(outcome.costs.assumed)} if outcome.costs.assumed else {}
    return {
        "name": written.name,
        "ranks": written.ranks,
        "microbatches": written.microbatches,
        "chunks": chunks(written),
        "makespan": outcome.timeline.makespan_seconds,
        "rows": rows,
        "text": str(written),
        **assumed,
    }
