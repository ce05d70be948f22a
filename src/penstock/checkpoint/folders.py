"""The folders of checkpoints, which appear atomically. Nothing here depends on their contents.

    .step-N.new    being written; if a crash leaves one behind, the next save deletes it
    step-N         complete: it got this name in a single rename
    .step-N.old    complete too, moved aside by a second save of step N; it is loaded if there is no step-N
    .step-N.gone   being deleted

No folder is written or deleted under a name that `load` accepts, so a crash at any point leaves the last good one.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from penstock._base.errors import ArgumentError

METADATA = ".metadata"
"""The file that `torch.distributed.checkpoint` writes last."""

_COMPLETE = re.compile(r"step-(\d+)|\.step-(\d+)\.old")


def folder_name(step: int) -> str:
    """Return the name of the checkpoint taken after this many steps."""
    return f"step-{step:08d}"


def latest(folder: str | Path) -> Path | None:
    """Return the checkpoint with the highest step in a folder of checkpoints; None if there is none."""
    checkpoints = _complete_checkpoints(Path(folder))
    return checkpoints[max(checkpoints)] if checkpoints else None


def find(path: Path) -> Path | None:
    """Return the checkpoint that the path names, or the latest in that folder. None if there is none.

    Raises ArgumentError if the path names a single checkpoint and that does not exist.
    """
    if is_complete(path):
        return path
    if match := _COMPLETE.fullmatch(path.name):
        checkpoints = _complete_checkpoints(path.parent)
        if int(match[1] or match[2]) in checkpoints:
            return checkpoints[int(match[1] or match[2])]
        names = ", ".join(checkpoints[step].name for step in sorted(checkpoints)) or "none"
        raise ArgumentError(f"there is no complete checkpoint {path}; its folder has {names}")
    return latest(path)


def is_complete(path: Path) -> bool:
    """Whether a folder is a complete checkpoint."""
    return (path / METADATA).is_file()


def prepare(parent: Path, step: int) -> Path:
    """Make a new folder to write a checkpoint to, in one that this job owns. Delete or repair what a crash left.

    Raises OSError.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for leftover in (*parent.glob(".step-*.new"), *parent.glob(".step-*.gone")):
        shutil.rmtree(leftover)
    for old in parent.glob(".step-*.old"):
        final = parent / old.name.removeprefix(".").removesuffix(".old")
        if final.exists():
            _delete(old)
        else:
            old.rename(final)
    temporary = parent / f".{folder_name(step)}.new"
    temporary.mkdir()
    return temporary


def publish(temporary: Path, keep: int | None, files: Iterable[str]) -> Path:
    """Turn a fully written folder into a checkpoint, and delete all but the last `keep` checkpoints.

    Args:
        temporary: the folder, from `prepare`.
        keep: how many checkpoints to keep; None keeps all.
        files: the files that the ranks report having written; this process must see them all.

    Raises OSError, and ArgumentError if a file is missing.
    """
    missing = [name for name in (*files, METADATA) if not (temporary / name).is_file()]
    if missing:
        raise ArgumentError(
            f"{temporary.parent} must be a folder that all ranks see: {missing[0]} was written by another rank, but is "
            "not there for the first"
        )
    final = temporary.parent / temporary.name.removeprefix(".").removesuffix(".new")
    old = temporary.parent / f".{final.name}.old"
    _sync(temporary)
    if final.exists():
        final.rename(old)
    temporary.rename(final)
    _sync(final.parent)
    if old.exists():
        _delete(old)
    if keep is not None:
        checkpoints = _complete_checkpoints(final.parent)
        for step in sorted(checkpoints)[:-keep]:
            if checkpoints[step] != final:
                _delete(checkpoints[step])
    return final


def _complete_checkpoints(parent: Path) -> dict[int, Path]:
    """Return the complete checkpoints in a folder, by step."""
    checkpoints: dict[int, Path] = {}
    for path in sorted(parent.iterdir() if parent.is_dir() else ()):  # .step-N.old sorts before step-N, which wins
        match = _COMPLETE.fullmatch(path.name)
        if match and is_complete(path):
            checkpoints[int(match[1] or match[2])] = path
    return checkpoints


def _delete(path: Path) -> None:
    renamed = path.with_name(f".{path.name.removeprefix('.').removesuffix('.old')}.gone")
    path.rename(renamed)
    shutil.rmtree(renamed)


def _sync(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a rename in it survives a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
