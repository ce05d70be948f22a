"""For tests: a pipeline, written with anything, trains as the unsplit model does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock._base.errors import VerificationError
from penstock.distributed.launch.target import call, load
from penstock.verification.blame.command import blame
from penstock.verification.blame.finding import Blame


def assert_same_training(train_step: Sequence[str], reference: str | Callable[[], Any], *, steps: int = 3) -> Blame:
    """Run a pipeline for some steps and compare it with the unsplit model, as `penstock blame` does.

    Args:
        train_step: the command that starts its ranks: `["torchrun", "--nproc-per-node", "2", "train.py"]`.
        reference: returns (model, args, target, loss), and options; or its name, such as `reference.py:make`.
        steps: the number of optimizer steps.

    Raises:
        VerificationError: an AssertionError that names the first wrong action.
    """
    result = blame(train_step, load(reference) if isinstance(reference, str) else call("reference", reference), steps)
    if not result.ok:
        raise VerificationError(result.summary())
    return result
