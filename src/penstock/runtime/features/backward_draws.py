"""Refuses random numbers drawn in backward: in a hook on a gradient, or in the backward of an autograd function.

Noise on gradients is published as such hooks. A forward draws from streams keyed by module, which hooks on the modules
set. In backward nothing says which module is drawing, so the numbers would depend on the schedule and the cuts.
"""

from __future__ import annotations

import ctypes

import torch

from penstock.compat import generator_of
from penstock.errors import PartitionError
from penstock.runtime.features.context import StageContext
from penstock.runtime.features.feature import Context, Feature, Watch


class BackwardDraws(Feature):
    """Refuses draws from torch's default generators in a stage's backward.

    A forward that runs again in it, as in checkpointing, does not count: it restores or seeds the generators.

    Args:
        stage: the stage's index.
        device: the device it runs on.
    """

    @classmethod
    def of(cls, stage: StageContext) -> BackwardDraws | None:
        """In training."""
        return cls(stage.index, stage.device) if stage.training else None

    def __init__(self, stage: int, device: torch.device) -> None:
        self._stage = stage
        self._generators = tuple(dict.fromkeys([torch.default_generator, generator_of(device)]))
        self._refused = Watch(self._states, self._refuse_draws)

    def autograd(self, microbatch: int) -> Context:
        """Wraps autograd's backward."""
        return self._refused

    def weights(self, microbatch: int) -> Context:
        """Wraps the work that a split backward put off."""
        return self._refused

    def _states(self) -> list[tuple[int, bytes]]:
        return [(generator.initial_seed(), _state_of(generator)) for generator in self._generators]

    def _refuse_draws(self, before: list[tuple[int, bytes]]) -> None:
        """Raises PartitionError if a generator has moved on from the same seed."""
        for (seed, state), (seed_now, now) in zip(before, self._states(), strict=True):
            if seed_now == seed and now != state:
                raise PartitionError(
                    f"the backward of stage {self._stage} draws random numbers (in a hook on a gradient, or in the "
                    "backward of an autograd function): they would depend on the order of the schedule, and differ "
                    "from those of one device. Draw them in the forward, and keep them for backward "
                    "(ctx.save_for_backward). If another thread draws meanwhile, give it a torch.Generator of its own"
                )


def _state_of(generator: torch.Generator) -> bytes:
    state = generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())
