"""Batch norms whose running statistics are those of the whole batch (`deferred_batch_norm=`), and those in checkpoints.

Deferred ones are committed once per step. Normalization does not change: each microbatch uses its own mean and
variance. A hook on each batch norm module notes the number, mean and squared deviations of the values that enter it. At
the end of the step these are merged in ascending order of microbatch, so neither the schedule nor recomputation changes
a bit, and the module's buffers are updated as one forward of the whole batch would have updated them. Updates by the
step's own forwards are undone.

Others are updated twice if the model checkpoints them: timm's DenseNet with `memory_efficient=True`. In plain torch,
`torch.utils.checkpoint` runs such a norm again in backward, which updates its running statistics once more, right after
the first time. In a pipeline the forwards of other microbatches may run between the two, and an average depends on the
order of its updates. So a forward makes both updates, and a second run in backward makes none.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase  # the public classes' common base
from torch.utils import checkpoint
from torch.utils.hooks import RemovableHandle

from penstock._base.compat_compiler import compiled as compiled_as
from penstock._base.errors import ArgumentError, PartitionError
from penstock.runtime.exact.streams import Hook
from penstock.runtime.features import recompute
from penstock.runtime.features.feature import NOTHING, Context, Feature, StageContext, Start
from penstock.runtime.features.recompute import Buffers
from penstock.runtime.front_end import Partition, Stage
from penstock.runtime.microbatch_kinds import distinct


class Moments(NamedTuple):
    """Per channel: number of values (one for all channels), mean, and sum of squared deviations from it."""

    values: int
    mean: Tensor
    deviations: Tensor

    @classmethod
    def of(cls, values: Tensor, dtype: torch.dtype) -> Moments:
        """Compute the moments of each channel of `values` (dimension 1), in `dtype`."""
        with torch.no_grad():
            values = values.detach().to(dtype)
            dims = [dim for dim in range(values.dim()) if dim != 1]
            count = values.numel() // values.shape[1]
            variance, mean = torch.var_mean(values, dims, correction=0)
            return cls(count, mean, variance * count)

    def merged(self, other: Moments) -> Moments:
        """Return the moments of both sets of values together."""
        count = self.values + other.values
        step = other.mean - self.mean
        mean = self.mean + step * (other.values / count)
        return Moments(count, mean, self.deviations + other.deviations + step**2 * (self.values * other.values / count))


class DeferredNorms(Feature):
    """The batch norms of one process's stages.

    Args:
        modules: the model's modules, by name; those that are not batch norms, or track no statistics, are skipped.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._norms = [m for _, m in modules if isinstance(m, _BatchNorm) and m.running_mean is not None]
        self._handles: list[RemovableHandle] = [
            m.register_forward_pre_hook(Hook(self._note), with_kwargs=True) for m in self._norms
        ]
        self._microbatch: int | None = None
        self._moments: dict[nn.Module, dict[int, list[Moments]]] = {}

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def buffers(self) -> list[Tensor]:
        """Return the running statistics that this process holds."""
        return [b for norm in self._norms if not _is_elsewhere(norm) for b in norm.buffers(recurse=False)]

    @contextmanager
    def forward(self, microbatch: int, *, runs_again: bool) -> Iterator[None]:
        """Wrap a forward: note what enters the modules in this microbatch's first run, but not in backward."""
        self._microbatch = microbatch
        try:
            yield
        finally:
            self._microbatch = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Wrap a training step: buffers do not change until its end, and not at all if it raises."""
        self._moments = defaultdict(lambda: defaultdict(list))
        before = {norm: _copies(norm) for norm in self._norms if _tracks(norm) and not _is_elsewhere(norm)}
        ended = False
        try:
            yield
            ended = True
        finally:
            moments, self._moments = self._moments, {}
            uneven = [n for n in before if n in moments and len({*map(len, moments[n].values())}) > 1] if ended else []
            ended = ended and not uneven
            with torch.no_grad():
                for norm, copies in before.items():
                    for name, copy in copies.items() if norm in moments or not ended else ():
                        norm.get_buffer(name).copy_(copy)
                    if ended and norm in moments:
                        _commit(norm, moments[norm])
        if uneven:
            minimum, *_, maximum = sorted(map(len, moments[uneven[0]].values()))
            raise ArgumentError(
                f"deferred_batch_norm=True: a {type(uneven[0]).__name__} is called {maximum} times in one microbatch "
                f"and {minimum} in another, so the whole batch has no definite number of updates; call it equally "
                "often in each, or leave deferred_batch_norm out"
            )

    def _note(self, norm: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Note the values that enter a module."""
        values = args[0] if args else kwargs["input"]
        if self._microbatch is not None and _tracks(norm):
            mean = norm.get_buffer("running_mean")
            moments = Moments.of(values, torch.promote_types(mean.dtype, values.dtype))
            self._moments[norm][self._microbatch].append(moments)


def _tracks(norm: nn.Module) -> bool:
    """Whether a forward updates the running statistics now."""
    return norm.training and bool(getattr(norm, "track_running_stats", True))


def _copies(norm: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in norm.named_buffers(recurse=False)}


def _is_elsewhere(norm: nn.Module) -> bool:
    return any(buffer.is_meta for buffer in norm.buffers(recurse=False))


def _commit(norm: nn.Module, by_microbatch: Mapping[int, Sequence[Moments]]) -> None:
    """Update the buffers once for each call of the module in the forward; usually there is one."""
    assert isinstance(norm, _BatchNorm)
    by_call = zip(*(by_microbatch[microbatch] for microbatch in sorted(by_microbatch)), strict=True)
    for first, *later in by_call:
        moments = first
        for added in later:
            moments = moments.merged(added)
        batches = norm.num_batches_tracked
        if batches is not None:
            batches.add_(1)
        factor = norm.momentum
        if factor is None:  # a plain average over all batches
            factor = 1 / float(batches) if batches is not None else 0.0
        unbiased = moments.deviations / (moments.values - 1)
        for buffer, value in ((norm.running_mean, moments.mean), (norm.running_var, unbiased)):
            if buffer is not None:
                buffer.mul_(1 - factor).add_(value.to(buffer.dtype) * factor)


# -- what cannot be deferred ------------------------------------------------------------------------------------------


def check_deferrable(partitions: Sequence[Partition], model: nn.Module) -> None:
    """Raise ArgumentError for running statistics that no hook sees."""
    owners = {id(b): (name, m) for name, m in model.named_modules() for b in m.buffers(recurse=False)}
    compiled = {id(part) for m in model.modules() if compiled_as(m) for part in m.modules()}
    for stage in (stage for partition in distinct(partitions) for stage in partition.stages):
        for name in stage.norms_as_functions:
            _reject(name, "is a call of batch norm as a function; only modules of torch.nn can be deferred")
        for buffer_name in stage.meta.updated:
            if buffer_name.rpartition(".")[2] not in ("running_mean", "running_var"):
                continue
            name, owner = owners[id(stage.buffers[buffer_name])]
            if id(owner) in compiled:
                _reject(name, "is compiled, so that nothing sees what enters it; compile other parts, or leave it out")
            if any(isinstance(part, _BatchNorm) for child in owner.children() for part in child.modules()):
                _reject(
                    name,
                    f"({type(owner).__name__}) has other batch norms take a part of what enters it, as timm's "
                    "SplitBatchNorm2d does",
                )
            if isinstance(owner, nn.SyncBatchNorm) or not isinstance(owner, _BatchNorm):
                kind = type(owner).__name__
                norm = "normalizes by itself" if isinstance(owner, _NormBase) else "keeps running statistics of its own"
                _reject(name, f"({kind}) {norm}; only the batch norms of torch.nn can be deferred")


def notes(stages: Iterable[Stage]) -> tuple[str, ...]:
    """Return the notes for users of deferred running statistics: whether there are none at all."""
    updated = (name for stage in stages for name in (*stage.meta.updated, *stage.may_update))
    if any(name.rpartition(".")[2] == "running_mean" for name in updated):
        return ()
    return ("deferred_batch_norm=True does nothing: no batch norm of the model updates running statistics in training",)


def _reject(name: str, problem: str) -> None:
    raise ArgumentError(f"deferred_batch_norm=True: {name!r} {problem}")


_REMEDY = "Switch gradient checkpointing off in the model, and choose recompute='always' instead"


class CheckpointedNorms(Feature):
    """The modules of one stage that update buffers of their own. Learns in its first forward which are checkpointed.

    Args:
        modules: these modules.
        around: modules in a checkpoint around them, which the stage does not run; one entry per call.
    """

    @classmethod
    def of(cls, stage: StageContext) -> CheckpointedNorms | None:
        """Build the feature in training, if a forward updates buffers; deferred batch norms handle their own."""
        merged, deferred = stage.stage, stage.binding.deferred
        updated = {id(buffer): name for name, buffer in merged.buffers.items() if name in merged.meta.updated}
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
        self._all, self._checkpointed = modules, frozenset(around)
        self._norms: dict[nn.Module, bool | None] = {}  # whether each is checkpointed; None: not known yet
        self._called: dict[int, set[nn.Module]] = {}  # by microbatch, of those within a checkpoint that the stage runs

    def begin_step(self, start: Start) -> None:
        """Drop what the last step learned: the model's checkpoints may have been switched on or off since."""
        self._norms = {module: True if module in self._checkpointed else None for module in self._all}

    def forward(self, microbatch: int, *, runs_again: bool) -> Context:
        """Wrap a forward of the stage."""
        return self._updating_twice(microbatch) if self._norms else NOTHING

    @contextmanager
    def _updating_twice(self, microbatch: int) -> Iterator[None]:
        self._called[microbatch] = set()
        with ExitStack() as stack:
            for module in self._norms:
                stack.enter_context(module.register_forward_pre_hook(partial(self._update, microbatch)))
            yield
        self._norms = {module: flag for module, flag in self._norms.items() if flag is not False}

    def _update(self, microbatch: int, module: nn.Module, args: Any) -> None:
        """Make, before a call in a forward, the update that backward will not make."""
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
        if module not in self._checkpointed:
            if module in self._called[microbatch]:
                raise _unknown_order(module)
            self._called[microbatch].add(module)
        with torch.no_grad():
            module.forward(*(arg.detach() if isinstance(arg, Tensor) else arg for arg in args))

    def autograd(self, microbatch: int) -> Context:
        """Wrap a backward of the stage, but not a forward that the pipeline itself runs again: what runs there updates
        copies."""
        rerun_norms = [module for module in self._norms if module not in self._checkpointed]
        return self._on_copies(rerun_norms, self._called.pop(microbatch, set())) if rerun_norms else NOTHING

    @contextmanager
    def _on_copies(self, norms: Sequence[nn.Module], called: set[nn.Module]) -> Iterator[None]:
        """Wrap a backward, which updates copies of the buffers. Raise PartitionError if it does not run what the
        forward assumed: frozen layers do not run again."""
        ran = set[nn.Module]()

        def note(module: nn.Module, _args: Any) -> None:
            if _in_checkpoint():
                ran.add(module)

        buffers = (buffer for module in norms for buffer in module._buffers.values() if buffer is not None)
        with ExitStack() as stack:
            stack.enter_context(Buffers(norms, buffers).copy().in_place())
            for module in norms:
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
    while frame is not None and frame.f_code.co_filename not in (checkpoint.__file__, recompute.__file__):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == checkpoint.__file__


def _updated_by(module: nn.Module, names: Mapping[int, str]) -> str | None:
    return next((names[id(buffer)] for buffer in module._buffers.values() if id(buffer) in names), None)


def _unknown_order(module: nn.Module) -> PartitionError:
    return PartitionError(
        f"a {type(module).__name__} that updates buffers is called several times in a forward that runs itself again "
        f"in backward; the order of its updates is not known. {_REMEDY}"
    )
