"""The story of a step, from the caller's batch to the result: the batch is cut, the schedule bound for its kind is
found, the engine runs that, and ranks get what the step gives back.

Steps do not overlap in a process: a step sets torch's generators and the state of its stages, and recording a model
replaces its tensors for a while. Servers of demos call from a pool of threads (gradio, FastAPI).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock._base.errors import ArgumentError, check_flags, warn
from penstock._base.marks import computing
from penstock._base.memory import overlap
from penstock._base.pytree import unflatten
from penstock.distributed.launch.step_file import announcer
from penstock.partition.nested import input_path
from penstock.runtime.batch.batch_dims import iter_leaves
from penstock.runtime.batch.cut import Batch, CutBatch, Cutting, Microbatch, move_to
from penstock.runtime.batch.outline import Outline, SingleRowError
from penstock.runtime.execute.executor import BoundSchedule, Feed
from penstock.runtime.features.deferred_norm import DeferredNorms
from penstock.runtime.loss.functions import SUM_ADVICE, Loss, padding_advice, reduction_advice, uses_target
from penstock.runtime.loss.loss import Reduction, check_sums, weights
from penstock.runtime.step.bound_schedules import BoundSchedules, Call, OutputsOption
from penstock.runtime.step.loss_dry_run import try_loss
from penstock.runtime.step.results import LossParts, StepResult, collect_outputs, share_loss, share_timeline


class Steps:
    """Runs the batches of one pipeline.

    Args:
        bound_schedules: one for each kind of batch so far; the first is added here.
        example: the batch that the pipeline is made for.
        loss: the user's; None if the model computes its own.
        broadcast_loss: whether every rank is to have the loss.

    Attributes:
        first: what runs batches like the example.
        has_inputs, has_outputs: whether this process runs the first, or the last stage.
        needs_inputs, needs_targets: whether the caller must pass them to this process; see `Pipeline`.
    """

    def __init__(
        self,
        bound_schedules: BoundSchedules,
        example: CutBatch,
        cutting: Cutting,
        loss: Loss | None,
        reduction: Reduction,
        *,
        broadcast_loss: bool,
    ) -> None:
        self.engine, self.order = bound_schedules.engine, bound_schedules.order
        self.bound_schedules, self.model_parts = bound_schedules, bound_schedules.model_parts
        self.cutting, self.loss, self.reduction = cutting, loss, reduction
        self._norms, self._broadcast_loss = bound_schedules.norms, broadcast_loss
        self.first = bound_schedules.add(example, Outline.of(example), training=True)
        self.has_inputs = any(rank in self.engine.ranks for rank in self.first.first_ranks)
        self.has_outputs = any(rank in self.engine.ranks for rank in self.first.last_ranks)
        self._takes_target = uses_target(loss)
        self._looks_at_targets = self._takes_target or callable(reduction)
        cuts_both = cutting.split is not None and self._looks_at_targets  # by one function of the user's
        self.needs_inputs = self.has_inputs or (cuts_both and self.has_outputs)
        self.needs_targets = self._looks_at_targets and (self.has_outputs or (cuts_both and self.has_inputs))
        self._parts = LossParts(self.engine, shared=broadcast_loss, of_function=loss is not None)
        self._is_advised = reduction_advice(loss, reduction) is not None
        self._padding_checked = self._is_advised
        self._announce = announcer()

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
        call = Call.of(training, outputs, timeline, self.engine.world.ranks)
        norms = self.deferring_norms() if training else nullcontext()
        # An evaluation may run within a step's loss only where this process drives all ranks.
        inner = (self, training and self.engine.world.is_local)
        with self.engine.control.reporting(), one_at_a_time(inner):
            if training or evaluates:
                check_sums(self.loss, self.reduction, batch.kwargs, self.order.microbatches)
            bound, feed, cut = self._prepare(batch, call, outputs is not False, loss_scale)
            is_first = training and number == 0
            if is_first and cut is not None:
                self._warn_if_nothing_trains(cut)
            with self.model_parts.accepting_own_changes(bound), norms:
                try:
                    times = self.engine.run_step(bound, feed, number, timed=timeline)
                except Exception as error:
                    given, example = map(_describe_inputs, (bound, self.first))
                    if given != example:
                        error.add_note(f"penstock: the batch has {given}; the pipeline was made for {example}")
                    raise
                adds_up = bound.head.adds_up and len(bound.kind.sizes) > 1 and not self._is_advised
                if is_first and adds_up and self.reduction == "mean":
                    warn(SUM_ADVICE)
                result = self._result(bound, call, times, evaluates, keep_outputs=feed.keep_outputs)
                if training:
                    self.bound_schedules.backward_to_batch(bound, cut)
            return result

    def _warn_if_nothing_trains(self, cut: CutBatch) -> None:
        leaves = [leaf for piece in cut.pieces for leaf in piece.leaves if isinstance(leaf, Tensor)]
        parameters = [parameter for _, parameter in self.model_parts.all_parameters()]
        if not any(tensor.requires_grad for tensor in (*parameters, *leaves)):
            warn("no parameter and no input of the model requires a gradient, so that a step trains nothing")

    def _prepare(
        self, original: Batch, call: Call, keep_outputs: bool, loss_scale: float
    ) -> tuple[BoundSchedule, Feed, CutBatch | None]:
        """Cut a batch, and find the bound schedule that runs it; with what its stages take in, and the cut batch."""
        batch = self.cutting.divide(original, "input") if self.has_inputs or self.has_outputs else original
        with torch.set_grad_enabled(call.training):
            cut = self.cutting.cut(batch, "input") if self.has_inputs else None
        try:
            bound = self.bound_schedules.next(cut, call)
        except SingleRowError:  # on every rank
            if self.cutting.inputs.min_rows > 1:
                raise
            self.cutting = self.cutting.in_pairs()
            return self._prepare(original, call, keep_outputs, loss_scale)
        except TypeError as error:
            if original.target is None and self.needs_targets:  # perhaps it is among the model's inputs
                error.add_note("penstock: target=None: pass what the loss takes as target=...")
            raise
        self._check_aliases(bound, batch)
        inputs, for_loss = self._inputs(bound, cut), self._for_loss(bound, batch) if self.has_outputs else (None, ())
        return bound, Feed(inputs, *for_loss, keep_outputs and self.has_outputs, loss_scale), cut

    @contextmanager
    def deferring_norms(self) -> Iterator[DeferredNorms | None]:
        """Wrap a training step: with `deferred_batch_norm`, running statistics are committed at its end, and are those
        of the first replica in all."""
        if self._norms is None:
            yield None
            return
        with self._norms.step():
            yield self._norms
        if self.engine.world.data_parallel > 1:
            self.engine.control.copy_from_first_process(self._norms.buffers())

    def dry_run(self, batch: Batch, *, loss: bool) -> str | None:
        """Raise what `run_batch` would for a batch like the example before its first forward and, if `loss`, for a loss
        that is no scalar or takes no gradient. One process drives all ranks. Return why the loss could not be tried;
        None if it could."""
        bound, batch = self.first, self.cutting.divide(batch, "input")
        self._check_aliases(bound, batch)
        if not loss:
            return None
        targets, _ = self._for_loss(bound, batch)
        devices = tuple({*self.engine.devices})
        with self.engine.streams.drawing(0, devices), computing(0, 0):
            loss_fn = getattr(self.loss, "__wrapped__", self.loss)  # as the user gave it
            return try_loss(bound, None if targets is None else targets[0], loss_fn)

    def microbatches(self, batch: Batch, device: torch.device) -> list[Microbatch]:
        """Cut one batch as `run_batch` does, and move it to `device`: return each piece's rows and the target that the
        loss and `reduction` get."""
        batch = self.cutting.divide(batch, "input")
        cut = self.cutting.cut(batch, "batch")
        targets = self.cutting.targets(batch, cut.sizes, labels=self._takes_labels(batch))
        inputs = [unflatten(piece.leaves, piece.structure) for piece in cut.pieces]
        moved = [move_to((*given, target), device) for given, target in zip(inputs, targets, strict=True)]
        return [Microbatch._make((*piece, rows)) for piece, rows in zip(moved, cut.sizes, strict=True)]

    def _devices(self, ranks: Sequence[int]) -> list[torch.device | None]:
        """Return the devices of ranks; None for those of other processes."""
        return [self.engine.devices[rank] if rank in self.engine.ranks else None for rank in ranks]

    def _check_aliases(self, bound: BoundSchedule, batch: Batch) -> None:
        """Raise ArgumentError for aliases in what this process was given."""
        if batch.pieces is not None or self.cutting.split is None:  # the recorded inputs are those of pieces
            check_aliases(bound.overwritten, batch if self._looks_at_targets else batch._replace(target=None))

    def _inputs(self, bound: BoundSchedule, cut: CutBatch | None) -> list[dict[int, Tensor]]:
        """Return, for each microbatch, the model's inputs by position among the first stage's inputs."""
        if cut is None:
            return []
        devices = self._devices(bound.first_ranks)
        parts = zip(bound.positions, self.bound_schedules.inputs(bound, cut), devices, strict=True)
        return [
            {
                position: move_to(tensor.detach() if tensor.requires_grad else tensor, device)
                for position, tensor in zip(positions, tensors, strict=True)
            }
            for positions, tensors, device in parts
        ]

    def _for_loss(self, bound: BoundSchedule, batch: Batch) -> tuple[Sequence[Any] | None, Sequence[float]]:
        """Return each microbatch's target, on the device that computes its loss, and the weights of the losses."""
        targets: Sequence[Any] | None = None
        if not self._takes_target or batch.has_target or bound.training:
            targets = self.cutting.targets(batch, bound.kind.sizes, labels=self._takes_labels(batch))
        has_none = all(target is None for target in targets or ())
        if callable(self.reduction) and has_none and not bound.training:
            targets = None  # a prediction without labels
        weight, devices = self._weights(bound, targets, batch), self._devices(bound.last_ranks)
        return targets and [move_to(target, device) for target, device in zip(targets, devices, strict=True)], weight

    def _weights(self, bound: BoundSchedule, targets: Sequence[Any] | None, batch: Batch) -> list[float]:
        """Return the weights of the microbatches' losses in the batch of all replicas."""
        reduction: Reduction = "mean" if targets is None else self._reduction(bound)
        replicas, engine = self.engine.replicas, self.engine
        if targets and reduction == "mean" and not self._padding_checked:
            on_host = all(not isinstance(target, Tensor) or target.device.type == "cpu" for target in targets)
            advice = padding_advice(self.loss, targets, bound.kind.sizes, self.model_parts.model, batch.kwargs)
            self._padding_checked = advice is not None or not on_host  # reading a device's targets waits for it
            if advice is not None:
                warn(advice)
        if replicas is None:
            return weights(reduction, bound.kind.sizes, targets or ())
        settings = self.bound_schedules.compute_digest(bound.kind.mode.settings)
        mean = partial(replicas.mean, training=bound.training, settings=settings, watched=engine.control.watchdog)
        if reduction == "sum":
            mean(0.0)  # no mean is needed, but replicas that are not in the same step must find out
        return weights(reduction, bound.kind.sizes, targets or (), self.engine.world.data_parallel, mean)

    def _reduction(self, bound: BoundSchedule) -> Reduction:
        """Return the user's reduction. A function reads a target on its original device, before it travels; if that
        fails, since the function uses tensors of its own, where the loss is computed."""
        reduction = self.reduction
        device = next((d for d in self._devices(bound.last_ranks) if d is not None), None)
        if not callable(reduction) or device is None or device.type == "cpu":
            return reduction

        def weigh(target: Any) -> float:
            try:
                return float(reduction(target))
            except RuntimeError:
                return float(reduction(move_to(target, device)))

        return weigh

    def _takes_labels(self, batch: Batch) -> bool:
        """Whether a reduction weighs a model's own loss, by its labels."""
        return self.loss is None and not batch.has_target

    def _result(
        self, bound: BoundSchedule, call: Call, times: Mapping[int, Any], evaluates: bool, *, keep_outputs: bool
    ) -> StepResult:
        if call.training or evaluates:
            self._parts.agree(bound)
        shared = share_loss(self.engine, bound, self.order.microbatches, broadcast=self._broadcast_loss)
        losses = tuple(loss for loss in bound.head.losses if loss is not None) if self.has_outputs else ()
        timeline = share_timeline(self.engine, bound.schedule, times, timed=call.timeline)
        outputs = tuple(bound.head.outputs) if keep_outputs else None
        targets = call.output_ranks(self.engine.world.ranks)
        if targets is not None:
            outputs = collect_outputs(self.engine, bound.last_ranks, outputs, targets)
        return StepResult(losses, timeline, bound.kind.sizes, shared, outputs)


def _describe_inputs(bound: BoundSchedule) -> str:
    """Return the number of dimensions and the dtype of each input of the first stage, in words."""
    inputs = bound.partitions[0].stages[0].meta.inputs
    return ", ".join(f"{x.name} of {len(x.meta.shape)} dimensions in {x.meta.dtype}" for x in inputs)


def check_aliases(overwritten: Collection[str], batch: Batch) -> None:
    """Raise ArgumentError if an input that the forward updates in place shares memory with another input or a target.

    On one device the others change with it: `loss(model(x), x)` compares with what a `ReLU(inplace=True)` made of x. In
    a pipeline each has its own memory, often in another process, and would not see the update.

    If the batch comes in pieces, this includes the inputs of other microbatches.

    `overwritten`: the paths of the inputs that the forward updates in place.
    """
    if not overwritten:
        return
    inputs: list[tuple[str, Tensor]] = []  # by their paths, as a caller would write them
    targets: list[tuple[str, Tensor]] = []
    for piece in batch.pieces or [batch]:
        input_leaves = iter_leaves((piece.args, dict(piece.kwargs)))
        inputs += [(input_path(path), leaf) for path, leaf in input_leaves if isinstance(leaf, Tensor)]
        targets += [(f"target{path}", leaf) for path, leaf in iter_leaves(piece.target) if isinstance(leaf, Tensor)]
    for index, (path, tensor) in enumerate(inputs):
        if path not in overwritten:
            continue
        candidates = [*inputs[:index], *inputs[index + 1 :], *targets]
        alias = next((name for name, candidate in candidates if overlap(tensor, candidate)), None)
        if alias is not None:
            text = f"{alias} of another microbatch" if alias == path else alias
            raise ArgumentError(
                f"the forward updates input {path} in place, and {text} shares memory with it: on one device {text} "
                "would change as well, but in a pipeline each has memory of its own. Pass a clone as one of the two "
                "(x.clone()), or have the model not update its input in place"
            )


_running: list[Hashable] = []
_lock = threading.RLock()


@contextmanager
def one_at_a_time(key: Hashable) -> Iterator[None]:
    """Wrap a step, or the making of a pipeline.

    Args:
        key: distinguishes it from others that may run within it, such as a step of another pipeline.

    Raises:
        ArgumentError: another thread is within one, or this thread is within the same.
    """
    if not _lock.acquire(blocking=False):
        raise ArgumentError(
            "another thread of this process is making a pipeline or running a step, which share torch's random "
            "generators and the model: use pipelines from one thread at a time, or in processes of their own"
        )
    try:
        if key in _running:
            raise ArgumentError(
                "this pipeline was asked for a step or an evaluation within its own step (in the loss, in a hook or in "
                "the model's forward): wait until the step has returned"
            )
        _running.append(key)
        try:
            yield
        finally:
            _running.remove(key)
    finally:
        _lock.release()
