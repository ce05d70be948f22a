"""What in a forward a recording cannot follow, but what may be inside of a module that runs as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn

from penstock.errors import PartitionError
from penstock.partition.source import is_ours


@dataclass(frozen=True, slots=True)
class Rate:
    """An attribute of a module between 0 and 1 that the code in question reads: the chance of dropping a layer, say."""

    module: nn.Module
    name: str
    value: float


class Obstacle(PartitionError):  # noqa: N818  (it becomes a PartitionError with what was found to help)
    """Raised where the forward does it; `remedies` finds out what helps.

    Args:
        why: what was met, and where.
        scope: the name of the module in whose forward it was met; empty for the model's own.
        rates: what the code read that may have led there.
    """

    def __init__(self, why: str, scope: str, rates: tuple[Rate, ...] = ()) -> None:
        remedy = f"Give leaves=[{scope!r}], so that it runs as a whole" if scope else "Do it outside of the model"
        super().__init__(f"{why}. {remedy}")
        self.why, self.scope, self.rates = why, scope, rates

    def because(self, reason: str) -> Obstacle:
        """The same, met on a way that was taken for a reason."""
        return Obstacle(f"{reason}. To record it call by call does not help: {self.why}", self.scope, self.rates)


def rates_read(error: BaseException) -> tuple[Rate, ...]:
    """The rates that the user's code in which an error arose reads from its own module."""
    return tuple(rate for frame in _frames(error) for rate in _rates(frame))


def _frames(error: BaseException) -> Iterator[FrameType]:
    """The user's innermost frame that the error passed through."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in reversed(frames):
        if not is_ours(frame.f_code.co_filename):
            yield frame
            return


def _rates(frame: FrameType) -> Iterator[Rate]:
    owner: Any = frame.f_locals.get("self")
    if isinstance(owner, nn.Module):
        for name in frame.f_code.co_names:
            value = vars(owner).get(name)
            if isinstance(value, float) and 0 < value <= 1:
                yield Rate(owner, name, value)
