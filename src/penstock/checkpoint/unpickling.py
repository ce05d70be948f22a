"""Unpickles plain values, tensors and torch's metadata, and nothing that could run code of a checkpoint's author."""

from __future__ import annotations

import io
import pickle
import pickletools
from functools import partial
from typing import Any

import torch

from penstock._base.files import MAX_VALUES, quoted

_METADATA = (
    "Metadata TensorStorageMetadata TensorProperties _MEM_FORMAT_ENCODING ChunkStorageMetadata BytesStorageMetadata "
    "MetadataIndex StorageMeta"
)
_ALLOWED = {
    "builtins": "complex dict frozenset int float list set slice str tuple",
    "collections": "Counter OrderedDict defaultdict deque",
    "numpy": "dtype ndarray",
    "numpy._core.multiarray": "scalar _reconstruct",
    "numpy.core.multiarray": "scalar _reconstruct",
    "pathlib": "Path PosixPath PurePosixPath",
    "pathlib._local": "Path PosixPath PurePosixPath",
    "torch": "Size device",
    "torch._utils": "_rebuild_tensor_v2 _rebuild_parameter",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": _METADATA,
}
"""The names that may be called, by module: those in the states of torch's optimizers and schedulers, numpy's numbers
and arrays, and what `torch.distributed.checkpoint` writes into its metadata."""


def unpickle(data: bytes) -> Any:
    """Read what `pickle` wrote. Any class may be allowed by `torch.serialization.add_safe_globals`, as for
    `torch.load`.

    Raises `NotAllowedError` for anything else, and whatever `pickle` raises if the data are damaged.
    """
    for number, (operation, argument, _) in enumerate(pickletools.genops(data)):
        if number == MAX_VALUES:
            raise pickle.UnpicklingError(f"it has more than {MAX_VALUES:,} operations")
        if operation.name in ("PUT", "LONG_BINPUT") and (argument or 0) > len(data):  # the length of a table
            raise pickle.UnpicklingError(f"it numbers a value {argument}")
    return _Unpickler(io.BytesIO(data)).load()


class NotAllowedError(pickle.UnpicklingError):
    """A class or function that could run any code."""


class _Unpickler(pickle.Unpickler):
    _remaining = MAX_VALUES

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):  # of a tensor, where torch would unpickle anything
            return _load_storage
        if module == "builtins" and name in ("bytearray", "range"):
            return partial(self._build_bounded, super().find_class(module, name))
        if name in _ALLOWED.get(module, "").split():
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        for allowed in torch.serialization.get_safe_globals():
            candidate, path = allowed if isinstance(allowed, tuple) else (allowed, "")
            if (path or f"{candidate.__module__}.{candidate.__qualname__}") == f"{module}.{name}":
                return candidate
        raise NotAllowedError(f"it calls {module}.{name}, which could run any code")

    def _build_bounded(self, kind: Any, *args: Any) -> Any:
        """Build a bytearray or a range: all of a pickle together may not be much longer than it."""
        self._remaining -= sum(abs(arg) for arg in args if isinstance(arg, int))
        if self._remaining < 0:
            raise pickle.UnpicklingError(f"{kind.__name__}{quoted(args)} is too long")
        return kind(*args)


def _load_storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
