"""Refuses stages that keep something from one forward to the next, as batch norm does, unless forwards run in order.

They run in order on one device, and in all of Penstock's schedules except those with two copies of a stage, each of
which sees only part of the batch. A user's own schedule may run forwards in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from penstock.errors import PartitionError
from penstock.runtime.features.context import StageContext
from penstock.runtime.features.feature import Feature
from penstock.schedule import Op


class ForwardOrder(Feature):
    """Refuses a forward that updates a buffer if the recording could not tell whether one does.

    Args:
        index: the stage's index.
        uncertain: the buffers that it may update, by name.
        why: what is wrong with the order.
    """

    @classmethod
    def of(cls, stage: StageContext) -> ForwardOrder | None:
        """If forwards are not in order. Raises PartitionError if the stage is known to keep something.

        For copies, everything known is refused earlier. The statistics of deferred batch norms are merged in order at
        the end of the step, but not those of copies.
        """
        why = _disorder(stage)
        if not why:
            return None
        one, norms = stage.stage, stage.binding.norms
        deferred = {id(buffer) for buffer in norms.buffers()} if norms is not None and not stage.copies else set()
        held = {name: buffer for name, buffer in one.buffers.items() if id(buffer) not in deferred}
        updated = [repr(name) for name in one.meta.updated if name in held or name not in one.buffers]
        for carried in (*updated, *(each.text for each in one.remembered)):
            raise _refusal(stage.index, carried, why)
        uncertain = {name: held[name] for name in one.may_update if name in held}
        return cls(stage.index, uncertain, why) if uncertain else None

    def __init__(self, index: int, uncertain: Mapping[str, Tensor], why: str) -> None:
        self._index, self._uncertain, self._why = index, uncertain, why

    @contextmanager
    def forward(self, microbatch: int, *, runs_again: bool) -> Iterator[None]:
        """Wraps a forward. Raises PartitionError afterwards if it updated such a buffer."""
        before = {name: buffer._version for name, buffer in self._uncertain.items()}
        yield
        for name, buffer in self._uncertain.items():
            if buffer._version != before[name]:
                raise _refusal(self._index, repr(name), self._why)


def _disorder(stage: StageContext) -> str:
    """What is wrong with the order in which a stage's forwards run, and what to do; empty if nothing is."""
    if stage.copies:
        return (
            "this schedule runs several copies of the stage, each of which would see only part of the batch; take a "
            "schedule with one copy (dualpipe-v for dualpipe)"
        )
    if stage.in_order(Op.F):
        return ""
    return (
        f"this schedule runs its forwards in the order {', '.join(map(str, stage.microbatches(Op.F)))}; take one that "
        "runs them in order of microbatch (1f1b, gpipe), or defer batch norm (deferred_batch_norm=True)"
    )


def _refusal(index: int, carried: str, why: str) -> PartitionError:
    return PartitionError(
        f"the forward of stage {index} carries {carried} over from one microbatch to the next, but {why}"
    )
