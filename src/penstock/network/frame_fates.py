"""Draw what happens to the k-th frame on a link from a seed, no matter when the frame comes and what came before it.

The jitter's distributions are netem's, computed by the formulas behind its tables. For a u that is uniform in 0..1, in
units of the jitter and cut off at 4:

    uniform       2u - 1
    normal        the normal distribution's quantile
    pareto        ((1 - u)^(-1/3) - 3/2) * 4/3
    paretonormal  a quarter of the normal one plus three quarters of the Pareto one, at the same u

A test checks them against the tables of an installed tc. Each kind of chance has its own random stream, so adding one
to a link does not change the others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.network.link import Chance, Impairment

LOST, DUPLICATE, CORRUPT, REORDER = 1, 2, 4, 8
"""The bits of a frame's fate: dropped; sent twice; sent with one wrong bit; sent without delay, ahead of others."""

_WIDEST = 4.0
"""Where netem's tables end, in units of the jitter."""
_STREAMS = ("delay", "delay luck", "loss", "loss luck", "loss state", "duplicate", "duplicate luck", "corrupt",
            "corrupt luck", "bit", "reorder", "reorder luck")  # fmt: skip

Floats = npt.NDArray[np.float64]


class Decisions(NamedTuple):
    """Decisions about consecutive frames: their fates, as bits; their delays, 0 or more; and which bit is wrong, if one
    is, from 0 to 2^62, to be taken modulo the number of bits."""

    fate: npt.NDArray[np.uint8]
    delay_ns: npt.NDArray[np.int64]
    bit: npt.NDArray[np.int64]


class FrameFates:
    """The decisions for one direction of a link, in order. They do not depend on how many are requested at a time."""

    def __init__(self, impairment: Impairment, seed: int, direction: int) -> None:
        """Create the streams from the network's seed. `direction`: a number unique among the network's directions."""
        self._impairment = impairment
        self._key = (abs(seed), int(seed < 0), direction)
        self._streams: dict[str, np.random.Generator] = {}
        self._last: dict[str, float] = {}
        self._is_bad = False
        self._since_reorder = 0

    def next(self, count: int) -> Decisions:
        """Return the decisions for the next frames."""
        rules = self._impairment
        fate = np.zeros(count, dtype=np.uint8)
        fate[self._lost(count)] |= LOST
        for bit, name, chance in ((DUPLICATE, "duplicate", rules.duplicate), (CORRUPT, "corrupt", rules.corrupt)):
            fate[self._happens(name, chance, count)] |= bit
        fate[self._reorders(count)] |= REORDER
        if rules.jitter_seconds:
            spread = quantile(rules.distribution, self._uniform("delay", rules.correlation, count))
            delays = rules.delay_seconds + rules.jitter_seconds * spread
            delay_ns = np.rint(np.maximum(delays, 0) * 1e9).astype(np.int64)
        else:
            delay_ns = np.full(count, round(rules.delay_seconds * 1e9), dtype=np.int64)
        return Decisions(fate, delay_ns, self._stream("bit").integers(0, 2**62, count))

    def _stream(self, name: str) -> np.random.Generator:
        """Return a random stream, created on demand: a link that changes in mid-run needs its first decisions soon."""
        if name not in self._streams:
            seeds = np.random.SeedSequence([*self._key, _STREAMS.index(name)])
            self._streams[name] = np.random.Generator(np.random.Philox(seeds))
        return self._streams[name]

    def _uniform(self, name: str, correlation: float, count: int) -> Floats:
        """Draw from 0..1 uniformly; each value repeats the one before it with the probability `correlation`."""
        fresh = self._stream(name).random(count)
        if not correlation or not count:
            return fresh
        repeats = self._stream(f"{name} luck").random(count) < correlation
        origin = np.maximum.accumulate(np.where(repeats, -1, np.arange(count)))
        values = np.where(origin < 0, self._last.get(name, fresh[0]), fresh[origin])
        self._last[name] = float(values[-1])
        return values

    def _happens(self, name: str, chance: Chance, count: int) -> npt.NDArray[np.bool_]:
        if not chance.share:
            return np.zeros(count, dtype=bool)
        return self._uniform(name, chance.correlation, count) < chance.share

    def _lost(self, count: int) -> npt.NDArray[np.bool_]:
        loss = self._impairment.loss
        if isinstance(loss, Chance):
            return self._happens("loss", loss, count)
        shares = np.empty(count)
        for index, value in enumerate(self._stream("loss state").random(count).tolist()):
            shares[index] = loss.loss_in_bad if self._is_bad else loss.loss_in_good
            self._is_bad = value >= loss.to_good if self._is_bad else value < loss.to_bad
        return self._stream("loss").random(count) < shares

    def _reorders(self, count: int) -> npt.NDArray[np.bool_]:
        rules = self._impairment
        happens = self._happens("reorder", rules.reorder, count)
        if rules.gap == 1 or not rules.reorder.share:
            return happens
        for index, reorders in enumerate(happens.tolist()):
            happens[index] = reorders and self._since_reorder >= rules.gap - 1
            self._since_reorder = 0 if happens[index] else self._since_reorder + 1
        return happens


def quantile(distribution: str, u: Floats) -> Floats:
    """Return the quantiles of a jitter's distribution, in units of the jitter, at the probabilities `u` in 0..1."""
    if distribution == "uniform":
        return 2 * u - 1
    values = np.zeros_like(u)
    if distribution in ("pareto", "paretonormal"):
        with np.errstate(divide="ignore"):
            values = np.minimum(((1 - u) ** (-1 / 3) - 1.5) * 4 / 3, _WIDEST)
    if distribution in ("normal", "paretonormal"):
        from scipy import special  # the switch has already loaded it when frames come

        normal = np.clip(special.ndtri(np.clip(u, 1e-300, 1 - 1e-16)), -_WIDEST, _WIDEST)
        values = normal if distribution == "normal" else 0.25 * normal + 0.75 * values
    return values
