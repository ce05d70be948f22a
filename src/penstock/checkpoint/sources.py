"""Sources of a whole model's weights, read one tensor at a time: one or more `safetensors` files, or a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from penstock.checkpoint import folders
from penstock.checkpoint.contents import model_key, model_tensors
from penstock.checkpoint.storage import Reader
from penstock.errors import ArgumentError, require
from penstock.files import read_json, validate
from penstock.runtime.gradients.distribution import copy_into

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
"""The `transformers` library's names for a single file of weights, and for the index of several."""


class Source(Protocol):
    """Tensors by name."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor in the source, by name."""

    def fill(self, tensor: Tensor, name: str) -> None:
        """Copies the named tensor's values into `tensor`, which has the same shape, casting to its dtype."""


def source_of(path: str | Path) -> Source:
    """The weights at a path.

    Args:
        path: a `.safetensors` file; a folder with `model.safetensors`, or with `model.safetensors.index.json` and the
            files that it names; a checkpoint, or a folder of checkpoints, of which the latest is used.

    Raises:
        ArgumentError: the path is none of these.
    """
    path = Path(path).absolute()  # it is read later, maybe after a chdir
    if path.is_file():
        return SafetensorsFiles([path])
    if (path / _SINGLE).is_file():
        return SafetensorsFiles([path / _SINGLE])
    if (path / _INDEX).is_file():
        what = str(path / _INDEX)
        index = validate(dict[str, Any], read_json(path / _INDEX), what)
        files = validate(dict[str, str], index.get("weight_map"), f"{what}: weight_map")
        return SafetensorsFiles([path / name for name in sorted(set(files.values()))])
    checkpoint = folders.find(path)
    if checkpoint is None:
        raise ArgumentError(
            f"{path}: expected a .safetensors file, a folder with {_SINGLE} or {_INDEX}, or a checkpoint"
        )
    return Checkpoint(checkpoint)


class SafetensorsFiles:
    """One or more `safetensors` files. A file is open only while it is read, so that its pages can be freed."""

    def __init__(self, paths: list[Path]) -> None:
        self._path_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            with _opened(path) as file:
                names = list(file.keys())
                self._path_of |= dict.fromkeys(names, path)
                self.shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}

    def fill(self, tensor: Tensor, name: str) -> None:
        with _opened(self._path_of[name]) as file:
            copy_into(tensor.detach(), file.get_tensor(name))


class Checkpoint:
    """The model in a checkpoint."""

    def __init__(self, path: Path) -> None:
        self._reader = Reader(path)
        like = model_tensors(self._reader.metadata)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in like.items()}

    def fill(self, tensor: Tensor, name: str) -> None:
        # Read straight into the tensor: torch's reader is part of reference cycles, so a temporary tensor given to it
        # would live until the garbage collector runs.
        self._reader.read({model_key(name): tensor.detach()})


def _opened(path: Path) -> Any:
    require("safetensors", "safetensors", for_what=f"reading {path}")
    from safetensors import SafetensorError, safe_open

    if path.exists() and not path.is_file():
        raise ArgumentError(f"{path} is not a safetensors file: expected a regular file")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ArgumentError(f"{path} is not a safetensors file: {error}") from None
