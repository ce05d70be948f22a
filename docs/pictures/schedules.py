"""Draws schedules.svg: four schedules of the same work on one axis of time. `make pictures` runs it."""

from __future__ import annotations

from pathlib import Path

from penstock.report import make_panel, svg
from penstock.schedule import generate
from penstock.simulate import StageCost, simulate

RANKS, MICROBATCHES = 4, 8
COST = StageCost(forward_seconds=1, backward_input_seconds=1, backward_weight_seconds=1)
NAMES = {"naive": "naive", "gpipe": "GPipe", "1f1b": "1F1B", "zb-h1": "zero bubble, ZB-H1"}


def picture() -> str:
    """The whole as SVG."""
    panels = []
    for name, words in NAMES.items():
        schedule = generate(name, RANKS, MICROBATCHES)
        timeline = simulate(schedule, COST)
        said = f"{words}: {timeline.makespan_seconds:g} units, ranks wait for {timeline.bubble_rate:.0%} of the time"
        panels.append(make_panel(schedule, timeline, said))
    return svg(panels, "units", hover=False)


if __name__ == "__main__":
    (Path(__file__).parent / "schedules.svg").write_text(picture(), encoding="utf-8")
