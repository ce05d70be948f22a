"""A step by hand: the calls of torch and of the system that Penstock's step makes, with nothing between them.

What any runtime needs that gives one device's gradients to the bit: aligned copies of microbatches and of what is
received, functions that take gradients as they are made, one backward for each microbatch, W as a product of its own,
and a message each way between ranks (two copies, a byte for each way of waking the other). It checks nothing, knows its
stages (`Linear`, `tanh`, a residual connection, a mean squared error), and never waits: each rank sends to itself, so
the values are not those of a step.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from penstock._base.compat import run_backward
from penstock.runtime.exact.rules import receive
from penstock.schedule import Op

TOKEN_BYTES = 4


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
        self._loop, self._anchor = _Loop(inputs[0]), torch.empty(0, requires_grad=True)
        self._mail: dict[tuple[str, int, int], Tensor] = {}
        self._kept: dict[tuple[int, int], Any] = {}

    def __call__(self) -> None:
        self._loop.begin(len(self._row))
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
            x, slot = receive(self._anchor, self._take("value", stage, stage - 1, microbatch))
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
            self._loop.send(value)

    def _take(self, what: str, stage: int, other: int, microbatch: int) -> Tensor:
        if self._rank_of[stage] == self._rank_of[other]:
            return self._mail.pop((what, stage, microbatch))
        return self._loop.receive()


class _Loop:
    """A channel from a rank to itself: shared memory, and a socket whose tokens are there before they are asked for."""

    def __init__(self, like: Tensor) -> None:
        self._bytes = like.numel() * like.element_size()
        self._shape, self._stride = tuple(like.shape), like.stride()
        self._map = mmap.mmap(-1, max(1, self._bytes))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._here, self._there = socket.socketpair()

    def begin(self, messages: int) -> None:
        """Puts enough tokens into the socket, and takes out what the last step has sent."""
        self._there.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self._there.recv(1 << 20)
        self._there.setblocking(True)
        self._there.sendall(bytes(TOKEN_BYTES * messages))

    def send(self, value: Tensor) -> None:
        ctypes.memmove(self._address, value.data_ptr(), self._bytes)
        self._here.sendall(bytes(TOKEN_BYTES))

    def receive(self) -> Tensor:
        self._here.recv(TOKEN_BYTES)
        value = torch.empty_strided(self._shape, self._stride, dtype=torch.float32)
        ctypes.memmove(value.data_ptr(), self._address, self._bytes)
        self._here.sendall(b"\0")
        return value
