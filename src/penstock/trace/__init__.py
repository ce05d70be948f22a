"""Timelines in: the folder that a run leaves (`runs/`), and traces of others.

`formats.py` takes files: Chrome's and Perfetto's traces, Kineto's among them (`chrome.py`), tables and lists
(`columns.py`). Out come recordings of events (`event.py`), put on one clock (`clocks.py`), and `TraceSteps`: the
steps that they show of which schedule (`measured.py`). `penstock.report.perfetto` writes them. Does not load torch.

>>> from penstock.trace.names import read_name
>>> read_name("F3 stage 2", {}).numbers
{'stage': 2, 'microbatch': 3}
"""

from penstock._base.lazy import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(__name__, {}, {"runs"})
