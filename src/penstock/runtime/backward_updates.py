"""What a backward updates: buffers, in a hook, in an autograd function, or in a forward that a checkpoint runs again;
and parameters, by a hook that takes the optimizer's step.

A sum over microbatches may be kept so, since backwards are in order. What the forward updates as well, such as a moving
average, depends on the order of forwards and backwards: in plain training each backward follows its forward at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from penstock.errors import PartitionError
from penstock.partition import Stage
from penstock.partition._compat import has_accumulation_hooks
from penstock.partition.loan import same_bits

LOOKS = 3
"""In so many backwards of a stage parameters with hooks are looked at: those of any step are alike."""


class BackwardUpdates:
    """Refuses updates in a stage's backward that would not be those of plain training.

    Args:
        copies: whether the schedule runs several copies of the stage.
    """

    def __init__(self, stage: Stage, *, copies: bool) -> None:
        self._index = stage.meta.index
        forward = (*stage.meta.updated, *stage.may_update)
        self._copies = copies
        self._buffers: Mapping[str, Tensor] = {
            name: buffer for name, buffer in stage.buffers.items() if copies or name in forward
        }
        self._parameters = stage.parameters
        self._looks = 0
        self.latest = -1
        """The microbatch of the stage's last forward."""

    @contextmanager
    def refused(self, microbatch: int) -> Iterator[None]:
        """Around autograd's backward. Raises PartitionError if it updates such a buffer, or a parameter."""
        if microbatch == self.latest and not self._copies:
            yield
            return
        before = {name: buffer._version for name, buffer in self._buffers.items()}
        self._looks += 1
        watched = [n for n, p in self._parameters.items() if has_accumulation_hooks(p)] if self._looks <= LOOKS else []
        values = {name: self._parameters[name].detach().clone() for name in watched}
        yield
        for name, value in values.items():
            if not same_bits(value, self._parameters[name].detach()):
                raise PartitionError(
                    f"the backward of stage {self._index} updates parameter {name!r} by a hook "
                    "(register_post_accumulate_grad_hook) while other microbatches are in flight, which plain training "
                    "would run with the new value. Step the optimizer after pipe.step, or choose microbatches=1"
                )
        for name, version in before.items():
            if self._buffers[name]._version != version:
                raise self._refusal(name)

    def _refusal(self, name: str) -> PartitionError:
        if self._copies:
            return PartitionError(
                f"the backward of stage {self._index} updates buffer {name!r}, but this schedule runs several copies "
                "of the stage, each of which would see a part of the batch only; take a schedule with one copy "
                "(dualpipe-v for dualpipe)"
            )
        return PartitionError(
            f"the backward of stage {self._index} updates buffer {name!r}, as its forward does (a checkpoint in the "
            "model runs it again, or a hook writes to it), and forwards of other microbatches have come between, so "
            "that the updates are not in the order of plain training. Switch gradient checkpointing off in the model, "
            "and choose recompute='always' instead, or leave the buffer alone in backward"
        )
