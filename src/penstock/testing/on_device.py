"""A transport for a device's tensors, as the scripts see it, which make theirs on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from penstock._base.stages import Link
from penstock.runtime.exact.rules import Layout, copy_as
from penstock.runtime.transport.protocol import Channel, Message, Pending, PointToPoint, Transport


class OnDevice:
    """One rank's transport, between copies to the device and back that keep strides and alignment."""

    def __init__(self, transport: PointToPoint, device: torch.device) -> None:
        self._transport = cast(Transport, transport)
        self._device = device
        for name in ("connect", "release", "end_step", "drop_step", "close", "broadcast"):
            if hasattr(transport, name):  # not all have collectives
                setattr(self, name, getattr(transport, name))
        if hasattr(transport, "reduce"):
            self.reduce = self._reduce

    def channel(self, program: int, link: Link, source_rank: int, target_rank: int, *, backward: bool) -> Channel:
        inner = self._transport.channel(program, link, source_rank, target_rank, backward=backward)
        return _Channel(inner, self._device)

    def _reduce(self, group: int, holders: Sequence[int], tensors: Sequence[Tensor]) -> Pending:
        there = [_moved(tensor, self._device) for tensor in tensors]
        return _Sum(self._transport.reduce(group, holders, there), there, tensors)


class _Channel:
    def __init__(self, inner: Channel, device: torch.device) -> None:
        self._inner = inner
        self._device = device
        self.post = inner.post

    def send(self, microbatch: int, message: Message) -> None:
        self._inner.send(microbatch, [None if tensor is None else _moved(tensor, self._device) for tensor in message])

    def receive(self, microbatch: int) -> list[Tensor | None]:
        arrived = self._inner.receive(microbatch)
        for tensor in arrived:
            assert tensor is None or tensor.device.type == self._device.type, f"a tensor arrived on {tensor.device}"
        return [None if tensor is None else _moved(tensor, torch.device("cpu")) for tensor in arrived]


class _Sum:
    def __init__(self, pending: Pending, there: Sequence[Tensor], here: Sequence[Tensor]) -> None:
        self._pending, self._pairs = pending, list(zip(here, there, strict=True))

    def wait(self) -> None:
        self._pending.wait()
        for tensor, total in self._pairs:
            tensor.copy_(total)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return copy_as(Layout.of(tensor), tensor, device)
