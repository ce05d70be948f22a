"""Training of a transformer from its numbers alone: work, messages, memory, and times from a device's specifications.

>>> round(transformer("llama3-70b").parameters / 1e9, 1)
70.6

Pure values and functions without torch: jobs can be planned that no machine at hand could hold.
"""

from penstock.plan.transformer.job import Job, Machine
from penstock.plan.transformer.model import NAMED, Transformer, transformer
from penstock.plan.transformer.step import Layout, Step, predict_step, profile_of, units_of

__all__ = [
    "NAMED",
    "Job",
    "Layout",
    "Machine",
    "Step",
    "Transformer",
    "predict_step",
    "profile_of",
    "transformer",
    "units_of",
]
