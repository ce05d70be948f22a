"""Checkpoints by `torch.distributed.checkpoint`, under the unsplit model's names: saved by one split, loaded by any.

A checkpoint is written aside and renamed when it is whole, so that a crash never leaves one that loads wrongly.
"""

from __future__ import annotations

import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save as write

from penstock.errors import ArgumentError
from penstock.pipe import Pipeline

_STEP = re.compile(r"step-(\d+)")
_MODEL, _OPTIMIZER, _GROUPS, _REST = "model/", "optimizer/", "optimizer groups", "rest"


class Stateful(Protocol):
    """A scheduler, a scaler: what is the same on every rank."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Restored:
    """What was loaded.

    Attributes:
        path: of the checkpoint.
        step: how many steps had been taken.
        extra: what was given to `save`.
    """

    path: Path
    step: int
    extra: Any


def save(
    folder: str | Path,
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    others: Mapping[str, Stateful] | None = None,
    extra: Any = None,
    keep: int | None = 2,
) -> Path:
    """Writes `folder/step-N`, where N is how many steps the pipeline has taken. Every rank calls it.

    Parameters, persistent buffers and the optimizer's states go by the unsplit model's names, a tied parameter by its
    first. Each rank writes what it holds, to a folder that all ranks see. Those that are older are deleted once the new
    one is whole.

    Args:
        folder: of this run's checkpoints; it is made if it is not there.
        pipe: the pipeline, between two steps.
        optimizer: of `pipe.parameters()`.
        others: a scheduler, a scaler, by names of your choice. Rank 0's are saved.
        extra: anything that can be pickled: how far the data were read. Rank 0's is saved.
        keep: how many checkpoints stay, at least 1; None: all.

    Raises:
        ArgumentError: on every rank, if the folder cannot be written to, or an argument is wrong.
    """
    if keep is not None and keep < 1:
        raise ArgumentError(f"keep={keep}: expected at least 1, or None to keep all")
    parent = Path(folder)
    name = f"step-{pipe.step_count:08d}"
    aside, final = parent / f".{name}.new", parent / name
    _together(pipe, lambda: _prepare(parent, aside), f"checkpoints cannot be written to {parent}")
    state: dict[str, Any] = {_MODEL + key: tensor for key, tensor in pipe.state_dict().items()}
    if optimizer is not None:
        state |= dict(_optimizer_states(pipe, optimizer))
    if pipe.world.rank in (None, 0):
        rest = {
            "step": pipe.step_count,
            "seed": pipe.seed,
            "extra": extra,
            "others": {key: other.state_dict() for key, other in (others or {}).items()},
        }
        state[_REST] = pickle.dumps(rest)  # dicts and lists would become many entries
        if optimizer is not None:
            state[_GROUPS] = pickle.dumps(_group_options(optimizer))
    writer = FileSystemWriter(aside)
    with _quiet():
        write(state, storage_writer=writer, process_group=pipe.control_group, no_dist=pipe.world.is_local)
    _together(pipe, lambda: _publish(parent, aside, final, keep), f"the checkpoint cannot be renamed to {final}")
    return final


def latest(folder: str | Path) -> Path | None:
    """The checkpoint with the most steps in a folder of checkpoints; None if there is none."""
    found = _checkpoints(Path(folder))
    return found[-1] if found else None


def load(
    folder: str | Path,
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    others: Mapping[str, Stateful] | None = None,
) -> Restored | None:
    """Loads the latest checkpoint of a folder, or the one that the path names. Every rank calls it.

    The pipeline may be split in another way, by another schedule, over another number of ranks. Training goes on as it
    would have: the random streams, too, are where they were.

    Args:
        folder: as for `save`, or one of the checkpoints in it.
        pipe: of the same model.
        optimizer: of `pipe.parameters()`, of the same kind, with as many groups. A parameter stays in its group.
        others: as for `save`.

    Returns:
        None if there is no checkpoint: then nothing was changed.

    Raises:
        ArgumentError: the checkpoint is not of this model, or lacks something that is asked for.
    """
    path = Path(folder) if (Path(folder) / ".metadata").is_file() else latest(folder)
    path = pipe.gather(path)[0]  # another rank may have looked before the folder was there
    if path is None:
        return None
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    _check_names(path, pipe, metadata)
    state: dict[str, Any] = {_MODEL + key: tensor for key, tensor in pipe.state_dict().items()}
    state[_REST] = None
    if optimizer is not None:
        if _GROUPS not in metadata.state_dict_metadata:
            raise ArgumentError(f"{path} has no optimizer; load it without, or save one")
        state |= dict(_empty_states(pipe, metadata))
        state[_GROUPS] = None
    with _quiet():
        read(state, storage_reader=reader, process_group=pipe.control_group, no_dist=pipe.world.is_local)
    rest = pickle.loads(state[_REST])
    for key, other in (others or {}).items():
        if key not in rest["others"]:
            there = ", ".join(rest["others"]) or "none"
            raise ArgumentError(f"others[{key!r}] is not in {path}, which has {there}")
        other.load_state_dict(rest["others"][key])
    if optimizer is not None:
        _load_optimizer(path, pipe, optimizer, state)
    pipe.restore(step_count=rest["step"], seed=rest["seed"])
    return Restored(path, rest["step"], rest["extra"])


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that there is one process only, which is as it should be."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


# -- the optimizer ----------------------------------------------------------------------------------------------------


def _optimizer_states(pipe: Pipeline, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """The state of each parameter, by `optimizer/NAME/KEY`."""
    for name, parameter in pipe.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{_OPTIMIZER}{name}/{key}", value


def _empty_states(pipe: Pipeline, metadata: Metadata) -> Iterator[tuple[str, Any]]:
    """What the checkpoint has for the parameters of this process, as tensors to load into."""
    held = dict(pipe.named_parameters())
    for path, stored in metadata.state_dict_metadata.items():
        name, _, key = path.removeprefix(_OPTIMIZER).rpartition("/")
        if path.startswith(_OPTIMIZER) and name in held:
            device = "cpu" if key == "step" else held[name].device
            if isinstance(stored, TensorStorageMetadata):
                yield path, torch.empty(stored.size, dtype=stored.properties.dtype, device=device)
            else:
                yield path, None


def _group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _load_optimizer(path: Path, pipe: Pipeline, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    options = pickle.loads(state[_GROUPS])
    if len(options) != len(optimizer.param_groups):
        raise ArgumentError(
            f"{path} has {len(options)} groups of parameters, but the optimizer {len(optimizer.param_groups)}; make "
            "the same groups on every rank"
        )
    names = {id(parameter): name for name, parameter in pipe.named_parameters()}
    own: dict[str, dict[str, Any]] = {}
    for full, value in state.items():
        if full.startswith(_OPTIMIZER):
            name, _, key = full.removeprefix(_OPTIMIZER).rpartition("/")
            own.setdefault(name, {})[key] = value
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = iter(range(len(order)))
    groups = [
        {**option, "params": [next(numbers) for _ in group["params"]]}
        for option, group in zip(options, optimizer.param_groups, strict=True)
    ]
    states = {number: own.get(names.get(id(parameter), ""), {}) for number, parameter in enumerate(order)}
    optimizer.load_state_dict({"state": {n: s for n, s in states.items() if s}, "param_groups": groups})


# -- folders ----------------------------------------------------------------------------------------------------------


def _together(pipe: Pipeline, act: Callable[[], None], fails: str) -> None:
    """Does something on the first rank while the others wait; all of them raise if it fails."""
    said = None
    if pipe.world.rank in (None, 0):
        try:
            act()
        except OSError as error:
            said = f"{fails}: {error.strerror or error}"
    said = pipe.gather(said)[0]
    if said is not None:
        raise ArgumentError(said)


def _prepare(parent: Path, aside: Path) -> None:
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(".step-*.new"):  # of a run that was killed
        shutil.rmtree(left)
    aside.mkdir()


def _publish(parent: Path, aside: Path, final: Path, keep: int | None) -> None:
    old = parent / f".{final.name}.old"
    if old.exists():
        shutil.rmtree(old)
    if final.exists():
        final.rename(old)
    aside.rename(final)
    if old.exists():
        shutil.rmtree(old)
    if keep is not None:
        for path in _checkpoints(parent)[:-keep]:
            if path != final:
                shutil.rmtree(path)


def _checkpoints(parent: Path) -> list[Path]:
    """Those that are whole, by their steps."""
    found = [
        (int(match[1]), path)
        for path in (parent.iterdir() if parent.is_dir() else ())
        if (match := _STEP.fullmatch(path.name)) and (path / ".metadata").is_file()
    ]
    return [path for _, path in sorted(found)]


def _check_names(path: Path, pipe: Pipeline, metadata: Metadata) -> None:
    saved = {name.removeprefix(_MODEL) for name in metadata.state_dict_metadata if name.startswith(_MODEL)}
    own = pipe.state_dict()
    missing = [name for name in own if name not in saved]
    foreign = sorted(saved - set(pipe.all_names()))
    if missing or foreign:
        some = ", ".join((missing or foreign)[:4])
        what = f"lacks {len(missing)} of its tensors" if missing else f"has {len(foreign)} tensors that it has not"
        raise ArgumentError(
            f"{path} is not of this model: it {what}, as {some}. Make the model as it was when it was saved"
        )
    for name, tensor in own.items():
        stored = metadata.state_dict_metadata[_MODEL + name]
        size = stored.size if isinstance(stored, TensorStorageMetadata) else ()
        if tuple(size) != tuple(tensor.shape):
            raise ArgumentError(
                f"{path} is not of this model: {name} has shape {tuple(size)} there and {tuple(tensor.shape)} here"
            )
