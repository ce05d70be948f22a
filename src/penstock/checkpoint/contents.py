"""What a checkpoint contains, and under which names. Both are the same for every split.

model/NAME            parameters and persistent buffers; a tied one under its first name
loss/NAME             those of the loss
optimizer/NAME/KEY    the optimizer's state for a parameter: a tensor, or a pickle of anything else
rest                  a pickle of everything that does not belong to one tensor: `Rest`
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from penstock.errors import ArgumentError
from penstock.pipe.pipeline import Pipeline

REST = "rest"
_MODEL, _OPTIMIZER = "model/", "optimizer/"
LOSS = "loss/"


class Stateful(Protocol):
    """Something with state that is the same on every rank: a scheduler, a scaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Group:
    """One of the optimizer's parameter groups: the parameters' names, over all ranks, and the group's options."""

    names: tuple[str, ...]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rest:
    """Everything in a checkpoint that does not belong to one tensor.

    Attributes:
        step, seed: the state of the random streams.
        extra, others: as passed to `save`.
        ties: maps each further name of a tied parameter or buffer to the name it is stored under.
        optimizer: the optimizer's class name; None if there is no optimizer.
        groups: the optimizer's groups.
    """

    step: int
    seed: int
    extra: Any
    others: dict[str, Any]
    ties: dict[str, str]
    optimizer: str | None = None
    groups: tuple[Group, ...] = ()

    def to_bytes(self) -> bytes:
        """Pickles a dict of plain values, which later versions can read."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        groups = [{"names": group.names, "options": group.options} for group in self.groups]
        return pickle.dumps({**values, "groups": groups})  # bytes: torch would split a dict into one entry per item

    @classmethod
    def from_bytes(cls, data: bytes) -> Rest:
        read = pickle.loads(data)
        return cls(**{**read, "groups": tuple(Group(**group) for group in read["groups"])})


# -- the model --------------------------------------------------------------------------------------------------------


def model_state(pipe: Pipeline) -> dict[str, Any]:
    """The tensors of this process's stages and of the loss: the live ones, not copies."""
    own = set(pipe.session.first_names().values())
    return {model_key(name) if name in own else LOSS + name: tensor for name, tensor in pipe.state_dict().items()}


def model_tensors(metadata: Metadata, kind: str = _MODEL) -> dict[str, Tensor]:
    """A meta tensor for each of the model's tensors in a checkpoint, by its name in the model; or of the loss's."""
    return {
        key.removeprefix(kind): torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
        for key, stored in metadata.state_dict_metadata.items()
        if key.startswith(kind) and isinstance(stored, TensorStorageMetadata)
    }


def model_key(name: str) -> str:
    """The key under which one of the model's tensors is stored."""
    return _MODEL + name


# -- the optimizer ----------------------------------------------------------------------------------------------------


def group_names(pipe: Pipeline, optimizer: torch.optim.Optimizer) -> list[tuple[str, ...]]:
    """The names of this process's parameters in each group.

    Raises ArgumentError if a parameter is not the pipeline's, since its state would be lost.
    """
    names = {id(parameter): name for name, parameter in pipe.named_parameters()}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        real = [parameter for parameter in group["params"] if parameter.numel()]  # a rank without any has a placeholder
        foreign = [parameter for parameter in real if id(parameter) not in names]
        if foreign:
            raise ArgumentError(
                f"optimizer: group {index} has a parameter of shape {tuple(foreign[0].shape)} that is not one of "
                "the pipeline's; make the pipeline first, and the optimizer from pipe.parameters() or "
                "pipe.named_parameters()"
            )
        groups.append(tuple(names[id(parameter)] for parameter in real if id(parameter) in names))
    return groups


def merge_groups(parts: Sequence[list[tuple[str, ...]] | None]) -> list[tuple[str, ...]] | None:
    """The names in each group, over all processes; None if there is no optimizer.

    Raises ArgumentError unless every process has the same number of groups.
    """
    counts = [None if part is None else len(part) for part in parts]
    for rank, count in enumerate(counts):
        if count != counts[0]:
            one, other = ("no optimizer" if n is None else f"{n} groups of parameters" for n in (counts[0], count))
            raise ArgumentError(
                f"optimizer: {one} on rank 0, but {other} on rank {rank}; make the same groups on every rank: a "
                "group may be empty"
            )
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return [tuple(dict.fromkeys(name for part in known for name in part[index])) for index in range(len(known[0]))]


def group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Each group's options: everything but its parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def optimizer_state(pipe: Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state for this process's parameters. Tensors are the live ones, not copies."""
    return {
        f"{_OPTIMIZER}{name}/{key}": value if isinstance(value, Tensor) else pickle.dumps(value)
        for name, parameter in pipe.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def empty_state(pipe: Pipeline, metadata: Metadata) -> dict[str, Any]:
    """What to load for this process's parameters from a checkpoint: a tensor to load into, or None for a pickle."""
    held = dict(pipe.named_parameters())
    return {
        path: _empty_like(held[name], key, metadata.state_dict_metadata[path])
        for path, name, key in _optimizer_entries(metadata.state_dict_metadata)
        if name in held
    }


def load_optimizer(
    pipe: Pipeline, optimizer: torch.optim.Optimizer, options: Sequence[dict[str, Any]], state: Mapping[str, Any]
) -> None:
    """Loads into an optimizer its groups' options and the state that was read for this process's parameters."""
    names = {id(parameter): name for name, parameter in pipe.named_parameters()}
    own: dict[str, dict[str, Any]] = {}
    for path, name, key in _optimizer_entries(state):
        value = state[path]
        own.setdefault(name, {})[key] = pickle.loads(value) if isinstance(value, bytes) else value
    numbered: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    count = 0
    for group, option in zip(group_options(optimizer), options, strict=True):
        parameters = optimizer.param_groups[len(groups)]["params"]
        groups.append({**group, **option, "params": list(range(count, count + len(parameters)))})
        for parameter in parameters:
            numbered[count] = own.get(names.get(id(parameter), ""), {})
            count += 1
    optimizer.load_state_dict({"state": {n: state for n, state in numbered.items() if state}, "param_groups": groups})
    _restore_dtypes(optimizer, {parameter: own.get(name, {}) for name, parameter in pipe.named_parameters()})


def _restore_dtypes(optimizer: torch.optim.Optimizer, saved: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Gives each tensor of the optimizer's state the dtype it was saved in: torch casts it to its parameter's.

    What follows a gradient in float32 (a momentum, say) would lose digits if its parameter is in bfloat16.
    """
    for parameter, state in saved.items():
        for key, value in state.items():
            loaded = optimizer.state.get(parameter, {}).get(key)
            if isinstance(loaded, Tensor) and isinstance(value, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(loaded.device)


def _optimizer_entries(paths: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """The optimizer's entries among `paths`: each path, the name of its parameter and the key of the state."""
    for path in paths:
        if path.startswith(_OPTIMIZER):
            name, _, key = path.removeprefix(_OPTIMIZER).rpartition("/")
            yield path, name, key


def _empty_like(parameter: Tensor, key: str, stored: object) -> Tensor | None:
    if not isinstance(stored, TensorStorageMetadata):
        return None
    if stored.size == parameter.shape:
        return torch.empty_like(parameter, dtype=stored.properties.dtype, requires_grad=False)
    device = "cpu" if key == "step" else parameter.device
    return torch.empty(stored.size, dtype=stored.properties.dtype, device=device)
