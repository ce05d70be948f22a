"""Exports the whole model to one `safetensors` file: the first rank writes it, the others send one tensor at a time.

The format is a length, a JSON header and the bytes. The library's own writer would need the whole model in the memory
of one process.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from penstock._base.errors import ArgumentError
from penstock._base.files import atomic
from penstock.checkpoint import folders
from penstock.checkpoint.collective import CHECKPOINT_IO, attempt, run_on_all_ranks
from penstock.checkpoint.contents import model_key, model_tensors
from penstock.checkpoint.storage import Reader, WorkContext
from penstock.pipe.pipeline import Pipeline
from penstock.runtime.gradients.dtensors import gather_full

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A tensor to write, and the process that holds it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owner: int = 0

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def export_safetensors(path: str | Path, pipe: Pipeline, *, metadata: Mapping[str, str] | None = None) -> Path:
    """Write all parameters and persistent buffers to one file, under the unsplit model's names. Every rank calls it.

    A tied tensor is stored once, under its first name; the file's metadata map its other names to that one, as
    `safetensors.torch.save_model` does. `safetensors.torch.load_model(model, path)` loads the file into the unsplit
    model; so does `from_pretrained` of `transformers`, given a `config.json` beside it. The first rank holds only one
    of the other ranks' tensors at a time. The file is written under a temporary name and then renamed.

    Args:
        path: where the first rank writes the file; its folder is created if missing.
        pipe: the pipeline, between two steps.
        metadata: further strings to store in the file, by name.

    Raises:
        ArgumentError: on every rank, if a tensor's dtype has no name in the format.
        CheckpointError: on every rank, if the file cannot be written.
    """
    path = Path(path)
    model_names = set(pipe.session.model_parts.names().values())  # without those of the loss
    local = {name: tensor for name, tensor in pipe.state_dict().items() if name in model_names}
    by_rank = pipe.all_gather_object(
        [FileEntry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in local.items()]
    )
    entries = order_entries(by_rank, pipe.session.model_parts.all_names())
    ties = {name: first for name, first in pipe.session.ties().items() if first in local}
    file_metadata = {name: first for part in pipe.all_gather_object(ties) for name, first in part.items()} | dict(
        metadata or {}
    )
    failure = f"cannot write {path}"
    run_on_all_ranks(pipe, lambda: _check(entries, file_metadata), failure)

    def stream() -> None:
        remaining = iter(entries)
        try:
            if pipe.is_main_process:
                data = (_transfer(pipe, entry, local) for entry in remaining)
                write_file(path, entries, file_metadata, data, partial(pipe.session.control.working, CHECKPOINT_IO))
        finally:
            for entry in remaining:  # on the other ranks; and on the first, if it failed: they still send the others
                _transfer(pipe, entry, local)

    with pipe.session.control.waiting("the weights"):
        future = attempt(stream)
    run_on_all_ranks(pipe, future.result, failure)
    return path


def export_checkpoint(folder: str | Path, path: str | Path, *, weights_only: bool = True) -> Path:
    """Write the model in a checkpoint to one `safetensors` file, like `export_safetensors`, but without the model.

    One tensor is in memory at a time.

    Args:
        folder: a checkpoint, or a folder of checkpoints, of which the latest is used.
        path: the file to write; its folder is created if missing.
        weights_only: as for `load`.

    Raises:
        ArgumentError: there is no checkpoint, or a tensor's dtype has no name in the format.
        CheckpointError: the checkpoint is damaged.
        OSError: the file cannot be written.
    """
    checkpoint = folders.find(Path(folder))
    if checkpoint is None:
        raise ArgumentError(f"{folder}: expected a checkpoint, or a folder of checkpoints")
    reader = Reader(checkpoint, weights_only=weights_only)
    tensors = model_tensors(reader.metadata)
    unordered = [FileEntry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    entries = order_entries([unordered], sorted(tensors))
    ties = {name: first for name, first in reader.global_state().ties.items() if first in tensors}
    _check(entries, ties)

    def read(name: str) -> Tensor:
        tensor = torch.empty_like(tensors[name], device="cpu")
        reader.read({model_key(name): tensor})
        return to_bytes(tensor)

    write_file(Path(path), entries, ties, (read(entry.name) for entry in entries))
    return Path(path)


def _transfer(pipe: Pipeline, entry: FileEntry, local: Mapping[str, Tensor]) -> Tensor:
    """Return a tensor's bytes on the first rank, to which its owner sends them; on the others, what they sent. Every
    rank calls it: a sharded tensor needs all that hold a part."""
    group = pipe.session.control.mesh_group
    rank = 0 if group is None else dist.get_rank(group)
    tensor = gather_full(local[entry.name]) if entry.name in local else None
    if entry.owner == rank and tensor is not None:
        data = to_bytes(tensor)
        if rank and entry.bytes:
            dist.send(data, group=group, group_dst=0)
        return data
    data = torch.empty(entry.bytes if rank == 0 else 0, dtype=torch.uint8)
    if data.numel():
        dist.recv(data, group=group, group_src=entry.owner)
    return data


def write_file(
    path: Path,
    entries: Sequence[FileEntry],
    metadata: Mapping[str, str],
    data: Iterable[Tensor],
    working: WorkContext = nullcontext,
) -> None:
    """Write a `safetensors` file under a temporary name, then rename it.

    Args:
        path: the file.
        entries: its tensors, in order.
        metadata: strings to store, by name.
        data: the bytes of each entry.
        working: makes a context for the work between two items of `data`, which waits for no other rank.

    Raises:
        OSError: the file cannot be written.
    """
    with ExitStack() as stack:
        with working():
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(stack.enter_context(atomic(path)).open("wb"))
            file.write(_header(entries, metadata))
        for tensor in data:
            with working():
                file.write(tensor.numpy().data)
        with working():
            file.flush()
            os.fsync(file.fileno())


def order_entries(by_rank: Sequence[Sequence[FileEntry]], names: Sequence[str]) -> list[FileEntry]:
    """Return every tensor once, from the first process that holds it. Larger dtypes come first, so that all are
    aligned."""
    first_entries = {
        entry.name: replace(entry, owner=owner) for owner in reversed(range(len(by_rank))) for entry in by_rank[owner]
    }
    return sorted(
        (first_entries[name] for name in names if name in first_entries), key=lambda entry: -entry.dtype.itemsize
    )


def _header(entries: Sequence[FileEntry], metadata: Mapping[str, str]) -> bytes:
    """Return the length of the JSON, then the JSON, padded to a multiple of 8 bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.bytes
        header[entry.name] = {"dtype": _DTYPES[entry.dtype], "shape": entry.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _check(entries: Sequence[FileEntry], metadata: Mapping[str, str]) -> None:
    for entry in entries:
        if entry.dtype not in _DTYPES:
            raise ArgumentError(
                f"{entry.name} is of {entry.dtype}, for which a safetensors file has no name; save a checkpoint instead"
            )
    for name, text in metadata.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise ArgumentError(f"metadata: expected texts by name, not {name!r}: {text!r}")


def to_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes on the CPU. A collective if it is sharded."""
    return gather_full(tensor).cpu().contiguous().reshape(-1).view(torch.uint8)
