"""Better schedules than the known ones: under a memory limit for each rank, for stages with different costs.

In come a placement, costs and limits; out comes `SearchResult`: a schedule, and a bound that none can beat.

>>> from penstock.schedule import Placement
>>> from penstock.simulate import StageCost
>>> found = search(Placement.loop(2), 4, [StageCost(1.0, 1.0, 1.0)] * 2, objective="makespan", seconds=0.1)
>>> found.timeline.makespan_seconds, found.lower_bound_seconds
(13.0, 13.0)
"""

from penstock._base.lazy import find_old_names
from penstock.simulate.search.bounds import lower_bound
from penstock.simulate.search.problem import Objective, Problem, problem
from penstock.simulate.search.result import SearchResult
from penstock.simulate.search.search import search

__all__ = ["Objective", "Problem", "SearchResult", "lower_bound", "problem", "search"]

__getattr__ = find_old_names(__name__)
