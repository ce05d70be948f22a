"""What a backward updates: buffers, in a hook, in an autograd function, or in a forward that a checkpoint runs again;
and parameters, in a hook that takes the optimizer's step.

A backward may keep a sum over microbatches, since backwards run in order. Anything that the forward takes or updates as
well, such as a moving average, depends on how forwards and backwards alternate: in plain training each backward follows
directly on its forward.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.compat import accumulation_hooks, storage_of
from penstock.errors import PartitionError
from penstock.partition.values.memory import same_bits
from penstock.partition.watch.observer import RUNNING, argument_names, written_arguments
from penstock.runtime.features.compiled import any_compiled
from penstock.runtime.features.context import StageContext
from penstock.runtime.features.feature import Feature, Start
from penstock.runtime.front_end import Stage
from penstock.runtime.gradients.distribution import is_distributed

LOOKS = 3
"""The number of a stage's backwards in which reads are watched: later ones are alike."""

LOOKS_AT_HOOKS = 16
"""The number of backwards, counted from when hooks are added, in which parameters with hooks are compared bit by bit: a
hook may wait for several backwards before it writes through `.data`. Writes that autograd knows of are seen in all."""


class BackwardUpdates(Feature):
    """Refuses updates in a stage's backward that would not be those of plain training, and reads of what has changed.

    Args:
        copies: whether the schedule runs several copies of the stage.
        is_compiled: whether parts of the stage are compiled, so that their operators cannot be watched.
    """

    @classmethod
    def of(cls, stage: StageContext) -> BackwardUpdates | None:
        """In training; with deferred batch norms their statistics are expected to change."""
        if not stage.training or stage.binding.norms is not None:
            return None
        compiled = stage.binding.compile is not None or any_compiled(stage.stage.module.modules())
        return cls(stage.stage, copies=stage.copies, is_compiled=compiled)

    def __init__(self, stage: Stage, *, copies: bool, is_compiled: bool) -> None:
        self._index = stage.meta.index
        forward = (*stage.meta.updated, *stage.may_update)
        self._copies, self._is_compiled = copies, is_compiled
        self._buffers: Mapping[str, Tensor] = {
            name: buffer for name, buffer in stage.buffers.items() if copies or name in forward
        }
        self._taken: Mapping[str, Tensor] = {
            name: buffer for name, buffer in stage.buffers.items() if name in stage.reads and name not in self._buffers
        }
        self._parameters = {
            name: parameter
            for name, parameter in stage.parameters.items()
            if name not in forward and not is_distributed(parameter)
        }
        self._hooks: dict[int, object] = {}
        self._looks_at_hooks = 0
        self._looks = 0
        self._latest = -1
        self._left: dict[int, dict[str, Tensor]] = {}

    def begin_step(self, start: Start) -> None:
        """Drops what a step that raised has left."""
        self._left.clear()

    @contextmanager
    def forward(self, microbatch: int, *, runs_again: bool) -> Iterator[None]:
        """Around a forward: notes what it leaves."""
        self._latest = microbatch
        yield
        if self._looks < LOOKS and not self._copies and not self._is_compiled:
            self._left[microbatch] = {name: buffer.detach().clone() for name, buffer in self._buffers.items()}

    @contextmanager
    def autograd(self, microbatch: int) -> Iterator[None]:
        """Around autograd's backward.

        Raises:
            PartitionError: it updates a parameter, or a buffer that forwards update, or reads a buffer that is no
                longer as its own forward left it.
        """
        left = self._left.pop(microbatch, {})
        if microbatch == self._latest and not self._copies:
            yield
            return
        self._looks += 1
        before, taken = _versions(self._buffers), _versions(self._taken)
        stale = {
            storage_of(self._buffers[name]): name
            for name, value in left.items()
            if not same_bits(value, self._buffers[name].detach())
        }
        with self._no_steps(), Reads(stale) if stale else nullcontext() as reads:
            yield
        for name, version in before.items():
            if self._buffers[name]._version != version:
                raise self._refusal(name)
        for name, version in taken.items():
            if self._taken[name]._version != version:
                raise PartitionError(
                    f"the backward of stage {self._index} updates buffer {name!r} (in a hook or an autograd function), "
                    "which its forward takes, and forwards of other microbatches have come between: in plain training "
                    "they would find the new value. Update it after the step, or choose schedule='naive' or "
                    "microbatches=1"
                )
        for name in () if reads is None else reads.found:
            raise PartitionError(
                f"the backward of stage {self._index} reads buffer {name!r}, which forwards of other "
                "microbatches have updated since its own (in a hook, an autograd function, or a checkpoint of the "
                "model, which runs a forward again). In the forward, keep what backward needs (a clone, an attribute), "
                "or choose schedule='naive' or microbatches=1"
            )

    @contextmanager
    def weights(self, microbatch: int) -> Iterator[None]:
        """Around what a split backward has put off. Raises PartitionError if it updates a parameter."""
        with nullcontext() if microbatch == self._latest else self._no_steps():
            yield

    @contextmanager
    def _no_steps(self) -> Iterator[None]:
        found = {name: some for name, p in self._parameters.items() if (some := accumulation_hooks(p))}
        hooks = {id(hook): hook for some in found.values() for hook in some}
        if not hooks.keys() <= self._hooks.keys():
            self._looks_at_hooks = 0
        self._hooks = hooks
        self._looks_at_hooks += 1
        looks = self._looks_at_hooks <= LOOKS_AT_HOOKS
        values = {name: self._parameters[name].detach().clone() for name in found} if looks else {}
        versions = _versions(self._parameters)
        yield
        for name, parameter in self._parameters.items():
            if parameter._version != versions[name] or (name in values and not same_bits(values[name], parameter)):
                raise PartitionError(
                    f"the backward of stage {self._index} updates parameter {name!r} by a hook "
                    "(register_post_accumulate_grad_hook) while other microbatches are in flight, which plain training "
                    "would run with the new value. Step the optimizer after pipe.step, or choose microbatches=1"
                )

    def _refusal(self, name: str) -> PartitionError:
        if self._copies:
            return PartitionError(
                f"the backward of stage {self._index} updates buffer {name!r}, but this schedule runs several copies "
                "of the stage, each of which would see only part of the batch; take a schedule with one copy "
                "(dualpipe-v for dualpipe)"
            )
        return PartitionError(
            f"the backward of stage {self._index} updates buffer {name!r}, as its forward does (a checkpoint in the "
            "model runs it again, or a hook writes to it), and forwards of other microbatches have come between, so "
            "that the updates are not in the order of plain training. Switch gradient checkpointing off in the model, "
            "and choose recompute='always' instead, or leave the buffer alone in backward"
        )


def _versions(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor._version for name, tensor in tensors.items()}


def _is_our_own() -> bool:
    """Whether Penstock itself calls the operator, as it does to save buffers around modules that run again."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, __file__, contextlib.__file__)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_PENSTOCK)


_TORCH, _PENSTOCK = str(Path(torch.__file__).parent), str(Path(__file__).parents[2])


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds out whether operators read some memory, other than in order to update it.

    Attributes:
        found: what is read, in order.
        ignored: memory that may be read for the time being.
    """

    supports_higher_order_operators = True

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self.found: dict[str, None] = {}
        self.ignored: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload):
            written = written_arguments(func)
            given = {**dict(zip(argument_names(func), args, strict=False)), **kwargs}
            for name, value in given.items():
                training = given.get("training", given.get("train", True))
                if name in written or (name in RUNNING and training):
                    continue
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(tensor, Tensor) and self._counts(storage_of(tensor)) and not _is_our_own():
                        self.found[self._names[storage_of(tensor)]] = None
        return func(*args, **kwargs)

    def _counts(self, memory: int) -> bool:
        return memory in self._names and memory not in self.ignored and self._names[memory] not in self.found
