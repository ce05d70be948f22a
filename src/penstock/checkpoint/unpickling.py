"""Unpickles plain values, tensors and torch's metadata, and nothing that could run code of a checkpoint's author.

A small pickle can also ask for endless work: to copy one list a thousand times, or to hash a tuple of a tuple of a
tuple, each twice in the next. So each operation pays for what it will look at before it runs.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType
from typing import IO, Any

import numpy
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from penstock.files import MAX_VALUES, quoted

_METADATA = (
    "Metadata TensorStorageMetadata TensorProperties _MEM_FORMAT_ENCODING ChunkStorageMetadata BytesStorageMetadata "
    "MetadataIndex StorageMeta"
)
_KNOWN = {
    "builtins": "bytearray complex dict frozenset int float list range set slice str tuple",
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


_BYTES_PER_VALUE = 64
"""What a value takes, roughly."""
_PICKLES = 5
"""Before the data in torch's older format."""
_MOST = 2 * MAX_VALUES
"""Values that a pickle may make, hash and copy: of the metadata of 36,000 tensors."""
_MAX_OPERATIONS, _MAX_REPEATED = 1000, 32
"""Of the pickle of one tensor, and those among them that take a value again, so that none unfolds to much."""


def unpickle(data: bytes) -> Any:
    """What `pickle` wrote. Any class may be allowed by `torch.serialization.add_safe_globals`, as for `torch.load`.

    Raises `NotAllowedError` for anything else, and whatever `pickle` raises if the data are damaged.
    """
    return _Unpickler(data).load()


def check_archive(raw: Any) -> None:
    """Raises an error if `torch.load` would make more of a file than there is: `torch.save` packs nothing, and saves
    one tensor, storage, or text of bytes at a time here."""
    with io.BufferedReader(raw) as file:
        if file.peek(4).startswith(b"PK"):
            with zipfile.ZipFile(file) as archive:
                if sum(entry.file_size for entry in archive.infolist()) > file.seek(0, io.SEEK_END):
                    raise pickle.UnpicklingError("it unpacks to more than it has")
                (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
                _check_pickle(io.BytesIO(archive.read(name)))
        else:
            for _ in range(_PICKLES):
                _check_pickle(file)


def _check_pickle(file: IO[bytes]) -> None:
    again = 0
    for number, (operation, argument, _) in enumerate(pickletools.genops(file)):
        again += operation.name in ("BINGET", "LONG_BINGET")
        if number > _MAX_OPERATIONS or again > _MAX_REPEATED:
            raise pickle.UnpicklingError("it is too long for one tensor")
        if isinstance(argument, str) and argument.endswith(" bytearray"):  # torch allows one of any length
            raise NotAllowedError("it calls bytearray")


class NotAllowedError(pickle.UnpicklingError):
    """A class or function that could run any code."""


class _Unpickler(pickle._Unpickler):
    """The one in Python: of the one in C, no operation can be looked at before it runs."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._left = _MOST

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):  # of a tensor, where torch would unpickle anything
            return _storage
        if name in _KNOWN.get(module, "").split():
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        for allowed in torch.serialization.get_safe_globals():
            found, path = allowed if isinstance(allowed, tuple) else (allowed, "")
            if (path or f"{found.__module__}.{found.__qualname__}") == f"{module}.{name}":
                return found
        raise NotAllowedError(f"it calls {module}.{name}, which could run any code")

    def spend(self, values: Iterable[Any], amount: int = 0) -> None:
        """Pays for an operation that hashes or copies these values, with what is in them."""
        self._left -= amount
        for value in values:
            self._left -= 1
            if isinstance(value, (str, bytes, bytearray)):
                self._left -= len(value) // _BYTES_PER_VALUE
            elif isinstance(value, (tuple, list, set, frozenset, dict)):
                self.spend(value)
            elif isinstance(value, range):
                self._left -= len(value)
            elif isinstance(value, MetadataIndex):
                self.spend(vars(value).values())
            elif isinstance(value, numpy.dtype):
                self._left -= value.itemsize // _BYTES_PER_VALUE
            if self._left < 0:
                break
        if self._left < 0:
            raise pickle.UnpicklingError(f"it is too long: more than {_MOST:,} values")


def _call(stack: list[Any]) -> Iterable[Any]:
    """What a call looks at: its arguments. Raises NotAllowedError: `pickle` writes no such call."""
    function: Any = stack[-2]
    arguments: tuple[Any, ...] = stack[-1]
    first = arguments[0] if arguments else None
    if (
        function in (str, numpy.ndarray)  # a text of all that is in a list; an array of any size
        or (function is numpy.dtype and not isinstance(first, str))
        or (getattr(function, "__name__", "") == "_reconstruct" and arguments[1] != (0,))
    ):
        raise NotAllowedError(f"it calls {function.__name__}{quoted(arguments)}")
    if function is bytearray:
        return (range(first),) if isinstance(first, int) else arguments
    if isinstance(first, (str, bytes, bytearray)) and function.__module__ in ("builtins", "collections", "torch"):
        return (range(len(first)),)
    return arguments


def _state(stack: list[Any]) -> Iterable[Any]:
    """What is put into an object. Raises NotAllowedError: it would go into a class or a function of everybody's."""
    made, state = stack[-2:]
    if isinstance(made, (type, FunctionType, BuiltinFunctionType)):
        raise NotAllowedError(f"it changes {quoted(made)}")
    return state if isinstance(state, tuple) else ()


_LOOKS_AT: dict[bytes, Callable[[list[Any]], Iterable[Any]]] = {
    pickle.REDUCE: _call,
    pickle.NEWOBJ: _call,
    pickle.BUILD: _state,
    pickle.SETITEM: lambda stack: stack[-2:-1],
    pickle.SETITEMS: lambda stack: stack[::2],
    pickle.DICT: lambda stack: stack[::2],
    pickle.ADDITEMS: lambda stack: stack,
    pickle.FROZENSET: lambda stack: stack,
}
"""Of the stack, the values that an operation hashes or copies."""
_COSTS = {pickle.REDUCE: 8, pickle.NEWOBJ: 8, pickle.EMPTY_SET: 4, pickle.EMPTY_DICT: 2, pickle.EMPTY_LIST: 2}
"""Of operations that make more than a small value."""
_UNUSED = (pickle.OBJ, pickle.INST, pickle.NEWOBJ_EX, pickle.BYTEARRAY8, pickle.EXT1, pickle.EXT2, pickle.EXT4)
"""No class of those above is written so."""


def _paid(code: bytes, act: Callable[[Any], None]) -> Callable[[Any], None]:
    cost, looks_at = _COSTS.get(code, 1), _LOOKS_AT.get(code, tuple)

    def run(self: Any) -> None:
        self.spend(looks_at(self.stack), cost)
        act(self)

    def run_quickly(self: Any) -> None:  # which most do
        self._left -= cost
        if self._left < 0:
            self.spend(())
        act(self)

    return run if code in _LOOKS_AT else run_quickly


_Unpickler.dispatch = {
    code: _paid(bytes([code]), act) for code, act in pickle._Unpickler.dispatch.items() if bytes([code]) not in _UNUSED
}


def _storage(data: bytes) -> Any:
    check_archive(io.BytesIO(data))
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
