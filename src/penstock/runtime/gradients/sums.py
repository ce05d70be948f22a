"""Sums gradients over processes: only the step's own contribution, in flat buffers, while other stages still run.

Parameters that several ranks hold (ties) start equal, and exactly those ranks sum their gradients. A group consists of
the parameters that the same set of stages holds.

Hooks on the gradient of a parameter that several stages hold are refused. In plain torch a hook is called once per
backward, with the sum over all uses of the parameter, or with what has been accumulated so far. Here each stage has its
own backward, and so only part of that sum; in bidirectional schedules each copy of a stage accumulates the gradients of
its own microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock._base.compat import has_accumulation_hooks, has_gradient_hooks
from penstock._base.errors import ArgumentError, PartitionError
from penstock._base.gradients import gradient_dtype, group_by_gradient_dtype, slot_elements
from penstock._base.stages import ties, ties_across_ranks
from penstock.distributed.failure import Position
from penstock.runtime.front_end import Stage
from penstock.runtime.gradients.distribution import is_distributed, local, local_gradient
from penstock.runtime.transport.protocol import Pending, Transport

Reduce = Callable[[Sequence[Tensor]], Pending]
"""Starts to sum tensors, in place, over some processes, with the same bits on each of them."""


class GradientSum:
    """Sums the gradients of some parameters over all processes that hold them.

    Only the step's own contribution is summed: what earlier steps accumulated is already the same everywhere. There is
    one buffer per dtype: the gradients, then for each gradient the number of processes that have it. These numbers are
    read only if this process lacks a gradient, since reading them waits for the device.

    From the second step on, the gradients that the step before had accumulate in the buffer: `.grad` are views of it,
    and nothing is copied before the sum, nor after it. A gradient that is new, or that someone replaced, is copied into
    the buffer; a gradient that was not computed is recognized by its view, which was never written to.

    Args:
        parameters: the same parameters, in the same order, on each process.
        reduce: starts the sum of the buffers.
        divisor: divides the sum.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], reduce: Reduce, divisor: int = 1) -> None:
        self.parameters = tuple(parameters)
        self._reduce = reduce
        self._divisor = divisor
        self._before: list[Tensor | None] = []
        self._buffers: list[Tensor] = []
        self._prepared: dict[torch.dtype, Tensor] = {}
        self._views: dict[nn.Parameter, Tensor] = {}
        self._present: dict[torch.dtype, tuple[list[bool], Tensor]] = {}
        self._pending: Pending | None = None

    def set_aside(self) -> None:
        """Set aside what earlier steps accumulated, until `finish`."""
        self._before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        for members in group_by_gradient_dtype(self.parameters).values():
            self._prepare(members)

    def start(self) -> None:
        """Start the sum."""
        self._buffers = [self._fill_buffer(members) for members in group_by_gradient_dtype(self.parameters).values()]
        self._pending = self._reduce(self._buffers)

    def finish(self) -> None:
        """Wait for the sum, if one was started, and add it to what was set aside."""
        before = dict(zip(self.parameters, self._before or [None] * len(self.parameters), strict=True))
        if self._pending is not None:
            self._pending.wait()
            for parameter, total in self._totals():
                parameter.grad = _add(before[parameter], total)
        elif self._before:  # nothing was added
            for parameter, grad in before.items():
                parameter.grad = _add(grad, self._step_gradient(parameter))
        self._before, self._buffers, self._pending = [], [], None
        self._prepared.clear()
        self._views.clear()

    def _prepare(self, members: Sequence[nn.Parameter]) -> None:
        """Make the buffer of the coming step, in which the gradients that the last one had accumulate."""
        flags, _ = self._present.get(gradient_dtype(members[0]), ([], None))
        if len(flags) != len(members):
            return
        for parameter, flag, slot in zip(members, flags, _slots(self._new_buffer(members), members), strict=False):
            if flag and _is_flat(parameter):
                view = slot.view(parameter.shape).data  # counts its own writes
                parameter.grad = self._views[parameter] = view

    def _new_buffer(self, members: Sequence[nn.Parameter]) -> Tensor:
        """Return a buffer of -0.0: adding to it changes no bit, where 0.0 would change the sign of -0.0."""
        dtype, size = gradient_dtype(members[0]), sum(_slot_sizes(members)) + len(members)
        negative_zero = complex(-0.0, -0.0) if dtype.is_complex else -0.0
        self._prepared[dtype] = torch.full((size,), negative_zero, dtype=dtype, device=members[0].device)
        return self._prepared[dtype]

    def _step_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of this step."""
        grad = parameter.grad
        is_untouched = grad is not None and grad is self._views.get(parameter) and grad._version == 0
        return None if is_untouched else grad

    def _fill_buffer(self, members: Sequence[nn.Parameter]) -> Tensor:
        for parameter in members:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ArgumentError(
                    f"a gradient of shape {list(parameter.shape)} is sparse, and several processes hold its parameter; "
                    "sparse gradients cannot be summed over processes: make the embedding with sparse=False"
                )
        dtype = gradient_dtype(members[0])
        flags = self._presence(members, dtype)
        buffer = self._prepared.get(dtype)
        if buffer is None:
            buffer = self._new_buffer(members)
        *slots, counts = _slots(buffer, members)
        counts.copy_(flags)
        for parameter, slot in zip(members, slots, strict=True):
            if parameter.grad is not self._views.get(parameter):
                grad = local_gradient(parameter)
                slot.copy_(torch.zeros_like(slot) if grad is None else grad.reshape(-1))
        return buffer

    def _presence(self, members: Sequence[nn.Parameter], dtype: torch.dtype) -> Tensor:
        """Return which gradients are here, as numbers on the device: those of the last step if the same ones are."""
        present = [self._step_gradient(p) is not None for p in members]
        cached, sample = self._present.get(dtype), local(members[0].detach())
        if cached is None or cached[0] != present or cached[1].device != sample.device:
            cached = self._present[dtype] = (present, sample.new_tensor([float(flag) for flag in present], dtype=dtype))
        return cached[1]

    def _totals(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Yield each parameter's sum; None if no process has a gradient."""
        for members, buffer in zip(group_by_gradient_dtype(self.parameters).values(), self._buffers, strict=True):
            *sums, count_slot = _slots(buffer, members)
            present, _ = self._present[buffer.dtype]
            counts: Sequence[float] = present if all(present) else count_slot.cpu().tolist()
            if self._divisor > 1:
                buffer /= self._divisor
            for parameter, total, count in zip(members, sums, counts, strict=True):
                yield parameter, self._gradient_view(parameter, total) if count else None

    def _gradient_view(self, parameter: nn.Parameter, total: Tensor) -> Tensor:
        view = self._views.get(parameter)
        return _gradient_in_buffer(total, parameter) if view is None else view


def _slot_sizes(members: Sequence[nn.Parameter]) -> list[int]:
    """Return the number of elements of each gradient in a buffer."""
    dtype = gradient_dtype(members[0])
    return [slot_elements(local(parameter.detach()).numel(), dtype) for parameter in members]


def _slots(buffer: Tensor, members: Sequence[nn.Parameter]) -> Sequence[Tensor]:
    """Return where each gradient is in a buffer, and then the numbers of processes that have them."""
    *slots, counts = torch.split(buffer, [*_slot_sizes(members), len(members)])
    return [*(slot[: local(p.detach()).numel()] for slot, p in zip(slots, members, strict=True)), counts]


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


class TieReducer(GradientSum):
    """One rank's part in the reduction of a group: the sum of its parameters' gradients.

    Args:
        numbers: the ranks' numbers in messages.
    """

    def __init__(
        self,
        index: int,
        group: TieGroup,
        parameters: Sequence[nn.Parameter],
        transport: Transport,
        numbers: Sequence[int],
    ) -> None:
        super().__init__(parameters, partial(transport.reduce, index, group.ranks))
        self._is_first = transport.rank == group.ranks[0]
        peers = tuple(numbers[rank] for rank in group.ranks if rank != transport.rank)
        self.position = Position(f"REDUCE_GRAD{index}", peers)
        """The rank's position while it waits for the sum."""

    def start_copies(self) -> None:
        """Start to copy the first rank's parameters to the others: a sum in which the others contribute -0.0."""
        for parameter in self.parameters:
            if not self._is_first:
                parameter.data.zero_().neg_()  # 0.0 would change the sign of the first rank's -0.0
        self._pending = self._reduce([parameter.data for parameter in self.parameters])

    def finish_copies(self) -> None:
        """Wait for the copies."""
        assert self._pending is not None
        self._pending.wait()
        self._pending = None


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
    """Raise PartitionError if one of these parameters has a hook that would see only part of its gradient."""
    for name, stages, parameter, in_one_backward in tied:
        if has_accumulation_hooks(parameter) or (in_one_backward and has_gradient_hooks(parameter)):
            raise PartitionError(
                f"parameter {name!r} has a hook on its gradient (register_hook or register_post_accumulate_grad_hook), "
                f"and is held by stages {list(stages)}: each would call the hook with its own share of the gradient, "
                "not with the sum, as plain training does. Choose cuts or a schedule so that only one stage holds it, "
                "or remove the hook and change the gradient after the step (p.grad, before optimizer.step())"
            )
