"""From costs to a plan: where to cut a model so that its slowest stage is as fast as it can be.

Pure values and functions; nothing here runs a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import face

if TYPE_CHECKING:
    from penstock.plan.choice import Choice as Choice
    from penstock.plan.choice import Wanted as Wanted
    from penstock.plan.choice import choices as choices
    from penstock.plan.cluster import Cluster as Cluster
    from penstock.plan.cluster import Kind as Kind
    from penstock.plan.plan import Plan as Plan
    from penstock.plan.plan import read_plan as read_plan
    from penstock.plan.planner import Lost as Lost
    from penstock.plan.planner import Planned as Planned
    from penstock.plan.planner import make_plans as make_plans
    from penstock.plan.sizes import Sizes as Sizes

_HOMES = {
    "Choice": "choice",
    "Wanted": "choice",
    "choices": "choice",
    "Cluster": "cluster",
    "Kind": "cluster",
    "Plan": "plan",
    "read_plan": "plan",
    "Lost": "planner",
    "Planned": "planner",
    "make_plans": "planner",
    "Sizes": "sizes",
}

__all__ = [*_HOMES]  # noqa: PLE0604  (one list of names, not two)

__getattr__, __dir__ = face(__name__, _HOMES)
