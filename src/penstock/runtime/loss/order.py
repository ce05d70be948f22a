"""Handles a loss that keeps state from one call to the next: a moving average in a buffer, a count of its calls.

One device calls it in order of microbatch, and so do most schedules. But each of two copies of the last stage calls it
for only part of the batch, and a user's own schedule may use any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import unwrap
from operator import is_
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ArgumentError
from penstock.partition.state.class_data import ClassData
from penstock.partition.state.closure_cells import contents
from penstock.partition.state.library import OF_TORCH, is_library
from penstock.partition.state.places import MISSING, Key, Place, Survey, named_by_code, stored_globals
from penstock.partition.state.reach import Trace
from penstock.partition.values.memory import same_bits
from penstock.runtime.front_end import Partition

LOOKS = 6
"""In how many calls everything that the loss reaches is examined; later ones behave alike."""


class LossState:
    """The state of a loss: buffers, other tensors that it updates, and whole numbers, which count something.

    Anything else that a call sets may be a note for the user to look at. So in the first calls the loss is called up to
    twice more, with the present contents and with those from before the first call: if it then returns something else,
    they are state. Whatever it prints or logs appears again.

    Args:
        loss: the loss; None if there is none.
        pipelines: how many copies of the last stage call it.
        partitions: the model's, each once: the model's modules do not belong to the loss.
    """

    def __init__(self, loss: Callable[..., Any] | None, pipelines: int, partitions: Sequence[Partition]) -> None:
        self._loss = None if loss is None else unwrap(loss)
        self._modules = [module for root in _roots(loss, 3) for module in root.modules()]
        self._pipelines, self._partitions = pipelines, partitions
        self._looks = 0 if loss is None else LOOKS
        self._held: set[int] = set()
        self._first: dict[Key, Any] = {}

    def call(
        self, losses: Sequence[Tensor | None], microbatch: int, run: Callable[[], Any], again: Callable[[], Any]
    ) -> Any:
        """Calls `run`, which calls the loss for a microbatch, and returns its result. `again`: a call to compare with.

        Raises:
            ArgumentError: the loss keeps state, and should have been called for other microbatches before.
        """
        if self.needs_no_look(losses, microbatch):
            return run()
        before = self._now()
        look = _Look(self.survey()) if self._looks else None
        result = run()
        for (number, name), held in self._now().items():
            was = before.get((number, name))
            if was is not None and not (was[0] is held[0] and was[1] == held[1]):
                raise self._refusal(type(self._modules[number]).__name__, name)
        if look is not None:
            self._looks -= 1
            kept = look.state(again, result, self._first)
            if kept is not None:
                raise self._refusal(_name_of(self._loss), kept)
            if not self._looks:
                self._first.clear()
        return result

    def needs_no_look(self, losses: Sequence[Tensor | None], microbatch: int) -> bool:
        """Whether the loss is called as on one device: after it was called for all microbatches before this one."""
        # `None in losses` would compare every tensor with None, which takes longer than the loss.
        in_order = self._pipelines == 1 and not any(map(_is_none, losses[:microbatch]))
        return self._loss is None or (in_order and not self._first)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Wraps calls of the loss: restores at the end whatever they changed."""
        if self._loss is None:
            yield
            return
        looks = [_Look(self.survey()), _Look(Survey(self.owners(), modules=True, skips=self._is_of_model))]
        tensors = [(tensor, version, tensor.detach().clone()) for look in looks for _, tensor, version in look.tensors]
        try:
            yield
        finally:
            for look in looks:
                look.restore()
            with torch.no_grad():
                for tensor, version, values in tensors:
                    if tensor._version != version:
                        tensor.copy_(values)

    @property
    def may_remember(self) -> bool:
        """Whether the loss can reach anything in which a call could store state."""
        loss = self._loss
        if isinstance(loss, partial):
            return True
        if not isinstance(loss, FunctionType):
            return loss is not None and not is_library(getattr(loss, "__module__", None) or "")
        if is_library(loss.__module__):
            return False
        return bool(loss.__closure__ or vars(loss) or named_by_code([loss]) or [*stored_globals([loss])])

    def owners(self) -> list[Any]:
        """The loss, or the object whose method it is, and the modules that make it up, except the model's."""
        found = [getattr(self._loss, "__self__", self._loss), *self._modules]
        return [owner for owner in found if not self._is_of_model(owner)]

    def survey(self) -> Survey:
        """The places and tensors that the loss reaches, except the model's."""
        loss = self._loss
        function = loss.__func__ if isinstance(loss, MethodType) else loss
        owner = getattr(loss, "__self__", loss)
        kinds = [kind for kind in type(owner).__mro__ if not is_library(kind.__module__)]
        code = [*kinds, *([function] if isinstance(function, FunctionType) else [])]
        traces = [Trace(data, name) for data in map(ClassData, kinds) for name in data]
        traces += [Trace(known, name) for known, name in stored_globals(code)]
        roots = [loss, *(value for value in named_by_code(code) if not isinstance(value, nn.Module))]
        survey = Survey(
            [root for root in roots if not self._is_of_model(root)], traces, modules=True, skips=self._is_of_model
        )
        left = (entry for partition in self._partitions for entry in partition.left)
        passed = {id(entry.place.entries) for entry in left}  # values from the model, not from calls
        for key in [key for key in survey.places if key[0] in passed]:
            del survey.places[key]
        return survey

    def _is_of_model(self, value: Any) -> bool:
        if not isinstance(value, nn.Module):
            return False
        for one in () if self._held else self._partitions:
            self._held.update(id(t) for s in one.stages for t in (*s.parameters.values(), *s.buffers.values()))
            self._held.update(map(id, one.elsewhere.values()))
        return any(id(tensor) in self._held for tensor in (*value.parameters(), *value.buffers()))

    def _now(self) -> dict[tuple[int, str], tuple[object, int]]:
        found: dict[tuple[int, str], tuple[object, int]] = {}
        for number, module in enumerate(self._modules):
            for name, buffer in module._buffers.items():
                found[number, name] = (buffer, 0 if buffer is None else buffer._version)
            for name, value in vars(module).items():
                if type(value) is int and name not in OF_TORCH:
                    found[number, name] = (None, value)
                elif isinstance(value, Tensor):
                    found[number, name] = (None, value._version)
        return found

    def _refusal(self, kind: str, name: str) -> ArgumentError:
        why = (
            f"this schedule has {self._pipelines} copies of the last stage, each of which calls it for a part of the "
            "batch only; use a schedule with one copy (dualpipe-v for dualpipe)"
            if self._pipelines > 1
            else "this schedule does not call it in order of microbatch; use one that does (1f1b, gpipe), and, if the "
            "last stage runs some of its forwards again, recompute='never' there"
        )
        return ArgumentError(
            f"loss: each call of {kind} updates its {name!r}, so that it matters in which order it is called, and {why}"
        )


class _Look:
    """Everything that a loss reaches, read before one or more of its calls."""

    def __init__(self, survey: Survey) -> None:
        self._places: Mapping[Key, Place] = survey.places
        self._before = {key: place.read() for key, place in survey.places.items()}
        self.tensors = [(name, t, t._version) for name, t in survey.tensors.values() if not t.is_inference()]
        self._generator = torch.get_rng_state()

    def state(self, run: Callable[[], Any], result: Any, first: dict[Key, Any]) -> str | None:
        """The name of some state that the latest call kept; None if it kept none.

        Args:
            run: the call.
            result: what it returned.
            first: the contents of each place before the first call that set it; extended here.
        """
        for name, tensor, version in self.tensors:
            if tensor._version != version:
                return name or "tensor"
        for key in (changed := self._changed()):
            first.setdefault(key, self._before[key])
        known = [key for key in first if key in self._places]
        if not known:
            return None
        after = {key: self._places[key].read() for key in known}
        numbers = [key for key in changed if type(after[key]) is int and type(self._before[key]) is int]
        if numbers:
            return numbers[0][1]
        generator = torch.get_rng_state()
        try:
            alike = all(_alike(self._again(run, values), result) for values in (after, {k: first[k] for k in known}))
        finally:
            torch.set_rng_state(generator)
            for key, value in after.items():
                self._places[key].write(value)
        return None if alike else next((key[1] for key in known if key[1]), "state")

    def restore(self) -> None:
        """Restores the contents."""
        for key in self._changed():
            self._places[key].write(self._before[key])

    def _changed(self) -> list[Key]:
        return [key for key, place in self._places.items() if not place.holds(self._before[key])]

    def _again(self, run: Callable[[], Any], values: Mapping[Key, Any]) -> Any:
        for key, value in values.items():
            self._places[key].write(value)
        torch.set_rng_state(self._generator)
        try:
            return run()
        except Exception:
            return MISSING  # it cannot run without the changes


_is_none = partial(is_, None)


def _alike(one: Any, other: Any) -> bool:
    return isinstance(one, Tensor) and isinstance(other, Tensor) and same_bits(one.detach(), other.detach())


def _name_of(loss: Any) -> str:
    owner = getattr(loss, "__self__", loss)
    return str(owner.__qualname__) if isinstance(owner, FunctionType) else type(owner).__name__


def _roots(value: Any, depth: int) -> Iterator[nn.Module]:
    """The modules that make up a loss, or that it names."""
    if isinstance(value, nn.Module):
        yield value
        return
    if depth == 0:
        return
    parts: list[Any] = [getattr(value, "__wrapped__", None)]
    if isinstance(value, MethodType):
        parts += [value.__self__, value.__func__]
    elif isinstance(value, partial):
        parts += [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, FunctionType):
        parts += [
            *map(contents, value.__closure__ or ()),
            *(value.__globals__.get(name) for name in value.__code__.co_names),
        ]
    for part in parts:
        if part is not None:
            yield from _roots(part, depth - 1)
