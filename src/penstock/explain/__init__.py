"""From a measured step to what to change first: traces read, compared with what they should have been, and explained.

>>> from penstock.explain import explain, read_run
>>> from penstock.report import write_perfetto
>>> from penstock.schedule import generate
>>> from penstock.simulate import StageCost, simulate
>>> costs = [StageCost(1.0, 1.0, 1.0), StageCost(1.5, 1.5, 1.5)]
>>> write_perfetto(simulate(generate("1f1b", ranks=2, microbatches=4), costs), "timeline.json")
>>> print(explain(read_run(["timeline.json"])).changes[0].text)
stage 1 takes 1.20 times the mean (rank 1): move work off it

Pure values and functions, but for `read_run`, which reads files; no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import face

if TYPE_CHECKING:
    from penstock.explain.changes import Change as Change
    from penstock.explain.event import Event as Event
    from penstock.explain.event import Recording as Recording
    from penstock.explain.explanation import Explanation as Explanation
    from penstock.explain.explanation import explain as explain
    from penstock.explain.measured import Run as Run
    from penstock.explain.measured import run_of as run_of
    from penstock.explain.predicted import Predicted as Predicted
    from penstock.explain.reading import read_run as read_run

_HOMES = {
    "Event": "event",
    "Recording": "event",
    "Run": "measured",
    "run_of": "measured",
    "read_run": "reading",
    "Predicted": "predicted",
    "Change": "changes",
    "Explanation": "explanation",
    "explain": "explanation",
}

__all__ = [*_HOMES]  # noqa: PLE0604  (one list of names, not two)

__getattr__, __dir__ = face(__name__, _HOMES)
