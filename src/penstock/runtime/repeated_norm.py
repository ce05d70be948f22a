"""Batch norms inside of `torch.utils.checkpoint`: plain torch counts such a batch again when it is run again.

There a microbatch's backward follows its forward, so that its statistics go into the running ones twice in a row.
In a pipeline other microbatches' forwards come between, and another order gives other numbers. So the forward updates
the running statistics as often as plain torch will have done behind the backward, and the backward not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.runtime.recompute import Buffers


class RepeatedNorms:
    """The batch norms of one stage that run again in backward.

    Args:
        repeats: each module, and how often it will run again.
    """

    def __init__(self, repeats: Mapping[nn.Module, int]) -> None:
        self._repeats = repeats
        self._buffers = Buffers(repeats, [b for norm in repeats for b in norm.buffers(recurse=False)])

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Around a forward."""
        handles = [norm.register_forward_hook(self._repeat, with_kwargs=True) for norm in self._repeats]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def still(self) -> Iterator[None]:
        """Around a backward."""
        with self._buffers.copy().in_place():
            yield

    def _repeat(self, norm: nn.Module, args: Any, kwargs: Any, result: Tensor) -> None:
        if norm.training:
            with torch.no_grad():
                for _ in range(self._repeats[norm]):
                    norm.forward(*args, **kwargs)
