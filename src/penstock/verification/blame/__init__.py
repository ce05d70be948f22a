"""Finds why a pipeline, written with anything, trains wrongly.

In comes what its ranks compute in a few steps, noted by hooks on modules (`watch`, `pipelining`) and left in files.
The unsplit model takes the same steps in one process, each from the weights and buffers that the pipeline had before
it (`replay`), under the names that it has for what stages hold (`names`). Out comes the first action that is wrong
(`judge`, `updates`): forward or backward of which stage and microbatch, a message between two, the loss, a sum of
gradients, clipping, or the optimizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock._base.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.verification.blame.watch import capture as capture

_HOMES = {
    "watch": "capture",
}

__all__, __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
