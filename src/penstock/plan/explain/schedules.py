"""The same work in another order, or in other pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from penstock._base.errors import ArgumentError
from penstock.plan.explain.factors import OP_INDEX
from penstock.plan.explain.replay import Change, Replay
from penstock.schedule import Op, Schedule, generate, names, peak_activations
from penstock.schedule.generators import ScheduleParams, schedule_spec, schedule_specs
from penstock.simulate.computations import COMPUTE, Floats, column

_F, _B, _I, _W = (COMPUTE.index(op) for op in (Op.F, Op.B, Op.I, Op.W))
_ROUNDING = 1 + 1e-9
MAX_ACTIONS = 100_000
"""Other schedules are tried for steps with up to this many actions."""


@dataclass(frozen=True, slots=True)
class Price:
    """What work takes in other pieces, each number for all stages or one for each.

    Attributes:
        forward: how many times as long a forward takes whose backward is split.
        input_gradient, weight_gradient: I and W, as shares of the whole backward.
        split_seconds: what splitting adds to a forward, and to its backward, besides.
        fixed_seconds: what does not shrink of an action that is cut in pieces, unless its op takes less at times.
    """

    forward: float | tuple[float, ...] = 1.0
    input_gradient: float | tuple[float, ...] = 0.5
    weight_gradient: float | tuple[float, ...] = 0.5
    split_seconds: float = 0.0
    fixed_seconds: float = 0.0


FREE, TYPICAL, EXPENSIVE = Price(), Price(1.05, 0.575, 0.575, 3e-4, 5e-4), Price(1.5, 0.75, 0.75, 0.0, np.inf)
"""If pieces cost nothing; as usual, and in small stages, by benchmarks/split_backward: the latter with all that the
shortest action of an op takes as its fixed cost."""
_JOIN_NOTE = "if splitting a backward costs up to half of the work"
_SPLIT_NOTE = "if splitting a backward costs nothing; it costs 2 to 20%, more in small stages"
NO_PRICE = "pass a --profile of this run to know"


def change_schedule(replay: Replay, text: str, slow: Floats, price: tuple[Price, ...] | str = NO_PRICE) -> Change:
    """Return the replay under another schedule: `zb-h1`, or with stages per rank `interleaved-1f1b/2`.

    Args:
        replay: with the schedule that was run.
        text: the schedule's name, and chunks if they are not its default.
        slow: how slow each rank is, by its stages, as in `Factors.rank`: stays with the rank where stages move.
        price: of split backwards, and its bounds; or why it is not known.

    Raises:
        ArgumentError: there is no such schedule, or not for these ranks and microbatches, or it has fewer stages.
    """
    name, _, chunks = text.partition("/")
    if chunks and not chunks.isdigit():
        raise ArgumentError(
            f"schedule {text!r}: expected a name, or a name and a number of stages per rank, as in zb-v/2"
        )
    entry, current = schedule_spec(name), replay.schedules[0]
    per_rank = current.placement.stages // current.placement.ranks
    if current.placement.pipelines > 1 or entry.placement == "bidirectional":
        raise ArgumentError(f"schedule {text!r}: not comparable; copies of a model cost something else")
    count = int(chunks) if chunks else max(per_rank, entry.chunks)
    if not count or count % per_rank:
        raise ArgumentError(f"schedule {text!r}: the trace has {per_rank} stages per rank, which cannot become {count}")
    schedule = generate(entry.name, current.ranks, current.microbatches, count)
    factor, splits, was_split = count // per_rank, schedule.splits, current.splits
    notes = []
    if factor > 1:
        notes.append(f"{count} stages per rank, each 1/{factor} as large")
    if splits != was_split and isinstance(price, str):
        notes.append(f"{_SPLIT_NOTE if splits else _JOIN_NOTE}; {price}")
    old_held, new_held = held_microbatches(current), held_microbatches(schedule)
    growth, rank = max((new / old, -rank) for rank, (old, new) in enumerate(zip(old_held, new_held, strict=True)))
    if growth > _ROUNDING:
        held = f"up to {new_held[-rank]:g} microbatches instead of {old_held[-rank]:g}"
        notes.append(f"rank {-rank} keeps {growth:.3g} times the activations, {held}")

    def apply(price: Price) -> Replay:
        seconds = np.repeat(_piece_seconds(replay.seconds, factor, price), factor, axis=2)
        if schedule.placement != current.placement:
            seconds = seconds / np.repeat(slow, factor, axis=2)[..., None]
            by_rank = np.stack([slow[:, :, list(stages)].mean(axis=2) for stages in current.placement.by_rank], axis=2)
            seconds = seconds * by_rank[:, :, list(schedule.placement.rank_of)][..., None]
        host = replay.host.copy()  # a part of a backward takes as much of it; a weight gradient is not sent
        if splits and not was_split:
            host[_I], host[_W] = host[_B], replay.with_links(0.0).host[_B]
        elif was_split and not splits:
            host[_B] = host[_I]
        seconds, host = _fit_ops(schedule, seconds, price), np.repeat(host, factor, axis=1)
        return replace(replay, schedules=(schedule,) * len(replay.schedules), seconds=seconds, host=host)

    prices: tuple[Price, ...] = (FREE,)
    if factor > 1 or splits != was_split:
        prices = price if not isinstance(price, str) and factor == 1 else (TYPICAL, FREE, EXPENSIVE)
    name = entry.name + (f"/{count}" if factor > 1 else "")
    text, cases = f"schedule {name} instead of {current.name}", tuple(map(apply, prices))
    measured = factor == 1 and (was_split == splits or not isinstance(price, str))
    return Change("schedule", text, cases, "; ".join(notes), measured, name, max(*old_held, *new_held))


def _piece_seconds(seconds: Floats, pieces: int, price: Price) -> Floats:
    """Return the seconds of each of this many equal pieces of an action."""
    if pieces == 1:
        return seconds
    shortest = np.fmin.reduce(seconds, axis=(0, 2, 3), keepdims=True)
    fixed = np.minimum(shortest, price.fixed_seconds)
    return fixed + (seconds - fixed) / pieces


@lru_cache(maxsize=16)
def held_microbatches(schedule: Schedule) -> list[float]:
    """Return the peak activations of each rank, in those of one microbatch on all of its stages."""
    per_rank = schedule.placement.stages / schedule.placement.ranks
    return [peak / per_rank for peak in peak_activations(schedule)]


def _fit_ops(schedule: Schedule, seconds: Floats, price: Price) -> Floats:
    """[R, O, S, M] with a time for each op that the schedule has: B in two parts for I and W, or their sum for B."""
    result, splits, was_split = seconds.copy(), schedule.splits, not np.isnan(seconds[:, _I]).all()
    forward, inputs, weights = (
        np.reshape(value, (1, -1, 1)) for value in (price.forward, price.input_gradient, price.weight_gradient)
    )
    joined = (seconds[:, _I] + np.nan_to_num(seconds[:, _W]) - price.split_seconds) / (inputs + weights)
    backward = np.where(np.isnan(seconds[:, _B]), np.maximum(joined, 0.0), seconds[:, _B])
    if splits and not was_split:
        result[:, _F] = seconds[:, _F] * forward + price.split_seconds
        result[:, _I], result[:, _W] = backward * inputs + price.split_seconds, backward * weights
    elif splits:
        total = np.nansum(seconds[:, _I]) + np.nansum(seconds[:, _W])
        for part in (_I, _W):
            typical = (np.nansum(seconds[:, part]) / total if total else 0.5) * backward
            result[:, part] = np.where(np.isnan(seconds[:, part]), typical, seconds[:, part])
    elif was_split:
        result[:, _F] = np.maximum(seconds[:, _F] - price.split_seconds, 0.0) / forward
    result[:, _B] = backward
    used = np.zeros(result.shape[1:], bool)
    for row in schedule.rows:
        used[OP_INDEX[column(row.op)], column(row.stage), column(row.microbatch)] = True
    return np.where(used, result, np.nan)


def other_schedules(replay: Replay, slow: Floats, price: tuple[Price, ...] | str) -> Iterator[Change]:
    """Yield the replay under each schedule that leaves stages as they are. Arguments are those of `change_schedule`."""
    current = replay.schedules[0]
    if current.placement.pipelines > 1 or sum(map(len, current.rows)) * len(replay.schedules) > MAX_ACTIONS:
        return
    per_rank = current.placement.stages // current.placement.ranks
    for entry in schedule_specs():
        params = ScheduleParams(current.ranks, current.microbatches, max(per_rank, entry.chunks))
        if not entry.fits(params, current.placement):
            continue
        change = change_schedule(replay, entry.name, slow, price)
        if change.cases[0].schedules[0].rows != current.rows:
            yield change


def double_microbatches(replay: Replay, rows: int | None = None) -> Iterator[Change]:
    """Microbatches of half the size, each taking half as long; nothing if the schedule has no name, or the smallest
    microbatch a single row. `rows`: what that has, if it is known."""
    current = replay.schedules[0]
    placement = current.placement
    if current.name not in names() or placement.pipelines > 1 or (rows is not None and rows < 2):
        return
    schedule = generate(current.name, current.ranks, 2 * current.microbatches, placement.stages // placement.ranks)
    halves = (np.repeat(_piece_seconds(replay.seconds, 2, price), 2, axis=3) for price in (TYPICAL, FREE, EXPENSIVE))
    schedules = (schedule,) * len(replay.schedules)
    cases = (replace(replay, schedules=schedules, seconds=_fit_ops(schedule, half, FREE)) for half in halves)
    text = f"cut the batch into {2 * current.microbatches} microbatches instead of {current.microbatches}"
    note = "if half a microbatch takes half as long, which was not measured: small ones often take longer"
    note += "; batch norm sees half the rows" + ("" if rows else "; microbatches need 2 rows or more")
    yield Change("pieces", text, tuple(cases), note, measured=False)
