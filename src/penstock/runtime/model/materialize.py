"""Allocates and initializes a model that was built on the meta device, one stage at a time.

Each module's own initializer (`reset_parameters`) runs under a stream keyed by the module's name, so the weights do not
depend on the number of stages. They differ from those of a model built directly on a device from one seed, where all
draws come from one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from penstock._base.compat import generator_of
from penstock._base.errors import ArgumentError
from penstock.runtime.exact.streams import key_of, mix

Materialize = Callable[[str, nn.Module], None]
"""Given a module's name and the module, sets the module's own tensors, which are allocated but uninitialized."""


def materialize(
    modules: Mapping[str, nn.Module], device: torch.device, seed: int, rule: Materialize | None = None
) -> None:
    """Allocates and initializes, in place, every tensor of these modules that is on the meta device.

    Args:
        modules: each module that holds tensors itself, by its name in the unsplit model.
        device: the device to allocate on.
        seed: the seed of the streams.
        rule: sets a module's tensors in place of its `reset_parameters`.

    Raises:
        ArgumentError: a module has no `reset_parameters` and there is no rule, or nothing sets one of its buffers.
    """
    made: dict[int, Tensor] = {}
    for name, module in modules.items():
        if not any(tensor.is_meta for _, tensor in own_tensors(module)):
            continue
        # A tied parameter keeps the values that its first module gave it.
        tied = [made[id(p)] for p in module.parameters(recurse=False) if id(p) in made]
        kept = [(tensor, tensor.detach().clone()) for tensor in tied]
        _allocate(module, device, made)
        buffers = dict(module.named_buffers(recurse=False))
        before = {key: buffer._version for key, buffer in buffers.items()}
        generator = generator_of(device)
        state = generator.get_state()
        generator.manual_seed(mix(seed, key_of(name)))
        try:
            _initialize(name, module, rule)
        finally:
            generator.set_state(state)
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)
        after = dict(module.named_buffers(recurse=False))
        for key, buffer in buffers.items():
            if after.get(key) is buffer and buffer._version == before[key]:
                raise ArgumentError(
                    f"buffer {name}.{key} is on the meta device and {type(module).__name__}.reset_parameters does not "
                    "set it: its values cannot be re-created; pass materialize=fn(name, module) that sets it, "
                    "or build the model on a real device"
                )


def _initialize(name: str, module: nn.Module, rule: Materialize | None) -> None:
    if rule is not None:
        rule(name, module)
        return
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise ArgumentError(
            f"module {name} ({type(module).__name__}) is on the meta device and has no reset_parameters(); "
            "pass materialize=fn(name, module) that sets its tensors, or build the model on a real device"
        )
    reset()


def _allocate(module: nn.Module, device: torch.device, made: dict[int, Tensor]) -> None:
    for names in (module._parameters, module._buffers):  # every name: a tensor may have two in one module
        for name, tensor in list(names.items()):
            if tensor is None or not tensor.is_meta:
                continue
            if id(tensor) not in made:
                new = torch.empty_like(tensor, device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
            setattr(module, name, made[id(tensor)])


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's parameters and buffers, without those of its children."""
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)
