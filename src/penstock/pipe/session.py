"""The implementation of a `Pipeline`: its steps, from the caller's batch to the result, and what checkpoints,
verification and integrations use outside of steps. Internal: users work with `Pipeline`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base import owner
from penstock._base.errors import ArgumentError, PipelineClosedError, check_flags, warn
from penstock._base.marks import computing
from penstock._base.pytree import leaf_tensors, unflatten
from penstock.distributed.launch.step_file import announcer
from penstock.partition.names import unwrapped
from penstock.pipe.options import Options
from penstock.pipe.result import StepResult
from penstock.pipe.run_recorder import Recorder
from penstock.pipe.verified import compute_fingerprint
from penstock.runtime.batch import microbatches as batches
from penstock.runtime.batch.cutting import Batch, Microbatch, check_aliases
from penstock.runtime.batch.outline import Outline, SingleRowError
from penstock.runtime.exact.streams import Streams
from penstock.runtime.execute.engine import Engine, draws_outside_modules
from penstock.runtime.execute.program import Feed
from penstock.runtime.features.compiled import Compile, any_compiled, effective_compile
from penstock.runtime.features.deferred_norm import DeferredNorms
from penstock.runtime.features.feature import Binding
from penstock.runtime.features.registry import RECOMPUTE, offload_by_stage, recompute_by_stage
from penstock.runtime.front_end import Partition
from penstock.runtime.loss.functions import SUM_ADVICE, explain_missing_target, padding_advice, uses_target
from penstock.runtime.loss.loss import Reduction, weights
from penstock.runtime.model.split_model import SplitModel
from penstock.runtime.step.bound_schedules import BoundSchedules, CachedSchedule, Call
from penstock.runtime.step.loss_dry_run import try_loss
from penstock.runtime.step.reentrancy import one_at_a_time
from penstock.runtime.step.results import (
    LossParts,
    OutputsOption,
    collect_outputs,
    encode_outputs,
    share_loss,
    share_timeline,
)
from penstock.schedule import Schedule
from penstock.schedule.lowering import Sharded


class Session:
    """The running half of a `Pipeline`.

    Args:
        order: computations alone, for the largest number of microbatches that a batch has.
        example: the batch that the pipeline is made for.

    Attributes:
        schedule: what every rank does for a batch like the example, communication included.
        bound_schedules: one for each kind of batch so far.
        has_inputs, has_outputs: whether this process runs the first, or the last stage.
        looks_at_targets: whether anything on any rank looks at targets.
        needs_inputs, needs_targets: whether the caller must pass them to this process; see `Pipeline`.
        step_count: steps so far; keys the random streams, so that it belongs to what a checkpoint restores.
        companions: what other modules keep while the pipeline lives, by its type.
        recorder: writes the run's folder; None if it has none.
        first_step: verifies the first step before it is taken; None if that is done, or not requested.
    """

    def __init__(
        self, engine: Engine, split: SplitModel, order: Schedule, example: batches.CutBatch, options: Options
    ) -> None:
        self.engine, self.control, self.world = engine, engine.control, engine.world
        self.split, self.order, self.options = split, order, options
        self.rows = sum(example.sizes)
        self.step_count = 0
        self.companions: dict[type, Any] = {}
        self.recorder: Recorder | None = None
        self.first_step: Callable[..., None] | None = None
        self._closed = False
        self._close_callbacks: list[Callable[[], None]] = []
        with engine.control.agreed():
            bind = partial(
                Binding,
                loss=explain_missing_target(options.loss),
                recompute=recompute_by_stage(options.recompute, order.placement.depth, RECOMPUTE),
                offload=offload_by_stage(options.offload, order.placement.depth),
                check_finite=options.check_finite,
                features=options.features,
            )
            sharded = _sharded(split, options)
            self.norms = DeferredNorms(split.model.named_modules()) if options.deferred_batch_norm else None
        local_stages = [stage for stage, rank in enumerate(order.placement.rank_of) if rank in engine.ranks]
        self.has_inputs = any(map(order.placement.is_first, local_stages))
        self.has_outputs = any(map(order.placement.is_last, local_stages))
        self.looks_at_targets = uses_target(options.loss) or callable(options.reduction)
        cuts_both = options.cutting.split is not None and self.looks_at_targets  # by one function of the user's
        self.needs_inputs = self.has_inputs or (cuts_both and self.has_outputs)
        self.needs_targets = self.looks_at_targets and (self.has_outputs or (cuts_both and self.has_inputs))
        self._parts = LossParts(engine, shared=options.broadcast_loss, of_function=options.loss is not None)
        self._padding_checked = bool(options.loss_notes)
        self._announce = announcer()
        engine.streams.first_microbatch = engine.world.replica * order.microbatches
        self.bound_schedules = BoundSchedules(engine, split, order, bind, options.compile, sharded, self.norms)
        self._first = self.bound_schedules.add(example, Outline.of(example), training=True)
        self.schedule = self._first.bound.schedule

    @property
    def device(self) -> torch.device:
        """The device on which this process computes; if it drives several ranks, the first one's."""
        return self.engine.devices[self.engine.ranks[0]]

    # -- the unsplit model ------------------------------------------------------------------------------------------

    @property
    def partition(self) -> Partition:
        """What the model was recorded as and cut into, for the first microbatch."""
        return self.split.partitions(training=True)[0]

    def fingerprint(self) -> str:
        """Identify the model, schedule and options."""
        return compute_fingerprint(self.split, self.engine, self.order, self.options)

    @property
    def compile(self) -> Compile:
        """How stages are compiled: as `compile=` says, or as the model compiled itself."""
        return effective_compile(self.options.compile, self.split.model, self.partition.stages)

    @property
    def has_compiled_blocks(self) -> bool:
        """Whether the model compiled blocks of its stages itself."""
        return any(any_compiled(stage.module.modules()) for stage in self.partition.stages)

    def ties(self) -> dict[str, str]:
        """Return, for each further name of a tied parameter or buffer, or of a list's, its first name."""
        pairs = ((unwrapped(name), first) for name, first in self.split.names().items())
        return {name: first for name, first in pairs if name != first}

    @property
    def drawing_modules(self) -> dict[str, nn.Module]:
        """The modules that draw random numbers when they are called, by name."""
        return {k: v for p in self.split.partitions(training=True) for k, v in p.drawing_modules.items()}

    @property
    def draws_outside_modules(self) -> bool:
        """Whether the model draws random numbers outside the modules that are called."""
        return any(draws_outside_modules(partition) for partition in self.split.partitions(training=True))

    @property
    def reorders_gradients(self) -> bool:
        """Whether gradients other than those of ties may be added in another order than in the unsplit model."""
        return any(partition.reorders_gradients for partition in self.split.partitions(training=True))

    # -- steps -------------------------------------------------------------------------------------------------------

    def run_batch(
        self,
        number: int,
        batch: Batch,
        *,
        training: bool,
        outputs: OutputsOption,
        timeline: bool,
        loss_scale: float = 1.0,
        evaluates: bool = True,
    ) -> StepResult:
        """Run one step, the `number`-th; see `Pipeline.step`. If it fails, the other ranks end as well.

        Args:
            evaluates: whether the loss is needed, not only the outputs.
        """
        if training and self._announce is not None:
            self._announce(number)
        check_flags(timeline=timeline)
        call = Call(training, encode_outputs(outputs, self.world.ranks), timeline)
        norms = self.deferring_norms() if training else nullcontext()
        with self.engine.control.reporting(), one_at_a_time((self, training)):
            if training or evaluates:
                self.options.check_inputs(batch.kwargs, self.order.microbatches)
            cached, feed, cut = self._prepare(batch, call, outputs is not False, loss_scale)
            is_first = training and number == 0
            if is_first and self.has_inputs:
                self._warn_if_nothing_trains(batch)
            with self.split.accepting_own_changes(cached.mode, cached.bound), norms:
                times = self.engine.run_step(cached.bound, feed, number, timed=timeline)
                adds_up = cached.bound.head.adds_up and len(cached.sizes) > 1 and not self.options.loss_notes
                if is_first and adds_up and self.options.reduction == "mean":
                    warn(SUM_ADVICE)
                result = self._result(cached, call, times, evaluates, keep_outputs=feed.keep_outputs)
                if training:
                    self.bound_schedules.backward_to_batch(cached, cut)
            return result

    def _warn_if_nothing_trains(self, batch: Batch) -> None:
        tensors = (
            *(parameter for _, parameter in self.split.all_parameters()),
            *leaf_tensors((batch.args, batch.kwargs)),
        )
        if not any(tensor.requires_grad for tensor in tensors):
            warn("no parameter and no input of the model requires a gradient, so that a step trains nothing")

    def _prepare(
        self, original: Batch, call: Call, keep_outputs: bool, loss_scale: float
    ) -> tuple[CachedSchedule, Feed, batches.CutBatch | None]:
        """Cut a batch, and find the bound schedule that runs it; with what its stages take in, and the cut batch."""
        batch = self._divide(original) if self.has_inputs or self.has_outputs else original
        with torch.set_grad_enabled(call.training):
            cut = self.cut(batch, "input", None) if self.has_inputs else None
        try:
            cached = self.bound_schedules.next(cut, call)
        except SingleRowError:  # on every rank
            if self.options.cutting.inputs.min_rows > 1:
                raise
            self.options.cut_in_pairs()
            return self._prepare(original, call, keep_outputs, loss_scale)
        except TypeError as error:
            if original.target is None and self.needs_targets:  # perhaps it is among the model's inputs
                error.add_note("penstock: target=None: pass what the loss takes as target=...")
            raise
        self._check_aliases(cached, batch)
        inputs = self._inputs(cached, cut)
        if not self.has_outputs:
            return cached, Feed(inputs, loss_scale=loss_scale), cut
        return cached, Feed(inputs, *self._for_loss(cached, batch), keep_outputs, loss_scale), cut

    @contextmanager
    def deferring_norms(self) -> Iterator[DeferredNorms | None]:
        """Wrap a training step: with `deferred_batch_norm`, running statistics are committed at its end, and are those
        of the first replica in all."""
        if self.norms is None:
            yield None
            return
        with self.norms.step():
            yield self.norms
        if self.world.data_parallel > 1:
            self.engine.control.copy_from_first_process(self.norms.buffers())

    def dry_run(self, batch: Batch, *, loss: bool) -> str | None:
        """Raise what `run_batch` would for a batch like the example before its first forward and, if `loss`, for a loss
        of any value. One process drives all ranks. Return why the loss could not be tried; None if it could."""
        cached, batch = self._first, self._divide(batch)
        self._check_aliases(cached, batch)
        if not loss:
            return None
        targets, _ = self._for_loss(cached, batch)
        devices = tuple({*self.engine.devices})
        with self.engine.streams.drawing(0, devices), computing(0, 0):
            loss_fn = getattr(self.options.loss, "__wrapped__", self.options.loss)  # as the user gave it
            return try_loss(cached.bound, None if targets is None else targets[0], loss_fn)

    def _divide(self, batch: Batch) -> Batch:
        """Return a batch with the microbatches that the user's function, if any, makes of it."""
        order, cutting = self.order, self.options.cutting
        return cutting.divide(batch, order.microbatches, "input", order.placement.pipelines)

    def cut(self, batch: Batch, label: str, device: torch.device | None) -> batches.CutBatch:
        """Return the microbatches of a batch's inputs, on `device` or, if None, where they are."""
        order, cutting = self.order, self.options.cutting
        return cutting.cut(batch, order.microbatches, label, device, order.placement.pipelines)

    def microbatches(self, batch: Batch, device: torch.device) -> list[Microbatch]:
        """Cut one batch as `run_batch` does: return each piece's rows and the target that the loss and `reduction`
        get."""
        batch = self._divide(batch)
        cut = self.cut(batch, "batch", device)
        targets = self.options.cutting.targets(batch, cut.sizes, device, labels=self._takes_labels(batch))
        inputs = [unflatten(piece.leaves, piece.structure) for piece in cut.pieces]
        parts = zip(inputs, targets, cut.sizes, strict=True)
        return [Microbatch(args, kwargs, target, rows) for (args, kwargs), target, rows in parts]

    def _devices(self, cached: CachedSchedule, end: Callable[[int], bool]) -> list[torch.device | None]:
        """Return where each microbatch's first (or last) stage runs; None if another process runs it."""
        order, engine = cached.bound.schedule, self.engine
        devices: list[torch.device | None] = [None] * len(cached.sizes)
        for stage in filter(end, range(order.placement.stages)):
            if (rank := order.placement.rank_of[stage]) in engine.ranks:
                for number in order.numbers_on(stage):
                    devices[number] = engine.devices[rank]
        return devices

    def _check_aliases(self, cached: CachedSchedule, batch: Batch) -> None:
        """Raise ArgumentError for aliases in what this process was given."""
        if batch.pieces is not None or self.options.cutting.split is None:  # the recorded inputs are those of pieces
            check_aliases(cached.overwritten, batch if self.looks_at_targets else batch._replace(target=None))

    def _inputs(self, cached: CachedSchedule, cut: batches.CutBatch | None) -> list[dict[int, Tensor]]:
        """Return, for each microbatch, the model's inputs by position among the first stage's inputs."""
        if cut is None:
            return []
        devices = self._devices(cached, self.order.placement.is_first)
        parts = zip(cached.positions, self.bound_schedules.inputs(cached, cut), devices, strict=True)
        return [
            {
                position: batches.move_to(tensor.detach() if tensor.requires_grad else tensor, device)
                for position, tensor in zip(positions, tensors, strict=True)
            }
            for positions, tensors, device in parts
        ]

    def _for_loss(self, cached: CachedSchedule, batch: Batch) -> tuple[Sequence[Any] | None, Sequence[float]]:
        """Return each microbatch's target, on the device that computes its loss, and the weights of the losses."""
        targets: Sequence[Any] | None = None
        if not uses_target(self.options.loss) or batch.has_target or cached.bound.training:
            targets = self.options.cutting.targets(batch, cached.sizes, None, labels=self._takes_labels(batch))
        has_none = all(target is None for target in targets or ())
        if callable(self.options.reduction) and has_none and not cached.bound.training:
            targets = None  # a prediction without labels
        weight, devices = self._weights(cached, targets, batch), self._devices(cached, self.order.placement.is_last)
        return targets and [
            batches.move_to(target, device) for target, device in zip(targets, devices, strict=True)
        ], weight

    def _weights(self, cached: CachedSchedule, targets: Sequence[Any] | None, batch: Batch) -> list[float]:
        """Return the weights of the microbatches' losses in the batch of all replicas."""
        reduction: Reduction = "mean" if targets is None else self._reduction(cached)
        replicas, engine = self.engine.replicas, self.engine
        if targets and reduction == "mean" and not self._padding_checked:
            on_host = all(not isinstance(target, Tensor) or target.device.type == "cpu" for target in targets)
            advice = padding_advice(self.options.loss, targets, cached.sizes, self.split.model, batch.kwargs)
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

    def _reduction(self, cached: CachedSchedule) -> Reduction:
        """Return the user's reduction. A function reads a target on its original device, before it travels; if that
        fails, since the function uses tensors of its own, where the loss is computed."""
        reduction = self.options.reduction
        device = next((d for d in self._devices(cached, self.order.placement.is_last) if d is not None), None)
        if not callable(reduction) or device is None or device.type == "cpu":
            return reduction

        def weigh(target: Any) -> float:
            try:
                return float(reduction(target))
            except RuntimeError:
                return float(reduction(batches.move_to(target, device)))

        return weigh

    def _takes_labels(self, batch: Batch) -> bool:
        """Whether a reduction weighs a model's own loss, by its labels."""
        return self.options.loss is None and not batch.has_target

    def _result(
        self, cached: CachedSchedule, call: Call, times: Mapping[int, Any], evaluates: bool, *, keep_outputs: bool
    ) -> StepResult:
        bound = cached.bound
        if call.training or evaluates:
            self._parts.agree(bound)
        shared = share_loss(self.engine, bound, self.order.microbatches, broadcast=self.options.broadcast_loss)
        losses = tuple(loss for loss in bound.head.losses if loss is not None) if self.has_outputs else ()
        timeline = share_timeline(self.engine, bound.schedule, times, timed=call.timeline)
        outputs = tuple(bound.head.outputs) if keep_outputs else None
        if call.outputs:
            outputs = collect_outputs(self.engine, bound.schedule, outputs, call.outputs)
        return StepResult(losses, timeline, cached.sizes, shared, outputs)

    @contextmanager
    def drawing(self) -> Iterator[Streams]:
        """Yield the random streams of the present step, to run the unsplit model with the masks that the pipeline
        draws."""
        streams = self.engine.streams
        with streams.drawing(self.step_count, tuple(self.engine.devices)):
            yield streams

    def require_synced_gradients(self, label: str) -> None:
        """Raise ArgumentError if each replica has its own gradients, so that replicas would diverge."""
        if self.engine.replicas is not None and self.engine.replicas.behind:
            raise ArgumentError(
                f"{label}: the last step was within no_sync(), so each replica has gradients of its own; take the last "
                "step before this call outside no_sync()"
            )

    # -- the end ------------------------------------------------------------------------------------------------------

    def on_close(self, act: Callable[[], None]) -> None:
        """Have `close` call `act` before it releases anything: for threads beside the steps. All ranks call it."""
        self._close_callbacks.append(act)

    def check_open(self) -> None:
        """Raise PipelineClosedError once `close` was called."""
        if self._closed:
            raise PipelineClosedError("this pipeline was closed; make a new one")

    def close(self) -> None:
        """Close the pipeline; see `Pipeline.close`."""
        if self._closed:
            return
        self._closed = True
        if self.norms is not None:
            self.norms.close()
        try:
            while self._close_callbacks and not self.engine.control.failed:
                self._close_callbacks.pop()()
        finally:
            owner.release(id(self))
            self.engine.close()


def _sharded(split: SplitModel, options: Options) -> Sharded:
    """Return the sharded stages and the user's window. Raise ArgumentError for a window without sharded stages."""
    if options.unshard_window is not None and not split.sharded_stages:
        raise ArgumentError(
            f"unshard_window={options.unshard_window}: parallelize= applied fully_shard to no stage; leave "
            "unshard_window out, or shard the stages"
        )
    return Sharded(split.sharded_stages, options.unshard_window)
