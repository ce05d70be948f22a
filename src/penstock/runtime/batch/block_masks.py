"""Cuts the block masks of FlexAttention by samples, as `torch.distributed.pipelining` does.

A block mask's function is called with a sample's number in the batch, which has to go on counting in a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from penstock._base.errors import ShapeError


def cut(mask: Any, sizes: Sequence[int], where: str, device: torch.device | None) -> list[Any]:
    """The pieces of a block mask; one for every sample goes whole to each microbatch. Raises ShapeError if it is for
    another number of samples.
    """
    mask = mask if device is None else mask.to(device)
    rows = mask.kv_num_blocks.shape[0]
    if rows == 1:
        return [mask] * len(sizes)
    if rows != sum(sizes):
        raise ShapeError(
            f"{where} is a BlockMask for {rows} rows; expected {sum(sizes)}, as the inputs have, or one for every row: "
            "pass B=None to create_block_mask"
        )
    pieces, ends = [copy(mask) for _ in sizes], accumulate(sizes)
    for name, value in vars(mask).items():
        if isinstance(value, Tensor) and len(value) == rows:
            for piece, part in zip(pieces, torch.split(value, list(sizes)), strict=True):
                setattr(piece, name, part)
    for piece, size, end in zip(pieces, sizes, ends, strict=True):
        piece.mask_mod = _shifted(mask.mask_mod, torch.tensor(end - size, device=mask.kv_num_blocks.device))
    return pieces


def _shifted(mask_mod: Callable[..., Tensor], start: Tensor) -> Callable[..., Tensor]:
    """A mask function for a microbatch that begins at a sample. As a tensor that needs no recording of its own."""

    def shifted(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return mask_mod(b + start.to(b.dtype), h, q, kv)

    return shifted
