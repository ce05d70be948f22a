"""Moves a model's parameters and buffers to the devices of the ranks that hold them, before stages refer to them.

Tensors move as with `Module.to`, which is called wherever one device holds a whole module, so that whatever a module
does there (an RNN flattens its weights) is done here too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def move(model: nn.Module, device_of: Mapping[int, torch.device]) -> bool:
    """Moves tensors in place. Returns whether there was anything to move.

    Modules that shared a parameter or buffer still share it afterwards: if `Module.to` makes a new object for each of
    them, all get the first.

    Args:
        model: the model whose tensors to move.
        device_of: the device of each tensor to move, by the tensor's `id`; all others stay where they are.
    """
    slots = [(slot, name, tensor) for module in model.modules() for slot, name, tensor in _slots(module)]
    if all(device_of.get(id(tensor), tensor.device) == tensor.device for _, _, tensor in slots):
        return False
    _move(model, device_of, set())
    moved: dict[int, Tensor] = {}
    for slot, name, before in slots:  # `slots` keeps the old tensors alive, so that their ids are not reused
        now = slot[name]
        if now is not None:
            slot[name] = moved.setdefault(id(before), now)
    return True


def _move(module: nn.Module, device_of: Mapping[int, torch.device], seen: set[int]) -> None:
    """Moves whole modules where possible, and single tensors of modules that are divided."""
    if id(module) in seen:
        return
    seen.add(id(module))
    found = {device_of.get(id(t)) for inner in module.modules() for _, _, t in _slots(inner)}
    if len(found) == 1 and (device := found.pop()) is not None:
        module.to(device)
        seen.update(map(id, module.modules()))
        return
    for slot, name, tensor in list(_slots(module)):
        if (device := device_of.get(id(tensor), tensor.device)) != tensor.device:
            holder = nn.Module()  # its `to` knows how to move a parameter together with its gradient
            held: dict[str, Any] = holder._parameters if isinstance(tensor, nn.Parameter) else holder._buffers
            held[name] = tensor
            holder.to(device)
            slot[name] = held[name]
    for child in module.children():
        _move(child, device_of, seen)


def _slots(module: nn.Module) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor]]:
    """The places of a module's own parameters and buffers: the dict, the name in it, and the tensor."""
    for slot in (module._parameters, module._buffers):
        yield from ((slot, name, tensor) for name, tensor in slot.items() if tensor is not None)  # type: ignore[misc]
