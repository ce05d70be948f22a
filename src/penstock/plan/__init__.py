"""From costs to a plan: replicas, ranks, cuts, schedule, microbatches and recomputation that make a step shortest.

>>> from penstock.costs import Profile, UnitCost
>>> from penstock.plan import Cluster, Sizes, make_plans
>>> units = tuple(UnitCost(f"blocks.{n}", 0.01, 0.01, 0.01) for n in range(4))
>>> sizes = Sizes({2: Profile(units, "cpu", "float32", {"x": (2, 8)})})
>>> make_plans(sizes, Cluster(2), global_batch=16).best[0].choice.replicas
2

Pure values and functions; nothing here runs a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock._base.lazy import lazy_exports
from penstock.costs.sizes import Sizes as Sizes

if TYPE_CHECKING:
    from penstock.plan.cluster import Cluster as Cluster
    from penstock.plan.cluster import DevicePool as DevicePool
    from penstock.plan.parallel_configs import FixedNumbers as FixedNumbers
    from penstock.plan.parallel_configs import ParallelConfig as ParallelConfig
    from penstock.plan.parallel_configs import enumerate_configs as enumerate_configs
    from penstock.plan.plan import Plan as Plan
    from penstock.plan.plan import read_plan as read_plan
    from penstock.plan.planner import PlanResult as PlanResult
    from penstock.plan.planner import RejectedConfig as RejectedConfig
    from penstock.plan.planner import make_plans as make_plans

_HOMES = {
    "parallel_configs": "ParallelConfig FixedNumbers enumerate_configs",
    "cluster": "Cluster DevicePool",
    "plan": "Plan read_plan",
    "planner": "RejectedConfig PlanResult make_plans",
}

__all__, __getattr__, __dir__ = lazy_exports(__name__, _HOMES, {"explain", "transformer"})
__all__ += ["Sizes"]
