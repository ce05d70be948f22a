"""Every error that Penstock raises on purpose.

    PenstockError
    ├── ArgumentError       (ValueError)    an argument is wrong: what was given, what was expected, what to do
    ├── ScheduleError       (ValueError)    a schedule is not legal, or its text cannot be read
    ├── PartitionError      (ValueError)    the model cannot be recorded or cut as asked
    ├── ShapeError          (ValueError)    a batch or a value between stages is not what was agreed on
    ├── CheckpointError     (RuntimeError)  a checkpoint cannot be written or read: a full disk, a file that is gone
    ├── FabricError         (RuntimeError)  an emulated network cannot be made, or a host of it is lost
    ├── ClosedError         (RuntimeError)  a pipeline is used after it was closed
    ├── MissingExtraError   (ImportError)   a package that an extra brings is not installed
    ├── NonFiniteError      (FloatingPointError) NaN or Inf, where `check_finite` looks for them
    ├── VerificationError   (AssertionError) the pipeline's result is not that of one device
    └── PipelineFailure     (RuntimeError)  a rank failed, or waits for one that does; names rank, action and cause

Each also derives from the built-in that its callers would expect, so `except ValueError` works as usual.
"""

from __future__ import annotations

import importlib.util


class PenstockError(Exception):
    """The root: catches everything that Penstock raises on purpose."""


class ArgumentError(PenstockError, ValueError):
    """An argument is wrong. The text names it, what was given, what was expected and the remedy."""


class ScheduleError(PenstockError, ValueError):
    """A schedule is not legal, or the text of one cannot be read."""


class PartitionError(PenstockError, ValueError):
    """The model cannot be recorded or cut as asked. The text names the module and, where known, the source line."""


class ShapeError(PenstockError, ValueError):
    """A batch, or a value that crosses a cut, is not of the shape, dtype or structure that was agreed on."""


class CheckpointError(PenstockError, RuntimeError):
    """A checkpoint, or a file of weights, cannot be written or read. Every rank raises it; training can go on."""


class FabricError(PenstockError, RuntimeError):
    """An emulated network cannot be made, or a host does not join or is lost. Names what is missing."""


class ClosedError(PenstockError, RuntimeError):
    """A pipeline is used after it was closed."""


class MissingExtraError(PenstockError, ImportError):
    """An optional package is not installed. The text names it and the extra that brings it."""


def require(extra: str, *packages: str, for_what: str) -> None:
    """Raises MissingExtraError if one of the packages that an extra brings is not installed."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise MissingExtraError(f"{for_what}: this needs {' and '.join(missing)}, pip install 'penstock[{extra}]'")


class NonFiniteError(PenstockError, FloatingPointError):
    """A value, the loss or a gradient is NaN or Inf. Names rank, action and what made it."""


class VerificationError(PenstockError, AssertionError):
    """The pipeline's outputs, loss, gradients or buffers differ from those of one device."""


class PipelineFailure(PenstockError, RuntimeError):  # noqa: N818  (what happened to a run, more than an error in one)
    """A rank failed, or this one waited in vain for another. Names the rank, the action and the cause."""
