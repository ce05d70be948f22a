"""The number of the training step under way, for a process that looks on: eight bytes in a file.

The process of rank 0 writes it if the environment names a file; `penstock run --hosts` reads it, so that a network can
change at a step. Writing takes about a microsecond: the file is mapped, and a number is one store.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

from penstock._base.errors import ArgumentError

VARIABLE = "PENSTOCK_STEP_FILE"
"""Of the environment: the file."""

NOT_YET = -1
_BYTES = 8


def announcer() -> Callable[[int], None] | None:
    """Return what to call with the number of each training step that begins; None where no launcher reads it, or on
    another rank. Raise ArgumentError if the file cannot be written."""
    path = os.environ.get(VARIABLE)
    if not path or os.environ.get("RANK", "0") != "0":
        return None
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(descriptor).st_size < _BYTES:
                os.pwrite(descriptor, NOT_YET.to_bytes(_BYTES, sys.byteorder, signed=True), 0)
            # As one number of eight bytes, so that no reader sees a half of it; `struct` would write byte by byte.
            number = memoryview(mmap.mmap(descriptor, _BYTES)).cast("q")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ArgumentError(
            f"{VARIABLE} is {path!r}, which cannot be written ({error.strerror}): name a file, or unset it"
        ) from None

    def announce(step: int) -> None:
        number[0] = step

    return announce


def read_step(path: Path | str) -> int:
    """Return the step in a file, counted from 0; -1 before the first."""
    try:
        with open(path, "rb", buffering=0) as file:
            data = file.read(_BYTES)
    except FileNotFoundError:
        return NOT_YET
    return int.from_bytes(data, sys.byteorder, signed=True) if len(data) == _BYTES else NOT_YET
