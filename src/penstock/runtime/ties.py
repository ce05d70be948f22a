"""Parameters that several ranks hold: started equal, and their gradients summed among exactly those ranks.

A group is the parameters that the same set of stages holds. Only the step's own contribution is summed: what earlier
steps have accumulated is the same on every holder already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.runtime.failure import Position
from penstock.runtime.transport import Pending, Transport


@dataclass(frozen=True, slots=True)
class TieGroup:
    """Parameters, by their canonical names, that live on exactly these stages, and the ranks that hold those."""

    names: tuple[str, ...]
    stages: tuple[int, ...]
    ranks: tuple[int, ...]


def tie_groups(ties: Mapping[str, Sequence[int]], rank_of: Sequence[int]) -> tuple[TieGroup, ...]:
    """The groups that span several ranks, in the order in which every rank reduces them."""
    by_stages: dict[tuple[int, ...], list[str]] = {}
    for name, stages in ties.items():
        by_stages.setdefault(tuple(stages), []).append(name)
    groups = []
    for stages, names in sorted(by_stages.items()):
        ranks = tuple(sorted({rank_of[stage] for stage in stages}))
        if len(ranks) > 1:
            groups.append(TieGroup(tuple(names), stages, ranks))
    return tuple(groups)


class TieReducer:
    """One rank's part in one group."""

    def __init__(self, index: int, group: TieGroup, parameters: Sequence[nn.Parameter], transport: Transport) -> None:
        self._index = index
        self._group = group
        self._parameters = tuple(parameters)
        self._transport = transport
        self._before: list[Tensor | None] = []
        self._buffers: list[Tensor] = []
        self._pending: Pending | None = None

        peers = tuple(rank for rank in group.ranks if rank != transport.rank)
        self.position = Position(f"REDUCE_GRAD{index}", peers)
        """What a rank does while it waits for the sum."""

    def start_equal(self) -> None:
        """Starts to copy the parameters of the group's first rank to the others: a sum in which theirs are zero."""
        for parameter in self._parameters:
            if self._transport.rank != self._group.ranks[0]:
                parameter.data.zero_()
        self._pending = self._transport.reduce(
            self._index, self._group.ranks, [parameter.data for parameter in self._parameters]
        )

    def end_equal(self) -> None:
        """Waits for the copies."""
        assert self._pending is not None
        self._pending.wait()
        self._pending = None

    def begin_step(self) -> None:
        """Sets aside what earlier steps accumulated."""
        self._before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def start(self) -> None:
        """Starts the sum. One buffer a dtype: the gradients, then for each the number of ranks that have one."""
        self._buffers = []
        for members in self._by_dtype():
            flat = [p.new_zeros(p.numel()) if p.grad is None else p.grad.detach().reshape(-1) for p in members]
            held = members[0].new_tensor([float(p.grad is not None) for p in members])
            self._buffers.append(torch.cat([*flat, held]))
        self._pending = self._transport.reduce(self._index, self._group.ranks, self._buffers)

    def end_step(self) -> None:
        """Waits for the sum and adds it to what was there before."""
        if self._pending is None:  # no stage of the group has a backward: nothing was added
            for parameter, grad in zip(self._parameters, self._before, strict=True):
                parameter.grad = grad
            return
        self._pending.wait()
        self._pending = None
        before = dict(zip(self._parameters, self._before, strict=True))
        for members, buffer in zip(self._by_dtype(), self._buffers, strict=True):
            *flat, held = torch.split(buffer, [*(p.numel() for p in members), len(members)])
            for parameter, total, count in zip(members, flat, held.tolist(), strict=True):
                grad = torch.empty_like(parameter.data).copy_(total.view(parameter.shape)) if count else None
                parameter.grad = _add(before[parameter], grad)
        self._before, self._buffers = [], []

    def _by_dtype(self) -> list[list[nn.Parameter]]:
        groups: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self._parameters:
            groups.setdefault(parameter.dtype, []).append(parameter)
        return list(groups.values())


def _add(before: Tensor | None, grad: Tensor | None) -> Tensor | None:
    if before is None or grad is None:
        return before if grad is None else grad
    return before.add_(grad)
