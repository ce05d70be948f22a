"""State of other objects than optimizers: this rank's part of an average of the weights, and rank 0's shared state.

A tensor belongs to a parameter or buffer if it has its shape and a key that ends with its name, as in a dict by name,
torch's `AveragedModel` and timm's `ModelEmaV3`, or if it is one of a list in the order of the parameters, as in
diffusers' `EMAModel` and torch_ema. All other floating-point tensors must be the same on every rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from penstock._base.errors import ArgumentError
from penstock.checkpoint.contents import LocalState, as_passed
from penstock.checkpoint.export import to_bytes
from penstock.partition import tensors_in
from penstock.pipe.pipeline import Pipeline
from penstock.runtime.gradients.dtensors import copy_into

_Path = tuple[Any, ...]
"""The keys and indices that lead to a value in nested dicts and lists."""


class PartitionedState:
    """An object's state on this rank.

    Attributes:
        local: the tensors that belong to parameters and buffers of this rank.
        shared: the state without the tensors that belong to any parameter or buffer.
    """

    def __init__(self, item: Any, pipe: Pipeline) -> None:
        self._item = item
        stored_names, local = pipe.session.model_parts.names(), pipe.state_dict()
        tensors = pipe.model.state_dict(keep_vars=True) | local
        self._names = {name: (stored_names.get(name, name), tensor.shape) for name, tensor in tensors.items()}
        parameter_names = {id(parameter): name for name, parameter in pipe.named_parameters()}
        orders = [list(pipe.parameters()), list(pipe.model.parameters())]
        orders += [[parameter for parameter in order if parameter.requires_grad] for order in orders]
        self._orders = [[(parameter_names.get(id(p), ""), p.shape) for p in order] for order in orders]
        self._positions: dict[_Path, tuple[str, str, Tensor]] = {}
        self.shared = self._divide(item if isinstance(item, Mapping) else item.state_dict(), ())
        self.local: LocalState = {}
        for name, key, tensor in self._positions.values():
            if name in local and not tensor.is_meta:
                self.local.setdefault(name, {})[key] = tensor.detach()

    def digest(self) -> list[tuple[Any, ...]]:
        """Return the shape and a checksum of each floating-point tensor that ranks must share."""
        floats = [tensor.detach() for tensor in tensors_in(self.shared) if tensor.is_floating_point()]
        return [(tuple(tensor.shape), zlib.crc32(to_bytes(tensor).numpy().data)) for tensor in floats]

    def load(self, shared: Any, local: LocalState) -> None:
        """Set the object's state from the shared state, which is changed, and this rank's tensors."""
        for path, (name, key, tensor) in self._positions.items():
            value, container = local.get(name, {}).get(key, tensor), shared
            if isinstance(self._item, Mapping):
                copy_into(tensor.detach(), value)
                continue
            for key_or_index in path[:-1]:
                container = container[key_or_index]
            if isinstance(container, list):
                container.insert(path[-1], value)
            else:
                container[path[-1]] = value
        if not isinstance(self._item, Mapping):
            self._item.load_state_dict(shared)

    def _divide(self, value: Any, path: _Path) -> Any:
        """Record the positions of the tensors of parameters and buffers, and return the shared state."""
        count_before, shared = len(self._positions), value
        if isinstance(value, Mapping):
            shared = {k: self._divide(item, (*path, k)) for k, item in value.items() if not self._noted(path, k, item)}
        elif isinstance(value, (list, tuple)):
            shapes = [item.shape if isinstance(item, Tensor) else None for item in value]
            order = next((order for order in self._orders if [shape for _, shape in order] == shapes), None)
            shared = [self._divide(item, (*path, index)) for index, item in enumerate(value)] if order is None else []
            for index, (name, _) in enumerate(order or ()):
                self._positions[*path, index] = name, _key(path), value[index]
        return shared if len(self._positions) > count_before else value

    def _noted(self, path: _Path, key: Any, item: Any) -> bool:
        """Record an item whose key ends with the name of a tensor of its shape. Return whether it does."""
        parts = str(key).split(".")
        for start in range(len(parts) if isinstance(item, Tensor) else 0):
            name, shape = self._names.get(".".join(parts[start:]), ("", None))
            if item.shape == shape:
                self._positions[*path, key] = name, _key((*path, *parts[:start])), item
                return True
        return False


def _key(path: _Path) -> str:
    return ".".join(map(str, path)).replace("/", ".") or "average"


def check_shared(digests: Sequence[Mapping[str, Any]]) -> None:
    """Raise ArgumentError if shared state differs between ranks, by the digests of each rank's objects."""
    for rank, rank_digests in enumerate(digests):
        for label, digest in rank_digests.items():
            if digest != digests[0].get(label):
                raise ArgumentError(
                    f"{as_passed(label)}: its tensors differ between rank 0 and rank {rank}, and have neither the "
                    "names nor the order of the pipeline's parameters, so that they cannot be divided by rank; pass "
                    "the optimizer itself, a dict of tensors by the names of pipe.named_parameters(), or an object "
                    "whose state_dict() has one, such as AveragedModel(pipe.model)"
                )
