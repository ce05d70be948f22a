"""Sums gradients over processes: only the step's own contribution, in flat buffers, while other stages still run.

Parameters that several ranks hold (ties) start equal, and exactly those ranks sum their gradients. A group consists of
the parameters that the same set of stages holds.

Hooks on the gradient of a parameter that several stages hold are refused. In plain torch a hook is called once per
backward, with the sum over all uses of the parameter, or with what has been accumulated so far. Here each stage has its
own backward, and so only part of that sum; in bidirectional schedules each copy of a stage accumulates the gradients of
its own microbatches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock._base.compat import has_accumulation_hooks, has_gradient_hooks
from penstock._base.errors import ArgumentError, PartitionError
from penstock._base.gradients import buckets, gradient_dtype, slot_elements
from penstock._base.stages import ties, ties_across_ranks
from penstock.distributed.failure import OUTSIDE, Position
from penstock.runtime.front_end import Stage
from penstock.runtime.gradients.dtensors import is_distributed, local, local_gradient
from penstock.runtime.transport.protocol import Pending, Reduce, Transport


class GradientSum:
    """Sums the gradients of some parameters over all processes that hold them.

    Only the step's own contribution is summed: what earlier steps accumulated is already the same everywhere.

    Args:
        parameters: the same parameters, in the same order, on each process.
        reduce: starts the sum of the buffers.
        position: the name of the wait for the sum, and the peers that it waits for.
        divisor: divides the sum.
        bucket_bytes: the size of the buffers, each of which is reduced by itself; None: one buffer per dtype, all
            reduced together.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        reduce: Reduce,
        position: Position = OUTSIDE,
        *,
        divisor: int = 1,
        bucket_bytes: int | None = None,
    ) -> None:
        self.parameters = tuple(parameters)
        self.position = position
        self._reduce = reduce
        self._divisor = divisor
        self._bucket_bytes = bucket_bytes
        self._dtypes: list[torch.dtype] = []
        self._buffers: list[GradientBuffer] = []
        self._open = False
        self._pending: list[Pending] = []

    def begin_step(self, *, set_aside: bool = True) -> None:
        """Called before a step that sums.

        Args:
            set_aside: whether `.grad` was already summed, and so is set aside until `end_step`.
        """
        self._open = True
        dtypes = [gradient_dtype(parameter) for parameter in self.parameters]
        if dtypes != self._dtypes:
            max_bytes = inf if self._bucket_bytes is None else self._bucket_bytes
            self._dtypes, self._buffers = dtypes, list(map(GradientBuffer, buckets(self.parameters, max_bytes)))
        for buffer in self._buffers if set_aside else ():
            buffer.set_aside()

    def start(self) -> None:
        """Start the sum, once the gradients are complete. Does nothing in a step that does not sum."""
        if self._open:
            together = [self._buffers] if self._bucket_bytes is None else [[buffer] for buffer in self._buffers]
            self._pending = [self._reduce([buffer.fill() for buffer in buffers]) for buffers in together]

    def end_step(self) -> None:
        """Wait for the sum, if it was started, and add it to what was set aside."""
        for pending in self._pending:
            pending.wait()
        for buffer in self._buffers:
            buffer.empty(self._divisor, was_summed=bool(self._pending))
        self._open, self._pending = False, []

    def start_copies(self, *, is_first: bool) -> Pending:
        """Start to copy the first process's parameters to the others: a sum in which the others contribute -0.0."""
        for parameter in self.parameters if not is_first else ():
            parameter.data.zero_().neg_()  # 0.0 would change the sign of the first process's -0.0
        return self._reduce([parameter.data for parameter in self.parameters])


class GradientBuffer:
    """The gradients of parameters in flat memory, all of one dtype, and then for each the number of processes that have
    it. These numbers are read only if this process lacks a gradient, since reading them waits for the device.

    From the second step on, the gradients that the step before had accumulate in the buffer: `.grad` are views of it,
    and nothing is copied before the sum, nor after it. A gradient that is new, or that someone replaced, is copied into
    the buffer; a gradient that was not computed is recognized by its view, which was never written to.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._dtype = gradient_dtype(parameters[0])
        self._before: list[Tensor | None] = []
        self._views: list[Tensor | None] = [None] * len(parameters)
        self._present: list[bool] = []
        self._flags: Tensor | None = None  # `_present`, as numbers on the device
        self._memory: Tensor | None = None

    def set_aside(self) -> None:
        """Set aside what earlier steps accumulated, and let gradients that the last step had accumulate in the buffer,
        which is made here."""
        self._before = [parameter.grad for parameter in self._parameters]
        if self._present:
            *slots, _ = self._slots()
            self._views = [
                slot.view(parameter.shape).data if was_present and _is_flat(parameter) else None
                for parameter, slot, was_present in zip(self._parameters, slots, self._present, strict=True)
            ]
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    def fill(self) -> Tensor:
        """Return the memory, with the step's gradients in it."""
        for parameter in self._parameters:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ArgumentError(
                    f"a gradient of shape {list(parameter.shape)} is sparse, and several processes hold its parameter; "
                    "sparse gradients cannot be summed over processes: make the embedding with sparse=False"
                )
        present = [grad is not None for grad in self._step_gradients()]
        sample = local(self._parameters[0].detach())
        if self._flags is None or present != self._present or self._flags.device != sample.device:
            self._present = present
            self._flags = sample.new_tensor([float(flag) for flag in present], dtype=self._dtype)
        *slots, counts = self._slots()
        counts.copy_(self._flags)
        for parameter, slot, view in zip(self._parameters, slots, self._views, strict=True):
            if parameter.grad is not view:
                grad = local_gradient(parameter)
                slot.copy_(torch.zeros_like(slot) if grad is None else grad.reshape(-1))
        assert self._memory is not None
        return self._memory

    def empty(self, divisor: int, *, was_summed: bool) -> None:
        """Give each parameter its gradient, added to what was set aside, and forget the memory. Without a sum, that is
        the step's own gradient."""
        before = self._before or [None] * len(self._parameters)
        if was_summed:
            for parameter, earlier, total in zip(self._parameters, before, self._totals(divisor), strict=True):
                parameter.grad = _add(earlier, total)
        elif self._before:
            for parameter, earlier, grad in zip(self._parameters, before, self._step_gradients(), strict=True):
                parameter.grad = _add(earlier, grad)
        self._before, self._views, self._memory = [], [None] * len(self._parameters), None

    def _slots(self) -> list[Tensor]:
        """Return where each gradient is in the memory, and then the numbers of processes that have them. New memory is
        of -0.0: adding to it changes no bit, where 0.0 would change the sign of -0.0."""
        lengths = [local(parameter.detach()).numel() for parameter in self._parameters]
        sizes = [*(slot_elements(length, self._dtype) for length in lengths), len(lengths)]
        if self._memory is None:
            value, device = complex(-0.0, -0.0) if self._dtype.is_complex else -0.0, self._parameters[0].device
            self._memory = torch.full((sum(sizes),), value, dtype=self._dtype, device=device)
        *slots, counts = torch.split(self._memory, sizes)
        return [*(slot[:length] for slot, length in zip(slots, lengths, strict=True)), counts]

    def _step_gradients(self) -> list[Tensor | None]:
        """Return the gradients of this step."""
        grads = [parameter.grad for parameter in self._parameters]
        untouched = [g is not None and g is v and g._version == 0 for g, v in zip(grads, self._views, strict=True)]
        return [None if skip else grad for grad, skip in zip(grads, untouched, strict=True)]

    def _totals(self, divisor: int) -> Iterator[Tensor | None]:
        """Yield each parameter's sum; None if no process has a gradient."""
        *sums, counts_here = self._slots()
        counts: Sequence[float] = self._present if all(self._present) else counts_here.cpu().tolist()
        if divisor > 1 and self._memory is not None:
            self._memory /= divisor
        for parameter, total, count, view in zip(self._parameters, sums, counts, self._views, strict=True):
            yield (_gradient_in_buffer(total, parameter) if view is None else view) if count else None


def _is_flat(parameter: nn.Parameter) -> bool:
    """Whether a piece of a buffer can be the parameter's gradient."""
    return parameter.is_contiguous() and not is_distributed(parameter)


def _gradient_in_buffer(total: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return a gradient in the buffer's memory, unless the parameter is laid out otherwise, or only part of it is
    here."""
    if _is_flat(parameter):
        return total.view(parameter.shape).data  # counts its own writes
    grad = torch.empty_like(parameter.data, dtype=total.dtype)
    local_grad = local(grad)
    local_grad.copy_(total.view(local_grad.shape))
    return grad


def _add(before: Tensor | None, grad: Tensor | None) -> Tensor | None:
    if before is None or grad is None:
        return before if grad is None else grad
    return before.add_(grad)


@dataclass(frozen=True, slots=True)
class TieGroup:
    """Parameters, by canonical name, that live on exactly these stages, and the ranks that hold the stages."""

    names: tuple[str, ...]
    stages: tuple[int, ...]
    ranks: tuple[int, ...]


def tie_groups(ties: Mapping[str, Sequence[int]], rank_of: Sequence[int]) -> tuple[TieGroup, ...]:
    """Return the groups that span several ranks, in the order in which every rank reduces them."""
    return tuple(
        TieGroup(tuple(names), stages, tuple(sorted({rank_of[stage] for stage in stages})))
        for stages, names in ties_across_ranks(ties, rank_of).items()
    )


def tie_sum(
    index: int, group: TieGroup, parameters: Sequence[nn.Parameter], transport: Transport, numbers: Sequence[int]
) -> GradientSum:
    """Return one rank's part in the reduction of a group. `numbers`: the ranks' numbers in messages."""
    peers = tuple(numbers[rank] for rank in group.ranks if rank != transport.rank)
    position = Position(f"REDUCE_GRAD{index}", peers)
    return GradientSum(parameters, partial(transport.reduce, index, group.ranks), position)


class Tied(NamedTuple):
    """A parameter that several stages hold.

    Attributes:
        name: its canonical name.
        stages: the stages that hold it.
        in_one_backward: whether a microbatch passes through several of these stages; otherwise they are copies of one.
    """

    name: str
    stages: tuple[int, ...]
    parameter: nn.Parameter
    in_one_backward: bool


def find_tied(stages: Sequence[Stage], local_stages: Iterable[Stage], pipelines: int) -> tuple[Tied, ...]:
    """Return the parameters of this process's stages that several stages hold.

    Args:
        stages: all stages, pipeline by pipeline.
        local_stages: the stages of this process.
        pipelines: how many copies of the model there are.
    """
    local_parameters = {name: parameter for stage in local_stages for name, parameter in stage.parameters.items()}
    in_one = ties([stage.meta for stage in stages[: len(stages) // pipelines]])
    all_ties = ties([stage.meta for stage in stages])
    return tuple(
        Tied(name, holders, local_parameters[name], name in in_one)
        for name, holders in all_ties.items()
        if name in local_parameters
    )


def check_no_hooks(tied: Iterable[Tied]) -> None:
    """Raise PartitionError if one of these parameters has a hook that would see only part of its gradient: training
    scripts clip each gradient so, by `for p in model.parameters(): p.register_hook(lambda g: g.clamp(-1, 1))`."""
    for name, stages, parameter, in_one_backward in tied:
        if has_accumulation_hooks(parameter) or (in_one_backward and has_gradient_hooks(parameter)):
            raise PartitionError(
                f"parameter {name!r} has a hook on its gradient (register_hook or register_post_accumulate_grad_hook), "
                f"and is held by stages {list(stages)}: each would call the hook with its own share of the gradient, "
                "not with the sum, as plain training does. Choose cuts or a schedule so that only one stage holds it, "
                "or remove the hook and change the gradient after the step (p.grad, before optimizer.step())"
            )
