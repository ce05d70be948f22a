"""What happens to frames on a link besides its rate, in the terms of tc netem: delay, jitter, loss and the like.

These are only values; model.py draws from them.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock._base.errors import ArgumentError

DISTRIBUTIONS = ("uniform", "normal", "pareto", "paretonormal")
"""Distributions of the jitter, as in netem."""


@dataclass(frozen=True, slots=True)
class Chance:
    """The chance that something happens to a frame.

    Attributes:
        share: the fraction of frames affected, 0..1.
        correlation: how likely a frame is to share the fate of the one before it, 0..1. Unlike netem's formula, this
            leaves `share` unchanged.
    """

    share: float = 0.0
    correlation: float = 0.0


NEVER = Chance()


@dataclass(frozen=True, slots=True)
class Bursts:
    """Loss by the Gilbert-Elliott model, netem's `loss gemodel`. All values are probabilities per frame, 0..1.

    Attributes:
        to_bad: the good state turns bad (p).
        to_good: the bad state turns good (r).
        loss_in_bad: a frame is lost in the bad state (1-h).
        loss_in_good: a frame is lost in the good state (1-k).
    """

    to_bad: float
    to_good: float
    loss_in_bad: float = 1.0
    loss_in_good: float = 0.0


@dataclass(frozen=True, slots=True)
class Impairment:
    """What happens to frames in one direction.

    Attributes:
        delay_seconds: the delay of every frame.
        jitter_seconds: the unit of the distribution: for uniform, the delay varies by up to this much either way; for
            the others, it is the standard deviation before the tails are cut off at four times the jitter.
        correlation: of the jitter, 0..1, as in `Chance`.
        distribution: one of `DISTRIBUTIONS`.
        overtaking: if True, a frame with a shorter delay passes those ahead of it, as in netem without a rate;
            otherwise it waits for them, so under load jitter turns into delay.
        loss, duplicate, corrupt, reorder: chances per frame. A reordered frame is not delayed and overtakes others; no
            other frame overtakes one.
        gap: the least distance in frames between two reordered frames.
        stall_seconds, stall_every_seconds: how long nothing leaves, and how often; the first stall comes after a whole
            period.

    Raises:
        ArgumentError: the values contradict each other.
    """

    delay_seconds: float = 0.0
    jitter_seconds: float = 0.0
    correlation: float = 0.0
    distribution: str = "uniform"
    overtaking: bool = False
    loss: Chance | Bursts = NEVER
    duplicate: Chance = NEVER
    corrupt: Chance = NEVER
    reorder: Chance = NEVER
    gap: int = 1
    stall_seconds: float = 0.0
    stall_every_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.overtaking and not self.jitter_seconds:
            raise ArgumentError(
                "without jitter no frame overtakes another: with overtaking also pass jitter, such as jitter 1ms"
            )
        if self.reorder.share and not self.delay_seconds:
            raise ArgumentError(
                "without a delay no frame can overtake another: with reorder also pass delay, such as delay 5ms"
            )
        if self.stall_seconds and self.stall_seconds >= self.stall_every_seconds:
            raise ArgumentError(
                f"a stall of {self.stall_seconds:g} s every {self.stall_every_seconds:g} s never ends: pass a longer "
                "period"
            )
        if self.gap < 1:
            raise ArgumentError(f"gap is {self.gap}: pass an integer >= 1")

    def __bool__(self) -> bool:
        return self != NOTHING

    @property
    def longest_seconds(self) -> float:
        """The longest delay of a frame, apart from stalls."""
        return self.delay_seconds + self._spread_seconds

    @property
    def shortest_seconds(self) -> float:
        """The shortest delay of a frame; 0 if frames may be reordered."""
        return 0.0 if self.reorder.share else max(self.delay_seconds - self._spread_seconds, 0.0)

    @property
    def varies(self) -> bool:
        """Whether frames differ in their delay."""
        return bool(self.jitter_seconds or self.reorder.share)

    @property
    def _spread_seconds(self) -> float:
        return self.jitter_seconds * (1 if self.distribution == "uniform" else 4)


NOTHING = Impairment()
