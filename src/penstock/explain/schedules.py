"""The same work in another order, or in other pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from penstock.errors import ArgumentError
from penstock.explain.case import PLACE, Case
from penstock.schedule import Op, Schedule, generate, names, peak_activations
from penstock.schedule.generators import Numbers, generator, generators
from penstock.simulate.columns import COMPUTE, Floats, column

_F, _B, _I, _W = (COMPUTE.index(op) for op in (Op.F, Op.B, Op.I, Op.W))
_SPLIT = "a backward's two parts taken as equally long"
_ROUNDING = 1 + 1e-9
_MOST_ACTIONS = 100_000
"""Of a step whose other schedules are all tried."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """A case under another schedule.

    Attributes:
        name: of the schedule, with its chunks if it has more than one.
        memory: the most activations that a rank holds, in those of one microbatch on all of its stages.
        note: what it assumes, and what it holds.
    """

    name: str
    case: Case
    memory: float
    note: str


def another(case: Case, text: str, slow: Floats) -> Ordered:
    """The case under a schedule, `zb-h1` or with chunks `interleaved-1f1b/2`.

    Args:
        case: with the schedule that was run.
        text: the schedule's name, and chunks if they are not its default.
        slow: how slow each rank is, by its stages, as in `Factors.rank`: stays with the rank where stages move.

    Raises:
        ArgumentError: there is no such schedule, or not for these ranks and microbatches, or it has fewer stages.
    """
    name, _, chunks = text.partition("/")
    if chunks and not chunks.isdigit():
        raise ArgumentError(f"schedule {text!r}: expected a name, or a name and a number of chunks, as in zb-v/2")
    entry, now = generator(name), case.schedules[0]
    each = now.placement.stages // now.placement.ranks
    if now.placement.pipelines > 1 or entry.placement == "bidirectional" or entry.slices > 1:
        raise ArgumentError(f"schedule {text!r}: not comparable; copies of a model and slices cost something else")
    asked = int(chunks) if chunks else max(each, entry.chunks)
    if not asked or asked % each:
        raise ArgumentError(f"schedule {text!r}: the trace has {each} stages a rank, which cannot become {asked}")
    made = generate(entry.name, now.ranks, now.microbatches, asked)
    factor, splits = asked // each, _splits(made)
    notes = []
    if factor > 1:
        notes.append(f"{asked} stages a rank, each 1/{factor} of what it was")
    if splits and np.isnan(case.seconds[:, _I]).all():
        notes.append(_SPLIT)
    held, holds = memory_of(now), memory_of(made)
    if holds > held * _ROUNDING:
        notes.append(f"a rank holds up to {holds:g} microbatches instead of {held:g}")
    seconds = np.repeat(case.seconds, factor, axis=2) / factor
    if made.placement != now.placement:
        seconds = seconds / np.repeat(slow, factor, axis=2)[..., None]
        of_rank = np.stack([slow[:, :, list(stages)].mean(axis=2) for stages in now.placement.by_rank], axis=2)
        seconds = seconds * of_rank[:, :, list(made.placement.rank_of)][..., None]
    spread = replace(
        case,
        schedules=(made,) * len(case.schedules),
        seconds=_for(made, seconds, splits=splits),
        host=np.repeat(case.host, factor, axis=1),
    )
    return Ordered(entry.name + (f"/{asked}" if factor > 1 else ""), spread, holds, "; ".join(notes))


def _splits(schedule: Schedule) -> bool:
    return any(code == Op.I.code for row in schedule.rows for _, code in row.kinds)


@lru_cache(maxsize=16)
def memory_of(schedule: Schedule) -> float:
    """The most that a rank holds, in a microbatch's activations on all of its stages."""
    return max(peak_activations(schedule)) * schedule.placement.ranks / schedule.placement.stages


def _for(schedule: Schedule, seconds: Floats, *, splits: bool) -> Floats:
    """[R, O, S, M] with a time for each op that the schedule has: halves of B for I and W, or their sum for B."""
    found = seconds.copy()
    whole = np.where(np.isnan(seconds[:, _B]), seconds[:, _I] + np.nan_to_num(seconds[:, _W]), seconds[:, _B])
    if splits:
        for part in (_I, _W):
            usual = _share(seconds, part) * whole
            found[:, part] = np.where(np.isnan(seconds[:, part]), usual, seconds[:, part])
    found[:, _B] = whole
    used = np.zeros(found.shape[1:], bool)
    for row in schedule.rows:
        used[np.array([PLACE[code] for code in row.op]), column(row.stage), column(row.microbatch)] = True
    return np.where(used, found, np.nan)


def _share(seconds: Floats, part: int) -> float:
    """The share of a backward that is I (or W), where any is split; half, where none is."""
    both = np.nansum(seconds[:, _I]) + np.nansum(seconds[:, _W])
    return float(np.nansum(seconds[:, part]) / both) if both else 0.5


def best_schedules(case: Case, slow: Floats) -> Iterator[Ordered]:
    """Of those that leave stages as they are, the fastest that needs no more memory, and the fastest at all if that
    needs more. `slow`: as for `another`.
    """
    now = case.schedules[0]
    if now.placement.pipelines > 1 or sum(map(len, now.rows)) * len(case.schedules) > _MOST_ACTIONS:
        return
    held = memory_of(now) * _ROUNDING
    each, found = now.placement.stages // now.placement.ranks, []
    for entry in generators():
        numbers = Numbers(now.ranks, now.microbatches, max(each, entry.chunks), entry.slices)
        if entry.slices > 1 or not entry.fits(numbers, now.placement):
            continue
        one = another(case, entry.name, slow)
        if one.case.schedules[0].rows != now.rows:
            found.append((one.case.pipeline_seconds, one))
    found.sort(key=lambda one: one[0])
    within = next((pair for pair in found if pair[1].memory <= held), None)
    if within:
        yield within[1]
    if found and found[0][1].memory > held and (within is None or found[0][0] < 0.99 * within[0]):
        yield found[0][1]


def twice_the_microbatches(case: Case) -> Ordered | None:
    """Microbatches of half the size, each taking half as long; None if the schedule has no name."""
    now = case.schedules[0]
    placement = now.placement
    if now.name not in names() or placement.pipelines > 1:
        return None
    made = generate(now.name, now.ranks, 2 * now.microbatches, placement.stages // placement.ranks)
    halves = np.repeat(case.seconds, 2, axis=3) / 2
    seconds = _for(made, halves, splits=_splits(made))
    spread = replace(case, schedules=(made,) * len(case.schedules), seconds=seconds)
    return Ordered(now.name, spread, memory_of(made) / 2, "if half a microbatch takes half as long")
