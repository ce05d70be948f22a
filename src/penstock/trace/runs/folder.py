"""The files of a run, and functions that write them: as a whole, or a line at a time."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from penstock._base.files import remove_leftovers

ABOUT = "run.json"
PREDICTED = "predicted.json"
STEPS = "steps.jsonl"
TIMELINES = "timelines"
MEMORY = "memory"
PREDICTED_MEMORY = "memory/predicted.json"
RANKS = "ranks"
EARLIER = "earlier"

_NUMBERED = re.compile(r"(\d+)\.json")


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Add lines to a file. Raise OSError; then the file is as it was before."""
    data = "".join(lines).encode()
    with path.open("ab", buffering=0) as file:  # what a buffer kept would be written when it closes, after the cut
        size = file.seek(0, os.SEEK_END)
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(path, size)
            raise


def end_last_line(path: Path) -> None:
    """End the line in which a crash left a file, so that the next begins on its own. Raise OSError."""
    with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
        if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
            file.write(b"\n")


def list_numbers(folder: Path) -> list[int]:
    """Return the numbers of the files N.json in a folder, ascending."""
    try:
        matches = [_NUMBERED.fullmatch(name) for name in os.listdir(folder)]
    except OSError:
        return []
    return sorted(int(match[1]) for match in matches if match)


def set_aside(folder: Path, names: Iterable[str]) -> None:
    """Move files and folders of an earlier run to earlier/N. Raise OSError."""
    existing = [name for name in names if (folder / name).exists()]
    if not existing:
        return
    earlier = folder / EARLIER
    earlier.mkdir(exist_ok=True)
    number = 1 + max((int(name) for name in os.listdir(earlier) if name.isdecimal()), default=0)
    (earlier / str(number)).mkdir()
    for name in existing:
        (folder / name).rename(earlier / str(number) / name)


def clear(folder: Path, first_number: int = 0) -> None:
    """Remove the files N.json of a folder from a number on, and what a crash left half written. Raise OSError."""
    for number in list_numbers(folder):
        if number >= first_number:
            (folder / f"{number}.json").unlink(missing_ok=True)
    remove_leftovers(folder)
