"""Values in files of JSON: what goes wrong with one is said in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from penstock.errors import ArgumentError


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes a value, a line for each entry. Raises ArgumentError if the file cannot be written."""
    try:
        Path(path).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"{os.fspath(path)!r} cannot be written: {error.strerror}") from error


def read_json(path: str | os.PathLike[str], what: str) -> Any:
    """The value in a file. Raises ArgumentError if it cannot be read, or is not JSON.

    Args:
        what: names the file in messages: "plan 'plan.json'".
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"{what} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{what} is not JSON: {error}") from error
