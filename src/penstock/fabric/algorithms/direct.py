"""Straight to whom it is for: point-to-point."""

from __future__ import annotations

from penstock.fabric.steps import Move, StepList


def send(ranks: int) -> StepList:
    """From rank 0 to rank 1; other ranks look on."""
    return StepList("send", "direct", ranks, 1, 1, ((Move(0, 1, 0, 1, 0),),))
