"""Pages with a timeline, as a report has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.report.frame import frame
from penstock.report.web.page import asset, bundle, embedded
from penstock.report.web.timeline_data import band, timeline_data
from penstock.schedule import Schedule
from penstock.schedule.timeline import Timeline
from penstock.simulate import LinkCost, StageCost, simulate

LATENCY = 0.25


def simulated(schedule: Schedule) -> Timeline:
    return simulate(schedule, StageCost(1.0, 1.5, 0.5), LinkCost(LATENCY))


def with_timeline(folder: Path, data: dict[str, Any]) -> Path:
    """A page whose `view` is a Timeline of the data, and whose `told` is what was selected."""
    start = (
        'window.view = new Timeline(document.getElementById("here"), '
        'JSON.parse(document.getElementById("data").textContent), {onselect: (one) => { window.told = one; }});\n'
    )
    body = f'<main><div id="here"></div></main>{embedded("data", data)}'
    path = folder / "page.html"
    path.write_text(frame("Timeline", body, style=asset("timeline.css"), script=bundle("timeline.js") + start))
    return path


def of_schedules(folder: Path, *schedules: Schedule) -> Path:
    return with_timeline(folder, timeline_data(band(one.name, simulated(one), one) for one in schedules))
