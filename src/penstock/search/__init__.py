"""Better schedules than the known ones: under a memory limit for each rank, for stages with different costs."""

from penstock.search.bounds import lower_bound
from penstock.search.exact import exact
from penstock.search.found import Found
from penstock.search.problem import Objective, Problem, problem
from penstock.search.search import search

__all__ = ["Found", "Objective", "Problem", "exact", "lower_bound", "problem", "search"]
