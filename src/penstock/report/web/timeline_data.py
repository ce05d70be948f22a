"""The data of a page's timeline: timelines as columns, with each action's dependencies, and memory over time."""

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

_INTEGERS = (np.int8, np.int16, np.int32)


def timeline_data(bands: Iterable[Mapping[str, Any]], *, unit: str = "s") -> dict[str, Any]:
    """Build the `data` of the component in static/timeline.js, ready for JSON.

    Args:
        bands: from `band`, from top to bottom.
        unit: of time: "s", or the name of another one.
    """
    return {"unit": unit, "ops": OPS, "bands": encode([*bands])}


@dataclass(frozen=True, slots=True)
class Order:
    """The part of a band that follows from its schedule alone.

    Attributes:
        ranks: for each rank op, stage, microbatch and peer of each action, and what it needs.
        indices: for each rank the index of each action.
    """

    ranks: Sequence[Mapping[str, Any]]
    indices: Sequence[Mapping[Action, int]]

    @classmethod
    def of(cls, rows: Sequence[Row], schedule: Schedule | None) -> Order:
        """Build the order from what each rank ran. `schedule`: None if dependencies are unknown."""
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
        return cls(columns, [{action: index for index, action in enumerate(row)} for row in rows])

    def encode(self) -> Order:
        """Return the same, encoded for a page, for one that is shown again and again."""
        return replace(self, ranks=encode(self.ranks))


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
        name: its title: "measured", a schedule's name.
        timeline: simulated or real.
        schedule: the one that it shows; None: dependencies are unknown.
        path: its critical path, if known; by default it is computed from the schedule.
        memory: of each rank, as `curve` makes it; None: not known.
        note: shown beside the name.
        order: of the timeline's actions, if known.
    """
    if schedule is not None and path is None and not timeline.serialized and len(timeline):
        path = critical_path(schedule, timeline)
    if order is None:
        order = Order.of([track.actions for track in timeline.tracks], schedule)
    critical: Sequence[NDArray[Any] | None] = [None] * timeline.ranks
    if path is not None:  # for each rank 1 where an action is on it
        critical = marks = [np.zeros(len(track), np.int64) for track in timeline.tracks]
        for span in path.spans:
            marks[span.rank][order.indices[span.rank][span.action]] = 1
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


def curve(memory: Memory, limit: float | None = None, *, unit: str = "bytes", label: str = "") -> dict[str, Any]:
    """Build a rank's memory over time for `band`: a step at each change.

    Args:
        memory: from `penstock.simulate.memory`.
        limit: of the rank; None or infinite: none.
        unit: of the sizes: "bytes", or the name of another one.
        label: where the curve is from, such as "predicted".
    """
    constant = memory.parameters + memory.gradients + memory.optimizer
    times = np.array([0.0, *memory.seconds])
    sizes = constant + np.array([0.0, *map(sum, zip(memory.activations, memory.unsharded, strict=True))])
    drops = np.append(sizes[1:] < sizes[:-1], True)
    keep = np.append(times[1:] != times[:-1], True) | drops  # of several changes at a moment: the highest, and the last
    finite_limit = None if limit is None or not math.isfinite(limit) else limit
    return {"t": times[keep], "bytes": sizes[keep], "limit": finite_limit, "unit": unit, "label": label}


def _needs(schedule: Schedule) -> list[dict[str, NDArray[Any]]]:
    """Return, for each rank, the indices of the actions that each of its actions waits for: those of action i are
    `to[at[i]:at[i + 1]]`, counted over all ranks."""
    dependencies = Dependencies(schedule)
    needs = []
    for rank in range(schedule.ranks):
        needed = [dependencies.before(node) for node in range(dependencies.first[rank], dependencies.first[rank + 1])]
        offsets = np.cumsum([0, *map(len, needed)])
        needs.append({"at": offsets, "to": np.array([node for nodes in needed for node in nodes], np.int64)})
    return needs


def encode_column(column: NDArray[Any]) -> dict[str, str]:
    """Encode a column as {type, base64}, little-endian, which `bands.js` reads. Integers take the least room."""
    if column.dtype.kind in "iu":
        low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
        kind: Any = next(dtype for dtype in _INTEGERS if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max)
    else:
        kind = np.float64
    array = np.ascontiguousarray(column, np.dtype(kind).newbyteorder("<"))
    text = base64.b64encode(array.tobytes()).decode("ascii")
    return {"type": f"{array.dtype.kind}{array.dtype.itemsize}", "base64": text}


def encode(value: Any) -> Any:
    """Convert dicts, lists and columns (numpy arrays) to plain values for JSON: columns as base64 of typed arrays,
    which take a third of the room."""
    if isinstance(value, np.ndarray):
        return encode_column(value)
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return value
