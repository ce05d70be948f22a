"""One step of a pipeline: from the caller's batch to the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock._base.errors import ArgumentError, warn
from penstock._base.marks import computing
from penstock._base.trees import unflatten
from penstock.distributed.launch.step_file import announcer
from penstock.pipe.options import Options
from penstock.pipe.result import StepResult
from penstock.runtime.batch import microbatches as batches
from penstock.runtime.batch.cutting import Batch, Microbatch, refuse_aliases
from penstock.runtime.batch.outline import Outline, SingleRowError
from penstock.runtime.execute.engine import BoundSchedule, Engine
from penstock.runtime.execute.program import Feed
from penstock.runtime.features.compiled import arguments_for, effective_compile
from penstock.runtime.features.deferred_norm import DeferredNorms, refuse_unseen
from penstock.runtime.features.feature import Binding
from penstock.runtime.features.registry import RECOMPUTE, offload_by_stage, recompute_by_stage
from penstock.runtime.front_end import Partition
from penstock.runtime.kinds import Kinds
from penstock.runtime.loss.functions import Loss, OutputLoss, padding, saying_what_is_missing
from penstock.runtime.loss.loss import Reduction, weights
from penstock.runtime.model.split_model import SplitModel
from penstock.runtime.step.bound_schedules import BoundSchedules, Cached, Call
from penstock.runtime.step.one_at_a_time import one_at_a_time
from penstock.runtime.step.rehearsal import try_loss
from penstock.runtime.step.results import LossParts, Wanted, bring, code_of, share_loss, share_timeline
from penstock.schedule import Schedule, first_microbatches
from penstock.schedule.lowering import Sharded, lower_evaluation, lower_training


class _Prepared(NamedTuple):
    """A batch before its step: the bound schedule that runs it, and what its stages take in."""

    cached: Cached
    feed: Feed
    cut: batches.CutBatch | None


class Steps:
    """Runs the steps of one pipeline.

    Args:
        order: computations alone, for the largest number of microbatches that a batch has.
        example: the batch that the pipeline is made for.

    Attributes:
        schedule: what every rank does for a batch like the example, communication included.
        bound_schedules: one for each kind of batch so far.
        has_inputs, has_outputs: whether this process runs the first, or the last stage.
    """

    def __init__(
        self,
        engine: Engine,
        split: SplitModel,
        order: Schedule,
        example: batches.CutBatch,
        options: Options,
        norms: DeferredNorms | None,
    ) -> None:
        self.world = engine.world
        self._engine = engine
        self._split = split
        self._order = order
        self._options = options
        self._norms = norms
        with engine.control.agreed():
            self._recompute = recompute_by_stage(options.recompute, order.placement.depth, RECOMPUTE)
            self._offload = offload_by_stage(options.offload, order.placement.depth)
            self._sharded = _sharded(split, options)
        here = [stage for stage, rank in enumerate(order.placement.rank_of) if rank in engine.ranks]
        self.has_inputs = any(map(order.placement.is_first, here))
        self.has_outputs = any(map(order.placement.is_last, here))
        self._loss = saying_what_is_missing(options.loss)
        self._parts = LossParts(engine, shared=options.share_loss, of_function=options.loss is not None)
        self._padding_checked = bool(options.loss_notes)
        self._announce = announcer()
        engine.streams.first_microbatch = engine.world.replica * order.microbatches
        self.bound_schedules = BoundSchedules(engine, split, self._bind, order.placement.rank_of[0])
        self._first = self.bound_schedules.add(example, Outline.of(example), training=True)
        first = self._first.bound
        self.schedule = first.schedule

    @property
    def looks_at_targets(self) -> bool:
        """Whether anything on any rank looks at targets."""
        return _wants_target(self._options.loss) or callable(self._options.reduction)

    @property
    def needs_inputs(self) -> bool:
        """Whether this process runs the first stage, or cuts the target with a function that also looks at inputs."""
        by_function = self._options.cutting.split is not None
        return self.has_inputs or (by_function and self.has_outputs and self.looks_at_targets)

    @property
    def needs_targets(self) -> bool:
        """Whether this process runs the last stage, or cuts the inputs with a function that also looks at targets."""
        by_function = self._options.cutting.split is not None
        return self.looks_at_targets and (self.has_outputs or (by_function and self.has_inputs))

    def run_batch(
        self,
        number: int,
        batch: Batch,
        *,
        training: bool,
        outputs: Wanted,
        timeline: bool,
        loss_scale: float = 1.0,
        evaluates: bool = True,
    ) -> StepResult:
        """One step, the `number`-th; see `Pipeline.step`. If it fails, the other ranks end as well.

        Args:
            evaluates: whether the loss is wanted, and not the outputs alone.
        """
        if training and self._announce is not None:
            self._announce(number)
        if not isinstance(timeline, bool):
            raise ArgumentError(f"timeline={timeline!r}: expected True or False")
        call = Call(training, code_of(outputs, self.world.ranks), timeline)
        norms = self.deferring_norms() if training else nullcontext()
        with self._engine.control.reporting(), one_at_a_time((self, training)):
            prepared = self._prepare(batch, call, outputs is not False, loss_scale)
            cached, bound = prepared.cached, prepared.cached.bound
            with self._split.accepting_own_changes(cached.mode, bound), norms:
                moments = self._engine.run_step(bound, prepared.feed, number, timed=timeline)
                result = self._result(prepared, call, moments, evaluates)
                if training:
                    self.bound_schedules.backward_to_batch(cached, prepared.cut)
            return result

    def _prepare(self, given: Batch, call: Call, keeps: bool, loss_scale: float) -> _Prepared:
        """Cuts a batch, and finds its bound schedule."""
        batch = self._divide(given) if self.has_inputs or self.has_outputs else given
        with torch.set_grad_enabled(call.training):
            cut = self.cut(batch, "input", None) if self.has_inputs else None
        try:
            cached = self.bound_schedules.next(cut, call)
        except SingleRowError:  # on every rank
            if self._options.cutting.inputs.min_rows > 1:
                raise
            self._options.cut_in_pairs()
            return self._prepare(given, call, keeps, loss_scale)
        except TypeError as error:
            if given.target is None and self.needs_targets:  # perhaps it is among the model's inputs
                error.add_note("penstock: target=None: pass what the loss takes as target=...")
            raise
        self._refuse_aliases(cached, batch)
        inputs = self._inputs(cached, cut)
        if not self.has_outputs:
            return _Prepared(cached, Feed(inputs, loss_scale=loss_scale), cut)
        return _Prepared(cached, Feed(inputs, *self._for_loss(cached, batch), keeps, loss_scale), cut)

    @contextmanager
    def deferring_norms(self) -> Iterator[DeferredNorms | None]:
        """Wraps a training step: with `deferred_batch_norm`, running statistics are committed at its end, and are those
        of the first replica in all."""
        if self._norms is None:
            yield None
            return
        with self._norms.step():
            yield self._norms
        if self.world.data_parallel > 1:
            self._engine.control.start_equal(self._norms.buffers())

    def rehearse(self, batch: Batch, *, loss: bool) -> str | None:
        """Raises what `run_batch` would for a batch like the example before its first forward and, if `loss`, for a
        loss of any value. One process drives all ranks. Returns why the loss could not be tried; None if it could."""
        cached, batch = self._first, self._divide(batch)
        self._refuse_aliases(cached, batch)
        if not loss:
            return None
        targets, _ = self._for_loss(cached, batch)
        devices = tuple({*self._engine.devices})
        with self._engine.streams.drawing(0, devices), computing(0, 0):
            given = getattr(self._options.loss, "__wrapped__", self._options.loss)  # as the user gave it
            return try_loss(cached.bound, None if targets is None else targets[0], given)

    def _divide(self, batch: Batch) -> Batch:
        """A batch with the microbatches that the user's function, if any, makes of it."""
        order, cutting = self._order, self._options.cutting
        return cutting.divide(batch, order.microbatches, "input", order.placement.pipelines)

    def cut(self, batch: Batch, what: str, device: torch.device | None) -> batches.CutBatch:
        """The microbatches of a batch's inputs, on `device` or, if None, where they are."""
        order, cutting = self._order, self._options.cutting
        return cutting.cut(batch, order.microbatches, what, device, order.placement.pipelines)

    def microbatches(self, batch: Batch, device: torch.device) -> list[Microbatch]:
        """One batch as `run_batch` cuts it, with each piece's rows and the target that the loss and `reduction` get."""
        batch = self._divide(batch)
        cut = self.cut(batch, "batch", device)
        targets = self._options.cutting.targets(batch, cut.sizes, device, labels=self._takes_labels(batch))
        inputs = [unflatten(piece.leaves, piece.structure) for piece in cut.pieces]
        parts = zip(inputs, targets, cut.sizes, strict=True)
        return [Microbatch(args, kwargs, one, rows) for (args, kwargs), one, rows in parts]

    def _bind(self, partitions: Sequence[Partition], training: bool) -> BoundSchedule:
        order, split = first_microbatches(self._order, len(partitions)), self._split
        kinds = Kinds.among(partitions).metas
        like = self._order if self.world.data_parallel > 1 else None
        with self._engine.agreed_at_first():
            if training:
                ties = [group.stages for group in split.tie_groups]
                order = lower_training(order, kinds, ties, self._sharded, like)
                if self._norms is not None:
                    refuse_unseen(partitions, split.model)
            else:
                order = lower_evaluation(order, kinds, self._sharded, like)
            binding = Binding(
                partitions,
                order,
                self._loss,
                training,
                recompute=self._recompute,
                offload=self._offload,
                norms=self._norms if training else None,
                sharded=split.sharded,
                compile=arguments_for(
                    effective_compile(self._options.compile, split.model, partitions[0].stages), self._order
                ),
                check_finite=self._options.check_finite,
                features=self._options.features,
            )
        return self._engine.bind(binding)

    def _devices(self, cached: Cached, end: Callable[[int], bool]) -> list[torch.device | None]:
        """Where each microbatch's first (or last) stage runs; None if another process runs it."""
        order, engine = cached.bound.schedule, self._engine
        found: list[torch.device | None] = [None] * len(cached.sizes)
        for stage in filter(end, range(order.placement.stages)):
            if (rank := order.placement.rank_of[stage]) in engine.ranks:
                for number in order.numbers_on(stage):
                    found[number] = engine.devices[rank]
        return found

    def _refuse_aliases(self, cached: Cached, batch: Batch) -> None:
        """Raises ArgumentError for aliases in what this process was given."""
        if batch.pieces is not None or self._options.cutting.split is None:  # the recorded inputs are those of pieces
            refuse_aliases(cached.overwritten, batch if self.looks_at_targets else batch._replace(target=None))

    def _inputs(self, cached: Cached, cut: batches.CutBatch | None) -> list[dict[int, Tensor]]:
        """For each microbatch, the model's inputs by position among the first stage's inputs."""
        if cut is None:
            return []
        devices = self._devices(cached, self._order.placement.is_first)
        given = zip(cached.positions, self.bound_schedules.inputs(cached, cut), devices, strict=True)
        return [
            {
                position: batches.on(tensor.detach() if tensor.requires_grad else tensor, device)
                for position, tensor in zip(positions, tensors, strict=True)
            }
            for positions, tensors, device in given
        ]

    def _for_loss(self, cached: Cached, batch: Batch) -> tuple[Sequence[Any] | None, Sequence[float]]:
        """Each microbatch's target, on the device that computes its loss, and the weights of the losses."""
        targets: Sequence[Any] | None = None
        if not _wants_target(self._options.loss) or batch.has_target or cached.bound.training:
            targets = self._options.cutting.targets(batch, cached.sizes, None, labels=self._takes_labels(batch))
        weight, devices = self._weights(cached, targets), self._devices(cached, self._order.placement.is_last)
        return targets and [batches.on(one, device) for one, device in zip(targets, devices, strict=True)], weight

    def _weights(self, cached: Cached, targets: Sequence[Any] | None) -> list[float]:
        """The weights of the microbatches' losses in the batch of all replicas."""
        reduction: Reduction = "mean" if targets is None else self._reduction(cached)
        replicas, engine = self._engine.replicas, self._engine
        if targets and reduction == "mean" and not self._padding_checked:
            on_host = all(not isinstance(target, Tensor) or target.device.type == "cpu" for target in targets)
            advice = padding(self._options.loss, targets, cached.sizes)
            self._padding_checked = advice is not None or not on_host  # reading a device's targets waits for it
            if advice is not None:
                warn(advice)
        if replicas is None:
            return weights(reduction, cached.sizes, targets or ())
        watched, settings = engine.control.watchdog, self.bound_schedules.settings()
        mean = partial(replicas.mean, training=cached.bound.training, settings=settings, watched=watched)
        if reduction == "sum":
            mean(0.0)  # no mean is needed, but replicas that are not in the same step must find out
        return weights(reduction, cached.sizes, targets or (), self.world.data_parallel, mean)

    def _reduction(self, cached: Cached) -> Reduction:
        """The user's reduction. A function reads a target where the user gave it, before it travels; if that fails,
        since the function uses tensors of its own, where the loss is computed.
        """
        reduction = self._options.reduction
        device = next((d for d in self._devices(cached, self._order.placement.is_last) if d is not None), None)
        if not callable(reduction) or device is None or device.type == "cpu":
            return reduction

        def weigh(target: Any) -> float:
            try:
                return float(reduction(target))
            except RuntimeError:
                return float(reduction(batches.on(target, device)))

        return weigh

    def _takes_labels(self, batch: Batch) -> bool:
        """Whether a reduction weighs a model's own loss, by its labels."""
        return self._options.loss is None and not batch.has_target

    def _result(self, prepared: _Prepared, call: Call, moments: Mapping[int, Any], evaluates: bool) -> StepResult:
        cached, feed, _ = prepared
        bound = cached.bound
        if call.training or evaluates:
            self._parts.agree(bound)
        shared = share_loss(self._engine, bound, self._order.microbatches, wanted=self._options.share_loss)
        losses = tuple(loss for loss in bound.head.losses if loss is not None) if self.has_outputs else ()
        timeline = share_timeline(self._engine, bound.schedule, moments, wanted=call.timeline)
        outputs = tuple(bound.head.outputs) if feed.keep_outputs else None
        if call.outputs:
            outputs = bring(self._engine, bound.schedule, outputs, call.outputs)
        return StepResult(losses, timeline, cached.sizes, shared, outputs)


def _sharded(split: SplitModel, options: Options) -> Sharded:
    """The sharded stages, as the user wants them gathered. Raises ArgumentError if there are none to gather."""
    if options.unshard_window is not None and not split.sharded_stages:
        raise ArgumentError(
            f"unshard_window={options.unshard_window}: parallelize= applied fully_shard to no stage; leave "
            "unshard_window out, or shard the stages"
        )
    return Sharded(split.sharded_stages, options.unshard_window)


def _wants_target(loss: Loss | None) -> bool:
    return loss is not None and not isinstance(loss, OutputLoss)
