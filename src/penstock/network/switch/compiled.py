"""Compile the switch's inner loop, and decide where the compiled code is kept."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from numba import config, njit

F = TypeVar("F", bound=Callable[..., Any])

_njit: Any = njit
_config: Any = config
_SOURCES = (*sorted(Path(__file__).parent.glob("*.py")), Path(__file__).parents[1] / "model.py")


def folder(sources: Iterable[Path]) -> Path | None:
    """Returns where to keep code compiled from these sources; None if that is not writable and numba must find a place.

    numba itself checks only the function's own file, and would go on using constants that have changed in another.
    """
    beside = Path(__file__).parent
    if not os.access(beside, os.W_OK):
        return None
    digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()
    return beside / "__pycache__" / f"numba-{digest[:16]}"


def _options() -> dict[str, bool]:
    """Returns numba's options, which turn off reference counting of arrays: it took ten times as long as the work.

    This is safe because nothing here creates an array, and Python holds the existing ones. The option is undocumented;
    with a numba that does not have it, the switch is just slower.
    """
    try:
        _njit("int64()", _nrt=False)(lambda: 0)
    except KeyError:
        return {"cache": True}
    return {"cache": True, "_nrt": False}


_FOLDER = folder(_SOURCES)
_OPTIONS = _options()


def compiled(function: F) -> F:
    """Compiles a function of arrays and integers when it is first called."""
    before = _config.CACHE_DIR
    if _FOLDER is not None:
        _config.CACHE_DIR = str(_FOLDER)
    try:
        made: F = _njit(**_OPTIONS)(function)
    finally:
        _config.CACHE_DIR = before
    return made
