"""Updates a batch norm twice if the model checkpoints it: timm's DenseNet with `memory_efficient=True`.

In plain torch, `torch.utils.checkpoint` runs such a norm again in backward, which updates its running statistics once
more, right after the first time. In a pipeline the forwards of other microbatches may run between the two, and an
average depends on the order of its updates. So a forward makes both updates, and a second run in backward makes none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import checkpoint

from penstock._base.errors import PartitionError
from penstock.runtime.features import recomputed_layers
from penstock.runtime.features.context import StageContext
from penstock.runtime.features.feature import NOTHING, Context, Feature, Start
from penstock.runtime.features.recompute import Buffers

_REMEDY = "Switch gradient checkpointing off in the model, and choose recompute='always' instead"


class CheckpointedNorms(Feature):
    """The modules of one stage that update buffers of their own. Learns in its first forward which are checkpointed.

    Args:
        modules: these modules.
        around: modules in a checkpoint around them, which the stage does not run; one entry per call.
    """

    @classmethod
    def of(cls, stage: StageContext) -> CheckpointedNorms | None:
        """In training, if a forward updates buffers; deferred batch norms handle their own."""
        one, norms = stage.stage, stage.binding.norms
        deferred = {id(buffer) for buffer in norms.buffers()} if norms is not None else set()
        updated = {id(buffer): name for name, buffer in one.buffers.items() if name in one.meta.updated}
        names = {key: name for key, name in updated.items() if key not in deferred}
        if not stage.training or not names:
            return None
        around = stage.stages[0].checkpointed
        if stage.binding.compile is not None:
            for module in around:
                if (name := _updated_by(module, names)) is not None:
                    raise PartitionError(
                        f"compile=: stage {stage.index} updates buffer {name!r} within a forward that runs itself "
                        "again in backward, which compiled code does not do as often as plain torch. "
                        f"{_REMEDY}, or leave compile= out"
                    )
            return None
        return cls([module for module in dict.fromkeys(stage.modules()) if _updated_by(module, names)], around)

    def __init__(self, modules: Sequence[nn.Module], around: Sequence[nn.Module]) -> None:
        for module in modules:
            if around.count(module) > 1:
                raise _unknown_order(module)
        self._all, self._around = modules, frozenset(around)
        self._norms: dict[nn.Module, bool | None] = {}  # whether each is checkpointed; None: not known yet
        self._called: dict[int, set[nn.Module]] = {}  # by microbatch, of those within a checkpoint that the stage runs

    def begin_step(self, start: Start) -> None:
        """Drops what the last step learned: the model's checkpoints may have been switched on or off since."""
        self._norms = {module: True if module in self._around else None for module in self._all}

    def forward(self, microbatch: int, *, runs_again: bool) -> Context:
        """Wraps a forward of the stage."""
        return self._updating(microbatch) if self._norms else NOTHING

    @contextmanager
    def _updating(self, microbatch: int) -> Iterator[None]:
        self._called[microbatch] = set()
        with ExitStack() as stack:
            for module in self._norms:
                stack.enter_context(module.register_forward_pre_hook(partial(self._update, microbatch)))
            yield
        self._norms = {module: known for module, known in self._norms.items() if known is not False}

    def _update(self, microbatch: int, module: nn.Module, args: Any) -> None:
        """Called before a call in a forward: makes the update that backward will not make."""
        if not module.training:
            return
        if self._norms[module] is None:
            self._norms[module] = _in_checkpoint()
        if not self._norms[module]:
            return
        if not isinstance(module, _BatchNorm):  # what it returns may depend on the buffer
            raise PartitionError(
                f"a {type(module).__name__} updates buffers in a forward that runs itself again in backward: plain "
                f"torch updates them in both runs, and may compute with other values in the second. {_REMEDY}"
            )
        if module not in self._around:
            if module in self._called[microbatch]:
                raise _unknown_order(module)
            self._called[microbatch].add(module)
        with torch.no_grad():
            module.forward(*(arg.detach() if isinstance(arg, Tensor) else arg for arg in args))

    def autograd(self, microbatch: int) -> Context:
        """Wraps a backward of the stage, but not a forward that the pipeline itself runs again: what runs there updates
        copies."""
        own = [module for module in self._norms if module not in self._around]
        return self._copying(own, self._called.pop(microbatch, set())) if own else NOTHING

    @contextmanager
    def _copying(self, own: Sequence[nn.Module], called: set[nn.Module]) -> Iterator[None]:
        """Raises PartitionError if it does not run what the forward assumed: frozen layers do not run again."""
        ran = set[nn.Module]()

        def note(module: nn.Module, _args: Any) -> None:
            if _in_checkpoint():
                ran.add(module)

        held = (buffer for module in own for buffer in module._buffers.values() if buffer is not None)
        with ExitStack() as stack:
            stack.enter_context(Buffers(own, held).copy().in_place())
            for module in own:
                stack.enter_context(module.register_forward_pre_hook(note))
            yield
        for module in called - ran:
            raise PartitionError(
                f"the forward of a {type(module).__name__} that updates buffers is in a torch.utils.checkpoint, but "
                f"backward does not run it again, as nothing in it or before it is trained. {_REMEDY}"
            )


def _in_checkpoint() -> bool:
    """Whether the model's own checkpoint is on the stack, not only that of a layer that `recompute=` runs again."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename not in (checkpoint.__file__, recomputed_layers.__file__):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == checkpoint.__file__


def _updated_by(module: nn.Module, names: Mapping[int, str]) -> str | None:
    return next((names[id(buffer)] for buffer in module._buffers.values() if id(buffer) in names), None)


def _unknown_order(module: nn.Module) -> PartitionError:
    return PartitionError(
        f"a {type(module).__name__} that updates buffers is called several times in a forward that runs itself again "
        f"in backward; the order of its updates is not known. {_REMEDY}"
    )
