"""Loads a checkpoint that any split saved. Every rank checks everything before any rank changes anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock._base.errors import ArgumentError
from penstock._base.second_names import also
from penstock._base.words import counted
from penstock.checkpoint import folders
from penstock.checkpoint.all_or_none import on_first, together
from penstock.checkpoint.averages import Divided
from penstock.checkpoint.contents import (
    LOSS,
    Names,
    Optimizers,
    Rest,
    by_label,
    empty_entries,
    entries,
    group_names,
    load_optimizer,
    merge_groups,
    model_state,
    model_tensors,
    read_entries,
)
from penstock.checkpoint.saving import wait_for_save
from penstock.checkpoint.storage import Reader
from penstock.pipe.pipeline import Pipeline


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


@also(others="stateful")
def load(
    folder: str | Path,
    pipe: Pipeline,
    optimizer: Optimizers | None = None,
    *,
    stateful: Mapping[str, Any] | None = None,
    weights_only: bool = True,
) -> Restored | None:
    """Load the latest checkpoint in a folder, or the one that the path names. Every rank calls it.

    The split, the schedule and the number of ranks may differ from those it was saved with. Random streams are
    restored too, so training continues as it would have without the interruption.

    Args:
        folder: as for `save`, or one of the checkpoints in it.
        pipe: a pipeline of the same model.
        optimizer: an optimizer of the same class as the saved one, with the same parameter names in each group; or a
            list or dict, as for `save`.
        stateful: as for `save`. Averages are made as they were, from the pipeline.
        weights_only: as for `torch.load`: unpickle only tensors, numbers, texts, containers and the classes that
            `torch.serialization.add_safe_globals` allows. Objects of other classes, in `extra` or in the state of
            `stateful`, need False, with which a checkpoint can run any code: pass it only if you trust who wrote it.

    Returns:
        What was loaded; None, with nothing changed, if there is no checkpoint.

    Raises:
        ArgumentError: on every rank, if the checkpoint is of another model, has another dtype, or lacks something
            that any rank asks for. Nothing has changed.
        CheckpointError: on every rank, if any rank cannot read it. The model may have been changed in part.
    """
    wait_for_save(pipe)
    path = on_first(pipe, partial(folders.find, Path(folder)), f"cannot read {folder}")
    if path is None:
        return None
    fails = f"cannot read {path}"

    def parts() -> tuple[Reader, Rest, dict[str, Any], dict[str, Any], Names]:
        reader = Reader(path, weights_only=weights_only)
        optimizers, items = by_label(optimizer, stateful)
        return reader, reader.rest(), optimizers, items, group_names(pipe, optimizers)

    reader, rest, optimizers, items, own = together(pipe, parts, fails)
    merge_groups(pipe.all_gather_object(own))

    def check() -> tuple[dict[str, Divided], dict[str, Any]]:
        _check_model(path, pipe, model_tensors(reader.metadata), model_tensors(reader.metadata, LOSS))
        if missing := [label for label in items if label not in rest.others]:
            raise ArgumentError(f"{missing[0]} is not in {path}, which has {', '.join(rest.others) or 'none'}")
        state = model_state(pipe)
        for label, one in optimizers.items():
            _check_optimizer(path, pipe, label, type(one).__name__, own[label], rest)
        divided = {label: Divided(item, pipe) for label, item in items.items()}
        for label in (*optimizers, *divided):
            read = empty_entries(pipe, reader.metadata, label)
            if label in divided and (alone := read.keys() ^ entries(label, divided[label].own).keys()):
                raise ArgumentError(
                    f"{label}: {min(alone)} is only {'in ' + str(path) if min(alone) in read else 'in the object'}; "
                    "make the object from the pipeline as it was when saved, before loading"
                )
            state |= read
        return divided, state

    divided, state = together(pipe, check, fails)
    together(pipe, lambda: reader.read(state), fails)

    def set_all() -> None:
        for label, one in optimizers.items():
            load_optimizer(pipe, one, rest.optimizers[label][1], read_entries(label, state))
        for label, part in divided.items():
            part.load(rest.others[label], read_entries(label, state))

    together(pipe, set_all, f"cannot load {path}")
    pipe.step_count, pipe.session.engine.streams.seed = rest.step, rest.seed  # where the random streams go on
    return Restored(path, rest.step, rest.extra)


def _check_model(path: Path, pipe: Pipeline, model: Mapping[str, Tensor], loss: Mapping[str, Tensor]) -> None:
    own, there = pipe.state_dict(), {**model, **loss}
    missing = [name for name in own if name not in there]
    foreign = sorted(model.keys() - set(pipe.session.split.all_names()))  # another loss may be meant
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


def _check_optimizer(path: Path, pipe: Pipeline, label: str, kind: str, own: list[tuple[str, ...]], rest: Rest) -> None:
    if label not in rest.optimizers:
        has = ", ".join(rest.optimizers) or "no optimizer"
        raise ArgumentError(f"{label} is not in {path}, which has {has}; load it without, or pass optimizers as saved")
    saved, groups = rest.optimizers[label]
    if saved != kind:
        raise ArgumentError(f"{path} has the state of {saved}, but the {label} is {kind}; make the same kind")
    if len(groups) != len(own):
        raise ArgumentError(
            f"{path} has {len(groups)} groups of parameters, but the {label} {len(own)}; make the groups as "
            "they were, on every rank: a group may be empty"
        )
    then = {name: index for index, (names, _) in enumerate(groups) for name in names}
    now = {name: index for index, names in enumerate(own) for name in names}
    for name, _ in pipe.named_parameters():
        if then.get(name) != now.get(name):
            was, is_ = ("in none" if n is None else f"in group {n}" for n in (then.get(name), now.get(name)))
            raise ArgumentError(
                f"{path}: {name} was {was} of the {label}'s groups, and is {is_} now; make the groups as they were"
            )
