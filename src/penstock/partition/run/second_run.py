"""Runs a unit a second time, to see what it takes of what its first run left, and undoes all that the run did."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor

from penstock.compat import FakeTensor, quiet, unset_fake_temporarily
from penstock.partition.state.provenance import Call
from penstock.partition.state.reach import Reach, in_context
from penstock.partition.values.memory import extent
from penstock.partition.values.objects import tensors_in
from penstock.partition.watch.observer import Observer
from penstock.trees import map_tensors


def again(
    run: Callable[[Any, Any], Any],
    args: Any,
    kwargs: Any,
    reach: Reach,
    observer: Observer,
    *,
    from_start: bool = False,
) -> None:
    """Calls `run(args, kwargs)` on copies, and undoes its effects. Does not mind if it raises.

    Args:
        from_start: run as if nothing had changed since the forward began; otherwise in the present state.
    """
    now, context = [(place, place.copied()) for place in reach.changed()], in_context()
    depth, called, work = len(observer.stack), len(observer.calls), observer.work
    copies = map_tensors(_copy, (args, kwargs))
    returned, kept = len(observer.returned), len(observer.kept)
    observer.take()
    if from_start:
        reach.restore()
    call = Call(-1, "", True, observer.provenance.roots(tensors_in(copies)))
    try:
        with suppress(Exception), observer.provenance.calling(call), quiet():
            run(*copies)
    finally:
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
