"""When a schedule's actions would run, given what they cost: time, memory, and why ranks wait."""

from penstock.simulate.idle import Cause, CriticalPath, critical_path, idle
from penstock.simulate.memory import Memory, memory
from penstock.simulate.simulate import NO_COST, Links, simulate

__all__ = ["NO_COST", "Cause", "CriticalPath", "Links", "Memory", "critical_path", "idle", "memory", "simulate"]
