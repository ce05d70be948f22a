"""Loads a checkpoint that any split saved. Every rank checks everything before any rank changes anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint import folders
from penstock.checkpoint.all_or_none import on_first, together
from penstock.checkpoint.contents import (
    LOSS,
    Rest,
    Stateful,
    empty_state,
    group_names,
    load_optimizer,
    merge_groups,
    model_state,
    model_tensors,
)
from penstock.checkpoint.saving import finish
from penstock.checkpoint.storage import Reader
from penstock.errors import ArgumentError
from penstock.pipe.pipeline import Pipeline
from penstock.words import counted


@dataclass(frozen=True, slots=True)
class Restored:
    """What was loaded.

    Attributes:
        path: the checkpoint's path.
        step: how many steps had been taken.
        extra: as passed to `save`.
    """

    path: Path
    step: int
    extra: Any


def load(
    folder: str | Path,
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    others: Mapping[str, Stateful] | None = None,
) -> Restored | None:
    """Loads the latest checkpoint in a folder, or the one that the path names. Every rank calls it.

    The split, the schedule and the number of ranks may differ from those it was saved with. Random streams are
    restored too, so training continues as it would have without the interruption.

    Args:
        folder: as for `save`, or one of the checkpoints in it.
        pipe: a pipeline of the same model.
        optimizer: an optimizer of the same class as the saved one, with the same parameter names in each group.
        others: as for `save`.

    Returns:
        What was loaded; None, with nothing changed, if there is no checkpoint.

    Raises:
        ArgumentError: on every rank, if the checkpoint is of another model, has another dtype, or lacks something
            that any rank asks for. Nothing has changed.
        CheckpointError: on every rank, if any rank cannot read it. The model may have been changed in part.
    """
    finish(pipe)
    others = dict(others or {})
    path = on_first(pipe, partial(folders.find, Path(folder)), f"cannot read {folder}")
    if path is None:
        return None
    fails = f"cannot read {path}"
    reader = together(pipe, lambda: Reader(path), fails)
    rest = together(pipe, reader.rest, fails)
    own = together(pipe, lambda: None if optimizer is None else group_names(pipe, optimizer), fails)
    merge_groups(pipe.gather(own))

    def check() -> None:
        _check_model(path, pipe, model_tensors(reader.metadata), model_tensors(reader.metadata, LOSS))
        _check_others(path, others, rest)
        if optimizer is not None and own is not None:
            _check_optimizer(path, pipe, type(optimizer).__name__, own, rest)

    together(pipe, check, fails)
    state = model_state(pipe) | ({} if optimizer is None else empty_state(pipe, reader.metadata))
    together(pipe, lambda: reader.read(state), fails)

    def set_all() -> None:
        if optimizer is not None:
            load_optimizer(pipe, optimizer, [group.options for group in rest.groups], state)
        for key, other in others.items():
            other.load_state_dict(rest.others[key])

    together(pipe, set_all, f"cannot load {path}")
    pipe.session.restore(step_count=rest.step, seed=rest.seed)
    return Restored(path, rest.step, rest.extra)


def _check_model(path: Path, pipe: Pipeline, model: Mapping[str, Tensor], loss: Mapping[str, Tensor]) -> None:
    own, there = pipe.state_dict(), {**model, **loss}
    missing = [name for name in own if name not in there]
    foreign = sorted(model.keys() - set(pipe.session.all_names()))  # another loss may be meant
    if missing or foreign:
        some = ", ".join((missing or foreign)[:4])
        what = (
            f"lacks {len(missing)} of this model's tensors"
            if missing
            else f"has {counted(len(foreign), 'tensor')} that this model does not have"
        )
        raise ArgumentError(
            f"{path} was saved from another model: it {what}, such as {some}. Build the model as it was when saved"
        )
    for name, tensor in own.items():
        shape = tuple(there[name].shape)
        if shape != tuple(tensor.shape):
            raise ArgumentError(
                f"{path} was saved from another model: {name} has shape {shape} there and {tuple(tensor.shape)} here"
            )
        if there[name].dtype != tensor.dtype:  # a cast would lose digits, and training would not continue as it was
            raise ArgumentError(
                f"{path} has {name} in {there[name].dtype}, and here it is in {tensor.dtype}; make the model in the "
                "dtype in which it was saved; `import_safetensors` takes its weights alone, and casts them"
            )


def _check_others(path: Path, others: Mapping[str, Stateful], rest: Rest) -> None:
    missing = [key for key in others if key not in rest.others]
    if missing:
        there = ", ".join(rest.others) or "none"
        raise ArgumentError(f"others[{missing[0]!r}] is not in {path}, which has {there}")


def _check_optimizer(path: Path, pipe: Pipeline, kind: str, own: list[tuple[str, ...]], rest: Rest) -> None:
    if rest.optimizer is None:
        raise ArgumentError(f"{path} has no optimizer; load it without, or save one")
    if rest.optimizer != kind:
        raise ArgumentError(
            f"{path} has the state of {rest.optimizer}, but the optimizer is {kind}; make the same kind"
        )
    if len(rest.groups) != len(own):
        raise ArgumentError(
            f"{path} has {len(rest.groups)} groups of parameters, but the optimizer {len(own)}; make the groups as "
            "they were, on every rank: a group may be empty"
        )
    then = {name: index for index, group in enumerate(rest.groups) for name in group.names}
    now = {name: index for index, names in enumerate(own) for name in names}
    for name, _ in pipe.named_parameters():
        if then.get(name) != now.get(name):
            was, is_ = ("in none" if n is None else f"in group {n}" for n in (then.get(name), now.get(name)))
            raise ArgumentError(
                f"{path}: {name} was {was} of the optimizer's groups, and is {is_} now; make the groups as they were"
            )
