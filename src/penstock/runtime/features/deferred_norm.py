"""Batch norm whose running statistics are those of the whole batch, committed once per step.

Normalization does not change: each microbatch uses its own mean and variance. A hook on each batch norm module notes
the number, mean and squared deviations of the values that enter it. At the end of the step these are merged in
ascending order of microbatch, so neither the schedule nor recomputation changes a bit, and the module's buffers are
updated as one forward of the whole batch would have updated them. Updates by the step's own forwards are undone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase  # the public classes' common base
from torch.utils.hooks import RemovableHandle

from penstock._base.compat_compiler import compiled as compiled_as
from penstock._base.errors import ArgumentError
from penstock.runtime.exact.streams import Hook
from penstock.runtime.features.feature import Feature
from penstock.runtime.front_end import Partition, Stage
from penstock.runtime.kinds import distinct


class Moments(NamedTuple):
    """Per channel: number of values (one for all channels), mean, and sum of squared deviations from it."""

    values: int
    mean: Tensor
    deviations: Tensor

    @classmethod
    def of(cls, values: Tensor, dtype: torch.dtype) -> Moments:
        """The moments of each channel of `values` (dimension 1), computed in `dtype`."""
        with torch.no_grad():
            values = values.detach().to(dtype)
            others = [dim for dim in range(values.dim()) if dim != 1]
            count = values.numel() // values.shape[1]
            variance, mean = torch.var_mean(values, others, correction=0)
            return cls(count, mean, variance * count)

    def merged(self, other: Moments) -> Moments:
        """The moments of both sets of values together."""
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
        self._seen: dict[nn.Module, dict[int, list[Moments]]] = {}

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def buffers(self) -> list[Tensor]:
        """The running statistics that this process holds."""
        return [b for norm in self._norms if not _is_elsewhere(norm) for b in norm.buffers(recurse=False)]

    @contextmanager
    def forward(self, microbatch: int, *, runs_again: bool) -> Iterator[None]:
        """Wraps a forward: notes what enters the modules in this microbatch's first run, but not in backward."""
        self._microbatch = microbatch
        try:
            yield
        finally:
            self._microbatch = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Wraps a training step: buffers do not change until its end, and not at all if it raises."""
        self._seen = defaultdict(lambda: defaultdict(list))
        before = {norm: _copies(norm) for norm in self._norms if _tracks(norm) and not _is_elsewhere(norm)}
        ended = False
        try:
            yield
            ended = True
        finally:
            seen, self._seen = self._seen, {}
            uneven = [n for n in before if n in seen and len({*map(len, seen[n].values())}) > 1] if ended else []
            ended = ended and not uneven
            with torch.no_grad():
                for norm, copies in before.items():
                    for name, copy in copies.items() if norm in seen or not ended else ():
                        norm.get_buffer(name).copy_(copy)
                    if ended and norm in seen:
                        _commit(norm, seen[norm])
        if uneven:
            fewest, *_, most = sorted(map(len, seen[uneven[0]].values()))
            raise ArgumentError(
                f"deferred_batch_norm=True: a {type(uneven[0]).__name__} is called {most} times in one microbatch and "
                f"{fewest} in another, so the whole batch has no definite number of updates; call it equally often "
                "in each, or leave deferred_batch_norm out"
            )

    def _note(self, norm: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Notes the values that enter a module."""
        values = args[0] if args else kwargs["input"]
        if self._microbatch is not None and _tracks(norm):
            mean = norm.get_buffer("running_mean")
            moments = Moments.of(values, torch.promote_types(mean.dtype, values.dtype))
            self._seen[norm][self._microbatch].append(moments)


def _tracks(norm: nn.Module) -> bool:
    """Whether a forward updates the running statistics now."""
    return norm.training and bool(getattr(norm, "track_running_stats", True))


def _copies(norm: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in norm.named_buffers(recurse=False)}


def _is_elsewhere(norm: nn.Module) -> bool:
    return any(buffer.is_meta for buffer in norm.buffers(recurse=False))


def _commit(norm: nn.Module, seen: Mapping[int, Sequence[Moments]]) -> None:
    """Updates the buffers once for each call of the module in the forward; usually there is one."""
    assert isinstance(norm, _BatchNorm)
    by_call = zip(*(seen[microbatch] for microbatch in sorted(seen)), strict=True)
    for first, *others in by_call:
        moments = first
        for other in others:
            moments = moments.merged(other)
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


def refuse_unseen(partitions: Sequence[Partition], model: nn.Module) -> None:
    """Raises ArgumentError for running statistics that no hook sees."""
    owners = {id(b): (name, m) for name, m in model.named_modules() for b in m.buffers(recurse=False)}
    compiled = {id(part) for m in model.modules() if compiled_as(m) for part in m.modules()}
    for stage in (stage for partition in distinct(partitions) for stage in partition.stages):
        for name in stage.norms_as_functions:
            _refuse(name, "is a call of batch norm as a function; only modules of torch.nn can be deferred")
        for buffer_name in stage.meta.updated:
            if buffer_name.rpartition(".")[2] not in ("running_mean", "running_var"):
                continue
            name, owner = owners[id(stage.buffers[buffer_name])]
            if id(owner) in compiled:
                _refuse(name, "is compiled, so that nothing sees what enters it; compile other parts, or leave it out")
            if any(isinstance(part, _BatchNorm) for child in owner.children() for part in child.modules()):
                _refuse(
                    name,
                    f"({type(owner).__name__}) has other batch norms take a part of what enters it, as timm's "
                    "SplitBatchNorm2d does",
                )
            if isinstance(owner, nn.SyncBatchNorm) or not isinstance(owner, _BatchNorm):
                kind = type(owner).__name__
                norm = "normalizes by itself" if isinstance(owner, _NormBase) else "keeps running statistics of its own"
                _refuse(name, f"({kind}) {norm}; only the batch norms of torch.nn can be deferred")


def notes(stages: Iterable[Stage]) -> tuple[str, ...]:
    """What the user should know who asks to defer running statistics: if there are none at all."""
    updated = (name for stage in stages for name in (*stage.meta.updated, *stage.may_update))
    if any(name.rpartition(".")[2] == "running_mean" for name in updated):
        return ()
    return ("deferred_batch_norm=True does nothing: no batch norm of the model updates running statistics in training",)


def _refuse(name: str, why: str) -> None:
    raise ArgumentError(f"deferred_batch_norm=True: {name!r} {why}")
