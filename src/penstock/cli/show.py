"""`penstock show`: draws a schedule in the terminal, or prints it as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.text import Text

from penstock.cli._cost_options import EPILOG as EPILOG
from penstock.cli._cost_options import CostOptions
from penstock.cli._options import Json, output_option, spread
from penstock.cli._order import OrderOptions
from penstock.cli._outcome import format_of
from penstock.cli._picture import Palette, legend, on_one_axis, proportional, slots
from penstock.costs import Outcome, with_one_model
from penstock.errors import ArgumentError
from penstock.files import write_text
from penstock.report.svg import WIDTH, panel_of, unit_of
from penstock.report.svg import svg as drawn
from penstock.schedule import Schedule, add_communication
from penstock.schedule.grid import in_slots
from penstock.simulate.figures import chunks, title
from penstock.web.picture import browser, write_drawing


class Background(Enum):
    """What a picture is for."""

    LIGHT = "light"
    DARK = "dark"


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
    has_costs = costs != CostOptions()
    several = _several(order, costs, has_costs=has_costs) if order.is_many and not (text or comms or as_json) else None
    schedule = order.one() if several is None else several.schedules[0]
    written = add_communication(schedule) if comms else schedule
    if svg is not None or png is not None:
        if text or comms or as_json:
            raise ArgumentError(
                f"{'--png' if svg is None else '--svg'}: a file shows the whole picture; leave out --text, --comms "
                "and --json"
            )
        if several is None:
            several = _Several(
                [schedule], [Outcome.simulated(schedule, costs.read(order.count, order.ranks))] if has_costs else []
            )
        _write(several, svg, png, background, WIDTH if width is None else width)
        for name, reason in several.left_out.items():
            print(f"left out: {name} {reason}")
        return
    if background is not None:
        raise ArgumentError("--background: only files have one; pass --svg or --png")
    if as_json:
        print(json.dumps(describe(Outcome.simulated(schedule, costs.read(order.count, order.ranks)), written)))
        return
    if text or comms:
        option = "--comms" if comms else "--text"
        if has_costs or width is not None:
            raise ArgumentError(
                f"{option}: the text has no times and no width; leave those options out, or pass --json"
            )
        print(written)
        return
    console = Console(highlight=False)
    palette = Palette.of(console)
    width = console.width if width is None else width
    _check(schedule, width)
    if several is not None:
        _print_several(several, width, console)
        return
    if has_costs:
        outcome = Outcome.simulated(schedule, costs.read(order.count, order.ranks))
        picture, note = proportional(schedule, outcome.timeline, width, palette), _note(schedule, outcome)
    else:
        picture, note = slots(schedule, width, palette), ""
    console.print(Text(title(schedule), "bold"), end="\n\n")
    console.print(picture, soft_wrap=True, end="\n\n")
    console.print(legend([schedule], palette, fills=has_costs))
    if note:
        console.print(note, style="dim")


@dataclass(frozen=True, slots=True)
class _Several:
    """Schedules under each other; their outcomes, if there are costs; and why others were left out."""

    schedules: Sequence[Schedule]
    outcomes: Sequence[Outcome]
    left_out: Mapping[str, str] = field(default_factory=dict)


def _several(order: OrderOptions, costs: CostOptions, *, has_costs: bool) -> _Several:
    schedules, refused = order.all()
    if not has_costs:
        return _Several(schedules, (), refused)
    outcomes, left_out = with_one_model(costs.read(order.count, order.ranks), schedules, refused)
    return _Several([one.schedule for one in outcomes], outcomes, left_out)


def _write(several: _Several, svg: Path | None, png: Path | None, background: Background | None, width: int) -> None:
    """Draws schedules into files, under each other: in proportion to time if there are outcomes, else in slots."""
    refuse_other("--svg", svg, ".svg")
    refuse_other("--png", png, ".png")
    if png is not None:
        browser(png)  # before anything is written
    panels = [panel_of(one.schedule, one.timeline) for one in several.outcomes]
    unit = unit_of(several.schedules[0]) if not panels else "s" if several.outcomes[0].costs.are_measured else "time"
    panels = panels or [panel_of(schedule) for schedule in several.schedules]
    picture = drawn(panels, unit, background="auto" if background is None else background.value, width=width)
    if svg is not None:
        write_text(svg, picture, f"--svg {svg}")
        print(f"wrote {svg}")
    if png is not None:
        write_drawing(picture, png)
        print(f"wrote {png}")


def _print_several(several: _Several, width: int, console: Console) -> None:
    palette, schedules = Palette.of(console), several.schedules
    timelines = [one.timeline for one in several.outcomes] or [in_slots(schedule) for schedule in schedules]
    pictures = on_one_axis(schedules, timelines, width, palette)
    for schedule, timeline, picture in zip(schedules, timelines, pictures, strict=True):
        console.print(Text.assemble((title(schedule), "bold"), f"; bubble {timeline.bubble_rate:.1%}"))
        console.print(picture, soft_wrap=True, end="\n\n")
    console.print(legend(schedules, palette, fills=True))
    if several.outcomes:
        longest = max(several.outcomes, key=lambda one: one.timeline.makespan_seconds)
        console.print(_note(longest.schedule, longest), style="dim")
    else:
        console.print("Every action takes one slot, whatever it does: pass costs to compare times.", style="dim")
    for name, reason in several.left_out.items():
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


def _check(schedule: Schedule, width: int) -> None:
    least = len(f"rank {schedule.ranks - 1}") + 10
    if width < least:
        raise ArgumentError(f"--width {width}: pass at least {least}")


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
        "slices": written.slices,
        "makespan": outcome.timeline.makespan_seconds,
        "rows": rows,
        "text": str(written),
        **assumed,
    }
