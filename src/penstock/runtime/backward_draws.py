"""Random numbers that a backward draws: in a hook on a gradient, or in the backward of an autograd function.

A forward's draws come from streams keyed by module, whose hooks set them. In backward nothing tells which module draws,
so that the numbers would follow the order of the schedule, and the cuts.
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

        A forward that runs again within it, as in checkpointing, restores the generators, or has set other seeds.

        Raises:
            PartitionError: it has drawn.
        """
        before = [(generator.initial_seed(), generator.get_state()) for generator in self._generators]
        yield
        for generator, (seed, state) in zip(self._generators, before, strict=True):
            if generator.initial_seed() == seed and not torch.equal(generator.get_state(), state):
                raise PartitionError(
                    f"the backward of stage {self._stage} draws random numbers (in a hook on a gradient, or in the "
                    "backward of an autograd function): they would follow the order of the schedule, and not be those "
                    "of one device. Draw them in the forward, and keep them for backward (ctx.save_for_backward). If "
                    "it is another thread that draws meanwhile, give it a torch.Generator of its own"
                )
