"""Where in the user's code something happens, for messages: the innermost frame outside torch and Penstock."""

from __future__ import annotations

import os
import sys
import traceback
from functools import cache
from pathlib import Path
from types import FrameType

import torch

_OURS = (
    *(str(folder) + os.sep for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])),
    *("<eval_with_key>", "<frozen "),
)
"""Each folder ends with a separator: other packages whose names begin with "torch" are the user's."""

_NN, _DEMO = str(Path(torch.nn.__file__).parent) + os.sep, str(Path(__file__).parents[1] / "demo") + os.sep


@cache
def is_ours(file: str) -> bool:
    """Whether a file of code is torch's or Penstock's."""
    return file.startswith(_OURS) and not file.startswith(_DEMO)


def current_line() -> str:
    """`file:line` of the running call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "unknown"


def raising_line(error: BaseException) -> str:
    """`file:line: code` of the user's innermost frame that the error passed through; without any, of torch.nn's."""
    entries = traceback.extract_tb(error.__traceback__)[::-1]
    users = (entry for entry in entries if not is_ours(entry.filename))
    entry = next(users, next((entry for entry in entries if entry.filename.startswith(_NN)), entries[0]))
    return f"{entry.filename}:{entry.lineno}" + (f": `{entry.line}`" if entry.line else "")
