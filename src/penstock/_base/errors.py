"""Every error that Penstock raises on purpose.

    PenstockError
    ├── ArgumentError       (ValueError)    an argument is wrong: what was given, what was expected, what to do
    │   └── PlanError                       a script cannot follow a plan: another model, device or number of ranks
    ├── ScheduleError       (ValueError)    a schedule is not legal, or its text cannot be read
    ├── PartitionError      (ValueError)    the model cannot be recorded or cut as asked
    ├── ShapeError          (ValueError)    a batch, or a value between stages, is not what was agreed on
    ├── CheckpointError     (RuntimeError)  a checkpoint cannot be written or read: a full disk, a damaged file
    ├── FabricError         (RuntimeError)  an emulated network cannot be made, or one of its hosts is lost
    ├── PipelineClosedError         (RuntimeError)  a pipeline is used after it was closed
    ├── MissingExtraError   (ImportError)   a package from an optional extra is not installed
    ├── NonFiniteError      (FloatingPointError) NaN or Inf where `check_finite` looks for them
    ├── VerificationError   (AssertionError) the pipeline's result differs from one device's
    └── RankFailedError     (RuntimeError)  a rank failed, or waited for one that did; names rank, action and cause

Each also derives from the built-in exception that callers would expect, so `except ValueError` works as usual.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from pathlib import Path
from typing import TypeGuard

_PACKAGE_FOLDER = str(Path(__file__).parents[1]) + os.sep
_OPTIMIZERS = os.sep + os.path.join("torch", "optim") + os.sep


class PenstockError(Exception):
    """The base class of every error that Penstock raises on purpose."""


class ArgumentError(PenstockError, ValueError):
    """An argument is wrong. The message names it, what was given, what was expected and what to do."""


class PlanError(ArgumentError):
    """A plan is for another model, device or arrangement of ranks. `penstock run` shows this line alone."""


class ScheduleError(PenstockError, ValueError):
    """A schedule is not legal, or its text cannot be read."""


class PartitionError(PenstockError, ValueError):
    """The model cannot be recorded or cut as asked. The message names the module and, if known, the source line."""


class ShapeError(PenstockError, ValueError):
    """A batch, or a value that crosses a cut, does not have the agreed shape, dtype or structure."""


class CheckpointError(PenstockError, RuntimeError):
    """A checkpoint or a weight file cannot be written or read. Every rank raises it; training can go on."""


class FabricError(PenstockError, RuntimeError):
    """An emulated network cannot be made, or a host did not join or is lost. Names what is missing."""


class PipelineClosedError(PenstockError, RuntimeError):
    """A pipeline is used after it was closed."""


class MissingExtraError(PenstockError, ImportError):
    """An optional package is not installed. The message names it and the extra that installs it."""


def require(extra: str, *packages: str, for_what: str) -> None:
    """Raise MissingExtraError unless all of these packages, which the extra installs, are there."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise MissingExtraError(f"{for_what}: this needs {' and '.join(missing)}, pip install 'penstock[{extra}]'")


class NonFiniteError(PenstockError, FloatingPointError):
    """A value, the loss or a gradient is NaN or Inf. Names the rank, the action and what produced it."""


class VerificationError(PenstockError, AssertionError):
    """The pipeline's outputs, loss, gradients or buffers differ from one device's."""


class RankFailedError(PenstockError, RuntimeError):
    """A rank failed, or this one waited in vain for another. Names the rank, the action and the cause."""


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer, which True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is an integer or a float."""
    return is_integer(value) or isinstance(value, float)


def check_flags(**flags: object) -> None:
    """Raise ArgumentError if one of these is not True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ArgumentError(f"{name}={value!r}: expected True or False")


def check_counts(*, required: bool = True, **counts: object) -> None:
    """Raise ArgumentError if one of these is not an integer >= 1. If `required`, None is refused, too."""
    for name, value in counts.items():
        if (required or value is not None) and not (is_integer(value) and value >= 1):
            raise ArgumentError(f"{name}={value!r}: expected an integer >= 1")


def check_seconds(*, limit: float = sys.float_info.max, **seconds: object) -> None:
    """Raise ArgumentError if one of these is not a number from 0 to `limit`; math.inf: no limit."""
    for name, value in seconds.items():
        if not (is_number(value) and 0 <= value <= limit):
            raise ArgumentError(f"{name}={value!r}: expected seconds, 0 or more")


COMMAND_FILENAME = "penstock"
"""Stands for the file name if a command called Penstock, so that a warning has no line."""


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a warning as one line of a command's output, unless it points to a line of the user's code. For
    `warnings.formatwarning`."""
    if filename == COMMAND_FILENAME:
        return f"penstock: warning: {message}\n"
    return _default_format(message, category, filename, lineno, line)


_default_format = warnings.formatwarning


def warn(message: str) -> None:
    """Warn at the line of the user's code that called Penstock, be it by an optimizer's hook."""
    level, frame = 1, sys._getframe()  # Python 3.12 has `skip_file_prefixes`
    while frame.f_back is not None and _is_passed(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    if str(frame.f_globals.get("__name__")).partition(".")[0] in ("typer", "runpy"):  # a command: no line of the user's
        warnings.warn_explicit(message, UserWarning, COMMAND_FILENAME, 0)
    else:
        warnings.warn(message, stacklevel=level)


def _is_passed(filename: str) -> bool:
    return filename.startswith(_PACKAGE_FOLDER) or _OPTIMIZERS in filename


PipelineFailure, ClosedError = RankFailedError, PipelineClosedError  # until 0.2
