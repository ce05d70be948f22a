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

from html import escape
from math import inf
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from penstock.schedule import Op, Placement, Schedule, generate
from penstock.schedule.timeline import Timeline
from penstock.search import search
from penstock.simulate import LinkCost, StageCost, simulate

SLOT, ROW, LEFT, TITLE, WIDTH = 30, 24, 52, 22, 690  # in pixels; a slot is narrower where there are many


def picture(timed: list[tuple[str, Schedule, Timeline]]) -> str:
    """Schedules under each other on one axis of time, as SVG whose colours the page's style gives."""
    longest = max(timeline.makespan_seconds for _, _, timeline in timed)
    slot = min(SLOT, WIDTH / longest)
    lines, y = [], 0.0
    for title, schedule, timeline in timed:
        lines.append(f'<text class="title" x="0" y="{y + 14}">{escape(title)}</text>')
        y += TITLE
        lines.extend(_rows(schedule, timeline, slot, y))
        y += ROW * schedule.ranks + 12
    size = f'viewBox="0 0 {LEFT + longest * slot + 1:g} {y:g}" style="max-width:{LEFT + longest * slot + 1:g}px"'
    return f'<svg class="schedule" role="img" xmlns="http://www.w3.org/2000/svg" {size}>' + "".join(lines) + "</svg>"


def _rows(schedule: Schedule, timeline: Timeline, slot: float, top: float) -> list[str]:
    lines = []
    for rank in range(schedule.ranks):
        y, end = top + rank * ROW, timeline.makespan_seconds * slot
        lines.append(f'<text class="rank" x="0" y="{y + 15}">rank {rank}</text>')
        lines.append(f'<rect class="idle" x="{LEFT}" y="{y}" width="{end:g}" height="{ROW - 3}"/>')
        for span in timeline.spans(rank):
            action = span.action
            x, width = LEFT + span.start_seconds * slot, (span.end_seconds - span.start_seconds) * slot
            shade = " late" if action.stage >= schedule.ranks else ""
            said = f"{action}: {span.start_seconds:g} to {span.end_seconds:g}"
            lines.append(
                f'<g class="{action.op.name}{shade}"><title>{said}</title>'
                f'<rect x="{x:g}" y="{y}" width="{width - 1:g}" height="{ROW - 3}" rx="2"/>'
                f'<text x="{x + width / 2 - 0.5:g}" y="{y + 15}">{action.microbatch}</text></g>'
            )
    return lines


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
        timed = []
        for name in self.arguments[0].split():
            schedule, timeline = self._timed(name)
            idle = f"{timeline.makespan_seconds:g} slots, bubble {timeline.bubble_rate:.0%}"
            timed.append((f"{name}: {idle}", schedule, timeline))
        figure = nodes.figure(classes=["schedule-figure"])
        figure += nodes.raw("", picture(timed) + legend({op for _, s, _ in timed for op in _ops(s)}), format="html")
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
        schedule = generate(name, ranks, microbatches, chunks=int(chunks) if chunks else None)
        share = schedule.placement.depth // ranks  # costs are of all that a rank does for a microbatch
        each = [StageCost(*(seconds / share for seconds in _seconds(cost))) for cost in costs]
        return schedule, simulate(schedule, each * (schedule.placement.depth // len(costs)), link)


def _seconds(cost: StageCost) -> tuple[float, float, float]:
    return cost.forward_seconds, cost.backward_input_seconds, cost.backward_weight_seconds


def _ops(schedule: Schedule) -> set[Op]:
    return {action.op for row in schedule.rows for action in row}


WORDS = {Op.F: "F forward", Op.B: "B backward (I + W)", Op.I: "I gradient of inputs", Op.W: "W gradient of weights"}


def legend(ops: set[Op]) -> str:
    items = "".join(f'<span class="{op.name}"><i></i>{words}</span>' for op, words in WORDS.items() if op in ops)
    return f'<div class="schedule-legend">{items}<span class="idle"><i></i>idle</span></div>'


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("schedule", ScheduleFigure)
    return {"parallel_read_safe": True}
