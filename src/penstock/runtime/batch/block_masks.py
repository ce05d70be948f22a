"""Cuts the block masks of FlexAttention by samples, as `torch.distributed.pipelining` does.

A block mask is no plain container: its mask function is called with a sample's number in the batch, which has to go on
counting in a microbatch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ShapeError


@dataclass(frozen=True)
class Hole:
    """Stands for a block mask in a batch. `number`: its place among those taken out."""

    number: int


def taken_out(tree: Any, found: list[Any]) -> Any:
    """The same batch with holes for block masks, which are added to `found`."""
    module: Any = sys.modules.get("torch.nn.attention.flex_attention")  # if it is not loaded, there are no masks
    if module is not None and isinstance(tree, module.BlockMask):
        found.append(tree)
        return Hole(len(found) - 1)
    return _mapped(tree, lambda value: taken_out(value, found)) if module is not None else tree


def put_back(tree: Any, pieces: Sequence[Any]) -> Any:
    """The same microbatch with pieces of block masks in the holes."""
    return pieces[tree.number] if isinstance(tree, Hole) else _mapped(tree, lambda value: put_back(value, pieces))


def _mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    if type(tree) is dict:
        return {key: function(value) for key, value in tree.items()}
    return type(tree)(map(function, tree)) if type(tree) in (list, tuple) else tree


def cut(mask: Any, sizes: Sequence[int], what: str, device: torch.device | None) -> list[Any]:
    """The pieces of a block mask; one that holds for every sample goes whole to each microbatch.

    Raises:
        ShapeError: it is for another number of samples.
    """
    mask = mask if device is None else mask.to(device)
    rows = mask.kv_num_blocks.shape[0]
    if rows == 1:
        return [mask] * len(sizes)
    if rows != sum(sizes):
        raise ShapeError(
            f"{what} has a BlockMask for {rows} rows; expected {sum(sizes)}, as the inputs have, or 1 (pass B=None to "
            "create_block_mask) for one that holds for every row"
        )
    starts = [0, *accumulate(sizes)]
    parts = [None if t is None else t.split(list(sizes)) for t in map(mask.__getattribute__, _TENSORS)]
    return [
        type(mask).from_kv_blocks(
            **{name: part if part is None else part[k] for name, part in zip(_TENSORS, parts, strict=True)},
            BLOCK_SIZE=mask.BLOCK_SIZE,
            mask_mod=_shifted(mask.mask_mod, torch.tensor(start, device=mask.kv_num_blocks.device)),
            seq_lengths=mask.seq_lengths,
        )
        for k, start in enumerate(starts[:-1])
    ]


_TENSORS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


def _shifted(mask_mod: Callable[..., Tensor], start: Tensor) -> Callable[..., Tensor]:
    """A mask function for a microbatch that begins at a sample. `start` is a tensor, so that all have one recording."""

    def shifted(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return mask_mod(b + start.to(b.dtype), h, q, kv)

    return shifted
