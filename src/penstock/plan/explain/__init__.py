"""From a measured step to what to change first: traces read, compared with what they should have been, and explained.

>>> from penstock.plan.explain import explain, load_trace
>>> from penstock.report import write_perfetto
>>> from penstock.schedule import generate
>>> from penstock.simulate import StageCost, simulate
>>> costs = [StageCost(1.0, 1.0, 1.0), StageCost(1.5, 1.5, 1.5)]
>>> write_perfetto(simulate(generate("1f1b", ranks=2, microbatches=4), costs), "timeline.json")
>>> print(explain(load_trace(["timeline.json"])).changes[0].text)
stage 1 takes 1.20 times the mean (rank 1): move layers to other stages

Pure values and functions, but for `load_trace`, which reads files; no torch.
"""

from __future__ import annotations

from penstock._base.lazy import find_old_names
from penstock.plan.explain.explanation import Explanation, explain
from penstock.plan.explain.predicted import Prediction
from penstock.plan.explain.replay import Change
from penstock.trace.event import Event, TraceData
from penstock.trace.formats import load_trace
from penstock.trace.measured import TraceSteps, steps_of_trace

__all__ = [
    "Change",
    "Event",
    "Explanation",
    "Prediction",
    "TraceData",
    "TraceSteps",
    "explain",
    "load_trace",
    "steps_of_trace",
]

__getattr__ = find_old_names(__name__)
