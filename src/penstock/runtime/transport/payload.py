"""A tensor as the bytes to send, for transports that move plain bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.runtime.exact import rules as exact
from penstock.runtime.exact.rules import Layout


def to_bytes(tensor: Tensor) -> bytes:
    """The elements of a tensor, on any device, in storage order."""
    return exact.pack(tensor).cpu().view(torch.uint8).numpy().tobytes()


def from_bytes(data: bytes, layout: Layout, device: torch.device) -> Tensor:
    """A tensor made from these bytes, in its own memory, with the layout that it had when `to_bytes` was called."""
    buffer = exact.allocate(layout, device)
    if data:
        buffer.flat.view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return exact.unpack(buffer)
