"""The models, by kind."""

from models import attributes, backwards, counters, draws, losses, memory, norms, places, values
from models.registry import CASES, Case

__all__ = [
    "CASES",
    "Case",
    "attributes",
    "backwards",
    "counters",
    "draws",
    "losses",
    "memory",
    "norms",
    "places",
    "values",
]
