"""When a schedule's actions would run, given their costs: time, memory, and why ranks wait.

In come a `Schedule` and what its stages and links cost; out comes a `Timeline`, as a real run leaves one.

>>> from penstock.schedule import generate
>>> from penstock.simulate import StageCost, simulate
>>> simulate(generate("1f1b", ranks=2, microbatches=4), [StageCost(1.0, 1.0, 1.0)] * 2).makespan_seconds
15.0

Names are loaded on first use: costs need only the standard library, the simulator needs numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock._base.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.simulate.costs import NO_COST as NO_COST
    from penstock.simulate.costs import LinkCost as LinkCost
    from penstock.simulate.costs import Links as Links
    from penstock.simulate.costs import StageCost as StageCost
    from penstock.simulate.memory_use import Memory as Memory
    from penstock.simulate.memory_use import Peaks as Peaks
    from penstock.simulate.memory_use import memory as memory
    from penstock.simulate.memory_use import peaks as peaks
    from penstock.simulate.simulator import simulate as simulate
    from penstock.simulate.waits import CriticalPath as CriticalPath
    from penstock.simulate.waits import IdleCause as IdleCause
    from penstock.simulate.waits import critical_path as critical_path
    from penstock.simulate.waits import idle_time_by_cause as idle_time_by_cause

_HOMES = {
    "costs": "LinkCost StageCost NO_COST Links",
    "simulator": "simulate",
    "waits": "IdleCause CriticalPath critical_path idle_time_by_cause",
    "memory_use": "Memory Peaks memory peaks",
}

__all__, __getattr__, __dir__ = lazy_exports(__name__, _HOMES, {"search"})
