"""The implementation of a `Pipeline`: its steps, and what checkpoints, verification and integrations use outside of
them. Internal: users work with `Pipeline`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock._base import owner
from penstock._base.errors import ArgumentError, PipelineClosedError
from penstock.partition.names import unwrapped
from penstock.pipe.optimizing import LocalClippingCheck
from penstock.pipe.options import Options
from penstock.pipe.run_recorder import Recorder
from penstock.pipe.verified import compute_fingerprint
from penstock.runtime.batch.cut import CutBatch
from penstock.runtime.exact.streams import Streams
from penstock.runtime.execute.engine import Engine, draws_outside_modules
from penstock.runtime.features.compiled import Compile, any_compiled, effective_compile
from penstock.runtime.features.deferred_norm import DeferredNorms
from penstock.runtime.features.feature import Binding
from penstock.runtime.features.registry import offload_by_stage, recompute_by_stage
from penstock.runtime.front_end import Partition
from penstock.runtime.loss.functions import explain_missing_target
from penstock.runtime.model.split_model import SplitModel
from penstock.runtime.step.bound_schedules import BoundSchedules
from penstock.runtime.step.step import Steps
from penstock.schedule import Schedule
from penstock.schedule.lowering import GatherPlan


class Session:
    """The running half of a `Pipeline`.

    Args:
        order: computations alone, for the largest number of microbatches that a batch has.
        example: the batch that the pipeline is made for.

    Attributes:
        schedule: what every rank does for a batch like the example, communication included.
        bound_schedules: one for each kind of batch so far.
        steps: runs batches.
        recompute, offload: the user's choice for each stage of one copy of the model.
        step_count: steps so far; keys the random streams, so that it belongs to what a checkpoint restores.
        companions: what other modules keep while the pipeline lives, by its type.
        recorder: writes the run's folder; None if it has none.
        first_step: verifies the first step before it is taken; None if that is done, or not requested.
    """

    def __init__(self, engine: Engine, split: SplitModel, order: Schedule, example: CutBatch, options: Options) -> None:
        self.engine, self.control, self.world = engine, engine.control, engine.world
        self.model_parts, self.order, self.options = split, order, options
        self.rows = sum(example.sizes)
        self.step_count = 0
        self.companions: dict[type, Any] = {}
        self.recorder: Recorder | None = None
        self.first_step: Callable[..., None] | None = None
        self._closed = False
        self._close_callbacks: list[Callable[[], None]] = []
        with engine.control.agreed():
            self.recompute = recompute_by_stage(options.recompute, order.placement.depth)
            self.offload = offload_by_stage(options.offload, order.placement.depth)
            bind = partial(
                Binding,
                loss=explain_missing_target(options.loss),
                recompute=self.recompute,
                offload=self.offload,
                check_finite=options.check_finite,
                features=options.features,
            )
            sharded = _sharded(split, options)
            self._norms = DeferredNorms(split.model.named_modules()) if options.deferred_batch_norm else None
        engine.streams.first_microbatch = engine.world.replica * order.microbatches
        self.bound_schedules = BoundSchedules(engine, split, order, bind, options.compile, sharded, self._norms)
        self.steps = Steps(
            self.bound_schedules,
            example,
            options.cutting,
            options.loss,
            options.reduction,
            broadcast_loss=options.broadcast_loss,
        )
        self.schedule = self.steps.first.schedule
        held = {name for name, _ in split.held_parameters()}
        others_train = any(p.requires_grad and name not in held for name, p in split.all_parameters())
        self._clipping_check = LocalClippingCheck(split.held_parameters) if others_train else None

    @property
    def device(self) -> torch.device:
        """The device on which this process computes; if it drives several ranks, the first one's."""
        return self.engine.devices[self.engine.ranks[0]]

    # -- the unsplit model ------------------------------------------------------------------------------------------

    @property
    def partition(self) -> Partition:
        """What the model was recorded as and cut into, for the first microbatch."""
        return self.model_parts.partitions(training=True)[0]

    def fingerprint(self) -> str:
        """Identify the model, schedule and options."""
        return compute_fingerprint(self.model_parts, self.engine, self.order, self.options)

    @property
    def compile(self) -> Compile:
        """How stages are compiled: as `compile=` says, or as the model compiled itself."""
        return effective_compile(self.options.compile, self.model_parts.model, self.partition.stages)

    @property
    def has_compiled_blocks(self) -> bool:
        """Whether the model compiled blocks of its stages itself."""
        return any(any_compiled(stage.module.modules()) for stage in self.partition.stages)

    def ties(self) -> dict[str, str]:
        """Return, for each further name of a tied parameter or buffer, or of a list's, its first name."""
        pairs = ((unwrapped(name), first) for name, first in self.model_parts.names().items())
        return {name: first for name, first in pairs if name != first}

    @property
    def drawing_modules(self) -> dict[str, nn.Module]:
        """The modules that draw random numbers when they are called, by name."""
        return {k: v for p in self.model_parts.partitions(training=True) for k, v in p.drawing_modules.items()}

    @property
    def draws_outside_modules(self) -> bool:
        """Whether the model draws random numbers outside the modules that are called."""
        return any(draws_outside_modules(partition) for partition in self.model_parts.partitions(training=True))

    @property
    def reorders_gradients(self) -> bool:
        """Whether gradients other than those of ties may be added in another order than in the unsplit model."""
        return any(partition.reorders_gradients for partition in self.model_parts.partitions(training=True))

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

    def accept_gradients(self) -> None:
        """Note that Penstock has just written the gradients; see `LocalClippingCheck`."""
        if self._clipping_check is not None:
            self._clipping_check.accept()

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
        if self._norms is not None:
            self._norms.close()
        if self._clipping_check is not None:
            self._clipping_check.close()
        try:
            while self._close_callbacks and not self.engine.control.failed:
                self._close_callbacks.pop()()
        finally:
            owner.release(id(self))
            self.engine.close()


def _sharded(split: SplitModel, options: Options) -> GatherPlan:
    """Return the sharded stages and the user's window. Raise ArgumentError for a window without sharded stages."""
    if options.unshard_window is not None and not split.sharded_stages:
        raise ArgumentError(
            f"unshard_window={options.unshard_window}: parallelize= applied fully_shard to no stage; leave "
            "unshard_window out, or shard the stages"
        )
    return GatherPlan(split.sharded_stages, options.unshard_window)
