"""Handles in-place writes by a forward to tensors that are not buffers and that its own backward reads: a plain tensor
in an attribute, a parameter without gradient.

Attributes that are set anew are restored for each microbatch (`forward_state.py`). Memory that is written to stays as
the last forward left it, so a backward that reads it is refused if other forwards ran in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from penstock.compat import storage_of
from penstock.errors import PartitionError
from penstock.partition.state.places import Survey
from penstock.partition.values.memory import same_bits
from penstock.runtime.features.backward_updates import Reads
from penstock.runtime.features.context import StageContext
from penstock.runtime.features.feature import NOTHING, Context, Feature, Start
from penstock.runtime.features.forward_state import roots_of
from penstock.schedule import Op

BACKWARDS = 4
"""Forwards are watched until the stage has run this many backwards; later ones behave alike."""

SMALL = 2**16
"""Tensors of at most this many bytes are compared bit by bit; larger ones by autograd's count of updates."""


@dataclass(frozen=True, eq=False, slots=True)
class TensorReading:
    """A tensor at some moment: autograd's count of its updates, and the values of a small one."""

    version: int
    values: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor) -> TensorReading:
        """The tensor as it is now."""
        small = tensor.numel() * tensor.element_size() <= SMALL
        return cls(tensor._version, tensor.detach().clone() if small else None)

    def fits(self, tensor: Tensor) -> bool:
        """Whether the tensor is still the same."""
        return self.version == tensor._version if self.values is None else same_bits(self.values, tensor.detach())


class TensorState(Feature):
    """Refuses a backward that reads a tensor which later forwards of the stage have written to.

    Args:
        index: the stage's index.
        survey: finds the existing tensors.
        known: tensors handled elsewhere: the stage's buffers.
        splits: the microbatches whose backward ends with W.
    """

    @classmethod
    def of(cls, stage: StageContext) -> TensorState | None:
        """In training."""
        if not stage.training or stage.sharded is not None:
            return None
        survey = partial(Survey, roots_of(stage.modules()))
        return cls(stage.index, survey, stage.stage.buffers.values(), stage.microbatches(Op.W))

    def __init__(
        self, index: int, survey: Callable[[], Survey], known: Iterable[Tensor] = (), splits: Iterable[int] = ()
    ) -> None:
        self._index = index
        self._survey = survey
        self._splits = frozenset(splits)
        self._known = {storage_of(buffer) for buffer in known}
        self._written: dict[int, tuple[str, Tensor]] = {}
        self._left: dict[int, dict[int, TensorReading]] = {}
        self._backwards = 0
        self._changes = 0  # the count of the model's changes when watching began
        self._latest = -1

    def begin_step(self, start: Start) -> None:
        """Drops anything left by a step that raised."""
        self._left.clear()
        if start.changes != self._changes:
            self._changes, self._backwards = start.changes, 0
        if self._backwards >= BACKWARDS:
            self._written.clear()

    def forward(self, microbatch: int, *, runs_again: bool) -> Context:
        """Wraps a forward: notes what it writes to."""
        self._latest = microbatch
        return self._noting(microbatch) if self._backwards < BACKWARDS else NOTHING

    @contextmanager
    def _noting(self, microbatch: int) -> Iterator[None]:
        found = {key: each for key, each in self._survey().tensors.items() if self._counts(each[1])}
        before = {key: TensorReading.of(tensor) for key, (_, tensor) in found.items()}
        yield
        for key, (name, tensor) in found.items():
            if key not in self._written and not before[key].fits(tensor):
                self._written[key] = name, tensor
                for left in self._left.values():  # earlier forwards left it just as this one found it
                    left[key] = before[key]
        self._left[microbatch] = {key: TensorReading.of(tensor) for key, (_, tensor) in self._written.items()}

    def again(self, microbatch: int) -> Context:
        """Wraps a forward that runs again, and so writes again."""
        if microbatch != self._latest:
            self._latest = -1
        return NOTHING

    def autograd(self, microbatch: int) -> Context:
        """Wraps autograd's backward. Raises PartitionError if it reads what other forwards wrote in the meantime."""
        watches = self._backwards < BACKWARDS and microbatch != self._latest
        self._backwards += 1
        keeps = microbatch in self._splits
        left = self._left.get(microbatch) if keeps else self._left.pop(microbatch, None)
        return self._watched(left) if watches and left else NOTHING

    def weights(self, microbatch: int) -> Context:
        """Wraps W, in which hooks on the gradients of parameters run. Raises PartitionError as `autograd` does."""
        left = self._left.pop(microbatch, None)
        return self._watched(left) if left and microbatch != self._latest else NOTHING

    @contextmanager
    def _watched(self, left: dict[int, TensorReading]) -> Iterator[None]:
        stale = [self._written[key] for key, reading in left.items() if not reading.fits(self._written[key][1])]
        if not stale:
            yield
            return
        with Reads({storage_of(tensor): name for name, tensor in stale}) as reads:
            yield
        for name in reads.found:
            raise PartitionError(
                f"the backward of stage {self._index} reads {name!r}, a tensor to which forwards of other microbatches "
                "have written since its own (in a hook or an autograd function). In the forward, set the attribute "
                "anew instead of writing in place, keep what backward needs in the function's ctx, or choose "
                "schedule='naive' or microbatches=1"
            )

    def _counts(self, tensor: Tensor) -> bool:
        """Whether a tensor is plain memory that no other rule covers."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or tensor.is_inference():
            return False
        if tensor.layout is not torch.strided or (tensor.is_leaf and tensor.requires_grad):
            return False
        return tensor.numel() > 0 and storage_of(tensor) not in self._known
