"""A pipeline by hand: the calls of torch and of the system that a step cannot do without, with nothing between them.

What any runtime needs that gives one device's gradients to the bit: aligned copies of microbatches and of what is
received, functions that take gradients as they are made, one backward for each microbatch, W as a product of its own,
and a message for each value and gradient that goes to the other rank (one call of a socket at each end). It checks
nothing and knows its stages (`Linear`, `tanh`, a residual connection, a mean squared error); what it leaves in `.grad`
is what Penstock leaves.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from penstock._base.compat import run_backward
from penstock.runtime.exact.rules import as_graph_input
from penstock.schedule import Op


class Floor:
    """A rank's step, called without arguments.

    Args:
        stages: the rank's own, each with a `linear`.
        rank_of: each stage's rank.
        row: its computations, in order.
        inputs, targets: a microbatch each, as views of the batch.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        rank_of: Sequence[int],
        row: Sequence[tuple[Op, int, Any]],
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
    ) -> None:
        self._linear: dict[int, Any] = {index: stage.linear for index, stage in stages.items()}
        self._rank_of, self._row, self._last = rank_of, row, len(rank_of) - 1
        self._inputs, self._targets = inputs, targets
        self._weight = 1 / len(inputs)
        self._split = {(stage, microbatch) for op, stage, microbatch in row if op is Op.I}
        self._lines, self._anchor = _lines(rank_of), torch.empty(0, requires_grad=True)
        self._like = inputs[0]
        self._mail: dict[tuple[str, int, int], Tensor] = {}
        self._kept: dict[tuple[int, int], Any] = {}

    def __call__(self) -> None:
        self._losses: list[Tensor] = []
        self._seed: Tensor | None = None
        self._given = [part.detach().clone() for part in self._inputs] if 0 in self._linear else []
        self._wanted = [part.detach().clone() for part in self._targets] if self._last in self._linear else []
        run = {Op.F: self._forward, Op.B: self._backward, Op.I: self._backward, Op.W: self._weights}
        for op, stage, microbatch in self._row:
            run[op](stage, microbatch)
        total: Tensor | None = None
        for loss in self._losses:
            term = loss.reshape(()) * self._weight
            total = term if total is None else total + term

    def _forward(self, stage: int, microbatch: int) -> None:
        linear, slot, deferred = self._linear[stage], list[Tensor](), list[Any]()
        if stage == 0:
            x = self._given[microbatch]
        else:
            x, slot = as_graph_input(self._anchor, self._take("value", stage, stage - 1, microbatch))
        if (stage, microbatch) in self._split:
            hidden = F.linear(x, linear.weight.detach(), linear.bias)
            hidden.grad_fn.register_prehook(deferred.append)  # type: ignore[union-attr]
        else:
            hidden = linear(x)
        root = output = x + torch.tanh(hidden)
        if stage == self._last:
            root = F.mse_loss(output, self._wanted[microbatch])
            self._losses.append(root.detach())
            self._seed = torch.full_like(root.detach(), self._weight) if self._seed is None else self._seed
        else:
            self._give("value", stage, stage + 1, microbatch, output)
        self._kept[stage, microbatch] = GradientEdge(root.grad_fn, root.output_nr), slot, deferred, x.detach()

    def _backward(self, stage: int, microbatch: int) -> None:
        edge, slot, deferred, x = self._kept.pop((stage, microbatch))
        seed = self._seed if stage == self._last else self._take("grad", stage, stage + 1, microbatch)
        run_backward((edge,), (seed,))
        if stage:
            self._give("grad", stage, stage - 1, microbatch, slot[0])
        self._kept[stage, microbatch] = deferred, x

    def _weights(self, stage: int, microbatch: int) -> None:
        ((grad,),), x = self._kept.pop((stage, microbatch))
        weight = self._linear[stage].weight
        with torch.no_grad():
            term = grad.t().mm(x)
            if weight.grad is None:
                weight.grad = term
            else:
                weight.grad += term

    def _give(self, what: str, stage: int, other: int, microbatch: int, value: Tensor) -> None:
        value = value.detach().resolve_conj().resolve_neg()
        if self._rank_of[stage] == self._rank_of[other]:
            self._mail[what, other, microbatch] = value
        else:
            self._lines[what, other].sendall(value.numpy())

    def _take(self, what: str, stage: int, other: int, microbatch: int) -> Tensor:
        if self._rank_of[stage] == self._rank_of[other]:
            return self._mail.pop((what, stage, microbatch))
        value = torch.empty_strided(self._like.shape, self._like.stride(), dtype=torch.float32)
        self._lines[what, stage].recv_into(value.numpy(), 0, socket.MSG_WAITALL)
        return value


def _lines(rank_of: Sequence[int]) -> dict[tuple[str, int], socket.socket]:
    """A socket between the two ranks for what each stage gets from the other rank: values, and gradients.

    Rank 0 listens, and rank 1 connects.
    """
    cuts = [stage for stage in range(1, len(rank_of)) if rank_of[stage - 1] != rank_of[stage]]
    keys = [key for stage in cuts for key in (("value", stage), ("grad", stage - 1))]
    with socket.socket(socket.AF_UNIX) as door:
        names = [f"\0{secrets.token_hex(16)}"]
        if dist.get_rank() == 0:
            door.bind(names[0])
            door.listen(len(keys))
        dist.broadcast_object_list(names, 0)
        lines = {}
        for key in keys:
            lines[key] = door.accept()[0] if dist.get_rank() == 0 else socket.socket(socket.AF_UNIX)
            if dist.get_rank() == 1:
                lines[key].connect(names[0])
        return lines
