"""Sums gradients over processes: only the step's own contribution, in flat buffers, while other stages still run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from penstock.errors import ArgumentError
from penstock.gradients import by_gradient_dtype, gradient_dtype
from penstock.runtime.gradients.distribution import is_distributed, local, local_gradient
from penstock.runtime.transport.protocol import Pending

Reduce = Callable[[Sequence[Tensor]], Pending]
"""Starts to sum tensors, in place, over some processes, with the same bits on each of them."""


class GradientSum:
    """Sums the gradients of some parameters over all processes that hold them.

    Only the step's own contribution is summed: what earlier steps accumulated is already the same everywhere. There is
    one buffer per dtype: the gradients, then for each gradient the number of processes that have it. These numbers are
    read only if this process lacks a gradient, since reading them waits for the device. The sums stay in the buffer,
    and `.grad` are views of it.

    Args:
        parameters: the same parameters, in the same order, on each process.
        reduce: starts the sum of the buffers.
        divisor: divides the sum.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], reduce: Reduce, divisor: int = 1) -> None:
        self._parameters = tuple(parameters)
        self._reduce = reduce
        self._divisor = divisor
        self._before: list[Tensor | None] = []
        self._buffers: list[Tensor] = []
        self._present: dict[torch.dtype, tuple[list[bool], Tensor]] = {}
        self._pending: Pending | None = None

    def set_aside(self) -> None:
        """Sets aside what earlier steps accumulated, until `finish`."""
        self._before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def start(self) -> None:
        """Starts the sum."""
        self._buffers = [self._flat(members) for members in by_gradient_dtype(self._parameters).values()]
        self._pending = self._reduce(self._buffers)

    def finish(self) -> None:
        """Waits for the sum, if one was started, and adds it to what was set aside."""
        before = dict(zip(self._parameters, self._before or [None] * len(self._parameters), strict=True))
        if self._pending is not None:
            self._pending.wait()
            for parameter, total in self._totals():
                parameter.grad = _add(before[parameter], total)
        elif self._before:  # nothing was added
            for parameter, grad in before.items():
                parameter.grad = _add(grad, parameter.grad)
        self._before, self._buffers, self._pending = [], [], None

    def _flat(self, members: Sequence[nn.Parameter]) -> Tensor:
        for parameter in members:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ArgumentError(
                    f"a gradient of shape {list(parameter.shape)} is sparse, and several processes hold its parameter; "
                    "sparse gradients cannot be summed over processes: make the embedding with sparse=False"
                )
        dtype = gradient_dtype(members[0])
        mine = [local(p.detach()) for p in members]
        grads = [local_gradient(p) for p in members]
        flat = [
            (torch.zeros_like(m, dtype=dtype) if g is None else g).reshape(-1) for g, m in zip(grads, mine, strict=True)
        ]
        return torch.cat([*flat, self._flags(members, dtype, mine[0])])

    def _flags(self, members: Sequence[nn.Parameter], dtype: torch.dtype, like: Tensor) -> Tensor:
        """Which gradients are here, as numbers on the device: those of the last step if the same ones are."""
        present = [p.grad is not None for p in members]
        known = self._present.get(dtype)
        if known is None or known[0] != present or known[1].device != like.device:
            known = self._present[dtype] = present, like.new_tensor([float(here) for here in present], dtype=dtype)
        return known[1]

    def _totals(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Each parameter's sum; None if no process has a gradient."""
        for members, buffer in zip(by_gradient_dtype(self._parameters).values(), self._buffers, strict=True):
            *flat, held = torch.split(buffer, [*(local(p.detach()).numel() for p in members), len(members)])
            here, _ = self._present[buffer.dtype]
            counts: Sequence[float] = here if all(here) else held.cpu().tolist()
            if self._divisor > 1:
                buffer /= self._divisor
            for parameter, total, count in zip(members, flat, counts, strict=True):
                yield parameter, _in_place(total, parameter) if count else None


def _in_place(total: Tensor, parameter: nn.Parameter) -> Tensor:
    """A gradient in the buffer's memory, unless the parameter is laid out otherwise, or only part of it is here."""
    if parameter.is_contiguous() and not is_distributed(parameter):
        return total.view(parameter.shape).detach()
    grad = torch.empty_like(parameter.data, dtype=total.dtype)
    mine = local(grad)
    mine.copy_(total.view(mine.shape))
    return grad


def _add(before: Tensor | None, grad: Tensor | None) -> Tensor | None:
    if before is None or grad is None:
        return before if grad is None else grad
    return before.add_(grad)
