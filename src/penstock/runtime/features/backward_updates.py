"""Refuses updates in backward that would differ from plain training: of buffers, in a hook, an autograd function, or a
forward that a checkpoint runs again; and of parameters, in a hook that takes the optimizer's step.

A backward may keep a sum over microbatches, since backwards run in order. Anything that the forward also reads or
updates, such as a moving average, depends on how forwards and backwards alternate: in plain training each backward
directly follows its forward.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.compat import accumulation_hooks, any_accumulation_hooks, any_gradient_hooks, storage_of
from penstock.errors import PartitionError
from penstock.partition.values.memory import same_bits
from penstock.partition.watch.observer import RUNNING, argument_names, written_arguments
from penstock.runtime.features.context import StageContext
from penstock.runtime.features.feature import NOTHING, Context, Feature, Start, Watch
from penstock.runtime.features.recomputed_layers import RunsAgain
from penstock.runtime.front_end import Stage
from penstock.runtime.gradients.distribution import is_distributed
from penstock.schedule import Op

LOOKS = 3
"""How many of a stage's backwards are watched for reads; later ones behave alike."""

SMALL = 2**16
"""Buffers of at most this many bytes are compared bit by bit in these backwards."""

LOOKS_AT_HOOKS = 16
"""In how many backwards after hooks are added parameters with hooks are compared bit by bit: a hook may wait for
several backwards before it writes through `.data`. Writes that autograd tracks are always seen."""


class _Noted(NamedTuple):
    name: str
    buffer: Tensor
    version: int
    value: Tensor | None


class BackwardUpdates(Feature):
    """Refuses updates in a stage's backward that would differ from plain training, and reads of what has changed.

    Args:
        layers: those that run again in backward.
        copies: whether the schedule runs several copies of the stage.
        splits: the microbatches whose backward ends with W.
        deferred: buffers of batch norms that are updated once per step.
    """

    @classmethod
    def of(cls, stage: StageContext) -> BackwardUpdates | None:
        """In training. The statistics of deferred batch norms are expected to change."""
        if not stage.training:
            return None
        return cls(
            stage.stage,
            [part for part in stage.modules() if isinstance(part, RunsAgain)],
            copies=stage.copies,
            splits=stage.microbatches(Op.W),
            deferred=stage.binding.norms.buffers() if stage.binding.norms is not None else (),
        )

    def __init__(
        self,
        stage: Stage,
        layers: Sequence[RunsAgain] = (),
        *,
        copies: bool,
        splits: Iterable[int] = (),
        deferred: Iterable[Tensor] = (),
    ) -> None:
        self._index = stage.meta.index
        self._splits = frozenset(splits)
        passed_over = {id(buffer) for buffer in deferred}
        buffers = {name: buffer for name, buffer in stage.buffers.items() if id(buffer) not in passed_over}
        forward = (*stage.meta.updated, *stage.may_update)
        self._copies = copies
        self._buffers: Mapping[str, Tensor] = {
            name: buffer for name, buffer in buffers.items() if copies or name in forward
        }
        self._taken: Mapping[str, Tensor] = {
            name: buffer for name, buffer in buffers.items() if name in stage.reads and name not in self._buffers
        }
        again = {id(buffer) for layer in layers for buffer in layer.buffers()}
        self._taken_again = {name: buffer for name, buffer in self._taken.items() if id(buffer) in again}
        self._has_layers = bool(layers)
        self._parameters = {
            name: parameter
            for name, parameter in stage.parameters.items()
            if name not in forward and not is_distributed(parameter)
        }
        self._held = tuple(self._parameters.values())
        self._steps = Watch(self._versions, self._refuse_steps)
        self._noting = Watch(self._gradient_hooks, self._note)
        self._hooks: dict[int, object] = {}
        self._looks_at_hooks = 0
        self._looks = 0
        self._changes = 0  # the count of the model's changes when watching began
        self._latest = -1  # the microbatch of the last forward
        self._runs_again = False  # whether that runs again in backward
        self._left: dict[int, dict[str, Tensor]] = {}
        self._uncounted: set[int] = set()  # microbatches whose W is the first that is watched of their backward
        self._hooked: str | None = None

    def begin_step(self, start: Start) -> None:
        """Drops anything left by a step that raised."""
        self._left.clear()
        self._uncounted.clear()
        if start.changes != self._changes:
            self._changes, self._looks = start.changes, 0

    def forward(self, microbatch: int, *, runs_again: bool) -> Context:
        """Wraps a forward: notes what it leaves behind."""
        self._latest, self._runs_again = microbatch, runs_again
        return self._noting if self._looks < LOOKS else NOTHING

    def _note(self, hooks: set[tuple[str, int]]) -> None:
        """Ends a forward that began with these hooks on gradients."""
        if new := self._gradient_hooks() - hooks:
            self._hooked = next(name for name, _ in new)
            if self._runs_again or self._has_layers:
                raise self._refuses_hook("would register once more where it runs again")
        if self._buffers and not self._copies:
            self._left[self._latest] = {name: buffer.detach().clone() for name, buffer in self._buffers.items()}

    def autograd(self, microbatch: int) -> Context:
        """Wraps autograd's backward.

        Raises:
            PartitionError: it updates a parameter, or a buffer that forwards update, or it reads a buffer that has
                changed since its own forward.
        """
        left = self._left.pop(microbatch, {}) if self._left else {}
        if microbatch == self._latest and not self._copies:
            if microbatch in self._splits:
                self._uncounted.add(microbatch)
            return self._watched_alone() if self._taken_again else NOTHING
        self._looks += 1
        if microbatch in self._splits:
            self._left[microbatch] = left
        return self._watched(left)

    def weights(self, microbatch: int) -> Context:
        """Wraps the work that a split backward put off. Raises PartitionError as `autograd` does."""
        left = self._left.pop(microbatch, {})
        uncounted = microbatch in self._uncounted
        self._uncounted.discard(microbatch)
        if microbatch == self._latest:
            return NOTHING
        self._looks += uncounted
        return self._watched(left)

    @contextmanager
    def _watched_alone(self) -> Iterator[None]:
        """Wraps a backward that directly follows its forward, and in which layers run again."""
        taken = self._noted(self._taken_again)
        yield
        self._refuse_changed(taken, self._refusal_of_taken)

    def _watched(self, left: Mapping[str, Tensor]) -> Context:
        """Wraps a backward, or its W, if forwards of other microbatches may have run since its forward."""
        hooks = self._hooks or any_accumulation_hooks(self._held)
        plain = not (left or hooks or self._taken or self._buffers or self._hooked)
        return self._steps if plain else self._watched_closely(left)

    @contextmanager
    def _watched_closely(self, left: Mapping[str, Tensor]) -> Iterator[None]:
        if self._hooked is not None:
            raise self._refuses_hook("registers anew, and hooks of other microbatches would run with it")
        stale = {
            storage_of(self._buffers[name]): name
            for name, value in left.items()
            if not same_bits(value, self._buffers[name].detach())
        }
        taken, own = self._noted(self._taken), self._noted(self._buffers)
        with self._no_steps(), Reads(stale) if stale else NOTHING as reads:
            yield
        self._refuse_changed(own, self._refusal)
        self._refuse_changed(taken, self._refusal_of_taken)
        for name in () if reads is None else reads.found:
            raise PartitionError(
                f"the backward of stage {self._index} reads buffer {name!r}, which forwards of other "
                "microbatches have updated since its own (in a hook, an autograd function, or a checkpoint of the "
                "model, which runs a forward again). In the forward, keep what backward needs (a clone, an attribute), "
                "or choose schedule='naive' or microbatches=1"
            )

    def _noted(self, buffers: Mapping[str, Tensor]) -> Sequence[_Noted]:
        """The current state of buffers. Small ones are copied in the first backwards, since autograd does not see
        writes through `.data`.
        """
        if not buffers:
            return ()
        looks = self._looks <= LOOKS
        return [
            _Noted(name, b, b._version, b.detach().clone() if looks and b.numel() * b.element_size() <= SMALL else None)
            for name, b in buffers.items()
        ]

    def _refuse_changed(self, noted: Sequence[_Noted], refusal: Callable[[str], PartitionError]) -> None:
        for name, buffer, version, value in noted:
            if buffer._version != version or (value is not None and not same_bits(value, buffer.detach())):
                raise refusal(name)

    def _gradient_hooks(self) -> set[tuple[str, int]]:
        """The hooks on gradients of parameters: for each the parameter's name and the hook's number."""
        if not any_gradient_hooks(self._held):
            return set()
        return {(name, key) for name, p in self._parameters.items() for key in p._backward_hooks or ()}

    def _refuses_hook(self, why: str) -> PartitionError:
        return PartitionError(
            f"the forward of stage {self._index} registers a hook on the gradient of parameter {self._hooked!r}, which "
            f"it {why}; register it once, outside of the forward, or choose schedule='naive' and recompute='never'"
        )

    def _refusal_of_taken(self, name: str) -> PartitionError:
        return PartitionError(
            f"the backward of stage {self._index} updates buffer {name!r} (in a hook or an autograd function), "
            "which its forward takes, and forwards of other microbatches have come between, or a layer runs again: in "
            "plain training forwards would find the new value only afterwards. Update it after the step, or choose "
            "schedule='naive' or microbatches=1, without recompute=<n>"
        )

    @contextmanager
    def _no_steps(self) -> Iterator[None]:
        found = {name: some for name, p in self._parameters.items() if (some := accumulation_hooks(p))}
        values = self._hooked_values(found) if found or self._hooks else {}
        versions = self._versions()
        yield
        self._refuse_steps(versions, values)

    def _versions(self) -> list[int]:
        return [*map(_version_of, self._held)]

    def _refuse_steps(self, versions: Sequence[int], values: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        if not values and versions == self._versions():
            return
        for version, (name, parameter) in zip(versions, self._parameters.items(), strict=True):
            if parameter._version != version or (name in values and not same_bits(values[name], parameter)):
                raise PartitionError(
                    f"the backward of stage {self._index} updates parameter {name!r} by a hook "
                    "(register_post_accumulate_grad_hook) while other microbatches are in flight, which plain training "
                    "would run with the new value. Step the optimizer after pipe.step, or choose microbatches=1"
                )

    def _hooked_values(self, found: Mapping[str, Sequence[object]]) -> Mapping[str, Tensor]:
        """Copies of the parameters with hooks, in the first backwards after hooks were added."""
        hooks = {id(hook): hook for some in found.values() for hook in some}
        if not hooks.keys() <= self._hooks.keys():
            self._looks_at_hooks = 0
        self._hooks = hooks
        self._looks_at_hooks += 1
        looks = self._looks_at_hooks <= LOOKS_AT_HOOKS
        return {name: self._parameters[name].detach().clone() for name in found} if looks else {}

    def _refusal(self, name: str) -> PartitionError:
        if self._copies:
            return PartitionError(
                f"the backward of stage {self._index} updates buffer {name!r}, but this schedule runs several copies "
                "of the stage, each of which would see only part of the batch; use a schedule with one copy "
                "(dualpipe-v for dualpipe)"
            )
        return PartitionError(
            f"the backward of stage {self._index} updates buffer {name!r}, as its forward does (a checkpoint in the "
            "model runs it again, or a hook writes to it), and forwards of other microbatches have come between, so "
            "that the updates are not in the order of plain training. Switch gradient checkpointing off in the model, "
            "and choose recompute='always' instead, or leave the buffer alone in backward"
        )


_version_of = attrgetter("_version")


def _is_our_own() -> bool:
    """Whether Penstock itself calls the operator, as when it saves buffers around modules that run again."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, __file__, contextlib.__file__)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_PENSTOCK)


_TORCH, _PENSTOCK = str(Path(torch.__file__).parent), str(Path(__file__).parents[2])


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds out whether operators read some memory other than to update it.

    Compiled code runs unchanged; only what it leaves to torch's own kernels is seen.

    Attributes:
        found: the names of what is read, in order.
    """

    supports_higher_order_operators = True

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self.found: dict[str, None] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: otherwise torch would run compiled code as if it were not compiled."""
        return True

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
        return memory in self._names and self._names[memory] not in self.found
