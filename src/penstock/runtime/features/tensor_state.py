"""What a forward writes in place into tensors that are no buffers, and its own backward reads: an attribute that holds
a plain tensor, a parameter without gradient.

Whatever is set anew is put back for each microbatch (`forward_state.py`). Memory that is written to stays what the last
forward has made of it, so that a backward which reads it is refused where other forwards have come between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.compat import storage_of
from penstock.errors import PartitionError
from penstock.partition.state.places import Survey, named_by_code
from penstock.partition.values.memory import same_bits
from penstock.runtime.features.backward_updates import Reads
from penstock.runtime.features.compiled import any_compiled
from penstock.runtime.features.context import StageContext
from penstock.runtime.features.feature import Feature, Start

BACKWARDS = 4
"""The number of a stage's backwards until which forwards are watched: later ones are alike."""

SMALL = 2**16
"""Tensors of so many bytes are compared bit by bit; of larger ones autograd's count of updates is."""


@dataclass(frozen=True, eq=False, slots=True)
class _Reading:
    version: int
    values: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor) -> _Reading:
        small = tensor.numel() * tensor.element_size() <= SMALL
        return cls(tensor._version, tensor.detach().clone() if small else None)

    def fits(self, tensor: Tensor) -> bool:
        return self.version == tensor._version if self.values is None else same_bits(self.values, tensor.detach())


class TensorState(Feature):
    """Refuses a backward that reads a tensor which later forwards of the stage have written to.

    Args:
        index: of the stage.
        modules: whose code it runs.
        known: tensors that others see to: the stage's buffers.
    """

    @classmethod
    def of(cls, stage: StageContext) -> TensorState | None:
        """In training, where operators can be watched."""
        if not stage.training or stage.binding.compile is not None or stage.sharded is not None:
            return None
        modules = [module for each in stage.stages for module in each.module.modules()]
        return None if any_compiled(modules) else cls(stage.index, modules, stage.stage.buffers.values())

    def __init__(self, index: int, modules: Iterable[nn.Module], known: Iterable[Tensor] = ()) -> None:
        self._index = index
        own = dict.fromkeys(modules)
        kinds = dict.fromkeys(base for module in own for base in type(module).__mro__)
        self._roots = [*own, *named_by_code(kinds)]
        self._known = {storage_of(buffer) for buffer in known}
        self._written: dict[int, tuple[str, Tensor]] = {}
        self._left: dict[int, dict[int, _Reading]] = {}
        self._backwards = 0
        self._latest = -1

    def begin_step(self, start: Start) -> None:
        """Drops what a step that raised has left."""
        self._left.clear()
        if self._backwards >= BACKWARDS:
            self._written.clear()

    @contextmanager
    def forward(self, microbatch: int, *, runs_again: bool) -> Iterator[None]:
        """Around a forward: notes what it writes to."""
        self._latest = microbatch
        if self._backwards >= BACKWARDS:
            yield
            return
        found = {key: each for key, each in Survey(self._roots).tensors.items() if self._counts(each[1])}
        before = {key: _Reading.of(tensor) for key, (_, tensor) in found.items()}
        yield
        for key, (name, tensor) in found.items():
            if key not in self._written and not before[key].fits(tensor):
                self._written[key] = name, tensor
                for left in self._left.values():  # earlier forwards left it as this one found it
                    left[key] = before[key]
        self._left[microbatch] = {key: _Reading.of(tensor) for key, (_, tensor) in self._written.items()}

    @contextmanager
    def autograd(self, microbatch: int) -> Iterator[None]:
        """Around autograd's backward. Raises PartitionError if it reads what other forwards have written since."""
        left = self._left.pop(microbatch, {})
        watches = self._backwards < BACKWARDS and microbatch != self._latest
        self._backwards += 1
        stale = [self._written[key] for key, reading in left.items() if not reading.fits(self._written[key][1])]
        if not watches or not stale:
            yield
            return
        with Reads({storage_of(tensor): name for name, tensor in stale}) as reads:
            yield
        for name in reads.found:
            raise PartitionError(
                f"the backward of stage {self._index} reads {name!r}, a tensor in which forwards of other microbatches "
                "have written since its own (in a hook or an autograd function). In the forward, set the attribute "
                "anew instead of writing in place, keep what backward needs in the function's ctx, or choose "
                "schedule='naive' or microbatches=1"
            )

    def _counts(self, tensor: Tensor) -> bool:
        """Whether a tensor is plain memory that no other rule is about."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or tensor.is_inference():
            return False
        if tensor.layout is not torch.strided or (tensor.is_leaf and tensor.requires_grad):
            return False
        return tensor.numel() > 0 and storage_of(tensor) not in self._known
