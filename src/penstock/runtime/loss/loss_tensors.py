"""Parameters and buffers of the loss, which live on the last stage, and those of the model that it must not read.

The loss's own are a learned temperature, or centers of classes. A penalty on all weights of the model
(`sum(p.square().sum() for p in model.parameters())`) would train only those of the last stage, or use meta-device
stand-ins for those of other ranks. The first loss of a bound schedule is watched for this."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from inspect import unwrap
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock._base.closures import contents
from penstock._base.errors import ArgumentError
from penstock.partition import leaves_of, tensors_in
from penstock.partition.user_code import is_library
from penstock.runtime.front_end import Partition

PREFIXES = ("loss.", "loss_fn.", "pipeline.loss.")
"""What the names of a loss's tensors begin with: the first of these with which no name of the model begins."""

_DEPTH = 5
"""How many functions, objects or containers deep to look for what a loss is made of."""
_MAX_ENTRIES = 64
"""Maximum number of entries of a container to search: a longer one has data, not losses."""


def collect_tensors(loss: Callable[..., Any] | None) -> dict[str, Tensor]:
    """Return what a loss trains, and the buffers that belong in a checkpoint, without duplicates, by names without a
    prefix.

    A teacher is no part of its loss: only parameters that require a gradient count, and modules in training mode.
    """
    tensors_by_id: dict[int, tuple[str, Tensor]] = {}
    for path, part, _ in _parts("", loss, _DEPTH):
        named = [(path, part)] if isinstance(part, Tensor) else _module_tensors(path, part)
        for name, tensor in named:
            if tensor.requires_grad or not isinstance(tensor, nn.Parameter):
                tensors_by_id.setdefault(id(tensor), (name.strip("."), tensor))
    return dict(tensors_by_id.values())


def notes(loss: Callable[..., Any] | None, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Name the modules that a loss trains (`tensors`: its own) only since a function of it names them: this may be the
    discriminator of a GAN, `loss_fn=lambda fake, y: bce(D(fake), y)`, which has an optimizer of its own."""
    trained = {id(tensor) for tensor in tensors.values() if is_trained(tensor)}
    modules = (
        (path, part) for path, part, in_code in _parts("", loss, _DEPTH) if in_code and not isinstance(part, Tensor)
    )
    names = [path.strip(".") for path, part in modules if any(id(p) in trained for p in part.parameters())]
    return (
        f"loss_fn calls {' and '.join(dict.fromkeys(names))}, whose parameters are trained with the model: they are in "
        "pipe.parameters(), and their gradients in the norm that is clipped. If this is meant, pass an nn.Module that "
        "holds them as loss_fn; otherwise call requires_grad_(False) on them before penstock.pipeline(...)",
    ) if names else ()  # fmt: skip


def add_loss_tensors(partition: Partition, tensors: Mapping[str, Tensor]) -> Partition:
    """Return the partition whose last stage holds the loss's tensors, too."""
    if not tensors:
        return partition
    *earlier, last = partition.stages
    parameters: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if is_trained(tensor)}
    buffers = {name: tensor for name, tensor in tensors.items() if name not in parameters}
    meta = replace(
        last.meta,
        parameters=(*last.meta.parameters, *parameters),
        buffers=(*last.meta.buffers, *buffers),
        trainable=last.meta.trainable or bool(parameters),
    )
    last = replace(last, meta=meta, parameters={**last.parameters, **parameters}, buffers={**last.buffers, **buffers})
    return replace(partition, stages=(*earlier, last))


def is_trained(tensor: Tensor) -> bool:
    """Whether it is a parameter, maybe frozen since, or a plain tensor that takes a gradient; else it is a buffer."""
    return isinstance(tensor, nn.Parameter) or tensor.requires_grad


def _module_tensors(path: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a module and its children. Those of torch's own losses are constants."""
    for inner, child in module.named_modules(prefix=path):
        if child.training and type(child).__module__ != nn.modules.loss.__name__:
            named = (*child._parameters.items(), *child._buffers.items())
            yield from (
                (f"{inner}.{name}", tensor)
                for name, tensor in named
                if tensor is not None and name not in child._non_persistent_buffers_set
            )


def _parts(name: str, value: Any, depth: int, in_code: bool = False) -> Iterator[tuple[str, nn.Module | Tensor, bool]]:
    """Yield the modules and trained tensors that a loss is made of, or names; names there, and whether code has
    them."""
    value = unwrap(value) if callable(value) else value
    if isinstance(value, nn.Module) or (isinstance(value, Tensor) and value.requires_grad and value.is_leaf):
        yield name, value, in_code
        return
    inner: dict[str, Any] = {}
    if isinstance(value, MethodType):
        inner = (
            {"": value.__self__} if isinstance(value.__self__, nn.Module) else getattr(value.__self__, "__dict__", {})
        )
    elif isinstance(value, partial):
        inner = {"": value.func, **dict(zip("0123456789", value.args, strict=False)), **value.keywords}
    elif isinstance(value, FunctionType):
        inner, in_code = _loaded_globals(value), True
        inner |= dict(zip(value.__code__.co_freevars, map(contents, value.__closure__ or ()), strict=True))
    elif isinstance(value, dict):
        inner = {str(key): part for key, part in islice(value.items(), _MAX_ENTRIES)}
    elif isinstance(value, (list, tuple)):
        inner = {str(index): part for index, part in enumerate(value[:_MAX_ENTRIES])}
    elif not isinstance(value, (type, ModuleType)) and not is_library(type(value).__module__):
        inner = getattr(value, "__dict__", {})
    for key, part in inner.items() if depth else ():
        yield from _parts(f"{name}.{key}", part, depth - 1, in_code)


class LossGuard(TorchFunctionMode):
    """Wraps the loss function: raises ArgumentError if it reads a tensor that is not on the last stage, as the L1
    penalty of many published training scripts does (`sum(p.abs().sum() for p in model.parameters())`).

    Args:
        elsewhere: `id` -> name of the model's parameters and updated buffers that are not on the last stage.
    """

    def __init__(self, elsewhere: Mapping[int, str]) -> None:
        super().__init__()
        self._elsewhere = elsewhere

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            result = func(*args, **(kwargs or {}))
        except Exception:
            self._check_arguments(args, kwargs)
            raise
        if isinstance(result, Tensor):
            self._check_arguments(args, kwargs)
        return result

    def _check_arguments(self, args: Any, kwargs: Any) -> None:
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) in self._elsewhere:
                raise _elsewhere_error(self._elsewhere[id(tensor)])


def check_graph(loss: Tensor, elsewhere: Mapping[int, str]) -> None:
    """Raise ArgumentError if a gradient would flow from the loss directly into one of these tensors."""
    for leaf in leaves_of([loss]):
        if id(leaf) in elsewhere:
            raise _elsewhere_error(elsewhere[id(leaf)])


def _elsewhere_error(name: str) -> ArgumentError:
    return ArgumentError(
        f"the loss reads {name!r} of the model, which is not on the last stage, where the loss is computed: its value "
        "there would be out of date, and its gradient would be lost. Compute this term in the forward and return "
        "it (or leave it in an attribute), or give the optimizer weight_decay=... for a penalty on weights"
    )


def _loaded_globals(function: FunctionType) -> dict[str, Any]:
    """Return the globals that a function's code loads, that of functions in it included. (`co_names` has attributes,
    too.)"""
    codes, names = [function.__code__], list[str]()
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        names += [instr.argval for instr in dis.get_instructions(code) if instr.opname == "LOAD_GLOBAL"]
    return {name: function.__globals__[name] for name in names if name in function.__globals__}
