"""The process's own random generators as something to save: what a data loader's augmentation draws from."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class Generators:
    """Python's `random`, numpy's legacy generator (if numpy is loaded), and torch's default ones, on CPU and CUDA.

    Give it to `save` and `load` as one of `others`. Rank 0's states are saved, and every rank gets them: use it where
    all ranks draw the same. Penstock's own draws (dropout) need nothing: they are keyed by seed and step.
    """

    def state_dict(self) -> dict[str, Any]:
        """Each generator's state."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if "numpy" in sys.modules:
            import numpy

            state["numpy"] = numpy.random.get_state()
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets each generator that has a saved state."""
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if "numpy" in state:
            import numpy

            numpy.random.set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
