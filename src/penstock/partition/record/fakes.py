"""Lends a model fake parameters and buffers while it is recorded, and removes whatever its forward leaves behind."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from penstock._base.compat import FakeTensorMode, unset_fake_temporarily
from penstock.partition.state.reachable import Holder, is_container


class Snapshot:
    """The attributes of every module, and the contents of containers there, for comparing and restoring."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._modules = [(m, Holder("", vars(m), vars(m).copy(), attributes=True, module=True)) for m in modules]
        self._contents = [Holder("", v, v.copy()) for m in modules for v in vars(m).values() if is_container(v)]

    def restore(self, keep_if: Callable[[Any], bool] = lambda value: False) -> None:
        """Restore everything except attributes whose new value `keep_if` accepts."""
        kept_values = [(vars(module), name, value) for module, name, value in self.changed() if keep_if(value)]
        for holder in (*(holder for _, holder in self._modules), *self._contents):
            holder.put(holder.before)
        for entries, name, value in kept_values:
            entries[name] = value

    def changed(self) -> Iterator[tuple[nn.Module, str, object]]:
        """Module, attribute and new value of each plain attribute that has changed."""
        return ((module, name, value) for module, holder in self._modules for name, value in holder.changes())


class Loan:
    """The fake parameters and buffers that stand in for a model's own.

    Attributes:
        mode, device: what they are made with, and where.
        fakes: canonical name -> the fake, for parameters and then buffers.
        names: a fake's `id` -> its canonical name.
        originals: a fake's `id` -> the model's own tensor.
        installed: a module's name, the dict of its parameters or buffers, and its contents with fakes.
    """

    def __init__(self, model: nn.Module, mode: FakeTensorMode, device: torch.device) -> None:
        self.mode, self.device = mode, device
        named = [*model.named_parameters(), *model.named_buffers()]
        first = {id(tensor): name for name, tensor in reversed(named)}  # a buffer may be another module's parameter
        tensors = {name: tensor for name, tensor in named if first[id(tensor)] == name}
        with mode:  # entered only once: that takes as long as making a fake
            self.fakes = {name: fake_like(tensor, mode, device) for name, tensor in tensors.items()}
        self.names = {id(fake): name for name, fake in self.fakes.items()}
        self.originals = {id(fake): tensors[name] for name, fake in self.fakes.items()}
        by_original = {id(tensor): self.fakes[name] for name, tensor in tensors.items()}
        install_tensors(model, lambda tensor: by_original[id(tensor)])
        self.installed = [(name, slots, slots.copy()) for name, slots in tensor_slots(model)]


def tensor_slots(module: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the dicts that hold the parameters and buffers of all modules in one, each with its module's name."""
    for name, inner in module.named_modules():
        yield from ((name, inner._parameters), (name, inner._buffers))


def install_tensors(module: nn.Module, replacement: Callable[[Tensor], Tensor]) -> None:
    """Replace the parameters and buffers of a module and all modules in it."""
    for _, slots in tensor_slots(module):
        slots.update({key: replacement(tensor) for key, tensor in slots.items() if tensor is not None})
    for inner in module.modules():
        if isinstance(inner, nn.RNNBase):  # it keeps a second list of its parameters
            inner._flat_weights = [getattr(inner, n, None) for n in inner._flat_weights_names]


def fake_like(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    """Return a fake with the same shape, strides, dtype and kind on the given device. Never a view, and without
    history."""
    fake = _fake_memory(tensor, mode, device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def fake_value(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    """Return a fake of a value that a call made: like `fake_like`, but not a leaf if it requires a gradient."""
    fake = _fake_memory(tensor, mode, device)
    with mode:
        return made_by_call(fake.requires_grad_()) if tensor.requires_grad else fake


def made_by_call(leaf: Tensor) -> Tensor:
    """Return a leaf that requires a gradient as a value that a call made."""
    with torch.enable_grad():
        copy = leaf.clone()  # unlike a view of a leaf, it may be updated in place
        return copy if copy.stride() == leaf.stride() else leaf.view_as(leaf)


def _fake_memory(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    if tensor.layout != torch.strided:
        with unset_fake_temporarily():
            return mode.from_tensor(tensor.detach(), static_shapes=True)
    with mode:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def save_generators() -> Callable[[], None]:
    """Return what puts torch's, Python's and numpy's generators back to where they are now."""
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    restorers: list[Callable[[], object]] = [
        partial(torch.set_rng_state, torch.get_rng_state()),
        partial(random.setstate, random.getstate()),
        *([partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())] if cuda else []),
        partial(numpy.random.set_state, numpy.random.get_state(legacy=False)),
    ]

    def restore() -> None:
        for restorer in restorers:
            restorer()

    return restore


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Restore torch's, Python's and numpy's generators on exit."""
    restore = save_generators()
    random.seed()  # a new state, so that a forward that seeds it is noticed whatever the old state was
    numpy.random.seed()
    try:
        yield
    finally:
        restore()
