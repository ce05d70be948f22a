"""Columns of numbers for a page: packed as base64 of typed arrays, or as plain lists."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NAMES = {"float64": "f8", "int32": "i4", "int16": "i2", "int8": "i1", "uint8": "u1"}
_WHOLE = (np.int8, np.int16, np.int32)


def packed(column: NDArray[Any]) -> dict[str, str]:
    """A column as {type, base64}, little-endian, which `bands.js` reads. Whole numbers take the least room."""
    if column.dtype.kind in "iu":
        low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
        kind: Any = next(one for one in _WHOLE if np.iinfo(one).min <= low and high <= np.iinfo(one).max)
    else:
        kind = np.float64
    made = np.ascontiguousarray(column, np.dtype(kind).newbyteorder("<"))
    return {"type": _NAMES[np.dtype(kind).name], "base64": base64.b64encode(made.tobytes()).decode("ascii")}


def for_page(value: Any, *, pack: bool = True) -> Any:
    """A value of dicts, lists and columns (numpy arrays) as plain values for JSON, columns packed or as lists."""
    if isinstance(value, np.ndarray):
        return packed(value) if pack else value.tolist()
    if isinstance(value, dict):
        return {key: for_page(one, pack=pack) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [for_page(one, pack=pack) for one in value]
    return value
