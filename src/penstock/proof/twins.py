"""Two models that start alike and share nothing: one to split, and one to compare it with."""

from __future__ import annotations

import copy
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import getattr_static
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.compat import has_accumulation_hooks, has_gradient_hooks, storage_of
from penstock.errors import ArgumentError
from penstock.partition.state.closure_cells import EMPTY, contents
from penstock.partition.units.chain import as_module
from penstock.partition.units.units import refuse_lazy
from penstock.partition.values.memory import same_bits
from penstock.words import a, in_a_line

_REMEDY = (
    "pass a function that makes the model in place of the model, penstock.verify(lambda: MyModel(...), ...); it may "
    "return a tuple of the model and its loss, where the loss reads the model"
)


class Made(NamedTuple):
    """A model and the loss that goes with it."""

    model: nn.Module
    loss: Any


def twins(model: nn.Module | Sequence[nn.Module] | Callable[[], Any], loss: Any) -> tuple[Made, Made]:
    """A model and one that starts alike: made twice from the same seeds, or made once and copied.

    Args:
        model: a module or layers; or a function that returns them, or a tuple of them and a loss.
        loss: the loss, if the function returns none.

    Raises:
        ArgumentError: the function returns something else, or other values when called again; or the model or the loss
            cannot be copied, or the model's copy shares state with it.
    """
    if isinstance(model, nn.Module) or not callable(model):
        return _copied(Made(as_module(model), loss))
    with _generators() as again:
        first = _made(model, loss)
        with again():
            second = _made(model, loss)
    if _shared(first, second) is not None:  # it returns a model that it keeps
        return _copied(first)
    _refuse_different(first, second)
    if second.loss is first.loss:
        memo: dict[int, Any] = {}
        second = second._replace(loss=_rebound(_copied_loss(first.loss, memo), memo))
    return first, second


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


@contextmanager
def _generators() -> Iterator[Callable[[], Any]]:
    """Yields a function that makes contexts in which all generators are as they were at the beginning."""
    before = _states()

    @contextmanager
    def again() -> Iterator[None]:
        after = _states()
        _restore(before)
        try:
            yield
        finally:
            _restore(after)

    yield again


def _states() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    numpy: Any = sys.modules.get("numpy")
    return torch.get_rng_state(), cuda, random.getstate(), numpy and numpy.random.get_state()


def _restore(states: tuple[Any, ...]) -> None:
    cpu, cuda, python, numpy = states
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate(python)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)


def _refuse_different(first: Made, second: Made) -> None:
    mine, other = (dict(_tensors(made.model)) for made in (first, second))
    differing = [name for name in mine.keys() | other.keys() if not _alike(mine.get(name), other.get(name))]
    if differing:
        raise ArgumentError(
            f"model: the function gives another model when it is called again from the same seeds: {min(differing)!r} "
            "differs, so that there is nothing to compare with; draw from the generators of torch, Python and numpy "
            "alone, and keep nothing from one call to the next"
        )


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return same_bits(one, other)


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
    other = Made(twin, _rebound(_copied_loss(made.loss, memo), memo))
    shared = _shared(made, other)
    if shared is not None:
        raise ArgumentError(
            f"the copy of this model shares {shared[0]} with it, through {shared[1]}, so that it cannot be the model "
            f"to compare with: {_REMEDY}"
        )
    return made, other


def _copied_loss(loss: Any, memo: dict[int, Any]) -> Any:
    """A copy that keeps its own state from call to call."""
    try:
        return copy.deepcopy(loss, memo)
    except Exception as error:
        raise ArgumentError(
            f"this loss cannot be copied ({in_a_line(error)}), and verify compares with a second one, which must not "
            "share what the first keeps from call to call: pass a function that makes the model and its loss each time "
            "it is called, penstock.verify(lambda: (MyModel(...), MyLoss(...)), ...)"
        ) from error


def _rebound(loss: Any, memo: dict[int, Any]) -> Any:
    """A loss function with variables of its own: it reads the copy wherever it directly names the model or a part of
    it, and copies of the modules and parameters that it has itself.
    """
    if not isinstance(loss, FunctionType):
        return loss

    def other(value: Any) -> Any:
        if (isinstance(value, nn.Module) and value.training) or (isinstance(value, Tensor) and value.requires_grad):
            return copy.deepcopy(value, memo)
        return memo.get(id(value), value) if isinstance(value, (nn.Module, Tensor)) else value

    names = {name: other(loss.__globals__[name]) for name in loss.__code__.co_names if name in loss.__globals__}
    moved = {name: value for name, value in names.items() if value is not loss.__globals__[name]}
    cells = tuple(
        cell if contents(cell) is EMPTY else CellType(other(contents(cell))) for cell in loss.__closure__ or ()
    )
    if not moved and not cells:
        return loss
    twin = FunctionType(loss.__code__, {**loss.__globals__, **moved}, loss.__name__, loss.__defaults__, cells)
    twin.__kwdefaults__ = loss.__kwdefaults__
    return twin


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from (*model.named_parameters(), *model.named_buffers())


def _shared(one: Made, other: Made) -> tuple[str, str] | None:
    """A part of one that the other reaches by attributes, hooks, closures or bound methods, and where; or None."""
    parts: dict[int, str] = {}
    memory: dict[int, str] = {}
    for name, tensor in _tensors(one.model):
        parts[id(tensor)] = f"{name!r}"
        if not tensor.is_meta and tensor.numel():
            memory[storage_of(tensor)] = f"the memory of {name!r}"
    for name, module in one.model.named_modules():
        parts[id(module)] = f"module {name!r}" if name else "the model"
    todo: list[tuple[Any, str]] = [(other.model, type(other.model).__name__), (other.loss, "the loss")]
    seen: set[int] = set()
    while todo:
        value, where = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if id(value) in parts:
            return parts[id(value)], where
        if isinstance(value, Tensor):
            if not value.is_meta and value.numel() and storage_of(value) in memory:
                return memory[storage_of(value)], where
        else:
            todo.extend(_reached(value, where))
    return None


def _is_part(value: object) -> bool:
    """Whether it is something that two models must not share. (mypy would rule out one because of the other.)"""
    kinds: tuple[type, ...] = (nn.Module, Tensor)
    return isinstance(value, kinds)


_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, weakref.ref, torch.dtype, torch.device)


def _reached(value: Any, where: str) -> Iterator[tuple[Any, str]]:
    """What an object leads to, and by which path."""
    match value:
        case _ if isinstance(value, _PLAIN):
            return
        case FunctionType():
            name = f"{where}: function {value.__qualname__!r}"
            yield from ((one, name) for one in map(contents, value.__closure__ or ()) if one is not EMPTY)
            yield from ((default, name) for default in value.__defaults__ or ())
            named = (value.__globals__.get(other) for other in value.__code__.co_names)
            yield from ((one, name) for one in named if _is_part(one))
        case MethodType():
            yield value.__self__, where
            yield value.__func__, where
        case partial():
            yield from ((one, where) for one in (value.func, *value.args, *value.keywords.values()))
        case dict():
            yield from ((one, where) for one in value.values())
        case list() | tuple() | set() | frozenset():
            yield from ((one, where) for one in value)
        case nn.Module():
            yield from ((one, f"{where}.{name}") for name, one in vars(value).items() if name not in _STATE)
            for table in _STATE:
                yield from ((one, f"{where}.{name}") for name, one in vars(value).get(table, {}).items())
            yield getattr_static(type(value), "forward", None), where  # TorchScript's cannot be read from its class
        case _:
            yield from ((one, f"{where}.{name}") for name, one in getattr(value, "__dict__", {}).items())


_STATE = ("_parameters", "_buffers", "_modules")
