"""The internals of a pipeline, for code that works on one outside its steps: checkpoints, proofs, integrations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from penstock._base import owner
from penstock._base.errors import ArgumentError, ClosedError
from penstock.partition.units.chain import default_kwargs, unwrapped
from penstock.pipe.options import Options
from penstock.pipe.recorder import Recorder
from penstock.pipe.steps import Steps
from penstock.pipe.verified import fingerprint_of
from penstock.runtime.batch import microbatches as batches
from penstock.runtime.exact.streams import Streams
from penstock.runtime.execute.engine import Engine, draws_in_glue
from penstock.runtime.features.compiled import Compile, any_compiled, effective_compile
from penstock.runtime.features.deferred_norm import DeferredNorms
from penstock.runtime.front_end import Partition
from penstock.runtime.model.split_model import SplitModel
from penstock.schedule import Schedule


class Session:
    """The running half of a `Pipeline`. Not for users: `Pipeline` has what they need.

    Attributes:
        step_count: steps so far; keys the random streams, so that it belongs to what a checkpoint restores.
        companions: what other modules keep while the pipeline lives, by its type.
        recorder: writes the run's folder; None if it has none.
        first_step: verifies the first step before it is taken; None if that is done, or was not asked.
    """

    def __init__(
        self, engine: Engine, split: SplitModel, order: Schedule, example: batches.CutBatch, options: Options
    ) -> None:
        self.engine = engine
        self.control = engine.control
        self.split = split
        self.order = order
        self.options = options
        self.rows = sum(example.sizes)
        self.step_count = 0
        self.companions: dict[type, Any] = {}
        self.recorder: Recorder | None = None
        self.first_step: Callable[..., None] | None = None
        self._closed = False
        self._before_close: list[Callable[[], None]] = []
        with engine.control.agreed():
            self.norms = DeferredNorms(split.model.named_modules()) if options.deferred_batch_norm else None
        self.steps = Steps(engine, split, order, example, options, self.norms)

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
        """Identifies the model, schedule and options."""
        return fingerprint_of(self.split, self.engine, self.order, self.options)

    @property
    def compile(self) -> Compile:
        """How stages are compiled: as `compile=` says, or as the model compiled itself."""
        return effective_compile(self.options.compile, self.split.model, self.partition.stages)

    @property
    def has_compiled_blocks(self) -> bool:
        """Whether the model compiled blocks of its stages itself."""
        return any(any_compiled(stage.module.modules()) for stage in self.partition.stages)

    def ties(self) -> dict[str, str]:
        """For each further name of a tied parameter or buffer, or of a list's, its first name."""
        every = ((unwrapped(name), first) for name, first in self.split.names().items())
        return {name: first for name, first in every if name != first}

    def default_kwargs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """What is passed to the model besides the caller's inputs (`use_cache=False` for models of `transformers`)."""
        return default_kwargs(self.split.model, args, kwargs)

    @property
    def drawing_modules(self) -> dict[str, nn.Module]:
        """The modules that draw random numbers when they are called, by name."""
        return {k: v for one in self.split.partitions(training=True) for k, v in one.drawing_modules.items()}

    @property
    def draws_in_glue(self) -> bool:
        """Whether the model draws random numbers outside the modules that are called."""
        return any(draws_in_glue(partition) for partition in self.split.partitions(training=True))

    @property
    def reorders_gradients(self) -> bool:
        """Whether gradients other than those of ties may be added in another order than in the unsplit model."""
        return any(partition.reorders_gradients for partition in self.split.partitions(training=True))

    # -- steps -------------------------------------------------------------------------------------------------------

    @contextmanager
    def drawing(self) -> Iterator[Streams]:
        """The random streams of the present step, to run the unsplit model with the masks that the pipeline draws."""
        streams = self.engine.streams
        with streams.drawing(self.step_count, tuple(self.engine.devices)):
            yield streams

    def refuse_unaveraged(self, what: str) -> None:
        """Raises ArgumentError if each replica has its own gradients, so that replicas would diverge."""
        if self.engine.replicas is not None and self.engine.replicas.behind:
            raise ArgumentError(
                f"{what}: the last step was within no_sync(), so each replica has gradients of its own; take the last "
                "step before this call outside no_sync()"
            )

    def restore(self, *, step_count: int, seed: int) -> None:
        """Sets the random streams to where they are after this many steps. Every rank calls it."""
        self.step_count = step_count
        self.engine.streams.seed = seed

    # -- the end ------------------------------------------------------------------------------------------------------

    def before_close(self, act: Callable[[], None]) -> None:
        """`close` calls `act` before it releases anything: for what runs alongside the steps. All ranks call it."""
        self._before_close.append(act)

    def refuse_closed(self) -> None:
        """Raises ClosedError once `close` was called."""
        if self._closed:
            raise ClosedError("this pipeline was closed; make a new one")

    def close(self) -> None:
        """See `Pipeline.close`."""
        if self._closed:
            return
        self._closed = True
        if self.norms is not None:
            self.norms.close()
        try:
            while self._before_close and not self.engine.control.failed:
                self._before_close.pop()()
        finally:
            owner.release(id(self))
            self.engine.close()
