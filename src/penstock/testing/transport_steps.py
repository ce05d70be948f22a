"""The steps that `transport_scripts.py` is made of, each by one of two ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock._base.stages import Link
from penstock.runtime.transport.protocol import Channel, Pending, Transport

LINK = Link(0, 1, ((0, "a"), (0, "b")))


@dataclass(slots=True)
class Rank:
    """A rank's transport, and what a script's steps leave for later steps."""

    transport: Transport
    program: int
    channels: dict[bool, Channel] = field(default_factory=dict)
    pending: list[Pending] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def channel(self, *, backward: bool = False) -> Channel:
        if backward not in self.channels:
            source = int(backward)
            self.channels[backward] = self.transport.channel(self.program, LINK, source, 1 - source, backward=backward)
        return self.channels[backward]


Step = tuple[int, Callable[[Rank], None]]


def both(step: Callable[[Rank], None]) -> Iterator[Step]:
    yield 0, step
    yield 1, step


def end_step(rank: Rank) -> None:
    rank.transport.end_step()


def drop_step(rank: Rank) -> None:
    rank.transport.drop_step()
    rank.pending.clear()
    rank.tensors.clear()


def close(rank: Rank) -> None:
    rank.transport.close()


def message(step: int, microbatch: int) -> list[Tensor]:
    """Two tensors that either rank can make: one channels-last, one that does not start on a cache line."""
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    image = torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last)
    return [image, torch.randn(8, generator=generator)[1:]]


def same(got: Tensor | None, expected: Tensor | None) -> None:
    if expected is None:
        assert got is None, "a tensor arrived where None was sent"
        return
    arrived = looks_like(got, expected)
    assert arrived.data_ptr() % 64 == expected.data_ptr() % 64, "the address modulo a cache line changed"


def looks_like(got: Tensor | None, expected: Tensor) -> Tensor:
    arrived = equal(got, expected)
    assert arrived.stride() == expected.stride(), f"strides {expected.stride()} became {arrived.stride()}"
    return arrived


def equal(got: Tensor | None, expected: Tensor) -> Tensor:
    """As far as values go, byte by byte: torch compares those of some types in no other way."""
    assert got is not None, "a tensor did not arrive"
    assert got.shape == expected.shape, f"shape {tuple(expected.shape)} became {tuple(got.shape)}"
    assert got.dtype == expected.dtype, f"{expected.dtype} became {got.dtype}"
    mine, other = (tensor.cpu().reshape(-1).contiguous().view(torch.uint8) for tensor in (got, expected))
    assert torch.equal(mine, other), f"a tensor arrived with other values ({expected.dtype})"
    return got


def send(rank: Rank, k: int, tensors: Sequence[Tensor | None], *, backward: bool = False) -> None:
    rank.channel(backward=backward).send(k, tensors)


def post(rank: Rank, k: int, *, backward: bool = False) -> None:
    rank.channel(backward=backward).post(k)


def take(
    rank: Rank,
    k: int,
    expected: Sequence[Tensor | None],
    *,
    backward: bool = False,
    same: Callable[[Any, Any], object] = same,
) -> None:
    for pair in zip(rank.channel(backward=backward).receive(k), expected, strict=True):
        same(*pair)
