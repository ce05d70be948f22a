"""Loads weights from a file of the whole model: each rank reads those of its own stages, one tensor at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from penstock._base.aliases import accept_aliases
from penstock._base.errors import ArgumentError, CheckpointError, require
from penstock._base.files import read_json, validate
from penstock.checkpoint import folders
from penstock.checkpoint.collective import run_on_all_ranks
from penstock.checkpoint.contents import model_key, model_tensors
from penstock.checkpoint.storage import Reader
from penstock.partition.given_model import as_module
from penstock.partition.names import known_names
from penstock.pipe.pipeline import Pipeline
from penstock.runtime.gradients.dtensors import copy_into
from penstock.runtime.model.ownership import Materialize


@accept_aliases(otherwise="init_missing")
def init_from_weights(
    path: str | Path,
    model: nn.Module | Sequence[nn.Module],
    *,
    init_missing: Materialize | None = None,
    strict: bool = True,
) -> Materialize:
    """Return a rule for `pipeline(model, materialize=...)` that fills a model on the meta device from a file.

    Each rank reads only the tensors of its own stages. Values are cast to the model's dtypes.

    Args:
        path: a `.safetensors` file; a folder with `model.safetensors` or `model.safetensors.index.json`, like those of
            `transformers`; a checkpoint, or a folder of checkpoints, of which the latest is used.
        model: the model to be split, on the meta device.
        init_missing: initializes a module for which the file lacks some tensors (non-persistent buffers, say), before
            those in the file are read; None: the module's `reset_parameters()`.
        strict: whether the file must contain exactly the model's parameters and persistent buffers.

    Raises:
        ArgumentError: there is no such file; a tensor is missing, unknown, or of another shape.
        CheckpointError: a file is damaged.
    """
    root = as_module(model)
    source = open_source(path)
    first_names = known_names(root)
    file_names = _match(path, root, first_names, source, strict)

    def rule(module_name: str, module: nn.Module) -> None:
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        prefix = f"{module_name}." if module_name else ""
        matches = [(tensor, file_names.get(first_names[prefix + key])) for key, tensor in tensors]
        if any(name is None for _, name in matches):
            _initialize(module_name, module, init_missing)
        for tensor, name in matches:
            if name is not None:
                source.fill(tensor, name)

    return rule


def import_safetensors(path: str | Path, pipe: Pipeline, *, strict: bool = True) -> None:
    """Read weights into a pipeline's model. Every rank calls it, and reads only the tensors of its own stages.

    Args:
        path: as for `init_from_weights`.
        pipe: a pipeline of a model whose names the file uses; a tied tensor may have any of its names.
        strict: whether the file must contain exactly the model's parameters and persistent buffers.

    Raises:
        ArgumentError: on every rank: there is no such file; a tensor is missing, unknown, or of another shape. Nothing
            has changed.
        CheckpointError: on every rank, if any rank cannot read a file.
    """
    failure = f"cannot read {path}"
    source = run_on_all_ranks(pipe, lambda: open_source(path), failure)
    local = pipe.state_dict()
    first_names = pipe.session.model_parts.names()
    file_names = run_on_all_ranks(pipe, lambda: _match(path, pipe.model, first_names, source, strict), failure)

    def read() -> None:
        for name, tensor in local.items():
            if name in file_names:
                source.fill(tensor, file_names[name])

    run_on_all_ranks(pipe, read, failure)


def _match(
    path: str | Path, model: nn.Module, first_names: Mapping[str, str], source: Source, strict: bool
) -> dict[str, str]:
    """Map the model's names to the file's, which may use any name of a tied tensor. Leaves out what the file lacks.

    Args:
        path: for errors.
        first_names: the first name for every name in the model.
        strict: whether the file must contain exactly the model's saved tensors.
    """
    saved = model.state_dict(keep_vars=True)
    shapes = {first_names[name]: tuple(tensor.shape) for name, tensor in saved.items() if name in first_names}
    file_names = {name: name for name in source.shapes if name in shapes}
    for name in source.shapes:
        file_names.setdefault(first_names.get(name, ""), name)
    file_names.pop("", None)
    missing = [name for name in shapes if name not in file_names]
    unknown = [name for name in source.shapes if name not in first_names and name not in shapes]
    if strict and (missing or unknown):
        lacks, has = (", ".join(names[:4]) or "none" for names in (missing, unknown))
        raise ArgumentError(
            f"{path} does not fit the model (missing: {lacks}; unknown to the model: {has}); pass the weights of "
            "this model, or strict=False to load the tensors that both have"
        )
    for name in shapes.keys() & file_names.keys():
        if source.shapes[file_names[name]] != shapes[name]:
            raise ArgumentError(
                f"{path}: {file_names[name]} has shape {source.shapes[file_names[name]]} there and {shapes[name]} in "
                "the model"
            )
    return {name: file_names[name] for name in shapes if name in file_names}


def _initialize(name: str, module: nn.Module, init_missing: Materialize | None) -> None:
    if init_missing is not None:
        init_missing(name, module)
    elif (reset := getattr(module, "reset_parameters", None)) is not None:
        reset()
    elif any(True for _ in module.parameters(recurse=False)):
        raise ArgumentError(
            f"module {name} ({type(module).__name__}) has parameters that the file lacks, and no reset_parameters(); "
            "pass init_missing=fn(name, module) that sets them"
        )


# -- sources of weights: files, or a checkpoint, read one tensor at a time ---------------------------------------------

_COPY = "copy the whole folder again"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
"""The `transformers` library's names for a single file of weights, and for the index of several."""


@dataclass(frozen=True, slots=True)
class Source:
    """Tensors by name.

    Attributes:
        shapes: each tensor's shape.
        fill: copies the named tensor into a tensor of its shape, casting to its dtype.
    """

    shapes: Mapping[str, tuple[int, ...]]
    fill: Callable[[Tensor, str], None]


def open_source(path: str | Path) -> Source:
    """Open the weights at a path, as for `init_from_weights`. Raise ArgumentError if it is none of these, and
    CheckpointError if a file is damaged."""
    path = Path(path).absolute()  # it is read later, maybe after a chdir
    if path.is_file():
        return _files_source([path])
    if (path / _SINGLE).is_file():
        return _files_source([path / _SINGLE])
    if (path / _INDEX).is_file():
        description = str(path / _INDEX)
        try:
            index = validate(dict[str, Any], read_json(path / _INDEX), description)
            files = validate(dict[str, str], index.get("weight_map"), f"{description}: weight_map")
        except ArgumentError as error:
            raise CheckpointError(f"{error}; {_COPY}") from None
        paths = [path / name for name in sorted(set(files.values()))]
        if missing := [p for p in paths if not p.is_file()]:
            raise CheckpointError(f"{path} lacks {missing[0].name}, which {_INDEX} names; {_COPY}")
        return _files_source(paths)
    checkpoint = folders.find(path)
    if checkpoint is None:
        raise ArgumentError(
            f"{path}: expected a .safetensors file, a folder with {_SINGLE} or {_INDEX}, or a checkpoint"
        )
    return _checkpoint_source(checkpoint)


def _files_source(paths: Sequence[Path]) -> Source:
    """Return the weights in `safetensors` files. A file is open only while it is read, to free its pages."""
    paths_by_name: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                paths_by_name[name], shapes[name] = path, tuple(file.get_slice(name).get_shape())

    def fill(tensor: Tensor, name: str) -> None:
        with _open(paths_by_name[name]) as file:
            copy_into(tensor.detach(), file.get_tensor(name))

    return Source(shapes, fill)


def _checkpoint_source(path: Path) -> Source:
    """Return the weights of the model in a checkpoint."""
    reader = Reader(path)

    def fill(tensor: Tensor, name: str) -> None:
        # Torch's reader is part of reference cycles, with what it read last: without a collection several tensors of
        # a large model would be there at once. And it reads straight into the tensor, not into a temporary one.
        reader.read({model_key(name): tensor.detach()})
        gc.collect(1)

    return Source({name: tuple(tensor.shape) for name, tensor in model_tensors(reader.metadata).items()}, fill)


def _open(path: Path) -> Any:
    require("safetensors", "safetensors", for_what=f"reading {path}")
    from safetensors import SafetensorError, safe_open

    if path.exists() and not path.is_file():
        raise ArgumentError(f"{path} is not a safetensors file: expected a regular file")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        problem = f"{path} is not a safetensors file: {error}"
        if path.suffix != ".safetensors":
            raise ArgumentError(f"{problem}; safetensors.torch.save_file makes one of a state_dict") from None
        raise CheckpointError(f"{problem}; {_COPY}") from None
