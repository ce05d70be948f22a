"""The same work in another order, or in other pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from penstock._base.errors import ArgumentError
from penstock.plan.explain.factors import PLACE
from penstock.plan.explain.replay import Case, Change
from penstock.schedule import Op, Schedule, generate, names, peak_activations
from penstock.schedule.generators import ScheduleParams, schedule_spec, schedule_specs
from penstock.simulate.computations import COMPUTE, Floats, column

_F, _B, _I, _W = (COMPUTE.index(op) for op in (Op.F, Op.B, Op.I, Op.W))
_ROUNDING = 1 + 1e-9
MAX_ACTIONS = 100_000
"""Of a step whose other schedules are all tried."""


@dataclass(frozen=True, slots=True)
class Price:
    """What work takes in other pieces, each number for all stages or one for each.

    Attributes:
        forward: how many times as long a forward takes whose backward is split.
        input_gradient, weight_gradient: I and W, as shares of the whole backward.
        split_seconds: what splitting adds to a forward, and to its backward, besides.
        fixed_seconds: what does not shrink of an action that is cut in pieces, unless its op takes less at times.
    """

    forward: float | Floats = 1.0
    input_gradient: float | Floats = 0.5
    weight_gradient: float | Floats = 0.5
    split_seconds: float = 0.0
    fixed_seconds: float = 0.0


FREE, USUAL, DEAR = Price(), Price(1.05, 0.575, 0.575, 3e-4, 5e-4), Price(1.5, 0.75, 0.75, 0.0, np.inf)
"""If pieces cost nothing; as usual, and in small stages, by benchmarks/split_backward: the latter with all that the
shortest action of an op takes as its fixed cost."""
_JOINED = "if splitting a backward costs up to half of the work; a profile (--profile) tells"
_SPLIT = "if splitting a backward costs nothing; it costs 2 to 20%, more in small stages: a profile (--profile) tells"


def another(case: Case, text: str, slow: Floats, price: tuple[Price, ...] | None = None) -> Change:
    """Return the case under another schedule: `zb-h1`, or with stages per rank `interleaved-1f1b/2`.

    Args:
        case: with the schedule that was run.
        text: the schedule's name, and chunks if they are not its default.
        slow: how slow each rank is, by its stages, as in `Factors.rank`: stays with the rank where stages move.
        price: of split backwards, and its bounds, if it was measured.

    Raises:
        ArgumentError: there is no such schedule, or not for these ranks and microbatches, or it has fewer stages.
    """
    name, _, chunks = text.partition("/")
    if chunks and not chunks.isdigit():
        raise ArgumentError(f"schedule {text!r}: expected a name, or a name and a number of chunks, as in zb-v/2")
    entry, now = schedule_spec(name), case.schedules[0]
    each = now.placement.stages // now.placement.ranks
    if now.placement.pipelines > 1 or entry.placement == "bidirectional":
        raise ArgumentError(f"schedule {text!r}: not comparable; copies of a model cost something else")
    asked = int(chunks) if chunks else max(each, entry.chunks)
    if not asked or asked % each:
        raise ArgumentError(f"schedule {text!r}: the trace has {each} stages a rank, which cannot become {asked}")
    made = generate(entry.name, now.ranks, now.microbatches, asked)
    factor, splits, split = asked // each, made.splits, now.splits
    notes = []
    if factor > 1:
        notes.append(f"{asked} stages a rank, each 1/{factor} of what it was")
    if splits != split and price is None:
        notes.append(_SPLIT if splits else _JOINED)
    held, holds = memory_of(now), memory_of(made)
    if holds > held * _ROUNDING:
        notes.append(f"a rank holds up to {holds:g} microbatches instead of {held:g}")

    def priced(price: Price) -> Case:
        seconds = np.repeat(_pieces(case.seconds, factor, price), factor, axis=2)
        if made.placement != now.placement:
            seconds = seconds / np.repeat(slow, factor, axis=2)[..., None]
            of_rank = np.stack([slow[:, :, list(stages)].mean(axis=2) for stages in now.placement.by_rank], axis=2)
            seconds = seconds * of_rank[:, :, list(made.placement.rank_of)][..., None]
        host = np.repeat(case.host, factor, axis=1)
        return replace(case, schedules=(made,) * len(case.schedules), seconds=_for(made, seconds, price), host=host)

    prices: tuple[Price, ...] = (FREE,)
    if factor > 1 or splits != split:
        prices = price if price is not None and factor == 1 else (USUAL, FREE, DEAR)
    name = entry.name + (f"/{asked}" if factor > 1 else "")
    text, cases = f"schedule {name} instead of {now.name}", tuple(map(priced, prices))
    measured = factor == 1 and (split == splits or price is not None)
    return Change("schedule", text, cases, "; ".join(notes), measured, name, max(held, holds))


def _pieces(seconds: Floats, pieces: int, price: Price) -> Floats:
    """Return the seconds of each of this many equal pieces of an action."""
    if pieces == 1:
        return seconds
    shortest = np.fmin.reduce(seconds, axis=(0, 2, 3), keepdims=True)
    fixed = np.minimum(shortest, price.fixed_seconds)
    return fixed + (seconds - fixed) / pieces


@lru_cache(maxsize=16)
def memory_of(schedule: Schedule) -> float:
    """Return the peak activations of a rank, in those of one microbatch on all of its stages."""
    return max(peak_activations(schedule)) * schedule.placement.ranks / schedule.placement.stages


def _for(schedule: Schedule, seconds: Floats, price: Price) -> Floats:
    """[R, O, S, M] with a time for each op that the schedule has: B in two parts for I and W, or their sum for B."""
    found, splits, split = seconds.copy(), schedule.splits, not np.isnan(seconds[:, _I]).all()
    forward, inputs, weights = (
        np.reshape(one, (1, -1, 1)) for one in (price.forward, price.input_gradient, price.weight_gradient)
    )
    joined = (seconds[:, _I] + np.nan_to_num(seconds[:, _W]) - price.split_seconds) / (inputs + weights)
    whole = np.where(np.isnan(seconds[:, _B]), np.maximum(joined, 0.0), seconds[:, _B])
    if splits and not split:
        found[:, _F] = seconds[:, _F] * forward + price.split_seconds
        found[:, _I], found[:, _W] = whole * inputs + price.split_seconds, whole * weights
    elif splits:
        both = np.nansum(seconds[:, _I]) + np.nansum(seconds[:, _W])
        for part in (_I, _W):
            usual = (np.nansum(seconds[:, part]) / both if both else 0.5) * whole
            found[:, part] = np.where(np.isnan(seconds[:, part]), usual, seconds[:, part])
    elif split:
        found[:, _F] = np.maximum(seconds[:, _F] - price.split_seconds, 0.0) / forward
    found[:, _B] = whole
    used = np.zeros(found.shape[1:], bool)
    for row in schedule.rows:
        used[PLACE[column(row.op)], column(row.stage), column(row.microbatch)] = True
    return np.where(used, found, np.nan)


def other_schedules(case: Case, slow: Floats, price: tuple[Price, ...] | None = None) -> Iterator[Change]:
    """Yield the case under each schedule that leaves stages as they are. Arguments are those of `another`."""
    now = case.schedules[0]
    if now.placement.pipelines > 1 or sum(map(len, now.rows)) * len(case.schedules) > MAX_ACTIONS:
        return
    each = now.placement.stages // now.placement.ranks
    for entry in schedule_specs():
        numbers = ScheduleParams(now.ranks, now.microbatches, max(each, entry.chunks))
        if not entry.fits(numbers, now.placement):
            continue
        found = another(case, entry.name, slow, price)
        if found.cases[0].schedules[0].rows != now.rows:
            yield found


def twice_the_microbatches(case: Case) -> Iterator[Change]:
    """Microbatches of half the size, each taking half as long; nothing if the schedule has no name."""
    now = case.schedules[0]
    placement = now.placement
    if now.name not in names() or placement.pipelines > 1:
        return
    made = generate(now.name, now.ranks, 2 * now.microbatches, placement.stages // placement.ranks)
    halves = (np.repeat(_pieces(case.seconds, 2, price), 2, axis=3) for price in (USUAL, FREE, DEAR))
    cases = (replace(case, schedules=(made,) * len(case.schedules), seconds=_for(made, one, FREE)) for one in halves)
    text = f"cut the batch into {2 * now.microbatches} microbatches instead of {now.microbatches}"
    yield Change("pieces", text, tuple(cases), "if half a microbatch takes half as long", measured=False)
