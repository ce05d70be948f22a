"""What each unit of a model costs, and where to cut so that the dearest stage costs least. Does not load torch.

In come measured or estimated `UnitCost`s; out come the units with which stages begin.

>>> best_starts(Problem(seconds=[1.0, 1.0, 1.0, 3.0]), stages=2)
[0, 3]
"""

from penstock.balance.cuts import Problem, best_starts, stage_bytes, stage_loads
from penstock.balance.doubts import doubts, variation
from penstock.balance.estimate import estimated, fitted
from penstock.balance.profile import (
    OPTIMIZER_VALUES,
    SPLIT_SECONDS,
    MeasuredLink,
    Operations,
    Profile,
    Tied,
    UnitCost,
    counted_again,
    first_difference,
    kept_bytes,
    read_profile,
    ties_of,
)

__all__ = [
    "OPTIMIZER_VALUES",
    "SPLIT_SECONDS",
    "MeasuredLink",
    "Operations",
    "Problem",
    "Profile",
    "Tied",
    "UnitCost",
    "best_starts",
    "counted_again",
    "doubts",
    "estimated",
    "first_difference",
    "fitted",
    "kept_bytes",
    "read_profile",
    "stage_bytes",
    "stage_loads",
    "ties_of",
    "variation",
]
