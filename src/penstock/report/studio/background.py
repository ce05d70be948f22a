"""Reads big files in a process of its own: parsing JSON lets no other thread run, so the page would get no answers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock._base.errors import ArgumentError, PenstockError
from penstock.report.studio.open_view import open_view
from penstock.report.web.page import page
from penstock.report.web.sources import load_contents


def report(path: Path, step: int | None = None) -> str:
    """Render the page of `penstock report`. Raise ArgumentError if there is nothing to report, or no such step."""
    return page(load_contents([path], step))


BIG_BYTES = 8 << 20
MAX_SECONDS = 60.0
_READERS: Mapping[str, Callable[..., Any]] = {"open_view": open_view, "report": report}


def read(reader: str, path: Path, *arguments: Any) -> Any:
    """Return a reader's result for a file or folder. Raise ArgumentError as it does, and if it takes too long."""
    if not any(map(_is_big, path.rglob("*") if path.is_dir() else [path])):
        return _READERS[reader](path, *arguments)
    try:
        result = subprocess.run(
            [sys.executable, "-P", "-m", "penstock.report.studio.background"],
            input=json.dumps([reader, str(path), arguments]),
            capture_output=True,
            text=True,
            timeout=MAX_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise ArgumentError(f"{path} takes more than {MAX_SECONDS:g} s to read; use `penstock explain`") from None
    except subprocess.CalledProcessError as error:
        raise ArgumentError(f"{path} cannot be read: its reader ended with status {error.returncode}") from None
    answer, error_text = json.loads(result.stdout)
    if error_text is not None:
        raise ArgumentError(error_text)
    return answer


def _is_big(file: Path) -> bool:
    """Whether parsing a file may take long: packed ones may be of any size."""
    with contextlib.suppress(OSError):  # it is being replaced, or is a folder
        with file.open("rb") as data:
            return data.read(2) == b"\x1f\x8b" or os.fstat(data.fileno()).st_size >= BIG_BYTES
    return False


def _main() -> None:
    os.nice(10)
    reader, path, arguments = json.load(sys.stdin)
    answer = error_text = None
    try:
        answer = _READERS[reader](Path(path), *arguments)
    except PenstockError as error:
        error_text = str(error)
    json.dump([answer, error_text], sys.stdout)


if __name__ == "__main__":
    _main()
