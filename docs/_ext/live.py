"""The directive `live-schedule`: schedules that a visitor can change, drawn by the studio's timeline, without a server.

What can be chosen is simulated while the site is built, and lies in one page, which the directive frames.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from docutils import nodes
from figures import pictures
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from penstock.report import make_panel
from penstock.report.frame import frame
from penstock.report.web.page import asset, bundle, embedded
from penstock.report.web.timeline_data import band, timeline_data
from penstock.schedule import generate
from penstock.simulate import StageCost, simulate

PAGE = "live-schedule.html"
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v")
RANKS, MICROBATCHES = (2, 4, 8), (4, 8, 16)
COSTS = {"F, I, W alike": (1.0, 1.0, 1.0), "I and W half of F": (2.0, 1.0, 1.0)}
SHOWN = ("gpipe", "1f1b", "zb-h1")
"""At first; with 4 ranks and 8 microbatches."""

_TITLE = "Schedules to play with"
_STYLE = """
body { margin: 0; padding: .5rem; }
h1 { font-size: 1rem; margin: 0 0 .4rem; }
form { display: flex; flex-wrap: wrap; gap: .3rem 1rem; align-items: center; font-size: .85rem; margin-bottom: .4rem; }
"""
_SCRIPT = """
const known = JSON.parse(document.getElementById("data").textContent);
const form = document.querySelector("form");
const chosen = () => {
  const given = new FormData(form);
  const others = ["ranks", "microbatches", "costs"].map((name) => given.get(name));
  const bands = given.getAll("schedule").map((name) => known[[name, ...others]]);
  return { unit: "slots", ops: known.ops, bands: bands.filter(Boolean) };
};
const options = { details: false, wheel: "focused", label: "Schedules" };
const view = window.view = new Timeline(document.getElementById("here"), chosen(), options);
form.addEventListener("change", () => { if (chosen().bands.length) view.setData(chosen()); });
addEventListener("message", ({ data }) => {
  if (!["light", "dark"].includes(data?.theme)) return;
  document.documentElement.dataset.theme = data.theme;
  view.refresh();
  report();
});
const report = () => parent.postMessage({ liveSchedule: Math.ceil(document.body.getBoundingClientRect().height) }, "*");
new ResizeObserver(report).observe(document.body); // which a frame that is out of sight does not
parent.postMessage("live-schedule", "*"); // the answer is the theme
"""


def page() -> str:
    """The page, with the timeline of everything that can be chosen."""
    known: dict[str, Any] = {"ops": timeline_data([])["ops"]}
    for name, ranks, microbatches, (costs, seconds) in itertools.product(SCHEDULES, RANKS, MICROBATCHES, COSTS.items()):
        schedule = generate(name, ranks, microbatches)
        share = schedule.placement.depth // ranks  # costs are of all that a rank does for a microbatch
        timeline = simulate(schedule, StageCost(*(each / share for each in seconds)))
        said = f"{name}: {timeline.makespan_seconds:g} slots, bubble {timeline.bubble_rate:.0%}"
        made = timeline_data([band(said, timeline, schedule)])
        known[f"{name},{ranks},{microbatches},{costs}"] = made["bands"][0]
    boxes = "".join(
        f'<label><input type="checkbox" name="schedule" value="{name}"{" checked" * (name in SHOWN)}> {name}</label>'
        for name in SCHEDULES
    )
    choices = "".join(
        f'<label>{label} <select name="{name}">{_options(values, first)}</select></label>'
        for label, name, values, first in (
            ("ranks", "ranks", RANKS, 4),
            ("microbatches", "microbatches", MICROBATCHES, 8),
            ("costs", "costs", COSTS, next(iter(COSTS))),
        )
    )
    form = f'<form aria-label="What is drawn">{choices}{boxes}</form>'
    body = f'<main><h1>{_TITLE}</h1>{form}<div id="here"></div></main>{embedded("data", known)}'
    style, script = asset("timeline.css") + _STYLE, bundle("timeline.js") + _SCRIPT
    return frame(_TITLE, body, style=style, script=script, generator="make docs")


def _picture() -> str:
    """What is chosen at first, for browsers that run no scripts."""
    made = [(name, generate(name, 4, 8)) for name in SHOWN]
    timed = [(name, schedule, simulate(schedule, StageCost(1.0, 1.0, 1.0))) for name, schedule in made]
    said = "{}: {:g} slots, bubble {:.0%}"
    return pictures(
        [
            make_panel(schedule, line, said.format(name, line.makespan_seconds, line.bubble_rate))
            for name, schedule, line in timed
        ]
    )


def _options(values: Any, first: object) -> str:
    return "".join(f"<option{' selected' * (value == first)}>{value}</option>" for value in values)


class LiveSchedule(SphinxDirective):
    has_content = True

    def run(self) -> list[nodes.Node]:
        source = f"_static/{PAGE}"
        figure = nodes.figure(classes=["live-schedule"])
        markup = f'<iframe src="{source}" title="{_TITLE}" height="640"></iframe>'
        markup += f"<noscript><style>.live-schedule iframe {{ display: none; }}</style>{_picture()}</noscript>"
        figure += nodes.raw("", markup, format="html")
        figure += nodes.caption("", "", *self.parse_inline(" ".join(self.content))[0])
        return [figure]


def write(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        (Path(app.outdir) / "_static" / PAGE).write_text(page(), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("live-schedule", LiveSchedule)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True}
