"""Imports what a rank's first step needs, in the process that forks the ranks, rather than in every rank.

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
    "penstock.verification.verify",
    "penstock.testing",
)


def up() -> None:
    for name in MODULES:
        import_module(name)
    gc.freeze()  # a collection would copy the memory of everything imported
