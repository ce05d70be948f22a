"""What a rank's first step imports, for processes that fork ranks: done once before, not in every rank.

A step's first FakeTensorMode alone loads all of `torch._dynamo`, which takes longer than most jobs.
"""

from __future__ import annotations

import gc
from importlib import import_module

MODULES = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "penstock.checkpoint",
    "penstock.proof.verify",
    "penstock.testing",
)


def up() -> None:
    for name in MODULES:
        import_module(name)
    gc.freeze()  # a collection would copy the memory of all that was imported
