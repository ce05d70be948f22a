"""Handles batch norm inside a module that runs itself again in backward, as `torch.utils.checkpoint` does.

In plain torch the second run updates the running statistics once more, right after the first. In a pipeline the
forwards of other microbatches may run between the two, and an average depends on the order of its updates. So a
module's forward makes all of its microbatch's updates at once, and reruns in backward make none. Their number is
learned from the first backward; updates made before that are redone in the right order.

What a forward computes must therefore not depend on these buffers, which in plain torch are then between two updates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.compat import storage_of
from penstock.errors import PartitionError
from penstock.partition.values.memory import same_bits
from penstock.partition.values.objects import tensors_in
from penstock.runtime.exact.saved import SavedTensor
from penstock.runtime.features.backward_updates import LOOKS, Reads
from penstock.runtime.features.compiled import any_compiled
from penstock.runtime.features.context import StageContext
from penstock.runtime.features.feature import Feature, Start
from penstock.runtime.features.recompute import BufferCopies, Buffers
from penstock.runtime.kinds import distinct

Hook = Callable[[nn.Module, Any], None]


class _Call(NamedTuple):
    """A call of a module in a forward: its microbatch and its arguments, to redo the same updates."""

    microbatch: int
    args: Sequence[Any]


class RepeatedUpdates(Feature):
    """The modules of one stage that update buffers of their own.

    Args:
        modules: the modules whose forward the stage runs.
        updated: the buffers that the stage's forward updates.
        checkpointed: modules that plain torch would run again, though the stage does not; one entry per call.
        looks: whether the first forward's operators can be watched: none is compiled, or runs on parts of tensors.
    """

    @classmethod
    def of(cls, stage: StageContext) -> RepeatedUpdates | None:
        """In training, if a forward updates buffers; deferred batch norms handle their own."""
        one, binding = stage.stage, stage.binding
        deferred = {id(buffer) for buffer in binding.norms.buffers()} if binding.norms is not None else set()
        updated = {name: one.buffers[name] for name in one.meta.updated if name in one.buffers}
        updated = {name: buffer for name, buffer in updated.items() if id(buffer) not in deferred}
        if not stage.training or not updated:
            return None
        if binding.compile is not None:
            _refuse_compiled(stage, updated)
            return None
        modules = stage.modules()
        looks = stage.sharded is None and not any_compiled(modules)
        return cls(modules, updated, _checkpointed(stage, updated), looks=looks)

    def __init__(
        self,
        modules: Iterable[nn.Module],
        updated: Mapping[str, Tensor],
        checkpointed: Sequence[nn.Module] = (),
        *,
        looks: bool = True,
    ) -> None:
        names = {id(buffer): name for name, buffer in updated.items()}
        self._watched = [
            _Watched(module, name, checkpointed.count(module))
            for module in dict.fromkeys(modules)
            if (name := next((names[id(b)] for b in module._buffers.values() if id(b) in names), None)) is not None
        ]
        self._learning = True
        self._names = {storage_of(buffer): name for name, buffer in updated.items()}
        self._looks = looks
        self._read: Collection[str] = ()

    @contextmanager
    def forward(self, microbatch: int, *, runs_again: bool) -> Iterator[None]:
        """Wraps a forward of the stage."""

        def entered(each: _Watched) -> Hook:
            learns = self._learning and not each.known
            return partial(each.note if learns else each.update_again, microbatch)

        with self._reads_of_others() if self._looks and self._watched else nullcontext(), ExitStack() as stack:
            for each in self._watched:
                stack.enter_context(each.module.register_forward_pre_hook(entered(each)))
            yield
        self._refuse_reads()

    @contextmanager
    def _reads_of_others(self) -> Iterator[None]:
        """Wraps the first forward: notes which buffers are read by code other than the modules that update them."""
        self._looks = False
        with Reads(self._names) as reads, ExitStack() as stack:
            for each in self._watched:
                own = each.storages()

                def enter(_: nn.Module, args: Any, own: Collection[int] = own) -> None:
                    reads.ignored |= {*own}

                def leave(_: nn.Module, args: Any, result: Any, own: Collection[int] = own) -> None:
                    reads.ignored -= {*own}

                stack.enter_context(each.module.register_forward_pre_hook(enter))
                stack.enter_context(each.module.register_forward_hook(leave, always_call=True))
            yield
        self._read = reads.found

    def _refuse_reads(self) -> None:
        """Raises PartitionError if other code reads what a module that runs again updates."""
        for each in self._watched if self._read else ():
            name = next((n for key in each.storages() if (n := self._names.get(key)) in self._read), None)
            if name is not None and (each.known or not self._learning):
                raise _between_updates(name, "is read by the module around it")

    @contextmanager
    def autograd(self, microbatch: int) -> Iterator[None]:
        """Wraps a backward of the stage, but not a forward that the pipeline itself runs again."""
        with ExitStack() as stack:
            for each in self._watched:
                stack.enter_context(each.module.register_forward_pre_hook(each.put_aside))
                stack.enter_context(each.module.register_forward_hook(each.put_back, always_call=True))
            yield
        if self._learning:
            self._learning = False
            self._watched = [each for each in self._watched if each.learn(microbatch)]
            self._refuse_reads()
        for each in self._watched:
            each.check(microbatch)

    def begin_step(self, start: Start) -> None:
        """Discards anything left by a step that raised."""
        for each in self._watched:
            each.begin_step(learning=self._learning)


class _Watched:
    """A module, identified by the name of one of its buffers.

    Its hooks exist only while the stage runs. If it is called after the first backward, every backward runs it again.
    """

    def __init__(self, module: nn.Module, name: str, checkpointed: int) -> None:
        if checkpointed > 1:
            raise _unknown_order(module, checkpointed)
        self.module, self._name = module, name
        self.known = bool(checkpointed)
        self._buffers = Buffers([module], [buffer for buffer in module._buffers.values() if buffer is not None])
        self._first: BufferCopies | None = None
        self._calls: list[_Call] = []
        self._again = checkpointed
        self._due: Counter[int] = Counter()  # by microbatch: how often its backward should run the module again
        self._ran = 0  # how often the current backward has run it
        self._own = dict(module._buffers)
        self._is_ours = False  # whether the pipeline makes the call in backward, on copies of the buffers
        self._aside: list[AbstractContextManager[None]] = []
        self._looks = LOOKS

    def storages(self) -> set[int]:
        """The storages of its own buffers."""
        return {storage_of(buffer) for buffer in self._own.values() if buffer is not None}

    def begin_step(self, *, learning: bool) -> None:
        """Discards anything left by a step that raised; while learning, as if nothing had run."""
        self._due.clear()
        self._ran = 0
        if learning:
            self._first, self._again = None, int(self.known)
            self._calls.clear()

    def note(self, microbatch: int, module: nn.Module, args: Any) -> None:
        """Called before a call in a forward while it is unknown whether backward repeats it."""
        if module.training:
            self._first = self._first or self._buffers.copy()
            self._calls.append(
                _Call(microbatch, [SavedTensor.of(arg) if isinstance(arg, Tensor) else arg for arg in args])
            )

    def update_again(self, microbatch: int, module: nn.Module, args: Any) -> None:
        """Called before a call in a forward: makes the updates that backward will not make."""
        if module.training:
            self._due[microbatch] += self._again
            self._update(args, self._again)

    def put_aside(self, module: nn.Module, _args: Any) -> None:
        """Called before a call in backward, which then updates copies: the pipeline's, or new ones."""
        self._is_ours = any(module._buffers[name] is not buffer for name, buffer in self._own.items())
        aside = nullcontext() if self._is_ours else self._buffers.copy().in_place()
        aside.__enter__()
        self._aside.append(aside)

    def put_back(self, module: nn.Module, _args: Any, _result: Any) -> None:
        """Called after a call in backward, which checkpointing may have ended as soon as it had what it needs."""
        self._aside.pop().__exit__(None, None, None)
        self._ran += module.training and not self._is_ours

    def learn(self, microbatch: int) -> bool:
        """Corrects what the forwards before the first backward left. Returns whether the module runs again at all."""
        calls, self._calls = self._calls, []
        self._again += self._ran if self._first is not None else 0
        in_forward = sum(call.microbatch == microbatch for call in calls)
        if self.known or not self._again:
            return self.known
        if in_forward != 1:
            raise _unknown_order(self.module, in_forward)
        assert self._first is not None
        with torch.no_grad():
            for (part, name), copy in zip(self._first.places, self._first.copies, strict=True):
                buffer = part._buffers[name]
                assert buffer is not None
                buffer.copy_(copy)
        self._first = None
        for call in calls:
            self._due[call.microbatch] += self._again
            self._update(
                [self._given(arg) if isinstance(arg, SavedTensor) else arg for arg in call.args], 1 + self._again
            )
        return True

    def check(self, microbatch: int) -> None:
        """Called after a backward. Raises PartitionError unless it ran the module as often as its forward assumed."""
        due, ran, self._ran = self._due.pop(microbatch, 0), self._ran, 0
        if not self.known and ran != due:
            raise PartitionError(
                f"the backward of microbatch {microbatch} has run a {type(self.module).__name__} that updates buffers "
                f"{ran} times, but its forward expected {due}, as in the first microbatch. If gradient "
                "checkpointing has been switched on or off in the model, make a new pipeline"
            )

    def _given(self, arg: SavedTensor) -> Tensor:
        if arg.is_changed:
            raise PartitionError(
                f"what enters a {type(self.module).__name__}, which runs again in backward, is updated in place later, "
                "so that its updates cannot be made in their right order. Switch gradient checkpointing off in the "
                "model, and choose recompute='always' instead"
            )
        return arg.tensor

    def _update(self, args: Sequence[Any], times: int) -> None:
        detached = [arg.detach() if isinstance(arg, Tensor) else arg for arg in args]
        if isinstance(self.module, _BatchNorm):  # what it returns in training depends on the batch alone
            with torch.no_grad():
                for _ in range(times):
                    self.module.forward(*detached)
            return
        for _ in range(times):
            with torch.no_grad(), self._same_draws():
                result = self.module.forward(*detached)
            if self._looks:
                self._looks -= 1
                self._refuse_dependence(result, detached)

    def _same_draws(self) -> AbstractContextManager[None]:
        """Restores the generators afterwards, so that the same numbers are drawn again."""
        held = [buffer for buffer in self._own.values() if buffer is not None]
        return torch.random.fork_rng({buffer.get_device() for buffer in held if buffer.is_cuda})

    def _refuse_dependence(self, result: Any, args: Sequence[Any]) -> None:
        """Raises PartitionError if the module's result differs before and after its last update."""
        with self._buffers.copy().in_place(), torch.no_grad(), self._same_draws():
            again = self.module.forward(*args)
        pairs = zip(tensors_in(result), tensors_in(again), strict=False)
        if any(one.shape != other.shape or not same_bits(one, other) for one, other in pairs):
            raise _between_updates(self._name, f"decides what its {type(self.module).__name__} returns")


def _checkpointed(stage: StageContext, updated: Mapping[str, Tensor]) -> Sequence[nn.Module]:
    """The modules that plain torch would run again, one entry per call.

    Raises:
        PartitionError: one that updates buffers would run again for only some microbatches of the batch.
    """
    first, *others = (each.checkpointed for each in distinct(stage.stages))
    buffers = {id(buffer) for buffer in updated.values()}
    for module in dict.fromkeys(module for other in others for module in (*first, *other)):
        uneven = any(other.count(module) != first.count(module) for other in others)
        if uneven and any(id(buffer) in buffers for buffer in module._buffers.values()):
            raise PartitionError(
                f"stage {stage.index} runs a {type(module).__name__} that updates buffers within a checkpoint, but not "
                "alike for all microbatches of this batch. Switch gradient checkpointing off in the model, and choose "
                "recompute='always' instead"
            )
    return first


def _refuse_compiled(stage: StageContext, updated: Mapping[str, Tensor]) -> None:
    """Raises PartitionError if plain torch would update a buffer once more in backward, unlike compiled code."""
    names = {id(buffer): name for name, buffer in updated.items()}
    for module in _checkpointed(stage, updated):
        name = next((names[id(b)] for b in module._buffers.values() if id(b) in names), None)
        if name is not None:
            raise PartitionError(
                f"compile=: stage {stage.index} updates buffer {name!r} within a forward that runs itself again in "
                "backward, which compiled code does not do as often as plain torch. Switch gradient checkpointing off "
                "in the model, and choose recompute='always' instead, or leave compile= out"
            )


def _unknown_order(module: nn.Module, calls: int) -> PartitionError:
    return PartitionError(
        f"a {type(module).__name__} that updates buffers is called {calls} times in a forward that runs itself "
        "again in backward; the order of its updates is not known. Switch gradient checkpointing "
        "off in the model, and choose recompute='always' instead"
    )


def _between_updates(name: str, what: str) -> PartitionError:
    return PartitionError(
        f"buffer {name!r} {what}, in a forward that runs itself again in backward: plain torch updates it in both "
        "runs, and computes with other values in the first than in the second. Switch gradient checkpointing off in "
        "the model, and choose recompute='always' instead"
    )
