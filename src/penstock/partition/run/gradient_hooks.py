"""Finds units whose next forward reads what a hook on a gradient left behind.

In plain training a microbatch's backward comes before the next forward; in a pipeline other forwards come in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.compat import FakeTensor, unset_fake_temporarily
from penstock.errors import PartitionError
from penstock.partition.run.replay import Operators
from penstock.partition.state.provenance import HOOKS, Call, Foreign
from penstock.partition.state.reach import Holder, Reach
from penstock.partition.values.objects import tensors_in
from penstock.partition.watch.observer import Observer, argument_names, written_arguments
from penstock.words import shortened

Replay = Callable[[Callable[[Foreign], None] | None], Operators | None]


class Hook(NamedTuple):
    """A hook that a forward registers on a value."""

    function: Callable[[Tensor], Any]
    value: Tensor

    @staticmethod
    def of(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Hook:
        """The arguments of `Tensor.register_hook`."""
        return Hook(hook, tensor.detach())


def refuse_hooks(unit: str, hooks: list[Hook], replay: Replay, reach: Reach, observer: Observer) -> None:
    """Raises PartitionError if a unit behaves differently, or reads other tensors, once its hooks have run.

    Args:
        replay: the operators of another run; it is given what that run takes besides its arguments.
    """
    filled = reach.changed()
    before = {id(place): place.copied() for place in filled}
    call = Call(HOOKS, unit, True, frozenset())
    with observer.provenance.calling(call), unset_fake_temporarily(), _taken_back() as updated:
        for function, value in hooks:
            try:
                function(torch.linspace(-1, 2, value.numel()).reshape(value.shape).to(value.dtype))
            except Exception:  # the hook may need the gradient of a full backward
                continue
    observer.take(keep=False)
    observer.provenance.forget(call)
    for tensor in updated:
        stray = observer.provenance.strays.get(observer.provenance.root(tensor))
        if stray is not None and stray.users:
            raise _refusal(unit, f"a tensor of shape {stray.shape} that is not a buffer")
    every = dict.fromkeys([*filled, *reach.changed()])  # hooks may have emptied what the forward has filled
    changed = [place for place in every if place.differs(before.get(id(place), place.before))]
    if not changed:
        return
    text = shortened([place.name(key) for place in changed for key, _ in place.changes()] or [p.text for p in changed])
    read: list[Foreign] = []
    after = replay(lambda f: read.append(f) if f.made is not None and f.made.call is call else None)
    _put_back(changed, before)
    if read or after != replay(None):
        raise _refusal(unit, text)


def _refusal(unit: str, text: str) -> PartitionError:
    return PartitionError(
        f"{unit!r} leaves something in {text} in a hook on a gradient, and reads it in its next forward: in a "
        "pipeline other forwards come between a forward and its backward, and would find something else there. "
        "Keep what hooks collect for what comes after the step"
    )


def _put_back(places: list[Holder], before: dict[int, Any]) -> None:
    for place in places:
        place.put(before.get(id(place), place.before))


@contextmanager
def _taken_back() -> Iterator[list[Tensor]]:
    """Undoes in-place updates on exit: a hook may add to the model's own tensors.

    Yields a list, which on exit is filled with the tensors that were updated.
    """
    updated: list[Tensor] = []
    with _Writes() as writes:
        yield updated
    with torch.no_grad():
        for tensor, value in reversed(writes.before):
            tensor.copy_(value)
    updated += [tensor for tensor, _ in writes.before]


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps copies of what is updated in place.

    Attributes:
        before: tensors and their copies, in the order of the updates.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and (written := written_arguments(func)):
            given = {**dict(zip(argument_names(func), args, strict=False)), **kwargs}
            for tensor in tensors_in([given.get(name) for name in written]):
                if not isinstance(tensor, FakeTensor):
                    self.before.append((tensor.detach(), tensor.detach().clone()))
        return func(*args, **kwargs)
