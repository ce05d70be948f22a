"""Two models that start alike and share nothing: one to split, and one to compare it with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock._base.compat import has_accumulation_hooks, has_gradient_hooks, storage_of
from penstock._base.errors import ArgumentError
from penstock._base.words import a, in_a_line
from penstock.partition.run.loan import save_generators
from penstock.partition.units.chain import as_module
from penstock.partition.units.units import refuse_lazy
from penstock.partition.values.memory import same_bits
from penstock.verification.beside_reach import held_by, reach_of

_REMEDY = (
    "pass a function that makes the model in place of the model, penstock.verify(lambda: MyModel(...), ...); it may "
    "return a tuple of the model and its loss, where the loss reads the model"
)


class Made(NamedTuple):
    """A model and the loss that goes with it."""

    model: nn.Module
    loss: Any


def twins(model: nn.Module | Sequence[nn.Module] | Callable[[], Any], loss: Any) -> tuple[Made, Made]:
    """Return a model and one that starts alike: made twice from the same seeds, or made once and copied.

    Args:
        model: a module or layers; or a function that returns them, or a tuple of them and a loss.
        loss: the loss, if the function returns none.

    Raises:
        ArgumentError: the function returns something else, or other values when called again; or the model or the loss
            cannot be copied, or the model's copy shares state with it.
    """
    if isinstance(model, nn.Module) or not callable(model):
        return _copied(Made(as_module(model), loss))
    start = save_generators()
    first, end = _made(model, loss), save_generators()
    start()
    second = _made(model, loss)
    end()
    if _shared(first, second) is not None:  # it returns a model that it keeps
        return _copied(first)
    _refuse_different(first, second)
    return first, second._replace(loss=_copied_loss(first.loss, {})) if second.loss is first.loss else second


def _made(make: Callable[[], Any], loss: Any) -> Made:
    returned = make()
    model, loss = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, loss)
    try:
        made = Made(as_module(model), loss)
    except ArgumentError:
        raise ArgumentError(
            f"model: the function returned {a(type(returned).__name__)}; expected a module, a list of layers, or a "
            "tuple of one of these and a loss"
        ) from None
    refuse_lazy(made.model)
    return made


def _refuse_different(first: Made, second: Made) -> None:
    mine, other = (dict(_tensors(made.model)) for made in (first, second))
    empty = torch.empty(0, dtype=torch.bits8)
    names = sorted(mine.keys() | other.keys())
    name = next((n for n in names if not same_bits(mine.get(n, empty), other.get(n, empty))), None)
    if name is not None:
        raise ArgumentError(
            f"model: the function gives another model when it is called again from the same seeds: {name!r} differs; "
            "draw from the generators of torch, Python and numpy alone, and keep nothing from one call to the next"
        )


def _copied(made: Made) -> tuple[Made, Made]:
    hooked = next((n for n, t in _tensors(made.model) if has_gradient_hooks(t) or has_accumulation_hooks(t)), None)
    if hooked is not None:
        raise ArgumentError(
            f"{hooked!r} has a hook on its gradient (register_hook or register_post_accumulate_grad_hook), which a "
            f"copy of the model does not take along, and verify compares with a second one: {_REMEDY}"
        )
    memo: dict[int, Any] = {}
    try:
        twin = copy.deepcopy(made.model, memo)
    except Exception as error:
        raise ArgumentError(
            f"this model cannot be copied ({in_a_line(error)}), and verify compares with a second one: {_REMEDY}"
        ) from error
    other = Made(twin, _copied_loss(made.loss, memo))
    shared = _shared(made, other)
    if shared is not None:
        raise ArgumentError(
            f"the copy of this model shares {shared[0]} with it, through {shared[1]}, so that it cannot be the model "
            f"to compare with: {_REMEDY}"
        )
    return made, other


def _copied_loss(loss: Any, memo: dict[int, Any]) -> Any:
    """Return a copy that keeps its own state from call to call."""
    try:
        return copy.deepcopy(loss, memo)
    except Exception as error:
        raise ArgumentError(
            f"this loss cannot be copied ({in_a_line(error)}), and verify compares with a second one: pass a function "
            "that makes the model and its loss each time, penstock.verify(lambda: (MyModel(...), MyLoss(...)), ...)"
        ) from error


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from (*model.named_parameters(), *model.named_buffers())


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Copy a model's parameters and buffers, by name."""
    return {name: tensor.detach().clone() for name, tensor in _tensors(model)}


def set_values(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give a model these values, and no gradients."""
    torch.clear_autocast_cache()  # of casts of the values as they were
    with torch.no_grad():
        for name, tensor in _tensors(model):
            if not same_bits(tensor, values[name]):
                tensor.copy_(values[name])
            tensor.grad = None


def _shared(one: Made, other: Made) -> tuple[str, str] | None:
    """Return a part of one that the other reaches by attributes, hooks, closures or bound methods, and where; or None.
    Among globals, only those count that the loss names."""
    parts: dict[int, str] = {}
    for name, module in one.model.named_modules():
        parts |= dict.fromkeys((id(module), id(vars(module))), f"module {name!r}" if name else "the model")
    parts |= {_memory(tensor): f"the memory of {name!r}" for name, tensor in _tensors(one.model)}
    reached = [(tensor, name) for name, tensor in _tensors(other.model)]
    for place in reach_of(other.model, other.loss).holders:
        if not place.outside:
            reached += [(place.entries, place.text), *((value, place.text) for value in held_by(place))]
    if isinstance(other.loss, FunctionType):
        known, code = other.loss.__globals__, other.loss.__code__
        reached += [(known[name], f"the loss: {name}") for name in code.co_names if name in known]
    return next(((parts[k], where) for v, where in reached for k in (id(v), _memory(v)) if k in parts), None)


def _memory(value: Any) -> int:
    """Return a key of a tensor's memory; for other values, and for tensors without any, one that nothing else has."""
    has = isinstance(value, Tensor) and not value.is_meta and value.layout == torch.strided and value.numel()
    return -storage_of(value) if has else id(value)
