"""A tensor as the bytes that travel for it, for transports that move plain bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.runtime.exact import rules as exact
from penstock.runtime.exact.rules import Layout


def to_bytes(tensor: Tensor) -> bytes:
    """The elements of a tensor, on whatever device, in the order in which they are stored."""
    return exact.pack(tensor).cpu().view(torch.uint8).numpy().tobytes()


def from_bytes(data: bytes, layout: Layout, device: torch.device) -> Tensor:
    """The tensor of these bytes, in memory of its own: as it was laid out where `to_bytes` was called."""
    buffer = exact.allocate(layout, device)
    if data:
        buffer.flat.view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return exact.unpack(buffer)
