"""How the switch's inner loop is compiled, and where the compiled code is kept."""

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
    """Where to keep code compiled from these; None if numba must find a place, as nothing may be written there.

    numba itself checks only the function's own file, and would go on with constants that have changed in another.
    """
    beside = Path(__file__).parent
    if not os.access(beside, os.W_OK):
        return None
    digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()
    return beside / "__pycache__" / f"numba-{digest[:16]}"


def _options() -> dict[str, bool]:
    """Turns off numba's reference counting of arrays, which took ten times as long as the work itself.

    Nothing here creates an array, and Python holds the existing ones. The option is undocumented: a numba without
    it makes a slower switch.
    """
    try:
        _njit("int64()", _nrt=False)(lambda: 0)
    except KeyError:
        return {"cache": True}
    return {"cache": True, "_nrt": False}


_FOLDER = folder(_SOURCES)
_OPTIONS = _options()


def compiled(function: F) -> F:
    """The function on arrays and integers alone, compiled when it is first called."""
    before = _config.CACHE_DIR
    if _FOLDER is not None:
        _config.CACHE_DIR = str(_FOLDER)
    try:
        made: F = _njit(**_OPTIONS)(function)
    finally:
        _config.CACHE_DIR = before
    return made
