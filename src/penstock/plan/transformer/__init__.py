"""Training of a transformer from its numbers alone: work, messages, memory, and times from a device's specifications.

>>> round(transformer("llama3-70b").parameters / 1e9, 1)
70.6

Pure values and functions without torch: jobs can be planned that no machine at hand could hold.
"""

from penstock._base.lazy import find_old_names
from penstock.plan.transformer.job import ClusterSpec, TrainingConfig
from penstock.plan.transformer.model import NAMED, TransformerConfig, transformer
from penstock.plan.transformer.step import ParallelLayout, StepEstimate, predict_step, profile_of, units_of

__all__ = [
    "NAMED",
    "ClusterSpec",
    "ParallelLayout",
    "StepEstimate",
    "TrainingConfig",
    "TransformerConfig",
    "predict_step",
    "profile_of",
    "transformer",
    "units_of",
]

__getattr__ = find_old_names(__name__)
