"""Updates a batch norm twice if the model checkpoints it: timm's DenseNet with `memory_efficient=True`.

In plain torch, `torch.utils.checkpoint` runs such a norm again in backward, which updates its running statistics once
more, right after the first time. In a pipeline the forwards of other microbatches may run between the two, and an
average depends on the order of its updates. So a forward makes both updates, and a second run in backward makes none.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import checkpoint

from penstock.errors import PartitionError
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
        self._all = [(module, around.count(module)) for module in modules]
        self._norms = [_Norm(*each) for each in self._all]  # those that are checkpointed, or may be

    def begin_step(self, start: Start) -> None:
        """Drops anything left by the last step: the model's checkpoints may have been switched on or off since."""
        self._norms = [_Norm(*each) for each in self._all]

    def forward(self, microbatch: int, *, runs_again: bool) -> Context:
        """Wraps a forward of the stage."""
        return self._updating(microbatch) if self._norms else NOTHING

    @contextmanager
    def _updating(self, microbatch: int) -> Iterator[None]:
        with ExitStack() as stack:
            for each in self._norms:
                stack.enter_context(each.module.register_forward_pre_hook(partial(each.update, microbatch)))
            yield
        self._norms = [each for each in self._norms if each.is_checkpointed is not False]

    def autograd(self, microbatch: int) -> Context:
        """Wraps a backward of the stage, but not a forward that the pipeline itself runs again."""
        return self._putting_aside(microbatch) if self._norms else NOTHING

    @contextmanager
    def _putting_aside(self, microbatch: int) -> Iterator[None]:
        with ExitStack() as stack:
            for each in self._norms:
                stack.enter_context(each.module.register_forward_pre_hook(each.put_aside))
                stack.enter_context(each.module.register_forward_hook(each.put_back, always_call=True))
            yield
        for each in self._norms:
            each.check(microbatch)


class _Norm:
    """One module.

    Attributes:
        is_checkpointed: None if that is not known yet.
    """

    def __init__(self, module: nn.Module, around: int) -> None:
        if around > 1:
            raise _unknown_order(module)
        self.module, self._is_around = module, bool(around)
        self.is_checkpointed = True if around else None
        self._due: Counter[int] = Counter()  # by microbatch: how often its backward should run the module again
        self._ran = 0  # how often the current backward has run it
        self._own = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        self._aside: list[AbstractContextManager[None]] = []

    def update(self, microbatch: int, module: nn.Module, args: Any) -> None:
        """Called before a call in a forward: makes the update that backward will not make."""
        if not module.training:
            return
        if self.is_checkpointed is None:
            self.is_checkpointed = _in_checkpoint()
        if not self.is_checkpointed:
            return
        if not isinstance(module, _BatchNorm):  # what it returns may depend on the buffer
            raise PartitionError(
                f"a {type(module).__name__} updates buffers in a forward that runs itself again in backward: plain "
                f"torch updates them in both runs, and may compute with other values in the second. {_REMEDY}"
            )
        if not self._is_around:
            if self._due[microbatch]:
                raise _unknown_order(module)
            self._due[microbatch] += 1
        with torch.no_grad():
            module.forward(*(arg.detach() if isinstance(arg, Tensor) else arg for arg in args))

    def put_aside(self, module: nn.Module, _args: Any) -> None:
        """Called before a call in backward, which then updates copies: the pipeline's, or new ones."""
        is_ours = any(module._buffers[name] is not buffer for name, buffer in self._own.items())
        aside = nullcontext() if is_ours else Buffers([module], self._own.values()).copy().in_place()
        aside.__enter__()
        self._aside.append(aside)
        self._ran += module.training and not is_ours

    def put_back(self, module: nn.Module, _args: Any, _result: Any) -> None:
        """Called after a call in backward, which checkpointing may have ended as soon as it had what it needs."""
        self._aside.pop().__exit__(None, None, None)

    def check(self, microbatch: int) -> None:
        """Called after a backward. Raises PartitionError unless it ran the module as often as its forward assumed."""
        due, ran, self._ran = self._due.pop(microbatch, 0), self._ran, 0
        if not self._is_around and ran != due:
            raise PartitionError(
                f"the backward of microbatch {microbatch} has run a {type(self.module).__name__} that updates buffers "
                f"{ran} times, but its forward expected {due}. If gradient checkpointing has been switched on or off "
                f"in the model, make a new pipeline; if it is not torch.utils.checkpoint's: {_REMEDY}"
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
