"""Refuses random numbers drawn in backward: in a hook on a gradient, or in the backward of an autograd function.

A forward draws from streams keyed by module, which hooks on the modules set. In backward nothing says which module is
drawing, so the numbers would depend on the schedule and the cuts.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from penstock.compat import generator_of
from penstock.errors import PartitionError
from penstock.runtime.exact.streams import Streams
from penstock.runtime.features.context import StageContext
from penstock.runtime.features.feature import Context, Feature, Watch

LOOKS = 3
"""How many of a stage's backwards are checked for draws from Python's and numpy's generators: later ones behave alike,
and in a long run other threads draw from these generators too."""


class BackwardDraws(Feature):
    """Refuses draws from torch's default generators, or Python's or numpy's, in a stage's backward.

    After the first backwards, it looks at torch's generators only.

    Args:
        stage: the stage's index.
        device: the device it runs on.
        streams: sets the generators when a forward draws, also within backward.
    """

    @classmethod
    def of(cls, stage: StageContext) -> BackwardDraws | None:
        """In training."""
        return cls(stage.index, stage.device, stage.streams) if stage.training else None

    def __init__(self, stage: int, device: torch.device, streams: Streams | None = None) -> None:
        self._stage = stage
        self._streams = streams
        self._looks = 0
        self._generators = tuple(dict.fromkeys([torch.default_generator, generator_of(device)]))
        self._refused_later = Watch(self._states, self._refuse_draws)

    def autograd(self, microbatch: int) -> Context:
        """Wraps autograd's backward: see `refused`."""
        return self.refused() if self._looks < LOOKS else self._refused_later

    def weights(self, microbatch: int) -> Context:
        """Wraps the work that a split backward put off: see `refused`."""
        return self.refused() if self._looks < LOOKS else self._refused_later

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Wraps code that must not draw.

        A forward that runs again in it, as in checkpointing, does not count: it restores or seeds the generators.

        Raises:
            PartitionError: the code drew.
        """
        self._looks += 1
        others, count = _foreign(), self._seedings()
        with self._refused_later:
            yield
        if self._seedings() == count and _foreign() != others:
            raise self._refusal("a random.Random")

    def _states(self) -> list[tuple[int, bytes]]:
        return [(generator.initial_seed(), _state_of(generator)) for generator in self._generators]

    def _refuse_draws(self, before: list[tuple[int, bytes]]) -> None:
        """Raises PartitionError if a generator has moved on from the same seed."""
        for (seed, state), (seed_now, now) in zip(before, self._states(), strict=True):
            if seed_now == seed and now != state:
                raise self._refusal("a torch.Generator")

    def _seedings(self) -> int:
        return 0 if self._streams is None else self._streams.seedings

    def _refusal(self, own: str) -> PartitionError:
        return PartitionError(
            f"the backward of stage {self._stage} draws random numbers (in a hook on a gradient, or in the backward of "
            "an autograd function): they would depend on the order of the schedule, and differ from those of one "
            "device. Draw them in the forward, and keep them for backward (ctx.save_for_backward). If another thread "
            f"draws meanwhile, give it {own} of its own"
        )


def _state_of(generator: torch.Generator) -> bytes:
    state = generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


def _foreign() -> tuple[Any, ...]:
    """The states of Python's and numpy's generators."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), kind, keys.tobytes(), *rest
