"""Things in a forward that a recording cannot follow, but that a module that runs as a whole may contain."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn

from penstock.errors import PartitionError
from penstock.partition.source import is_ours


@dataclass(frozen=True, slots=True)
class Rate:
    """A module attribute between 0 and 1 that the code in question reads, such as the chance of dropping a layer.

    `value` may also be a list or tuple with one number per layer.
    """

    module: nn.Module
    name: str
    value: Any

    def alike(self, number: float) -> Any:
        """The value that sets it to a number, for every layer."""
        return type(self.value)([number] * len(self.value)) if isinstance(self.value, (list, tuple)) else number


OUTSIDE = "Do it outside of the model"
ELSEWHERE = f"{OUTSIDE}, or in a module of its own that leaves=[...] names, so that it runs as a whole"


class Obstacle(PartitionError):  # noqa: N818  (it becomes a PartitionError with what was found to help)
    """Raised when the forward does something that cannot be recorded; `remedies` finds out what helps.

    Args:
        why: what the forward did, and where.
        scope: the name of the module whose forward did it; empty for the model's own.
        rates: the rates that the code read and that may have led there.
        otherwise: what to say if nothing that was tried helped.
    """

    def __init__(self, why: str, scope: str, rates: tuple[Rate, ...] = (), otherwise: str = "") -> None:
        otherwise = otherwise or (OUTSIDE if scope else ELSEWHERE)
        super().__init__(f"{why}. {f'Pass leaves=[{scope!r}], so that it runs as a whole' if scope else otherwise}")
        self.why, self.scope, self.rates, self.otherwise = why, scope, rates, otherwise

    def because(self, reason: str) -> Obstacle:
        """The same obstacle, with the reason why the module around it was opened."""
        why = f"{reason}. Recording it call by call does not help: {self.why}"
        return Obstacle(why, self.scope, self.rates, self.otherwise)


def rates_read(error: BaseException) -> tuple[Rate, ...]:
    """The rates read by the module whose code raised an error."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return _rates_of(reversed(frames))


def rates_here() -> tuple[Rate, ...]:
    """The rates read by the module whose code is running."""
    return _rates_of(_running(sys._getframe(1)))


def _running(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _rates_of(frames: Iterable[FrameType]) -> tuple[Rate, ...]:
    """The rates of the user's first frame that is a module's method: it may have called a function with its rate."""
    for frame in frames:
        if not is_ours(frame.f_code.co_filename) and isinstance(frame.f_locals.get("self"), nn.Module):
            return tuple(_rates(frame))
    return ()


def _rates(frame: FrameType) -> Iterator[Rate]:
    owner: Any = frame.f_locals["self"]
    for name in frame.f_code.co_names:
        value = vars(owner).get(name)
        numbers = value if isinstance(value, (list, tuple)) else [value]
        within = all(isinstance(number, (int, float)) and 0 <= number <= 1 for number in numbers)
        if within and any(isinstance(number, float) and number for number in numbers):
            yield Rate(owner, name, value)
