"""Makes two equal models that share nothing: one to split, and one to compare it with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock._base.compat import has_accumulation_hooks, has_gradient_hooks, storage_id
from penstock._base.errors import ArgumentError
from penstock._base.formatting import a, one_line
from penstock._base.memory import same_bits
from penstock.partition.given_model import as_module
from penstock.partition.record.fakes import save_generators
from penstock.partition.units import refuse_lazy
from penstock.verification.states import build_reach, initial_values

_REMEDY = (
    "pass a function that makes the model in place of the model, penstock.verify(lambda: MyModel(...), ...); it may "
    "return a tuple of the model and its loss, where the loss reads the model"
)


class ModelAndLoss(NamedTuple):
    """A model and the loss that goes with it."""

    model: nn.Module
    loss: Any


def with_reference(
    model: nn.Module | Sequence[nn.Module] | Callable[[], Any], loss: Any
) -> tuple[ModelAndLoss, ModelAndLoss]:
    """Return a model and an equal one: made twice from the same seeds, or made once and copied.

    Args:
        model: a module or layers; or a function that returns them, or a tuple of them and a loss.
        loss: the loss, if the function returns none.

    Raises:
        ArgumentError: the function returns something else, or other values when called again; or the model or the loss
            cannot be copied, or the model's copy shares state with it.
    """
    if isinstance(model, nn.Module) or not callable(model):
        return _copy_pair(ModelAndLoss(as_module(model), loss))
    restore_start = save_generators()
    first, restore_end = _call_factory(model, loss), save_generators()
    restore_start()
    second = _call_factory(model, loss)
    restore_end()
    if _find_shared(first, second) is not None:  # it returns a model that it keeps
        return _copy_pair(first)
    _check_same_values(first, second)
    return first, second._replace(loss=_copy_loss(first.loss, {})) if second.loss is first.loss else second


def _call_factory(make: Callable[[], Any], loss: Any) -> ModelAndLoss:
    output = make()
    model, loss = output if isinstance(output, tuple) and len(output) == 2 else (output, loss)
    try:
        result = ModelAndLoss(as_module(model), loss)
    except ArgumentError:
        raise ArgumentError(
            f"model: the function returned {a(type(output).__name__)}; expected a module, a list of layers, or a "
            "tuple of one of these and a loss"
        ) from None
    refuse_lazy(result.model)
    return result


def _check_same_values(first: ModelAndLoss, second: ModelAndLoss) -> None:
    first_tensors, second_tensors = (dict(_named_tensors(pair.model)) for pair in (first, second))
    empty = torch.empty(0, dtype=torch.bits8)
    names = sorted(first_tensors.keys() | second_tensors.keys())
    name = next((n for n in names if not same_bits(first_tensors.get(n, empty), second_tensors.get(n, empty))), None)
    if name is not None:
        raise ArgumentError(
            f"model: the function gives another model when it is called again from the same seeds: {name!r} differs; "
            "set all values (torch.empty leaves any), draw from the generators of torch, Python and numpy alone, and "
            "keep nothing from one call to the next"
        )


def _copy_pair(pair: ModelAndLoss) -> tuple[ModelAndLoss, ModelAndLoss]:
    refuse_lazy(pair.model)
    name = next((n for n, t in _named_tensors(pair.model) if has_gradient_hooks(t) or has_accumulation_hooks(t)), None)
    if name is not None:
        raise ArgumentError(
            f"{name!r} has a hook on its gradient (register_hook or register_post_accumulate_grad_hook), which a "
            f"copy of the model does not take along, and verify compares with a second one: {_REMEDY}"
        )
    memo: dict[int, Any] = {}
    try:
        model_copy = copy.deepcopy(pair.model, memo)
    except Exception as error:
        raise ArgumentError(
            f"this model cannot be copied ({one_line(error)}), and verify compares with a second one: {_REMEDY}"
        ) from error
    copied = ModelAndLoss(model_copy, _copy_loss(pair.loss, memo))
    shared = _find_shared(pair, copied)
    if shared is not None:
        raise ArgumentError(
            f"the copy of this model shares {shared[0]} with it, through {shared[1]}, so that it cannot be the model "
            f"to compare with: {_REMEDY}"
        )
    return pair, copied


def _copy_loss(loss: Any, memo: dict[int, Any]) -> Any:
    """Return a copy that keeps its own state from call to call."""
    try:
        return copy.deepcopy(loss, memo)
    except Exception as error:
        raise ArgumentError(
            f"this loss cannot be copied ({one_line(error)}), and verify compares with a second one: pass a function "
            "that makes the model and its loss each time, penstock.verify(lambda: (MyModel(...), MyLoss(...)), ...)"
        ) from error


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from (*model.named_parameters(), *model.named_buffers())


def copy_values(model: nn.Module) -> dict[str, Tensor]:
    """Copy a model's parameters and buffers, by name."""
    return {name: tensor.detach().clone() for name, tensor in _named_tensors(model)}


def set_values(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give a model these values, and no gradients."""
    torch.clear_autocast_cache()  # of casts of the values as they were
    with torch.no_grad():
        for name, tensor in _named_tensors(model):
            if not same_bits(tensor, values[name]):
                tensor.copy_(values[name])
            tensor.grad = None


def _find_shared(first: ModelAndLoss, second: ModelAndLoss) -> tuple[str, str] | None:
    """Return a part of `first` that `second` reaches by attributes, hooks, closures or methods, and the path; or None.
    Among globals, only those count that the loss names."""
    parts: dict[int, str] = {}
    for name, module in first.model.named_modules():
        parts |= dict.fromkeys((id(module), id(vars(module))), f"module {name!r}" if name else "the model")
    parts |= {_memory_key(tensor): f"the memory of {name!r}" for name, tensor in _named_tensors(first.model)}
    reachable = [(tensor, name) for name, tensor in _named_tensors(second.model)]
    for holder in build_reach(second.model, second.loss).holders:
        if not holder.outside:
            reachable += [(holder.entries, holder.text), *((value, holder.text) for value in initial_values(holder))]
    if isinstance(second.loss, FunctionType):
        namespace, code = second.loss.__globals__, second.loss.__code__
        reachable += [(namespace[name], f"the loss: {name}") for name in code.co_names if name in namespace]
    return next(((parts[key], path) for v, path in reachable for key in (id(v), _memory_key(v)) if key in parts), None)


def _memory_key(value: Any) -> int:
    """Return a key of a tensor's memory; for other values, and tensors without memory, a unique key."""
    has_storage = isinstance(value, Tensor) and not value.is_meta and value.layout == torch.strided and value.numel()
    return -storage_id(value) if has_storage else id(value)
