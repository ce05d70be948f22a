"""Reads big files in a process of its own: parsing JSON lets no other thread run, so the page would get no answers."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ArgumentError
from penstock.studio import opened
from penstock.web.page import page
from penstock.web.sources import shown


def report(path: Path, step: int | None = None) -> str:
    """The page of `penstock report`. Raises ArgumentError if there is nothing to report, or no such step."""
    return page(shown([path], step))


BIG_BYTES = 8 << 20
MAX_SECONDS = 60.0
_READERS: Mapping[str, Callable[..., Any]] = {"opened": opened.opened, "report": report}


def read(reader: str, path: Path, *arguments: Any) -> Any:
    """Return what a reader makes of a file or folder. Raises ArgumentError as it does, and if it takes too long."""
    if not any(map(_is_big, path.rglob("*") if path.is_dir() else [path])):
        return _READERS[reader](path, *arguments)
    with multiprocessing.get_context("spawn").Pool(1, os.nice, (10,)) as one:
        try:
            return one.apply_async(_read, (reader, path, *arguments)).get(MAX_SECONDS)
        except multiprocessing.TimeoutError:
            raise ArgumentError(f"{path} takes more than {MAX_SECONDS:g} s to read; use `penstock explain`") from None


def _read(reader: str, path: Path, *arguments: Any) -> Any:
    return _READERS[reader](path, *arguments)


def _is_big(file: Path) -> bool:
    """Whether parsing a file may take long: packed ones may be of any size."""
    with contextlib.suppress(OSError):  # it was replaced just now, or is a folder
        with file.open("rb") as data:
            return data.read(2) == b"\x1f\x8b" or os.fstat(data.fileno()).st_size >= BIG_BYTES
    return False
