"""Random numbers that a backward draws: in a hook on a gradient, or in the backward of an autograd function.

A forward draws from streams keyed by module, which hooks on the modules set. In backward nothing says which module is
drawing, so the numbers would depend on the schedule and on the cuts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from penstock.errors import PartitionError
from penstock.runtime.streams import generator_of


class BackwardDraws:
    """Refuses what a stage's backward draws from torch's default generators.

    Args:
        stage: its index.
        device: that it runs on.
    """

    def __init__(self, stage: int, device: torch.device) -> None:
        self._stage = stage
        self._generators = tuple(dict.fromkeys([torch.default_generator, generator_of(device)]))

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Around autograd's backward.

        A forward that runs again within it, as in checkpointing, is no draw: it restores the generators, or seeds them.

        Raises:
            PartitionError: it has drawn.
        """
        before = [(generator.initial_seed(), generator.get_state()) for generator in self._generators]
        yield
        for generator, (seed, state) in zip(self._generators, before, strict=True):
            if generator.initial_seed() == seed and not torch.equal(generator.get_state(), state):
                raise PartitionError(
                    f"the backward of stage {self._stage} draws random numbers (in a hook on a gradient, or in the "
                    "backward of an autograd function): they would depend on the order of the schedule, and differ "
                    "from those of one device. Draw them in the forward, and keep them for backward "
                    "(ctx.save_for_backward). If another thread draws meanwhile, give it a torch.Generator of its own"
                )
