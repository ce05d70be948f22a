"""Why actions take as long as they do: the stage, the rank that runs it, the microbatch, and what is left.

An action's time is taken as a product: what its op takes on its stage (typical of all replicas), how slow its rank is,
how long its microbatch, and a rest that is its own. Medians, so that a few slow actions do not count as a slow stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.schedule import Op
from penstock.simulate.computations import COMPUTE, Floats, column
from penstock.trace.measured import Replica

OP_INDEX = np.array([COMPUTE.index(op) if op.is_compute else -1 for op in Op])
"""The index of an op along O, by its code."""
ALIKE_FRACTION = 0.05
"""Times that differ by less than this are taken as alike."""
SLOW_FACTOR = 1.1
"""A rank is slow if one of its ops takes this many times what is typical of the stage."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Times by replica (R), op (O, as in `COMPUTE`), stage (S) and microbatch (M); NaN where there is no such action.

    Attributes:
        seconds: as measured, [R, O, S, M].
        typical: of the stage's op, [O, S].
        rank: by how much the rank is slower than is typical, [R, O, S].
        microbatch: by how much a microbatch is longer than the mean, [R, M].
    """

    seconds: Floats
    typical: Floats
    rank: Floats
    microbatch: Floats

    @property
    def even(self) -> Floats:
        """If all stages were alike."""
        used = ~np.isnan(self.typical)
        means = np.nansum(self.typical, axis=1) / np.maximum(1, used.sum(axis=1))
        return self._broadcast(np.where(used, means[:, None], np.nan))

    @property
    def by_stage(self) -> Floats:
        """If no rank were slow, and all microbatches alike."""
        return self._broadcast(self.typical)

    @property
    def by_rank(self) -> Floats:
        """If all microbatches were alike."""
        return self._broadcast(self.typical) * self.rank[..., None]

    @property
    def by_microbatch(self) -> Floats:
        """Without what is an action's own."""
        return self.by_rank * self.microbatch[:, None, None, :]

    @property
    def residual(self) -> Floats:
        """By how much each action is slower than all that explains it."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.by_microbatch > 0, self.seconds / self.by_microbatch, 1.0)

    def _broadcast(self, by_stage: Floats) -> Floats:
        """[O, S] for every action that there is."""
        return np.where(np.isnan(self.seconds), np.nan, by_stage[None, :, :, None])


def fit_factors(replicas: Sequence[Replica]) -> Factors:
    """Fit the factors that explain the times of one step."""
    seconds = action_seconds(replicas)
    with np.errstate(divide="ignore", invalid="ignore"):
        microbatch = _microbatch_factors(seconds)
        base = _low_median(seconds / microbatch[:, None, None, :], axis=3)
        typical = _low_median(base, axis=0)
        rank = np.where(base > 0, base / typical[None], 1.0)
        rank = np.where(np.isfinite(rank), rank, 1.0)
    return Factors(seconds, typical, rank, microbatch)


def _low_median(values: Floats, axis: int | tuple[int, ...], *, keepdims: bool = False) -> Floats:
    """Return the median of the values that are not NaN, and NaN where there are none; the lower of two in the middle,
    so that of two values a delayed one does not count. (numpy's warns of a stage without an op, and a warning cannot be
    silenced in one thread alone.)"""
    axes = (axis,) if isinstance(axis, int) else axis
    last = np.moveaxis(values, axes, range(-len(axes), 0))
    ordered = np.sort(last.reshape(*last.shape[: -len(axes)], -1), axis=-1)  # NaN sorts last
    counts = np.count_nonzero(~np.isnan(ordered), axis=-1, keepdims=True)
    medians = np.take_along_axis(ordered, np.maximum(counts - 1, 0) // 2, axis=-1)[..., 0]
    return np.expand_dims(medians, axes) if keepdims else medians


def _microbatch_factors(seconds: Floats) -> Floats:
    """Return by what factor each microbatch is longer than the mean, [R, M], by most ops of most stages."""
    typical = _low_median(seconds, axis=(0, 3), keepdims=True)
    ratio = seconds / np.where(typical > 0, typical, np.nan)
    factors = _low_median(ratio, axis=(1, 2))
    factors = np.where(factors > 0, factors, 1.0)  # unknown, or beyond the clock, if a range is all wait
    uniform = factors.max(axis=1) < factors.min(axis=1) * (1 + ALIKE_FRACTION)  # then it is the replica's ranks
    factors[uniform] = 1.0
    factors /= factors.mean()
    return factors if np.abs(factors - 1).max() >= ALIKE_FRACTION else np.ones_like(factors)


def action_seconds(replicas: Sequence[Replica]) -> Floats:
    """Return the seconds of each action, [R, O, S, M]."""
    schedule = replicas[0].schedule
    microbatches = max(replica.schedule.microbatches for replica in replicas)
    seconds = np.full((len(replicas), len(COMPUTE), schedule.stages, microbatches), np.nan)
    for number, replica in enumerate(replicas):
        for track in replica.timeline.tracks:
            row = track.actions
            took = column(track.end) - column(track.start)
            seconds[number, OP_INDEX[column(row.op)], column(row.stage), column(row.microbatch)] = took
    return seconds
