"""What the timeline of a page shows: timelines as columns, with what each action needs, and memory over time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.schedule import Dependencies, Op, Schedule
from penstock.schedule.timeline import Timeline
from penstock.simulate import Memory
from penstock.simulate.columns import column
from penstock.simulate.waits import CriticalPath, critical_path
from penstock.web.columns import for_page

OPS = [op.value for op in Op]
"""Names by `Op.code`."""


def timeline_data(bands: Iterable[dict[str, Any]], *, unit: str = "s", pack: bool = True) -> dict[str, Any]:
    """The `data` of the component in static/timeline.js, ready for JSON.

    Args:
        bands: what `band` made, from top to bottom.
        unit: of time: "s", or the name of another one.
        pack: columns as base64 of typed arrays, which take a third of the room; otherwise plain lists.
    """
    made: dict[str, Any] = for_page({"unit": unit, "ops": OPS, "bands": [*bands]}, pack=pack)
    return made


def band(
    name: str,
    timeline: Timeline,
    schedule: Schedule | None = None,
    *,
    path: CriticalPath | None = None,
    memory: Sequence[dict[str, Any] | None] | None = None,
    note: str = "",
) -> dict[str, Any]:
    """One timeline, for `timeline_data`.

    Args:
        name: what it shows: "measured", a schedule's name.
        timeline: simulated or real.
        schedule: the one that it shows; None: nothing is known of who waits for whom.
        path: its critical path, if it is known already; otherwise it is found, if there is a schedule.
        memory: of each rank, as `curve` makes it; None: not known.
        note: more to say beside the name.
    """
    if schedule is not None and path is None and not timeline.in_turns and len(timeline):
        path = critical_path(schedule, timeline)
    needs = [None] * timeline.ranks if schedule is None else _needs(schedule, timeline)
    critical = _critical(timeline, path)
    ranks = [
        {
            "name": f"rank {rank}",
            "start": column(track.start),
            "end": column(track.end),
            "waited": column(track.waited) if any(track.waited) else None,
            "op": column(track.actions.op),
            "stage": column(track.actions.stage),
            "microbatch": column(track.actions.microbatch),
            "needs": needs[rank],
            "critical": critical[rank],
            "memory": None if memory is None else memory[rank],
        }
        for rank, track in enumerate(timeline.tracks)
    ]
    slices = 1 if schedule is None else schedule.slices
    return {"name": name, "note": note, "slices": slices, "ranks": ranks}


def curve(held: Memory, limit: float | None = None, *, unit: str = "bytes", label: str = "") -> dict[str, Any]:
    """A rank's memory over time, for `band`: a step at each change.

    Args:
        held: what `penstock.simulate.memory` found.
        limit: of the rank; None or infinite: none.
        unit: of the sizes: "bytes", or the name of another one.
        label: where the curve is from, such as "predicted".
    """
    constant = held.parameters + held.gradients + held.optimizer
    moments = np.array([0.0, *held.seconds])
    sizes = constant + np.array([0.0, *map(sum, zip(held.activations, held.unsharded, strict=True))])
    drops = np.append(sizes[1:] < sizes[:-1], True)
    kept = (
        np.append(moments[1:] != moments[:-1], True) | drops
    )  # of several changes at a moment: the highest, and the last
    bounded = None if limit is None or not math.isfinite(limit) else limit
    return {"t": moments[kept], "bytes": sizes[kept], "limit": bounded, "unit": unit, "label": label}


def _needs(schedule: Schedule, timeline: Timeline) -> list[dict[str, NDArray[Any]]]:
    """For each rank the numbers of the actions that each of its actions waits for: those of action i are
    `to[at[i]:at[i + 1]]`, counted over all ranks.
    """
    known = Dependencies(schedule.with_rows(track.actions for track in timeline.tracks))
    found = []
    for rank in range(timeline.ranks):
        each = [known.before(node) for node in range(known.first[rank], known.first[rank + 1])]
        at = np.cumsum([0, *map(len, each)])
        found.append({"at": at, "to": np.array([node for nodes in each for node in nodes], np.int64)})
    return found


def _critical(timeline: Timeline, path: CriticalPath | None) -> list[NDArray[Any] | None]:
    """For each rank 1 where an action is on the critical path."""
    if path is None:
        return [None] * timeline.ranks
    marks = [np.zeros(len(track), np.int64) for track in timeline.tracks]
    for span in path.spans:
        track = timeline.tracks[span.rank]
        starts = column(track.start)
        low, high = (int(np.searchsorted(starts, span.start_seconds, side)) for side in ("left", "right"))
        for place in range(low, high):
            if track.actions[place] == span.action:
                marks[span.rank][place] = 1
    return [*marks]
