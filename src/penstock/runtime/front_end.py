"""What the runtime needs from a model cut into stages, whether by `penstock.partition` or by another front end.

A front end is called with the inputs of one microbatch and returns a `Partition`, which holds the `Stage`s. Both are
frozen dataclasses; the runtime copies them with some values changed (`dataclasses.replace`). Nothing checks what a
front end claims, so leave a field empty only if it has nothing to report. `tests/runtime/ready_made.py` is a small
example.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import Field
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from penstock._base.stages import StageMeta
from penstock.partition import Left, Origin, RandomSource, Remembered, Surroundings


class Stage(Protocol):
    """One stage, a frozen dataclass; see `penstock.partition.Stage` for the fields."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def meta(self) -> StageMeta: ...
    @property
    def module(self) -> nn.Module:
        """`module(*inputs)` returns the tuple of outputs, both in the order of `meta`."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]: ...
    @property
    def buffers(self) -> Mapping[str, Tensor]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def frame(self) -> Surroundings | None: ...
    @property
    def depends_on_values(self) -> bool: ...
    @property
    def may_update(self) -> tuple[str, ...]: ...
    @property
    def reads(self) -> tuple[str, ...]: ...
    @property
    def remembered(self) -> tuple[Remembered, ...]: ...
    @property
    def draws_outside_modules(self) -> bool: ...
    @property
    def checkpointed(self) -> Sequence[nn.Module]: ...
    @property
    def norms_as_functions(self) -> Sequence[str]: ...
    @property
    def code(self) -> str:
        """The stage's code, as text for people to read."""

    def on(self, device: torch.device) -> Self:
        """The same stage, creating its own tensors on another device. Its parameters and buffers do not move."""


class Partition(Protocol):
    """All stages for one kind of microbatch, a frozen dataclass; see `penstock.partition.Partition` for the fields."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def stages(self) -> Sequence[Stage]: ...
    @property
    def drawing_modules(self) -> Mapping[str, nn.Module]: ...
    @property
    def draw_offsets(self) -> tuple[Mapping[str, int], ...]: ...
    @property
    def is_foreign(self) -> bool: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    @property
    def origins(self) -> Mapping[str, Origin]: ...
    @property
    def left(self) -> tuple[Left, ...]: ...
    @property
    def leaves_here(self) -> bool: ...
    @property
    def elsewhere(self) -> Mapping[str, Tensor]: ...
    @property
    def overwritten(self) -> frozenset[str]: ...
    @property
    def reorders_gradients(self) -> bool: ...
    @property
    def code(self) -> str: ...

    def holds(self, leaves: Sequence[Any]) -> bool:
        """Whether it is valid for the values of these leaves of (args, kwargs)."""

    def arrange(self, leaves: Sequence[Any]) -> list[Tensor]:
        """The tensors that stage 0 receives, from leaves of (args, kwargs) that are known to be of its kind."""

    def build_output(self, leaves: Sequence[Tensor]) -> Any:
        """The model's own result from the last stage's outputs."""

    def leaving(self, leaves: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Wraps the loss: puts in place what the forward leaves elsewhere."""


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
        """Divides the model like this from now on, and discards all partitions made so far."""

    def __call__(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Partition:
        """The partition for these inputs of one microbatch; the same object for the same kind."""

    def forget(self) -> None:
        """Drops every reference to parameters that the model no longer holds."""

    def attributes(self) -> Hashable:
        """What a partition depends on besides inputs, modes and autocast."""

    def settle(self, attributes: Any) -> None:
        """Called after a step with the `attributes` from before it: the step's own changes do not count as new."""

    def opened_modules(self) -> frozenset[int]:
        """The `id` of each module whose buffers the stages read themselves."""

    def names(self) -> dict[str, str]:
        """Maps every name of a parameter or buffer in the model, tied ones included, to the name that stages use."""


MakeFrontEnd = Callable[[Any, int, RandomSource], FrontEnd]
"""Makes a front end for a model, a number of stages, and the source of random streams."""
