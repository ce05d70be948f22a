"""Compiles inner loops with numba, and decides where the compiled code is kept."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from numba import config, njit

F = TypeVar("F", bound=Callable[..., Any])

_njit: Any = njit
_config: Any = config


def compiler(sources: Sequence[Path]) -> Callable[[F], F]:
    """Return a decorator that compiles a function of arrays and numbers when it is first called.

    Args:
        sources: all files whose code or constants end up in the compiled functions, which lie in the first one's
            folder. numba itself checks only the function's own file, and would go on using constants that have changed
            in another.
    """
    cache = folder(sources)

    def decorate(function: F) -> F:
        before = _config.CACHE_DIR
        if cache is not None:
            _config.CACHE_DIR = str(cache)
        try:
            compiled: F = _njit(**_OPTIONS)(function)
        finally:
            _config.CACHE_DIR = before
        return compiled

    return decorate


def folder(sources: Sequence[Path]) -> Path | None:
    """Return where to keep code compiled from these sources; None if that is not writable: numba must find a place."""
    directory = sources[0].parent
    if not os.access(directory, os.W_OK):
        return None
    digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()
    return directory / "__pycache__" / f"numba-{digest[:16]}"


def _options() -> dict[str, bool]:
    """Return numba's options, which turn off reference counting of arrays: it took ten times as long as the work.

    This is safe because nothing here creates an array, and Python holds the existing ones. The option is undocumented;
    with a numba that does not have it, the loops are just slower.
    """
    try:
        _njit("int64()", _nrt=False)(lambda: 0)
    except KeyError:
        return {"cache": True}
    return {"cache": True, "_nrt": False}


_OPTIONS = _options()
