"""What the timeline of a page shows: timelines as columns, with what each action needs, and memory over time."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.schedule import Action, Dependencies, Op, Row, Schedule
from penstock.schedule.describe import SENTENCES
from penstock.schedule.timeline import Timeline
from penstock.simulate import Memory
from penstock.simulate.computations import column
from penstock.simulate.waits import CriticalPath, critical_path

OPS = [op.value for op in Op]
"""Names by `Op.code`."""

_WHOLE = (np.int8, np.int16, np.int32)


def timeline_data(bands: Iterable[Mapping[str, Any]], *, unit: str = "s") -> dict[str, Any]:
    """Build the `data` of the component in static/timeline.js, ready for JSON.

    Args:
        bands: what `band` made, from top to bottom.
        unit: of time: "s", or the name of another one.
    """
    return {"unit": unit, "ops": OPS, "bands": for_page([*bands])}


@dataclass(frozen=True, slots=True)
class Order:
    """What a band shows of its schedule, whatever actions take.

    Attributes:
        ranks: for each rank op, stage, microbatch and peer of each action, and what it needs.
        places: for each rank where an action stands.
    """

    ranks: Sequence[Mapping[str, Any]]
    places: Sequence[Mapping[Action, int]]

    @classmethod
    def of(cls, rows: Sequence[Row], schedule: Schedule | None) -> Order:
        """Build the order from what each rank ran. `schedule`: None if it is unknown who waits for whom."""
        needs = [None] * len(rows) if schedule is None else _needs(schedule.with_rows(rows))
        columns = [
            {
                "op": column(row.op),
                "stage": column(row.stage),
                "microbatch": column(row.microbatch),
                "peer": column(row.peer) if any(peer >= 0 for peer in row.peer) else None,
                "needs": need,
            }
            for row, need in zip(rows, needs, strict=True)
        ]
        return cls(columns, [{action: place for place, action in enumerate(row)} for row in rows])

    def packed(self) -> Order:
        """Return the same, encoded for a page, for one that is shown again and again."""
        return replace(self, ranks=for_page(self.ranks))


def band(
    name: str,
    timeline: Timeline,
    schedule: Schedule | None = None,
    *,
    path: CriticalPath | None = None,
    memory: Sequence[dict[str, Any] | None] | None = None,
    note: str = "",
    order: Order | None = None,
) -> dict[str, Any]:
    """Build one timeline for `timeline_data`.

    Args:
        name: what it shows: "measured", a schedule's name.
        timeline: simulated or real.
        schedule: the one that it shows; None: nothing is known of who waits for whom.
        path: its critical path, if it is known already; otherwise it is found, if there is a schedule.
        memory: of each rank, as `curve` makes it; None: not known.
        note: more to say beside the name.
        order: of the timeline's actions, if it is known already.
    """
    if schedule is not None and path is None and not timeline.serialized and len(timeline):
        path = critical_path(schedule, timeline)
    if order is None:
        order = Order.of([track.actions for track in timeline.tracks], schedule)
    critical: Sequence[NDArray[Any] | None] = [None] * timeline.ranks
    if path is not None:  # for each rank 1 where an action is on it
        critical = marks = [np.zeros(len(track), np.int64) for track in timeline.tracks]
        for span in path.spans:
            marks[span.rank][order.places[span.rank][span.action]] = 1
    ranks = [
        {
            "name": f"rank {rank}",
            "start": column(track.start),
            "end": column(track.end),
            "waited": column(track.waited) if any(track.waited) else None,
            **order.ranks[rank],
            "critical": critical[rank],
            "memory": None if memory is None else memory[rank],
        }
        for rank, track in enumerate(timeline.tracks)
    ]
    return {"name": name, "note": note, "said": dict(SENTENCES), "ranks": ranks}


def curve(held: Memory, limit: float | None = None, *, unit: str = "bytes", label: str = "") -> dict[str, Any]:
    """Build a rank's memory over time for `band`: a step at each change.

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


def _needs(schedule: Schedule) -> list[dict[str, NDArray[Any]]]:
    """Return, for each rank, the indices of the actions that each of its actions waits for: those of action i are
    `to[at[i]:at[i + 1]]`, counted over all ranks."""
    known = Dependencies(schedule)
    found = []
    for rank in range(schedule.ranks):
        each = [known.before(node) for node in range(known.first[rank], known.first[rank + 1])]
        at = np.cumsum([0, *map(len, each)])
        found.append({"at": at, "to": np.array([node for nodes in each for node in nodes], np.int64)})
    return found


def packed(column: NDArray[Any]) -> dict[str, str]:
    """Encode a column as {type, base64}, little-endian, which `bands.js` reads. Integers take the least room."""
    if column.dtype.kind in "iu":
        low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
        kind: Any = next(one for one in _WHOLE if np.iinfo(one).min <= low and high <= np.iinfo(one).max)
    else:
        kind = np.float64
    made = np.ascontiguousarray(column, np.dtype(kind).newbyteorder("<"))
    text = base64.b64encode(made.tobytes()).decode("ascii")
    return {"type": f"{made.dtype.kind}{made.dtype.itemsize}", "base64": text}


def for_page(value: Any) -> Any:
    """Convert dicts, lists and columns (numpy arrays) to plain values for JSON: columns as base64 of typed arrays,
    which take a third of the room."""
    if isinstance(value, np.ndarray):
        return packed(value)
    if isinstance(value, dict):
        return {key: for_page(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [for_page(one) for one in value]
    return value
