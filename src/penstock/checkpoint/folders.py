"""Where checkpoints lie, and how one appears atomically. Nothing here knows what they contain.

    .step-N.new    is being written; left by a crash, it is deleted by the next save
    step-N         is whole: it got this name in one rename
    .step-N.old    is whole too; a second save of step N puts it aside, so that it counts if there is no step-N
    .step-N.gone   is being deleted

No folder is ever written to, or deleted, under a name that is loaded: a crash at any point leaves the last good one.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from penstock.errors import ArgumentError

METADATA = ".metadata"
"""What `torch.distributed.checkpoint` writes last."""

_WHOLE = re.compile(r"step-(\d+)|\.step-(\d+)\.old")


def name_of(step: int) -> str:
    """The name of the checkpoint after this number of steps."""
    return f"step-{step:08d}"


def latest(folder: str | Path) -> Path | None:
    """The checkpoint with the most steps in a folder of checkpoints; None if there is none."""
    found = _found(Path(folder))
    return found[max(found)] if found else None


def find(path: Path) -> Path | None:
    """The latest checkpoint of a folder, or the one that the path itself names. None if there is none.

    Raises ArgumentError if the path names a single checkpoint that does not exist.
    """
    if is_whole(path):
        return path
    if match := _WHOLE.fullmatch(path.name):
        there = _found(path.parent)
        if int(match[1] or match[2]) in there:
            return there[int(match[1] or match[2])]
        names = ", ".join(there[step].name for step in sorted(there)) or "none"
        raise ArgumentError(f"there is no complete checkpoint {path}; its folder has {names}")
    return latest(path)


def is_whole(path: Path) -> bool:
    """Whether a folder is a completely written checkpoint."""
    return (path / METADATA).is_file()


def prepare(parent: Path, step: int) -> Path:
    """A new folder to write a checkpoint to. Deletes or repairs what a crash left behind.

    Raises OSError.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for left in (*parent.glob(".step-*.new"), *parent.glob(".step-*.gone")):
        shutil.rmtree(left)
    for old in parent.glob(".step-*.old"):
        final = parent / old.name.removeprefix(".").removesuffix(".old")
        if final.exists():
            _delete(old)
        else:
            old.rename(final)
    aside = parent / f".{name_of(step)}.new"
    aside.mkdir()
    return aside


def publish(aside: Path, keep: int | None, files: Iterable[str]) -> Path:
    """Makes a written folder a checkpoint, and deletes what is older than the last `keep`.

    Args:
        aside: from `prepare`.
        keep: how many stay; None: all.
        files: what the ranks report having written; this process must see all of them.

    Raises OSError, and ArgumentError if a file is not there.
    """
    missing = [name for name in files if not (aside / name).is_file()]
    if missing:
        raise ArgumentError(
            f"{aside.parent} must be a folder that all ranks see: {missing[0]} was written by another rank, but is not "
            "there for the first"
        )
    final = aside.parent / aside.name.removeprefix(".").removesuffix(".new")
    old = aside.parent / f".{final.name}.old"
    _sync(aside)
    if final.exists():
        final.rename(old)
    aside.rename(final)
    _sync(final.parent)
    if old.exists():
        _delete(old)
    if keep is not None:
        found = _found(final.parent)
        for step in sorted(found)[:-keep]:
            if found[step] != final:
                _delete(found[step])
    return final


def _found(parent: Path) -> dict[int, Path]:
    """The whole checkpoints of a folder, by step."""
    found: dict[int, Path] = {}
    for path in sorted(parent.iterdir() if parent.is_dir() else ()):  # .step-N.old comes before step-N, which wins
        match = _WHOLE.fullmatch(path.name)
        if match and is_whole(path):
            found[int(match[1] or match[2])] = path
    return found


def _delete(path: Path) -> None:
    gone = path.with_name(f".{path.name.removeprefix('.').removesuffix('.old')}.gone")
    path.rename(gone)
    shutil.rmtree(gone)


def _sync(folder: Path) -> None:
    """Flushes the names that a rename has given to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
