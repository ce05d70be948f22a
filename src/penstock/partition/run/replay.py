"""Finds units whose behaviour depends on what earlier Python code in the forward has set.

A flag, a length or a counter in an attribute, a shared object or a global is not a tensor, and leaves no trace in a
recording. On its own stage, a unit would find what was there before the forward, or what it left there itself for
another microbatch. So if anything has changed, the unit runs once more as if nothing had, and if it changes something
itself, once more after that. The operators of these runs are compared.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from penstock.compat import FakeTensor, quiet, unset_fake_temporarily
from penstock.partition.state.provenance import Call, Foreign
from penstock.partition.state.reach import Reach, in_context
from penstock.partition.units.units import LeavesTraces
from penstock.partition.values.memory import extent
from penstock.partition.watch.observer import Observer
from penstock.trees import flatten, map_tensors

Operators = Sequence[Any]


def operators(
    run: Callable[[Any, Any], Any],
    args: Any,
    kwargs: Any,
    reach: Reach,
    observer: Observer,
    *,
    from_start: bool,
    times: int = 1,
    takes: Callable[[Foreign], None] | None = None,
) -> Operators | None:
    """Calls `run(args, kwargs)`, undoes its effects, and returns its operators; None if it raises.

    Args:
        from_start: run as if nothing had changed since the forward began; otherwise in the present state.
        times: how many times in a row to run it; the operators are the last run's.
        takes: called with each tensor that it takes besides its arguments.
    """
    drawn = random.getstate(), sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    now, context = [(place, place.copied()) for place in reach.changed()], in_context()
    depth, called, work = len(observer.stack), len(observer.calls), observer.work
    copies = map_tensors(_copy, (args, kwargs))
    first, returned, kept = len(observer.provenance.numbers), len(observer.returned), len(observer.kept)
    observer.take()
    if from_start:
        reach.restore()
    given = observer.provenance.roots(t for t in flatten(copies).leaves if isinstance(t, Tensor))
    call = Call(-1, "", True, given)
    try:
        for _ in range(times):
            with observer.provenance.calling(call), observer.saved.aside(), quiet(), observer.logging() as log:
                run(*copies)
        found: Operators | None = log
        for foreign in observer.provenance.foreign.values():
            if takes is not None and foreign.reader is call:
                takes(foreign)
    except Exception:
        found = None
    finally:
        random.setstate(drawn[0])
        if drawn[1] is not None:
            sys.modules["numpy"].random.set_state(drawn[1])
        reach.restore()
        for place, entries in (*now, *((place, place.before) for place in context)):
            place.put(entries)
        del observer.stack[depth:], observer.calls[called:]
        for key in list(observer.returned)[returned:]:
            del observer.returned[key]
        observer.take(keep=False)
        del observer.kept[kept:]  # what is updated in place in this run ends with it
        observer.work = work
        observer.provenance.forget(call)
    del copies
    if any(memory.is_alive for memory in observer.provenance.numbers[first:]):
        raise LeavesTraces
    return found


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides, which determine what `contiguous`, `view` and the like do."""
    if not isinstance(tensor, FakeTensor):  # its values are known
        with unset_fake_temporarily():
            return tensor.clone()
    copy = tensor.clone()
    if copy.stride() == tensor.stride():
        return copy
    memory = tensor.new_empty(extent(tensor.size(), tensor.stride())).requires_grad_(tensor.requires_grad)
    return (memory.clone() if tensor.requires_grad else memory).as_strided(tensor.size(), tensor.stride())
