"""`torch.distributed.checkpoint` on a folder: tensors and pickles by name, which all ranks write and any can read."""

from __future__ import annotations

import io
import math
import pickle
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from penstock._base.errors import ArgumentError, CheckpointError
from penstock._base.files import read_bytes
from penstock._base.formatting import one_line, printable_line
from penstock.checkpoint.contents import GLOBAL_STATE, GlobalState
from penstock.checkpoint.folders import METADATA
from penstock.checkpoint.unpickling import NotAllowedError, unpickle


def silence_warnings() -> None:
    """Silence torch's warning that one process works alone, which is intended here.

    Permanently: `catch_warnings` would cover one thread only.
    """
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


WorkContext = Callable[[], AbstractContextManager[object]]
"""Makes a context for each part of the work that waits for no other rank."""


def write(folder: Path, state: dict[str, Any], group: ProcessGroup | None, working: WorkContext) -> list[str]:
    """Write the state of every rank of a group; None: this process is alone. An entry of several ranks is written once.

    Returns the names of all ranks' files. Raises torch's own errors, on every rank.
    """
    writer = _Writer(folder, working)
    metadata = save(state, storage_writer=writer, process_group=group, no_dist=group is None)
    return sorted({stored.relative_path for stored in metadata.storage_data.values()})


class _Writer(FileSystemWriter):
    """Marks the time it spends on files; in between, ranks wait for each other."""

    def __init__(self, folder: Path, working: WorkContext) -> None:
        super().__init__(folder)
        self._working = working

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        with self._working():
            try:
                return super().write_data(*args, **kwargs)
            except RuntimeError as error:  # torch.save closes its archive after a write has failed, which fails, too
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with self._working():
            super().finish(metadata, results)
        # torch 2.11 fills in a copy of the metadata that it then writes.
        metadata.storage_data = {result.index: result.storage_data for rank in results for result in rank}


class Reader(FileSystemReader):
    """Reads a checkpoint in this process alone.

    Attributes:
        metadata: the contents of the checkpoint. They describe the whole model, and are read only once.
    """

    def __init__(self, path: Path, *, weights_only: bool = True) -> None:
        """Raise CheckpointError if the checkpoint lacks one of its files or its metadata are damaged, or OSError.

        Args:
            path: the checkpoint.
            weights_only: whether to unpickle only what cannot run code. The metadata never are.
        """
        super().__init__(path)
        self._weights_only = weights_only
        file = path / METADATA
        try:
            self.metadata: Metadata = unpickle(read_bytes(file))
            _check(path, self.metadata)
        except ArgumentError:
            raise
        except Exception as error:  # random bytes raise anything
            raise CheckpointError(_damage_message(file, error)) from error
        files = {stored.relative_path for stored in (self.metadata.storage_data or {}).values()}
        missing = [name for name in sorted(files) if not (path / name).is_file()]
        if missing or GLOBAL_STATE not in self.metadata.state_dict_metadata:
            incomplete = f"it lacks {missing[0]}; take another checkpoint, or copy the whole folder" if missing else ""
            reason = incomplete or "it was not written by penstock.checkpoint.save"
            raise CheckpointError(f"{path} cannot be loaded: {reason}")

    def read(self, state: dict[str, Any]) -> None:
        """Read into the tensors in `state`, and replace each None with the stored value.

        Raises CheckpointError, which names the file, if a file is damaged; ArgumentError if a value would run code.
        """
        silence_warnings()
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)  # it fills `state` itself
        try:
            load(state, storage_reader=self, planner=planner, no_dist=True)
        except CheckpointException as failed:
            raise next(iter(failed.failures.values()))[0] from None
        for key, value in state.items():
            if isinstance(value, bytes):
                state[key] = self._unpickle(key, value)

    def _unpickle(self, key: str, data: bytes) -> Any:
        try:
            return unpickle(data) if self._weights_only else pickle.loads(data)
        except NotAllowedError as error:
            raise ArgumentError(
                f"{self.path}: {key!r} needs a class that is not allowed ({printable_line(str(error), 160)}); allow it "
                "with torch.serialization.add_safe_globals, or, if you trust the checkpoint, pass weights_only=False"
            ) from error
        except Exception as error:
            raise CheckpointError(_damage_message(Path(self.path), error)) from error

    def global_state(self) -> GlobalState:
        """Read everything that does not belong to one tensor."""
        state: dict[str, Any] = {GLOBAL_STATE: None}
        self.read(state)
        try:
            return GlobalState(**state[GLOBAL_STATE])
        except (TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(_damage_message(Path(self.path), error)) from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """For torch."""
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """For torch: file by file, so that an error names one."""
        per_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            per_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in per_file.items():
            try:
                future = super().read_data(replace(plan, items=items), planner)
            except OSError:
                raise
            except Exception as error:
                raise CheckpointError(_damage_message(Path(self.path) / name, error)) from error
        return future if per_file else super().read_data(plan, planner)


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read bytes as torch reads tensors; torch itself would unpickle anything here."""
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _check(path: Path, metadata: Metadata) -> None:
    """Raise an error if the metadata are of another type, or describe more than the files in that folder hold."""
    stored_bytes: dict[str, int] = {}
    sizes: dict[str, float] = {}
    for index, stored in metadata.storage_data.items():
        name = stored.relative_path
        if name not in sizes:
            if Path(name).name != name:
                raise ValueError(f"it names {str(name)[:80]!r}, which is not a file of this folder")
            sizes[name] = (path / name).stat().st_size if (path / name).is_file() else math.inf
        if stored.offset < 0 or stored.length < 0 or sizes[name] < stored.offset + stored.length:
            raise ValueError(f"{name} is shorter than stated")
        stored_bytes[index.fqn] = stored_bytes.get(index.fqn, 0) + stored.length
    for name, item in metadata.state_dict_metadata.items():
        if isinstance(item, TensorStorageMetadata):
            if item.size.numel() * item.properties.dtype.itemsize > stored_bytes.get(name, 0):
                raise ValueError(f"{name[:80]!r} is larger than its files")
        elif not isinstance(item, BytesStorageMetadata):
            raise TypeError(f"{str(name)[:80]!r} is neither a tensor nor bytes")


def _damage_message(file: Path, error: Exception) -> str:
    return (
        f"{file} is damaged or not a checkpoint file ({printable_line(one_line(error), 200)}); take another "
        "checkpoint, or copy the whole folder again"
    )
