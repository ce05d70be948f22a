"""A timeline as a plain-text table: where each rank's time went."""

from __future__ import annotations

from penstock.report.marks import scaled
from penstock.schedule.timeline import Timeline

TURNS = "no bubble: the ranks took turns in one process; simulate these times to see how they would overlap"


def summary(timeline: Timeline) -> str:
    """One line per rank: time computing, time waiting for messages, and the bubble as a share of the span.

    The rest of a rank's time is overhead, and the time before its first and after its last action. Ranks that took
    turns in one process have no bubble to report.
    """
    scale, unit = scaled(timeline.makespan_seconds)
    span = timeline.span_seconds
    lines = [("rank", f"busy ({unit})", f"waiting ({unit})", "" if timeline.in_turns else "bubble")]
    for rank in range(timeline.ranks):
        busy, waited = timeline.busy_seconds(rank), timeline.waited_seconds(rank)
        bubble = 1 - busy / span if span else 0.0
        share = "" if timeline.in_turns else f"{bubble:.1%}"
        lines.append((str(rank), f"{busy / scale:.3f}", f"{waited / scale:.3f}", share))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    end = TURNS if timeline.in_turns else f"bubble {timeline.bubble_rate:.1%}"
    return "\n".join([*table, f"makespan {timeline.makespan_seconds / scale:.3f} {unit}, {end}"])
