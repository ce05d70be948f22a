"""`torch.distributed.checkpoint` on a folder: tensors and pickles by name, which all ranks write and any can read."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from penstock.checkpoint.contents import REST, Rest
from penstock.errors import ArgumentError


def hush() -> None:
    """Silences torch's warning that one process works alone, which is intended here.

    Permanently: `catch_warnings` would cover one thread only.
    """
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


Around = Callable[[], AbstractContextManager[object]]
"""Makes a context for each part of the work that waits for no other rank."""


def write(folder: Path, state: dict[str, Any], group: ProcessGroup | None, alone: Around) -> list[str]:
    """Writes what every rank of a group holds; None: this process is alone. What several ranks hold is written once.

    Returns the names of all ranks' files. Raises torch's own errors, on every rank.
    """
    writer = _Writer(folder, alone)
    metadata = save(state, storage_writer=writer, process_group=group, no_dist=group is None)
    return sorted({stored.relative_path for stored in metadata.storage_data.values()})


class _Writer(FileSystemWriter):
    """Marks the time it spends on files; in between, ranks wait for each other."""

    def __init__(self, folder: Path, alone: Around) -> None:
        super().__init__(folder)
        self._alone = alone

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        with self._alone():
            return super().write_data(*args, **kwargs)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with self._alone():
            super().finish(metadata, results)
        # torch 2.11 fills in a copy of the metadata that it then writes.
        metadata.storage_data = {result.index: result.storage_data for rank in results for result in rank}


class Reader:
    """Reads a checkpoint in this process alone.

    Attributes:
        path: the checkpoint's path.
        metadata: what the checkpoint contains.
    """

    def __init__(self, path: Path) -> None:
        """Raises ArgumentError if the checkpoint lacks one of its files, OSError if it cannot be read."""
        self.path = path
        self._reader = _OnceRead(path)
        self.metadata = self._reader.read_metadata()
        files = {stored.relative_path for stored in (self.metadata.storage_data or {}).values()}
        missing = [name for name in sorted(files) if not (path / name).is_file()]
        if missing or REST not in self.metadata.state_dict_metadata:
            what = f"it lacks {missing[0]}" if missing else "it was not written by penstock.checkpoint.save"
            raise ArgumentError(f"{path} cannot be loaded: {what}; take another checkpoint, or copy the whole folder")

    def read(self, state: dict[str, Any]) -> None:
        """Reads into the tensors in `state`, and replaces each None with the stored value."""
        hush()
        load(state, storage_reader=self._reader, no_dist=True)

    def rest(self) -> Rest:
        """Everything that does not belong to one tensor."""
        state: dict[str, Any] = {REST: None}
        self.read(state)
        return Rest.from_bytes(state[REST])


class _OnceRead(FileSystemReader):
    """Reads the metadata, which describe the whole model, only once, however often something else is read."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata
