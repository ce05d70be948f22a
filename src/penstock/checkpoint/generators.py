"""The process's global random generators as something to save: data augmentation, for example, draws from them."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class RngState:
    """Python's `random`, numpy's legacy generator (if numpy is loaded), and torch's defaults for CPU and CUDA.

    Pass it to `save` and `load` in `stateful`. Rank 0's states are saved, and every rank loads them, so use it
    only if all ranks draw the same numbers. Penstock's own draws (dropout) do not need it: they are keyed by seed and
    step.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each generator."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if "numpy" in sys.modules:
            import numpy

            state["numpy"] = numpy.random.get_state()
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set each generator that has a saved state."""
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if "numpy" in state:
            import numpy

            numpy.random.set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
