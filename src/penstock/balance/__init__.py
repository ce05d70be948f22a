"""What each unit of a model costs, and where to cut so that the dearest stage costs least. Does not load torch."""

from penstock.balance.cuts import Problem, best_starts, stage_bytes, stage_loads
from penstock.balance.profile import OPTIMIZER_VALUES, Profile, UnitCost, first_difference, read_profile

__all__ = [
    "OPTIMIZER_VALUES",
    "Problem",
    "Profile",
    "UnitCost",
    "best_starts",
    "first_difference",
    "read_profile",
    "stage_bytes",
    "stage_loads",
]
