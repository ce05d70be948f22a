"""The directive `schedule`: draws schedules while the site is built, so that no figure can be out of date.

    ```{schedule} gpipe, 1f1b
    :ranks: 4
    :microbatches: 8
    What the reader should see in it.
    ```

Several names are drawn under each other on one axis of time; `interleaved-1f1b:4` has four chunks, and `search` is what
the search finds within `memory-limit`. `costs` are a rank's F, I and W, in slots (1 1 1 by default), or one such group
for each rank: `1 1 1; 1 1 1; 1 1 1; 2 2 2`. `latency` is what a message between two ranks takes.
"""

from __future__ import annotations

from math import inf
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from penstock.report.svg import Panel, svg
from penstock.schedule import Placement, Schedule, generate
from penstock.schedule.timeline import Timeline
from penstock.simulate import LinkCost, StageCost, simulate
from penstock.simulate.search import search

WIDTH = 760
"""Of a figure in pixels, at most: the width of a page's text."""


def pictures(panels: list[Panel]) -> str:
    """One for a light page and one for a dark page: the theme shows the one that suits it."""
    light, dark = (svg(panels, "slots", background=theme, width=WIDTH) for theme in ("light", "dark"))
    return f'<div class="only-light">{light}</div><div class="only-dark">{dark}</div>'


class ScheduleFigure(SphinxDirective):
    required_arguments = 1
    final_argument_whitespace = True
    has_content = True
    option_spec: ClassVar = {
        "ranks": directives.positive_int,
        "microbatches": directives.positive_int,
        "costs": directives.unchanged,
        "latency": float,
        "memory-limit": float,
    }

    def run(self) -> list[nodes.Node]:
        panels = []
        for name in self.arguments[0].split():
            schedule, timeline = self._timed(name)
            known, _, chunks = name.partition(":")
            title = f"{known}, {chunks} chunks" if chunks else known
            said = f"{timeline.makespan_seconds:g} slots, bubble {timeline.bubble_rate:.0%}"
            copies = schedule.placement.pipelines > 1
            lighter = f"the copy from rank {schedule.placement.ranks - 1}" if copies else "later chunks"
            panels.append(Panel(f"{title}: {said}", timeline, lighter))
        figure = nodes.figure(classes=["schedule-figure"])
        label = f"timeline of {' and '.join(self.arguments[0].split())}"  # what scrolls can be reached by the keyboard
        drawn = f'<div class="scrolls" tabindex="0" role="group" aria-label="{label}">{pictures(panels)}</div>'
        figure += nodes.raw("", drawn, format="html")
        figure += nodes.caption("", "", *self.parse_inline(" ".join(self.content))[0])
        return [figure]

    def _timed(self, name: str) -> tuple[Schedule, Timeline]:
        ranks, microbatches = self.options.get("ranks", 4), self.options.get("microbatches", 8)
        costs = [StageCost(*map(float, stage.split())) for stage in self.options.get("costs", "1 1 1").split(";")]
        link = LinkCost(self.options.get("latency", 0.0), inf)
        if name == "search":
            limit = self.options.get("memory-limit")
            each = costs * (ranks // len(costs))
            found = search(Placement.loop(ranks), microbatches, each, link, memory_limit=limit, seconds=0.5)
            return found.schedule, found.timeline
        name, _, chunks = name.partition(":")
        schedule = generate(name, ranks, microbatches, stages_per_rank=int(chunks) if chunks else None)
        share = schedule.placement.depth // ranks  # costs are of all that a rank does for a microbatch
        each = [StageCost(*(seconds / share for seconds in _seconds(cost))) for cost in costs]
        return schedule, simulate(schedule, each * (schedule.placement.depth // len(costs)), link)


def _seconds(cost: StageCost) -> tuple[float, float, float]:
    return cost.forward_seconds, cost.backward_input_seconds, cost.backward_weight_seconds


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("schedule", ScheduleFigure)
    return {"parallel_read_safe": True}
