"""When a schedule's actions would run, given what they cost."""

from penstock.simulate.simulate import simulate

__all__ = ["simulate"]
