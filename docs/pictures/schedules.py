"""Draws schedules.svg: four schedules of the same work on one axis of time. `python docs/pictures/schedules.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.schedule import Op, generate
from penstock.simulate import StageCost, simulate

RANKS, MICROBATCHES = 4, 8
COST = StageCost(forward_seconds=1, backward_input_seconds=1, backward_weight_seconds=1)
NAMES = {"naive": "naive", "gpipe": "GPipe", "1f1b": "1F1B", "zb-h1": "zero bubble, ZB-H1"}

SLOT, ROW, LEFT, TOP = 8.6, 15, 40, 20  # in pixels
COLORS = {Op.F: "#0072b2", Op.B: "#e69f00", Op.I: "#e69f00", Op.W: "#009e73"}  # told apart by the colour-blind, too
WORDS = {Op.F: "forward", Op.I: "backward (of inputs)", Op.W: "backward of weights"}
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #24292f } .n { font-size: 8px; fill: #fff; text-anchor: middle }
.t { font-weight: 600 } .r { fill: #57606a } .b { fill: #8c959f; opacity: .15 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .r { fill: #9198a1 } .n { fill: #fff } }
"""


def panel(name: str, top: float) -> Iterator[str]:
    """A schedule: a row a rank, each action as long as it takes."""
    schedule = generate(name, RANKS, MICROBATCHES)
    timeline = simulate(schedule, COST)
    said = f"{NAMES[name]}: {timeline.makespan_seconds:g} units, ranks wait for {timeline.bubble_rate:.0%} of the time"
    yield f'<text class="t" x="{LEFT}" y="{top - 5}">{said}</text>'
    for rank in range(RANKS):
        y = top + rank * ROW
        yield f'<text class="r" x="0" y="{y + 11}">rank {rank}</text>'
        yield f'<rect class="b" x="{LEFT}" y="{y}" width="{timeline.makespan_seconds * SLOT:.1f}" height="{ROW - 2}"/>'
        for span in timeline.spans(rank):
            x, width = LEFT + span.start_seconds * SLOT, (span.end_seconds - span.start_seconds) * SLOT
            op, number = span.action.op, span.action.microbatch
            yield f'<rect x="{x:.1f}" y="{y}" width="{width - 0.6:.1f}" height="{ROW - 2}" fill="{COLORS[op]}"/>'
            yield f'<text class="n" x="{x + width / 2:.1f}" y="{y + 9.5}">{number}</text>'


def legend(y: float) -> Iterator[str]:
    x = LEFT
    for op, words in WORDS.items():
        yield f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLORS[op]}"/>'
        yield f'<text x="{x + 17}" y="{y + 10}">{words}</text>'
        x += 40 + 6 * len(words)


def picture() -> str:
    """The whole as SVG."""
    height = ROW * RANKS + 32
    inside = [line for k, name in enumerate(NAMES) for line in panel(name, TOP + k * height)]
    bottom = TOP + len(NAMES) * height - 8
    inside += legend(bottom)
    size = f'viewBox="0 0 880 {bottom + 20}" width="880" height="{bottom + 20}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>'
    return "\n".join([head, *inside, "</svg>", ""])


if __name__ == "__main__":
    (Path(__file__).parent / "schedules.svg").write_text(picture(), encoding="utf-8")
