"""Loads a checkpoint that any split saved. Every rank checks everything before any rank changes anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock._base.aliases import accept_aliases
from penstock._base.errors import ArgumentError
from penstock._base.formatting import pluralize
from penstock.checkpoint import folders
from penstock.checkpoint.averages import PartitionedState
from penstock.checkpoint.collective import run_on_all_ranks, run_on_rank0
from penstock.checkpoint.contents import (
    LOSS,
    GlobalState,
    Names,
    Optimizers,
    as_passed,
    empty_entries,
    entries,
    group_names,
    label_objects,
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


@accept_aliases(others="stateful")
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
    path = run_on_rank0(pipe, partial(folders.find, Path(folder)), f"cannot read {folder}")
    if path is None:
        return None
    failure = f"cannot read {path}"

    def open_checkpoint() -> tuple[Reader, GlobalState, dict[str, Any], dict[str, Any], Names]:
        reader = Reader(path, weights_only=weights_only)
        optimizers, items = label_objects(optimizer, stateful)
        return reader, reader.global_state(), optimizers, items, group_names(pipe, optimizers)

    reader, saved, optimizers, items, local_names = run_on_all_ranks(pipe, open_checkpoint, failure)
    merge_groups(pipe.all_gather_object(local_names))

    def check() -> tuple[dict[str, PartitionedState], dict[str, Any]]:
        _check_model(path, pipe, model_tensors(reader.metadata), model_tensors(reader.metadata, LOSS))
        if missing := [label for label in items if label not in saved.others]:
            has = ", ".join(map(as_passed, saved.others)) or "none"
            raise ArgumentError(f"{as_passed(missing[0])} is not in {path}, which has {has}")
        state = model_state(pipe)
        for label, opt in optimizers.items():
            _check_optimizer(path, pipe, label, type(opt).__name__, local_names[label], saved)
        partitioned = {label: PartitionedState(item, pipe) for label, item in items.items()}
        for label in (*optimizers, *partitioned):
            stored = empty_entries(pipe, reader.metadata, label)
            if label in partitioned and (extra := stored.keys() ^ entries(label, partitioned[label].local).keys()):
                place = f"in {path}" if min(extra) in stored else "in the object"
                raise ArgumentError(
                    f"{as_passed(label)}: {min(extra)} is only {place}; make the object from the pipeline as it was "
                    "when saved, before loading"
                )
            state |= stored
        return partitioned, state

    partitioned, state = run_on_all_ranks(pipe, check, failure)
    run_on_all_ranks(pipe, lambda: reader.read(state), failure)

    def set_all() -> None:
        for label, opt in optimizers.items():
            load_optimizer(pipe, opt, saved.optimizers[label][1], read_entries(label, state))
        for label, part in partitioned.items():
            part.load(saved.others[label], read_entries(label, state))

    run_on_all_ranks(pipe, set_all, f"cannot load {path}")
    pipe.step_count, pipe.session.engine.streams.seed = saved.step, saved.seed  # so that random streams continue
    return Restored(path, saved.step, saved.extra)


def _check_model(path: Path, pipe: Pipeline, model: Mapping[str, Tensor], loss: Mapping[str, Tensor]) -> None:
    local, saved = pipe.state_dict(), {**model, **loss}
    missing = [name for name in local if name not in saved]
    unknown = sorted(model.keys() - set(pipe.session.model_parts.all_names()))  # the loss may differ
    if missing or unknown:
        examples = ", ".join((missing or unknown)[:4])
        difference = (
            f"lacks {len(missing)} of this model's tensors"
            if missing
            else f"has {pluralize(len(unknown), 'tensor')} that this model does not have"
        )
        raise ArgumentError(
            f"{path} was saved from another model: it {difference}, such as {examples}. "
            "Build the model as it was when saved"
        )
    for name, tensor in local.items():
        shape = tuple(saved[name].shape)
        if shape != tuple(tensor.shape):
            raise ArgumentError(
                f"{path} was saved from another model: {name} has shape {shape} there and {tuple(tensor.shape)} here"
            )
        if saved[name].dtype != tensor.dtype:  # a cast would lose digits, and training would not continue as it was
            raise ArgumentError(
                f"{path} has {name} in {saved[name].dtype}, and here it is in {tensor.dtype}; make the model in the "
                "dtype in which it was saved; `import_safetensors` takes its weights alone, and casts them"
            )


def _check_optimizer(
    path: Path, pipe: Pipeline, label: str, kind: str, groups: list[tuple[str, ...]], state: GlobalState
) -> None:
    if label not in state.optimizers:
        has = ", ".join(state.optimizers) or "no optimizer"
        raise ArgumentError(f"{label} is not in {path}, which has {has}; load it without, or pass optimizers as saved")
    saved_kind, saved_groups = state.optimizers[label]
    if saved_kind != kind:
        raise ArgumentError(f"{path} has the state of {saved_kind}, but the {label} is {kind}; make the same kind")
    if len(saved_groups) != len(groups):
        raise ArgumentError(
            f"{path} has {len(saved_groups)} groups of parameters, but the {label} {len(groups)}; make the groups as "
            "they were, on every rank: a group may be empty"
        )
    old_index = {name: index for index, (names, _) in enumerate(saved_groups) for name in names}
    new_index = {name: index for index, names in enumerate(groups) for name in names}
    for name, _ in pipe.named_parameters():
        if old_index.get(name) != new_index.get(name):
            was, now = ("in none" if n is None else f"in group {n}" for n in (old_index.get(name), new_index.get(name)))
            raise ArgumentError(
                f"{path}: {name} was {was} of the {label}'s groups, and is {now} now; make the groups as they were"
            )
