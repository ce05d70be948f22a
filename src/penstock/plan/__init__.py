"""From costs to a plan: where to cut a model so that its slowest stage is as fast as it can be.

Pure values and functions; nothing here runs a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import face

if TYPE_CHECKING:
    from penstock.plan.graph_cut import GraphCut as GraphCut
    from penstock.plan.graph_cut import cut_graph as cut_graph
    from penstock.plan.work_graph import Transfer as Transfer
    from penstock.plan.work_graph import Work as Work
    from penstock.plan.work_graph import WorkGraph as WorkGraph

_HOMES = {
    "GraphCut": "graph_cut",
    "cut_graph": "graph_cut",
    "Transfer": "work_graph",
    "Work": "work_graph",
    "WorkGraph": "work_graph",
}

__all__ = [*_HOMES]  # noqa: PLE0604  (one list of names, not two)

__getattr__, __dir__ = face(__name__, _HOMES)
