"""Sees which batch norms run inside of `torch.utils.checkpoint`, and so will run again in backward."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import checkpoint

from penstock.errors import PartitionError


class Repeats:
    """Told by the observer of every module that is called."""

    def __init__(self) -> None:
        self._depths: dict[nn.Module, set[int]] = {}
        self._without = 0

    @contextmanager
    def without(self) -> Iterator[None]:
        """Around a checkpoint that is not run again, since nothing that enters it takes a gradient."""
        self._without += 1
        try:
            yield
        finally:
            self._without -= 1

    def enter(self, module: nn.Module) -> None:
        """Notes a call."""
        if isinstance(module, _BatchNorm) and module.training and module.track_running_stats:
            self._depths.setdefault(module, set()).add(_depth() - self._without)

    def found(self) -> dict[nn.Module, int]:
        """How often each runs again, where it does. Raises PartitionError where that is not the same in all calls."""
        found = {}
        for module, depths in self._depths.items():
            if len(depths) > 1:
                raise PartitionError(
                    f"a {type(module).__name__} is called inside of torch.utils.checkpoint and outside of it: use a "
                    "batch norm of its own in each place, or checkpoint both"
                )
            if max(depths) > 0:
                found[module] = max(depths)
        return found


def _depth() -> int:
    """How many calls of `checkpoint` are under way."""
    depth, frame = 0, sys._getframe(1)
    caller: FrameType | None = frame
    while caller is not None:
        code = caller.f_code
        depth += code.co_name == "checkpoint" and code.co_filename == checkpoint.__file__
        caller = caller.f_back
    return depth
