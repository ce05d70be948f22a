"""What the runtime needs from a model cut into stages, whether by `penstock.partition` or by another front end.

A front end is called with the inputs of one microbatch and returns a `Partition`, which holds the `Stage`s: those of
`penstock.partition`, or other frozen dataclasses with the attributes that the runtime asks for, which copies them with
some values changed (`dataclasses.replace`). Nothing checks what a front end claims, so leave a field empty only if it
has nothing to report. `tests/runtime/ready_made.py` is a small example.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from penstock.partition import Partition, RandomSource, Stage

__all__ = ["FrontEnd", "MakeFrontEnd", "Partition", "Stage"]


class FrontEnd(Protocol):
    """Makes the partition for each kind of microbatch. `penstock.partition.Partitioner` is Penstock's own.

    Attributes:
        model: the unsplit model, whose names for parameters and buffers the stages use.
        cuts: the names at which stages 1.. begin; None until they are decided.
    """

    @property
    def model(self) -> nn.Module: ...
    @property
    def cuts(self) -> tuple[str, ...] | None: ...
    @property
    def division(self) -> Any:
        """Where the model is cut, as a value that can be sent to all processes."""

    def divide(self, division: Any) -> None:
        """Divide the model like this from now on, and discard all partitions made so far."""

    def __call__(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Partition:
        """Return the partition for these inputs of one microbatch; the same object for the same kind."""

    def forget(self) -> None:
        """Drop every reference to parameters that the model no longer holds."""

    def attributes(self) -> Hashable:
        """Return what a partition depends on besides inputs, modes and autocast."""

    def settle(self, attributes: Any) -> None:
        """Called after a step with the `attributes` from before it: the step's own changes do not count as new."""

    def opened_modules(self) -> frozenset[int]:
        """Return the `id` of each module whose buffers the stages read themselves."""

    def names(self) -> dict[str, str]:
        """Map every name of a parameter or buffer in the model, tied ones included, to the name that stages use."""


MakeFrontEnd = Callable[[Any, int, RandomSource], FrontEnd]
"""Makes a front end for a model, a number of stages, and the source of random streams."""
