"""Refuses stages that keep something from one forward to the next, as batch norm does, unless forwards run in order.

They run in order on one device, and in all of Penstock's schedules except those with two copies of a stage, each of
which sees only part of the batch. A user's own schedule may run forwards in any order.

What is known from the recording is refused at once. But a forward may begin to keep something later, because a flag was
switched or the batch's values ask for it. If it updates a tensor, it is refused. Anything else that it sets may be a
note, or a table that is made once. So the forward runs again with what it has left, with what was there before any
forward had set it, and with what it would leave for other values; if it then gives something else, it is refused.
Blocks that branch on values may read what they keep in any forward, so they all run again, unless no code reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.partition.state.names_in_classes import names_read
from penstock.partition.state.places import Attribute, Key, Place, Values
from penstock.runtime.features.context import StageContext
from penstock.runtime.features.feature import Feature, Forward, Start
from penstock.runtime.features.kept_state import KeptState
from penstock.runtime.features.run_again import Run, undone
from penstock.runtime.front_end import Stage
from penstock.runtime.kinds import distinct
from penstock.schedule import Op
from penstock.words import shortened

LOOKS = 6
"""How many forwards of a stage are examined closely: the first ones, and those after a change of the model, or after
one has set something for the first time. Later ones behave alike."""


class ForwardOrder(Feature):
    """Refuses forwards that carry something over from one microbatch to the next.

    Args:
        stage: the stage, and what surrounds it.
        why: what is wrong with the order.
        kept: what the forwards keep.
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
        deferred = {id(buffer): buffer for buffer in norms.buffers()} if norms and not stage.copies else {}
        updated = [repr(name) for name in one.meta.updated if id(one.buffers.get(name)) not in deferred]
        for carried in (*updated, *(each.text for each in one.remembered)):
            raise _refusal(stage.index, carried, why)
        gathered = one.parameters.values() if stage.sharded is not None else ()
        return cls(stage, why, KeptState(stage.modules(), one.traces, (*deferred.values(), *gathered)))

    def __init__(self, stage: StageContext, why: str, kept: KeptState) -> None:
        self._stage, self._why, self._kept = stage, why, kept
        self._use = stage.stage
        self._code = [each.module for each in distinct(stage.stages)]
        self._set: dict[Key, Place] = {}
        self._first: dict[Key, Any] = {}  # what was in these places before a forward set them
        self._left: dict[Key, Any] = {}  # what the latest forward left there
        self._looks = LOOKS
        self._changes = 0  # those of the model that are watched
        self._copies = any(each.mutated for one in stage.stages for each in one.meta.inputs)
        self._waits = False
        self._run: Run | None = None

    def begin_step(self, start: Start) -> None:
        """After a change of the model, forwards may keep something else. Drops anything left by a step that raised."""
        if start.changes != self._changes:
            self._changes, self._looks = start.changes, LOOKS
        for key, place in self._set.items():
            if not place.holds(self._left[key]):  # set from outside
                self._first[key] = place.read()
        self._run, self._waits = None, False

    def forward_of(self, run: Forward, stage: Stage) -> Forward:
        """The same, noted so that it can run again, unless it is sharded: then its parameters are gone afterwards."""
        if self._stage.sharded is not None:
            return run

        def forward(*args: Any) -> Sequence[Tensor]:
            if not self._waits:
                return run(*args)
            self._waits = False
            results, self._run = Run.of(run, args, copies=self._copies)
            return results

        return forward

    @contextmanager
    def forward(self, microbatch: int, *, runs_again: bool) -> Iterator[None]:
        """Wraps a forward. Raises PartitionError afterwards if it has carried something over."""
        if self._looks:
            self._kept.find()
        look = self._kept.look(closely=self._looks > 0)
        before = {key: place.read() for key, place in self._set.items()}
        self._waits = True
        yield
        run, self._run, self._waits = self._run, None, False
        written = self._kept.written(look)
        if written is not None:
            raise self._refusal(repr(self._tensor_name(*written)))
        if new := self._kept.set_since(look, self._set):
            self._set |= {key: place for key, (place, _) in new.items()}
            before |= {key: was for key, (_, was) in new.items()}
            self._first |= {key: before[key] for key in new}
            self._looks = LOOKS
        self._left = {key: place.read() for key, place in self._set.items()}
        closely, self._looks = self._looks > 0, max(self._looks - 1, 0)
        if closely:
            self._kept.find()
        if run is not None and self._set and (closely or self._may_read(before)):
            self._examine(run, microbatch, before, closely=closely)

    def _may_read(self, before: Values) -> bool:
        """Whether a forward that has found `before` has set something that a block may read for some values only."""
        if not self._use.depends_on_values:
            return False
        changed = (place for key, place in self._set.items() if not place.same(self._left[key], before[key]))
        return any(not place.key[1] or place.key[1] in self._names_read for place in changed)

    @cached_property
    def _names_read(self) -> frozenset[str]:
        return frozenset().union(*map(names_read, self._code))

    def _examine(self, run: Run, microbatch: int, before: Values, *, closely: bool) -> None:
        """Runs a forward that has found `before` again. Raises PartitionError if it has carried something over."""
        if not run.is_intact:
            self._copies, self._looks = True, max(self._looks, 1)
            return
        tensors = [tensor for _, tensor in self._kept.tensors if not isinstance(tensor, nn.Parameter)]
        with undone({**self._kept.places, **self._set}, tensors, self._stage.device) as put:
            carried = self._carried(run, microbatch, before, put, closely=closely)
        if carried:
            raise self._refusal(shortened([self._place_name(self._set[key]) for key in carried]))

    def _carried(
        self, run: Run, microbatch: int, before: Values, put: Callable[[Values], None], *, closely: bool
    ) -> Collection[Key]:
        """The places on which a forward depends that others set as well."""

        def gives_the_same(values: Values) -> bool:
            put(values)
            self._begin_streams(microbatch)
            return run.gives_the_same()

        def left_by_others() -> Iterator[Values]:
            yield self._left
            if closely:
                yield self._first
                put(self._first)
                self._begin_streams(microbatch)
                run.on_other_values()
                yield {key: place.read() for key, place in self._set.items()}

        for values in left_by_others():
            if not gives_the_same(values) and gives_the_same(before):  # otherwise it never gives the same
                return [k for k in values if not gives_the_same({**before, k: values[k]})] or values.keys()
        return ()

    def _begin_streams(self, microbatch: int) -> None:
        stage = self._stage
        if stage.streams is not None:
            stage.streams.begin(microbatch, stage.draw_offsets(microbatch), stage=stage.index)

    def _tensor_name(self, name: str, tensor: Tensor) -> str:
        held = {**self._use.parameters, **self._use.buffers}
        return next((known for known, each in held.items() if each is tensor), name)

    def _place_name(self, place: Place) -> str:
        for path, module in (named for code in self._code for named in code.named_modules()):
            if isinstance(place, Attribute) and any(place.holder is held for held in (vars(module), module._buffers)):
                return f"{path}.{place.name}".lstrip(".")
        return place.key[1]

    def _refusal(self, carried: str) -> PartitionError:
        return _refusal(self._stage.index, carried, self._why)


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
