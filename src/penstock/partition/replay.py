"""Finds units that do something else because of what Python code before them in the forward has set.

A flag, a length or a counter in an attribute, a shared object or a global is no tensor, and leaves no trace in a
recording. On a stage of its own, a unit finds what was there before the forward. So where something has changed, a unit
runs once more as if nothing had, and the operators of both runs are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from penstock.partition._compat import flatten, quiet
from penstock.partition.observer import Observer
from penstock.partition.provenance import Call
from penstock.partition.reach import Place, Reach
from penstock.partition.state import map_tensors

Operators = Sequence[Any]


def operators_as_before(
    run: Callable[[Any, Any], Any], args: Any, kwargs: Any, reach: Reach, changed: Sequence[Place], observer: Observer
) -> Operators | None:
    """The operators of `run(args, kwargs)` if nothing had been changed; None if it raises then."""
    now = [(place, place.copied()) for place in changed]
    depth, called = len(observer.stack), len(observer.calls)
    copies = map_tensors(Tensor.clone, (args, kwargs))
    observer.take()
    reach.restore()
    given = observer.provenance.roots(t for t in flatten(copies).leaves if isinstance(t, Tensor))
    call = Call(-1, "", True, given)
    try:
        with observer.provenance.calling(call), quiet(), observer.logging() as log:
            run(*copies)
        return log
    except Exception:
        return None
    finally:
        reach.restore()
        for place, entries in now:
            place.put(entries)
        del observer.stack[depth:], observer.calls[called:]
        observer.take()
        observer.provenance.forget(call)
