"""Cuts the block masks of FlexAttention by samples, as `torch.distributed.pipelining` does.

A block mask's function is called with a sample's number in the batch, which has to go on counting in a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ShapeError


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
    given = {name: getattr(mask, name) for name in _TENSORS}
    parts = {name: tensor.split(list(sizes)) for name, tensor in given.items() if tensor is not None}
    starts = torch.tensor([0, *accumulate(sizes)], device=mask.kv_num_blocks.device)
    return [
        type(mask).from_kv_blocks(
            **{name: part[k] for name, part in parts.items()},
            BLOCK_SIZE=mask.BLOCK_SIZE,
            mask_mod=_shifted(mask.mask_mod, starts[k].clone()),
            seq_lengths=mask.seq_lengths,
        )
        for k in range(len(sizes))
    ]


_TENSORS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


def _shifted(mask_mod: Callable[..., Tensor], start: Tensor) -> Callable[..., Tensor]:
    """A mask function for a microbatch that begins at a sample. As a tensor that needs no recording of its own."""

    def shifted(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return mask_mod(b + start.to(b.dtype), h, q, kv)

    return shifted
