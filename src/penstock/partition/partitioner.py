"""Partitions any model, once for each signature of its inputs. The cuts are decided once and kept."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.compat import autocast_kinds, autocast_state
from penstock._base.errors import ArgumentError, PartitionError, check_counts
from penstock._base.formatting import pluralize
from penstock._base.marks import computing
from penstock._base.pytree import Flat, flatten, unflatten
from penstock.costs import Profile
from penstock.partition.choose_cuts import (
    NO_LIMIT,
    WORTH_MOVING,
    ChosenCuts,
    StageBudget,
    collect_notes,
    cut_at_best,
    decide_by_measuring,
)
from penstock.partition.cut.balance import Balance, BalanceChoice
from penstock.partition.cut.candidates import candidates, cut_at
from penstock.partition.cut.opening import choose_opening, count_blocks, initial_spec
from penstock.partition.given_model import as_module, default_kwargs
from penstock.partition.measure.measuring import BUDGET_SECONDS, measure
from penstock.partition.measure.running import MakeSplitter
from penstock.partition.names import known_names, public_name
from penstock.partition.obstacles import Obstacle
from penstock.partition.record.attempts import record
from penstock.partition.recording import RandomSource, Recording
from penstock.partition.remedies import explain_obstacle
from penstock.partition.stages.interpolation import Dims, Lengths, resize_inputs
from penstock.partition.stages.partition import Leaf, Partition, build_partition, build_stages, describe
from penstock.partition.stages.stage_plans import CutRecording
from penstock.partition.state.settings import Assumptions, Attributes
from penstock.partition.units import Opening, UnitSpec, find_units, refuse_compiled, refuse_lazy

Division = tuple[ChosenCuts, Opening]
"""Where a model is cut, and which modules are opened for it."""

VARIANTS = 32
"""How many recordings one signature may have, if the forward branches on the values of its integer inputs."""

KEPT_PARTITIONS = 128
"""How many signatures' partitions are kept for later calls; the oldest are dropped first."""


class Partitioner:
    """Cuts a model into stages.

    Args:
        model: a module, unedited; or a list of modules, each of which gets what the one before it returned (layers, or
            ready-made stages if there are as many as `stages`).
        stages: how many.
        cuts: names of the modules or lines at which stages 1.. begin (see `cut.names`), in program order; chosen by
            `balance` if not given.
        leaves: names of modules to run as a whole because a recording cannot follow them.
        opens: names of modules to record call by call, so that cuts can fall inside them; see `Opening`.
        streams: sets the generator for recorded random calls; see `RandomSource`.
        budget: what stages may take of memory.
        balance: what to spread evenly over the stages; see `BalanceChoice`. Times are measured by `weigh`; until then,
            cuts even out the work.

    Raises ArgumentError for invalid arguments, PartitionError (also when called) for a model that cannot be recorded
    or cut as asked.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        stages: int,
        cuts: Sequence[str] | None = None,
        leaves: Sequence[str] | None = None,
        *,
        opens: Sequence[str] | None = None,
        streams: RandomSource,
        balance: Balance | BalanceChoice = "time",
        budget: StageBudget = NO_LIMIT,
    ) -> None:
        check_counts(stages=stages)
        self._choice = BalanceChoice.of(balance)
        if cuts is not None and len(cuts) != stages - 1:
            raise ArgumentError(
                f"{pluralize(len(cuts), 'cut')} for {pluralize(stages, 'stage')}: name the first module of each stage "
                f"but the first, {pluralize(stages - 1, 'name')}"
            )
        self.model = as_module(model)
        self.stages = stages
        self.cuts = None if cuts is None else tuple(public_name(self.model, cut) for cut in cuts)
        self._auto_cuts = cuts is None
        self._streams, self._budget = streams, budget
        self._partitions: dict[Hashable, list[Partition]] = {}
        self._lengths: list[Lengths] = []
        self._weighable: dict[Hashable, Recording] = {}  # what `weigh` may measure, and `divide` cut elsewhere
        self._is_settled = not (self._choice.measures and self._auto_cuts and stages > 1)  # whether neither will come
        self._decision = ChosenCuts(self.cuts or ())
        self._keep_alive: dict[Hashable, list[object]] = {}
        self._spec = initial_spec(self.model, leaves or (), opens or (), self.cuts, stages)
        if self._choice.profile is not None and self._auto_cuts:  # so that the same units are there
            known = {name for name, _ in self.model.named_modules()} - self._spec.opening.names
            self._spec = self._spec.opening_more(for_balance=known.intersection(self._choice.profile.opened))
        self._assumptions = Assumptions()
        self._refresh_modules()

    def __call__(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Partition:
        """Return the stages for one microbatch's arguments. Record them when their signature is new.

        The signature: structure, shapes, strides, dtypes, devices and constants of the arguments, the modules' training
        flags, identity and requires_grad of parameters and buffers, and the grad and autocast modes. If the forward
        branches on values of integer inputs (is any token masked?), what it reads from them is part of the signature
        too, and ranks that must agree on the partition have to pass the same values.
        """
        kwargs = dict(kwargs or {})
        flat = flatten((tuple(args), kwargs))
        key = structure, descriptions, state = self._key(flat)
        variants = self._partitions.get(key, [])
        for variant in variants:
            if variant.holds(flat.leaves):
                return variant
        if len(variants) == VARIANTS and any(isinstance(guard.expected, torch.Size) for guard in variants[-1].guards):
            del variants[0]  # a shape that depends on values is like the shape of an input
        if len(variants) == VARIANTS:
            guard = variants[-1].guards[-1]
            raise PartitionError(
                f"the forward reads values of its inputs at {guard.source_line}, and got another result for each of "
                f"{VARIANTS} microbatches (now not {guard.expected!r}). Do it outside of the model"
            )
        cached = self._weighable.get(key)
        if cached is not None and all(guard.holds(flat.leaves) for guard in cached.guards):
            del self._weighable[key]
        else:  # none was made, or one for another branch
            cached = None
        matches = (lengths.at((structure, state), descriptions, flat.leaves) for lengths in self._lengths)
        partition = next((match for match in matches if match is not None), None)
        if partition is None:
            recording, partition = self._make(args, kwargs, cached)
            key = self._key(flat)  # recording may have opened blocks
            if not self._is_settled:
                self._weighable.setdefault(key, recording)
            else:
                self._learn_lengths(flat, descriptions, partition)
        variants = self._partitions.setdefault(key, [])
        for index, variant in enumerate(variants):
            if (joined := partition.joined(variant)) is not None:
                del variants[index]
                partition = joined
                break
        variants.append(partition)
        # The key contains ids, which no other object may reuse.
        plain = [leaf for leaf in flat.leaves if not isinstance(leaf, Tensor)]
        self._keep_alive[key] = [*plain, *(slots.get(name) for slots, name in self._slots)]
        while len(self._partitions) > KEPT_PARTITIONS:
            oldest = next(iter(self._partitions))
            del self._partitions[oldest], self._keep_alive[oldest]
        return partition

    def _key(self, flat: Flat) -> tuple[Hashable, tuple[Leaf, ...], Hashable]:
        return flat.structure, tuple(describe(leaf) for leaf in flat.leaves), self._state()

    def forget(self) -> None:
        """Drop all recordings, and with them every reference to parameters that the model no longer holds."""
        self._partitions.clear()
        self._lengths.clear()
        self._keep_alive.clear()
        self._weighable.clear()
        self._is_settled = True

    @property
    def division(self) -> Division:
        """What the first call, and `weigh`, decided."""
        return self._decision, self._spec.opening

    def divide(self, division: Division) -> None:
        """Take over this decision, and forget what was made of another."""
        self._adopt(division, dict(self._weighable) if division[1] == self._spec.opening else {})

    def _adopt(self, division: Division, recordings: dict[Hashable, Recording]) -> None:
        self._decision, self._spec = division[0], replace(self._spec, opening=division[1])
        self.cuts = self._decision.cuts
        self.forget()
        self._weighable = recordings
        self._refresh_modules()

    def weigh(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None:
        """Measure the units of what these inputs, or earlier ones, were recorded as, if times are to be even, and cut
        there. Change nothing of the model. Other processes `divide` like this one.

        A module may weigh little by its operations and take long: of ResNet-50, whose last blocks have small images and
        large weights, half of the time on a CPU. Then it is opened, recorded and measured once more.
        """
        kwargs = dict(kwargs or {})
        self(args, kwargs)
        recordings = self._weighable
        recording = next(iter(recordings.values()), None)
        if recording is None:
            return
        decision = decide_by_measuring(recording, self.model, self.cuts or (), args, kwargs, self._budget)
        finer = self._measure_parts(recording, decision, args, kwargs) if decision.is_uneven else None
        self._weighable, self._is_settled = {}, True
        try:
            recording, decision = finer or (recording, decision)
            cut_at(recording, self.model, decision.cuts)
        except PartitionError:  # each cut is possible, but not all of them together
            return
        if finer is not None:
            self._spec = recording.unit_spec
            self._adopt((decision, self._spec.opening), {})
            self._weighable[self._key(flatten((tuple(args), kwargs)))] = recording
        elif decision != self._decision:
            self._adopt((decision, self._spec.opening), recordings)

    def _measure_parts(
        self, recording: Recording, decision: ChosenCuts, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Recording, ChosenCuts] | None:
        """Open the modules inside which the best cuts by these times fall, and measure again. None if that finds
        nothing faster."""
        names = recording.unit_spec.opening.names
        spec = choose_opening(recording, self.model, self.stages, self._choice.by, decision.unit_seconds)
        if spec.opening.names == names:
            return None
        try:
            finer = self._record(args, kwargs, spec)
            if finer.unit_spec.opening.names == names:  # it could not be opened
                return None
            by_work, split = cut_at_best(finer, self.model, self.stages, self._choice, self._budget)
            build_stages(split, self._streams)
            second = decide_by_measuring(finer, self.model, by_work.cuts, args, kwargs, self._budget)
        except (PartitionError, ArgumentError):  # of parts that cannot be cut, or do not fit
            return None
        is_faster = second.seconds and max(second.seconds) < WORTH_MOVING * max(decision.seconds)
        return (finer, second) if is_faster else None

    def profile(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        budget_seconds: float | None = BUDGET_SECONDS,
        splits: MakeSplitter | None = None,
    ) -> Profile:
        """Measure the cost of each unit, with modules opened for as many stages as there are repeated blocks.

        Args:
            budget_seconds: how long to measure; None: measure nothing, only count operations.
            splits: makes what splits backwards, which are then measured too.

        Raises PartitionError if the model cannot be recorded, UnmeasurableError if its units cannot be run.
        """
        kwargs, model, asked = dict(kwargs or {}), self.model, sorted(self._spec.opening.asked)
        opening = initial_spec(model, self._spec.leaves, asked, None, max(2, count_blocks(model))).opening
        recording = self._record(args, kwargs, replace(self._spec, opening=opening))
        with computing(0, 0):
            units = candidates(recording, model, "flops") or candidates(recording, model, "flops", 2)
            return measure(recording, model, units, args, kwargs, budget_seconds, splits, memory=True)

    def attributes(self) -> Attributes:
        """Return what a forward recorded call by call reads besides its inputs, which its recording takes as given."""
        return self._assumptions.read()

    def settle(self, attributes: Attributes) -> None:
        """Call after a step, with the earlier `attributes`: what the step itself changed does not count as a change."""
        self._assumptions.settle(attributes)

    def opened_modules(self) -> frozenset[int]:
        """`id` of each module whose forward is recorded call by call."""
        return frozenset(map(id, self._assumptions.opened.values()))

    def names(self) -> dict[str, str]:
        """Map every name of a parameter or buffer in the model, tied ones included, to the one that stages use."""
        return known_names(self.model)

    def _refresh_modules(self) -> None:
        """Find the modules again: some may have been opened, and the user may have replaced some."""
        refuse_compiled(self.model)
        refuse_lazy(self.model)
        self._modules = list(self.model.modules())
        self._slots = [(slots, name) for m in self._modules for slots in (m._parameters, m._buffers) for name in slots]
        units = find_units(self.model, self._spec)
        self._assumptions.find_modules(self.model, {unit.module for unit in units.values()})

    def _state(self) -> Hashable:
        tensors = [slots.get(name) for slots, name in self._slots]
        return (
            self.attributes(),
            tuple(m.training for m in self._modules),
            tuple((id(t), t is not None and t.requires_grad) for t in tensors),
            torch.is_grad_enabled(),
            *(autocast_state(torch.device(kind)) for kind in autocast_kinds()),
        )

    def _make(
        self, args: Sequence[Any], kwargs: dict[str, Any], cached: Recording | None = None
    ) -> tuple[Recording, Partition]:
        """Record these arguments, if it is not known what they are recorded as, and cut the recording."""
        if self.cuts is None:
            self._decision, split = self._record_and_choose(args, kwargs)
        else:
            recording = self._record(args, kwargs, self._spec) if cached is None else cached
            try:
                split = cut_at(recording, self.model, self.cuts)
            except PartitionError as error:
                if not self._auto_cuts:
                    raise
                reason = str(error).removeprefix("cuts: ").partition(". ")[0]
                raise PartitionError(
                    "this batch cannot be cut where Penstock cut the first one, at "
                    f"{', '.join(map(repr, self.cuts))}: {reason}. Stages keep their modules: pass cuts= at modules "
                    "that run for every batch, or make a new pipeline for batches like this one"
                ) from error
        self.cuts, self._spec = tuple(split.cuts), split.recording.unit_spec
        self._refresh_modules()
        partition = build_partition(split, self._streams, flatten((tuple(args), kwargs)).paths)
        decision, notes = self._decision, collect_notes(self._decision, partition.work)
        partition = replace(partition, notes=(*partition.notes, *notes), costs=decision.costs, link=decision.link)
        return split.recording, partition

    def _record_and_choose(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[ChosenCuts, CutRecording]:
        """Record, and cut at the best, for which more modules may be opened."""
        spec = self._spec
        while True:
            recording = self._record(args, kwargs, spec)
            opening = recording.unit_spec.opening
            spec = choose_opening(recording, self.model, self.stages, self._choice.by)
            if spec.opening.names != opening.names:
                continue
            try:
                return cut_at_best(recording, self.model, self.stages, self._choice, self._budget)
            except PartitionError:
                if not opening.for_balance:
                    raise
                spec = replace(spec, opening=opening.without(opening.for_balance))

    def _record(self, args: Sequence[Any], kwargs: dict[str, Any], spec: UnitSpec) -> Recording:
        kwargs = {**kwargs, **default_kwargs(self.model, args, kwargs)}
        try:
            return record(self.model, args, kwargs, spec)
        except Obstacle as obstacle:

            def record_again(leaves: Sequence[str], new_kwargs: Mapping[str, Any]) -> Recording:
                return record(self.model, args, new_kwargs, replace(spec, leaves=tuple(leaves)))

            text = explain_obstacle(obstacle, record_again, self.model, spec.leaves, kwargs, self.stages)
            raise PartitionError(text) from obstacle

    def _learn_lengths(self, flat: Flat, leaves: Sequence[Leaf], partition: Partition) -> None:
        """Look for other lengths of the same inputs among what was recorded."""

        def probe(dims: Dims, length: int) -> Partition:
            args, kwargs = unflatten(resize_inputs(flat.leaves, dims, length), flat.structure)
            return self._make(args, kwargs)[1]

        family = (flat.structure, self._state())
        if not any(lengths.learn(family, leaves, partition, probe) for lengths in self._lengths):
            self._lengths = [*self._lengths, Lengths(family, leaves, partition)][-KEPT_PARTITIONS:]
