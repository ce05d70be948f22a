"""The contents of a checkpoint and their names. Both are the same for every split.

model/NAME            parameters and persistent buffers; a tied one under its first name
loss/NAME             those of the loss
optimizer/NAME/KEY    the optimizer's state for a parameter: a tensor, or a pickle of anything else
LABEL/NAME/KEY        an average's tensor for a parameter or buffer: see `averages`
rest                  a pickle of everything that does not belong to one tensor: `GlobalState`

With several optimizers, each has its label in place of `optimizer`: optimizer[1], optimizer['head'], others['muon'].
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from penstock._base.errors import ArgumentError
from penstock.pipe.pipeline import Pipeline

GLOBAL_STATE = "rest"
_MODEL = "model/"
LOSS = "loss/"
_RANK_KEYS = ("params", "param_names")

Optimizers = torch.optim.Optimizer | Sequence["Optimizers"] | Mapping[str, "Optimizers"]
"""An optimizer, or lists and dicts of optimizers."""

LocalState = dict[str, dict[str, Any]]
"""State of this process's parameters and buffers, by the tensor's name and by key."""

Names = dict[str, list[tuple[str, ...]]]
"""Names of the parameters in each group of each optimizer, by label."""

Groups = list[tuple[tuple[str, ...], dict[str, Any]]]
"""An optimizer's groups: the parameters' names, over all ranks, and the group's options."""


class Stateful(Protocol):
    """Something with state: a scheduler, a scaler, an average of the weights."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True)
class GlobalState:
    """Everything in a checkpoint that does not belong to one tensor.

    Attributes:
        step, seed: the state of the random streams.
        extra: as passed to `save`.
        others: the shared state of other objects, by label.
        ties: maps each further name of a tied parameter or buffer to the name it is stored under.
        optimizers: each optimizer's class name and groups, by label.
    """

    step: int
    seed: int
    extra: Any
    others: dict[str, Any]
    ties: dict[str, str]
    optimizers: dict[str, tuple[str, Groups]]


def label_objects(
    optimizer: Optimizers | None, stateful: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the optimizers, and the other stateful objects, from nested lists and dicts: each by a label.

    Raises ArgumentError if something is no optimizer and has no state.
    """
    labeled = dict((*_iterate_labeled("optimizer", optimizer), *_iterate_labeled("others", stateful or None)))
    optimizers = {label: item for label, item in labeled.items() if hasattr(item, "param_groups")}
    other_objects = {label: item for label, item in labeled.items() if label not in optimizers}
    for label, item in other_objects.items():
        if label.startswith("optimizer") or not (hasattr(item, "load_state_dict") or isinstance(item, Mapping)):
            raise ArgumentError(
                f"{as_passed(label)} is {type(item).__name__}: expected an optimizer, or in stateful= an object with "
                "state_dict and load_state_dict, or a dict of tensors by parameter name; or lists and dicts of these"
            )
    return optimizers, other_objects


def as_passed(label: str) -> str:
    """Return a label for messages, which name `stateful=`; files say `others`."""
    return label.replace("others", "stateful", 1) if label.startswith("others") else label


def _iterate_labeled(label: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value)) if len(value) > 1 else next(iter(value), None)
    if isinstance(value, Mapping) and not all(isinstance(item, Tensor) for item in value.values()):
        for key, item in value.items():
            yield from _iterate_labeled(f"{label}[{key!r}]", item)
    elif value is not None:
        yield label, value


# -- the model --------------------------------------------------------------------------------------------------------


def model_state(pipe: Pipeline) -> dict[str, Any]:
    """Return the tensors of this process's stages and of the loss: the live ones, not copies."""
    names = set(pipe.session.model_parts.names().values())
    return {model_key(name) if name in names else LOSS + name: tensor for name, tensor in pipe.state_dict().items()}


def model_tensors(metadata: Metadata, prefix: str = _MODEL) -> dict[str, Tensor]:
    """Return a meta tensor for each of the model's tensors in a checkpoint, by its name in the model; or of the
    loss's."""
    return {
        key.removeprefix(prefix): torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
        for key, stored in metadata.state_dict_metadata.items()
        if key.startswith(prefix) and isinstance(stored, TensorStorageMetadata)
    }


def model_key(name: str) -> str:
    """Return the key under which one of the model's tensors is stored."""
    return _MODEL + name


# -- what belongs to a parameter or buffer --------------------------------------------------------------------------


def entries(label: str, local: LocalState) -> dict[str, Any]:
    """Return an optimizer's or an average's entries to save."""
    return {
        f"{label}/{name}/{key}": value if isinstance(value, Tensor) else pickle.dumps(value)
        for name, values in local.items()
        for key, value in values.items()
    }


def empty_entries(pipe: Pipeline, metadata: Metadata, label: str) -> dict[str, Any]:
    """Return the entries to load for this process's tensors: a tensor to load into, or None for a pickle."""
    local, stored = pipe.state_dict(), metadata.state_dict_metadata
    return {
        path: _empty_like(local[name], key, stored[path]) for path, name, key in _split(stored, label) if name in local
    }


def read_entries(label: str, state: Mapping[str, Any]) -> LocalState:
    """Return the state that was read for this process's tensors."""
    local: LocalState = {}
    for path, name, key in _split(state, label):
        local.setdefault(name, {})[key] = state[path]
    return local


def _split(paths: Iterable[str], label: str) -> Iterator[tuple[str, str, str]]:
    """Yield the entries of an optimizer or average among `paths`: each path, the name of its tensor and the key."""
    for path in paths:
        if path.startswith(f"{label}/"):
            name, _, key = path.removeprefix(f"{label}/").rpartition("/")
            yield path, name, key


def _empty_like(tensor: Tensor, key: str, stored: object) -> Tensor | None:
    if not isinstance(stored, TensorStorageMetadata):
        return None
    if stored.size == tensor.shape:
        return torch.empty_like(tensor, dtype=stored.properties.dtype)
    device = "cpu" if key == "step" else tensor.device
    return torch.empty(stored.size, dtype=stored.properties.dtype, device=device)


# -- the optimizer ----------------------------------------------------------------------------------------------------


def group_names(pipe: Pipeline, optimizers: Mapping[str, torch.optim.Optimizer]) -> Names:
    """Return the names of this process's parameters in each group of each optimizer.

    Raises ArgumentError if a parameter is not the pipeline's, since its state would be lost.
    """
    names = {id(parameter): name for name, parameter in pipe.named_parameters()}
    groups: Names = {label: [] for label in optimizers}
    for label, optimizer in optimizers.items():
        for index, group in enumerate(optimizer.param_groups):
            nonempty = [parameter for parameter in group["params"] if parameter.numel()]  # empty ones are placeholders
            foreign = [parameter for parameter in nonempty if id(parameter) not in names]
            if foreign:
                raise ArgumentError(
                    f"{label}: group {index} has a parameter of shape {tuple(foreign[0].shape)} that is not one of "
                    "the pipeline's; make the pipeline first, and the optimizer from pipe.parameters() or "
                    "pipe.named_parameters()"
                )
            groups[label].append(tuple(names[id(parameter)] for parameter in nonempty))
    return groups


def merge_groups(parts: Sequence[Mapping[str, list[tuple[str, ...]]]]) -> Names:
    """Merge the names in each group of each optimizer, over all processes.

    Raises ArgumentError unless every process has the same optimizers with the same number of groups.
    """
    merged = {}
    for label in dict.fromkeys(label for part in parts for label in part):
        counts = [len(part[label]) if label in part else None for part in parts]
        for rank, count in enumerate(counts):
            if count != counts[0]:
                base, other = ("no optimizer" if n is None else f"{n} groups of parameters" for n in (counts[0], count))
                raise ArgumentError(
                    f"{label}: {base} on rank 0, but {other} on rank {rank}; make the same groups on every rank: a "
                    "group may be empty"
                )
        aligned = zip(*(part[label] for part in parts), strict=True)
        merged[label] = [tuple(dict.fromkeys(name for names in group for name in names)) for group in aligned]
    return merged


def group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return each group's options: everything but its parameters and their names."""
    return [{key: value for key, value in group.items() if key not in _RANK_KEYS} for group in optimizer.param_groups]


def optimizer_state(pipe: Pipeline, optimizer: torch.optim.Optimizer, label: str) -> LocalState:
    """Return the optimizer's state for this process's parameters. Tensors are the live ones, not copies.

    Raises ArgumentError if `state_dict` has other entries than those of torch's optimizers: a container's, say.
    """
    state, names = optimizer.state_dict().get("state"), _names_by_number(pipe, optimizer)
    if state is None or state.keys() - names.keys():
        raise ArgumentError(
            f"{label}: {type(optimizer).__name__}.state_dict() has other entries than a state for each parameter, and "
            "they cannot be divided by rank; pass the optimizers of torch.optim that it contains, in a list"
        )
    return {names[number]: values for number, values in state.items() if names[number]}


def load_optimizer(pipe: Pipeline, optimizer: torch.optim.Optimizer, groups: Groups, local: LocalState) -> None:
    """Load into an optimizer its groups' options and the state of this process's parameters."""
    packed = optimizer.state_dict()
    state = {number: local[name] for number, name in _names_by_number(pipe, optimizer).items() if name in local}
    pairs = zip(packed["param_groups"], groups, strict=True)
    optimizer.load_state_dict({**packed, "state": state, "param_groups": [{**p, **o} for p, (_, o) in pairs]})
    _restore_dtypes(optimizer, {parameter: local.get(name, {}) for name, parameter in pipe.named_parameters()})


def _names_by_number(pipe: Pipeline, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """Return the parameter's name for each number of a parameter in an optimizer's state dict."""
    names = {id(parameter): name for name, parameter in pipe.named_parameters()}
    packed = optimizer.state_dict().get("param_groups", [])
    groups = optimizer.param_groups if packed else ()
    pairs = (zip(p["params"], group["params"], strict=True) for p, group in zip(packed, groups, strict=True))
    return {number: names.get(id(parameter), "") for group in pairs for number, parameter in group}


def _restore_dtypes(optimizer: torch.optim.Optimizer, saved: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Give each tensor of the optimizer's state the dtype it was saved in: torch casts it to its parameter's.

    What follows a gradient in float32 (a momentum, say) would lose digits if its parameter is in bfloat16.
    """
    for parameter, state in saved.items():
        for key, value in state.items():
            loaded = optimizer.state.get(parameter, {}).get(key)
            if isinstance(loaded, Tensor) and isinstance(value, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(loaded.device)
