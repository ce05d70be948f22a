"""A model that is split over ranks, and its training and evaluation steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from penstock.errors import ArgumentError, ClosedError
from penstock.partition import Partition
from penstock.partition.stages.aliases import crosses_twice
from penstock.pipe.groups import OptionsOf, parameter_groups
from penstock.pipe.options import Options
from penstock.pipe.result import StepResult
from penstock.pipe.steps import Steps
from penstock.runtime.batch import microbatches as batches
from penstock.runtime.batch.cutting import Microbatch
from penstock.runtime.exact.streams import Streams
from penstock.runtime.execute.engine import Engine, draws_in_glue
from penstock.runtime.features import compiled
from penstock.runtime.features.deferred_norm import DeferredNorms
from penstock.runtime.features.per_stage import notes as offload_notes
from penstock.runtime.features.per_stage import offload_by_stage
from penstock.runtime.gradients.distribution import local, whole
from penstock.runtime.loss.loss import checked_scale
from penstock.runtime.model.split_model import SplitModel
from penstock.runtime.model.state_dicts import evaluating, load_into
from penstock.runtime.step.outputs import Wanted
from penstock.schedule import Schedule, check
from penstock.stages import StageMeta
from penstock.words import counted


class Pipeline:
    """A model that is split over ranks. Made by `pipeline`; ended by `close`, or by leaving a `with` block.

    Attributes:
        schedule: what every rank does for a batch like the example, communication included.
        world: the processes.
        step_count: steps so far; keys the random streams, so that it belongs to what a checkpoint restores.
        loss_scale: of the last step: what its gradients are multiplied with.
        companions: what other modules keep for as long as the pipeline lives, by its type.
    """

    def __init__(
        self, engine: Engine, split: SplitModel, order: Schedule, example: batches.Cut, options: Options
    ) -> None:
        self.world = engine.world
        self.step_count = 0
        self.loss_scale = 1.0
        self.companions: dict[type, Any] = {}
        self._engine = engine
        self._split = split
        self._order = order
        self._options = options
        self._rows = sum(example.sizes)
        self._closed = False
        self._before_close: list[Callable[[], None]] = []
        with engine.control.agreed():
            self._norms = DeferredNorms(split.model.named_modules()) if options.deferred_batch_norm else None
        self._steps = Steps(engine, split, order, example, options, self._norms)
        self.schedule = self._steps.schedule

    # -- training -------------------------------------------------------------------------------------------------

    def step(
        self,
        *args: Any,
        target: Any = None,
        outputs: Wanted = False,
        timeline: bool = False,
        loss_scale: float = 1.0,
        **kwargs: Any,
    ) -> StepResult:
        """Forward and backward of one batch. Gradients are added to `.grad`, as `loss.backward()` would.

        Every rank calls it. Only ranks where `needs_inputs` (`needs_targets`) is true look at the inputs (the target).

        Args:
            args, kwargs: the model's inputs: tensors with the batch in their first dimension (or where `batch_dims`
                says), `Microbatches`, scalars and plain values; with `split`, whatever it takes. Where their shapes,
                dtypes or plain values are new, the model is recorded again.
            target: what `loss` takes besides the model's output; cut as the inputs are. None where it takes nothing.
            outputs: keep the model's outputs, for `result.outputs`: True where the last stage is, "all" on every rank,
                a number on the rank of that number. Every rank says the same, or True and False.
            timeline: note what every rank does when, for `result.timeline`; on every rank alike.
            loss_scale: gradients are multiplied with it, the loss that is reported is not; see `penstock.GradScaler`.

        Raises:
            ShapeError: tensors disagree on the number of rows.
            PartitionError: the model cannot be recorded for this batch.
            ArgumentError: a target is missing, the loss is not a scalar, or the ranks do not make the same call.
            PipelineFailure: another rank failed.
        """
        self._refuse_closed()
        self.loss_scale = checked_scale(loss_scale)
        with self.deferring():
            result = self._steps.run(
                self.step_count,
                args,
                kwargs,
                target,
                training=True,
                outputs=outputs,
                timeline=timeline,
                loss_scale=self.loss_scale,
            )
        if self._norms is not None and self.world.data_parallel > 1:
            self._engine.control.start_equal(self._norms.buffers())  # as all buffers of replicas
        self.step_count += 1
        return result

    def evaluate(
        self, *args: Any, target: Any = None, outputs: Wanted = False, timeline: bool = False, **kwargs: Any
    ) -> StepResult:
        """Forward of one batch in evaluation mode. No gradient and no buffer is touched, and the mode is restored.

        Takes what `step` takes. Without a target there is no loss, unless the model computes its own.
        """
        self._refuse_closed()
        with evaluating(self._split):
            return self._steps.run(
                self.step_count, args, kwargs, target, training=False, outputs=outputs, timeline=timeline
            )

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ClosedError("this pipeline was closed; make a new one")

    def predict(self, *args: Any, outputs: Wanted = True, **kwargs: Any) -> Any:
        """The model's output for a whole batch, in evaluation mode, as the unsplit model would return it: the
        microbatches' outputs, put together along their first dimension, as `batch_dims` says, or by `merge`.

        Args:
            args, kwargs: as for `step`.
            outputs: who gets it: True the ranks where `has_outputs` is true, "all" every rank, a number the rank of
                that number. The others get None.

        Raises:
            ArgumentError: the schedule has two copies of the model, and outputs=True.
            ShapeError: an output cannot be put together: it is a scalar, has other than its microbatch's rows, or
                lengths differ. `evaluate(..., outputs=True)` gives each microbatch's own.
        """
        result = self.evaluate(*args, outputs=outputs, **kwargs)
        return None if result._outputs is None else self._options.cutting.join(result.outputs, result.sizes)

    # -- what this process holds ------------------------------------------------------------------------------------

    @property
    def global_batch(self) -> int:
        """Rows of a whole batch like the example, over all replicas: rows of a microbatch * microbatches * replicas."""
        return self._rows * self.world.data_parallel

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, steps do not average gradients over the replicas; the next step outside of it averages them all.

        For accumulation over several steps, as `DistributedDataParallel.no_sync`. Until then `.grad` is the replica's
        own. Without replicas it changes nothing.
        """
        replicas = self._engine.replicas
        before = replicas is None or replicas.active
        if replicas is not None:
            replicas.active = False
        try:
            yield
        finally:
            if replicas is not None:
                replicas.active = before

    @property
    def needs_inputs(self) -> bool:
        """Whether this process must pass the model's inputs: it runs the first stage, or the last one and `split=` cuts
        the target, too."""
        return self._steps.needs_inputs

    @property
    def needs_targets(self) -> bool:
        """Whether this process must pass the target: something looks at targets, and it runs the last stage, or the
        first one with `split=`, which cuts both."""
        return self._steps.needs_targets

    @property
    def has_outputs(self) -> bool:
        """Whether this process runs the last stage, from which outputs and losses come."""
        return self._steps.has_outputs

    @property
    def model(self) -> nn.Module:
        """The model, or the chain of the layers that were given. Stages of other processes are on the meta device."""
        return self._split.model

    @property
    def cuts(self) -> tuple[str, ...]:
        """The module that each stage but the first begins with."""
        return self._split.cuts

    @property
    def stages(self) -> tuple[StageMeta, ...]:
        """What enters, leaves and lives on each stage, of all ranks."""
        return tuple(stage.meta for stage in self.partition.stages)

    @property
    def code(self) -> str:
        """The stages' forward functions, as Python."""
        return self.partition.code

    @property
    def notes(self) -> tuple[str, ...]:
        """What recording the model had to say, and what the schedule, compiled stages and offload cost."""
        inexact = [violation.text for violation in check(self.schedule) if not violation.fatal]
        partition = self.partition
        draws = bool(partition.drawing_modules) or self.draws_in_glue
        offload = offload_by_stage(self._options.offload, self._order.placement.depth)
        compiling = compiled.notes_of(self._options.compile, self.schedule, draws=draws)
        return (*partition.notes, *inexact, *compiling, *offload_notes(offload, self._order))

    @property
    def split_share(self) -> dict[int, float]:
        """For each stage of this process whose backward the schedule splits: how much of it waits for W, as the share
        of the elements of its trained parameters whose gradient does. Known after a step; the rest is done at I."""
        programs = next((job.programs for job in reversed(list(self._steps.jobs)) if job.training), ())
        runners = (runner for program in programs for runner in program.runners.values())
        return {runner.meta.index: runner.split.share for runner in runners if runner.split is not None}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this process's stages, each once, by their names in the unsplit model."""
        return iter(self._split.held_parameters())

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this process's stages. A rank without any gets an empty one: optimizers want some."""
        held = [parameter for _, parameter in self.named_parameters()]
        return iter(held or [nn.Parameter(torch.empty(0, device=self.device))])

    def parameter_groups(self, options_of: OptionsOf) -> list[dict[str, Any]]:
        """Groups for an optimizer: the same number, in the same order, on every rank; some may be empty on this one.

        Args:
            options_of: takes a parameter's name in the unsplit model and the parameter (of other ranks' there is only
                the shape), and returns its options, `{"weight_decay": 0.0}`; None leaves it out. It is not asked about
                parameters that take no gradient: those are left out.

        Raises:
            ArgumentError: the options are not a dict, or hold parameters.
        """
        return parameter_groups(self.all_parameters(), self.named_parameters(), options_of)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their norm, over all ranks, is at most `max_norm`. Every rank calls it.

        `torch.nn.utils.clip_grad_norm_(pipe.parameters())` would take each rank's own norm. Here a tied parameter
        counts once, and norms are added in the unsplit model's order: the same bits for any number of ranks.

        Returns the norm before clipping, a scalar on the CPU.

        Raises:
            ArgumentError: the last step was within `no_sync`: replicas have gradients of their own.
        """
        self.refuse_unaveraged("clip_grad_norm_")
        norms: dict[str, Tensor] = {}
        held = [(name, p.grad) for name, p in self.named_parameters() if p.grad is not None]
        for part in self.gather({name: whole(torch.linalg.vector_norm(grad)).cpu() for name, grad in held}):
            norms.update(part)
        ordered = [norms[name] for name, _ in self.all_parameters() if name in norms]
        total = torch.linalg.vector_norm(torch.stack(ordered)) if ordered else torch.zeros(())
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for _, grad in held:
            local(grad).mul_(factor.to(grad.device))
        return total

    def refuse_unaveraged(self, what: str) -> None:
        """Raises ArgumentError if gradients are each replica's own, so that replicas would part."""
        if self._engine.replicas is not None and self._engine.replicas.behind:
            raise ArgumentError(
                f"{what}: the last step was within no_sync(), so that gradients are each replica's own; take the last "
                "step before it outside of no_sync()"
            )

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers of this process's stages, by their names in the unsplit model."""
        return iter(self._split.held_buffers())

    def state_dict(self) -> dict[str, Tensor]:
        """The parameters and persistent buffers of this process's stages, by their names in the unsplit model.

        A tied parameter has its first name. What no stage uses is on rank 0. The tensors are the live ones. See
        `penstock.checkpoint` for all ranks'.
        """
        held: dict[str, Tensor] = dict((*self.named_parameters(), *self.named_buffers(), *self._split.held_unused()))
        return {name: held[name].detach() for name in self.all_names() if name in held}

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Copies values into what this process holds. `state` may be of the whole unsplit model.

        Raises:
            ArgumentError: a shape differs; or, with `strict`, something that is held is not in `state`, or something in
                `state` is not of the model.
        """
        load_into(self.state_dict(), state, {*self.model.state_dict(), *self.all_names()}, strict=strict)

    def restore(self, *, step_count: int, seed: int) -> None:
        """Sets the random streams to where they are after so many steps. Every rank calls it."""
        self.step_count = step_count
        self._engine.streams.seed = seed

    def train(self, mode: bool = True) -> Self:
        """Sets training or evaluation mode on every module, as `nn.Module.train` does."""
        self._split.model.train(mode)
        return self

    def eval(self) -> Self:
        """`train(False)`."""
        return self.train(False)

    @property
    def seed(self) -> int:
        """Of the random streams."""
        return self._engine.streams.seed

    @property
    def device(self) -> torch.device:
        """Where this process computes; where it drives several ranks, the first one's."""
        return self._engine.devices[self._engine.ranks[0]]

    @property
    def draws_in_glue(self) -> bool:
        """Whether the model draws random numbers outside of any module that is called."""
        return any(draws_in_glue(partition) for partition in self._split.partitions(training=True))

    @property
    def reorders_gradients(self) -> bool:
        """Whether gradients of stages may be added in another order than in the unsplit model, beside those of ties."""
        return any(crosses_twice(partition.stages) for partition in self._split.partitions(training=True))

    @property
    def drawing_modules(self) -> dict[str, nn.Module]:
        """The modules that draw random numbers when they are called, by name."""
        return {k: v for one in self._split.partitions(training=True) for k, v in one.drawing_modules.items()}

    def all_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Every parameter of the unsplit model, each once; those that no stage uses as well."""
        return self._split.all_parameters()

    def all_names(self) -> list[str]:
        """Every parameter and persistent buffer of the unsplit model, each once, by its first name."""
        return self._split.all_names()

    def first_names(self) -> dict[str, str]:
        """For every name of a parameter or buffer in the unsplit model, tied ones' too, that of its first."""
        return self._split.names()

    def default_kwargs(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """What is passed to the model besides the caller's inputs (`use_cache=False` for models of `transformers`)."""
        return self._split.default_kwargs(args, kwargs)

    def split_batch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None, device: torch.device | None = None
    ) -> list[Microbatch]:
        """The microbatches of one batch, as `step` makes them: each tensor in memory of its own, where this process
        computes if nothing else is said."""
        return self._steps.microbatches(args, kwargs, target, device or self.device)

    @property
    def partition(self) -> Partition:
        """What the model was recorded as and cut into, for the first microbatch."""
        return self._split.partitions(training=True)[0]

    def rehearse(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, *, loss: bool) -> str | None:
        """Raises what the first step with this batch would raise before its first forward. With `loss`, also what the
        loss raises whatever the values: it is called once, for an output that is made up. Without other processes.

        Returns why the loss could not be tried, if so.
        """
        return self._steps.rehearse(args, kwargs, target, loss=loss)

    @contextmanager
    def drawing(self) -> Iterator[Streams]:
        """The random streams of the present step: to run the unsplit model with the masks that the pipeline draws."""
        streams = self._engine.streams
        with streams.drawing(self.step_count, tuple(self._engine.devices)):
            yield streams

    @contextmanager
    def deferring(self) -> Iterator[DeferredNorms | None]:
        """Around a training step: with `deferred_batch_norm`, running statistics are committed at its end."""
        if self._norms is None:
            yield None
        else:
            with self._norms.step():
                yield self._norms

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all: it prints, and it writes what is written once."""
        return self.world.is_first

    @property
    def control_group(self) -> ProcessGroup | None:
        """A gloo group of the pipeline's processes, for what is no part of a step; None where this process is alone."""
        return self._engine.control.control_group

    def gather(self, value: Any) -> list[Any]:
        """One object from each process of the mesh, given to all of them. A collective: every rank calls it."""
        return self._engine.control.gather(value)

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Around a wait for all other ranks outside of a step: if one is lost, this rank says so and ends."""
        return self._engine.control.waiting(what)

    def working(self, what: str) -> AbstractContextManager[None]:
        """Around this rank's own part of what all ranks do outside of a step, which may be within `waiting`."""
        return self._engine.control.working(what)

    # -- the end ------------------------------------------------------------------------------------------------------

    def before_close(self, act: Callable[[], None]) -> None:
        """`close` calls `act` before it gives anything back: for what goes on beside the steps. All ranks call it."""
        self._before_close.append(act)

    def close(self) -> None:
        """Removes hooks, ends the watchdog, gives back process groups. The parameters stay."""
        if self._closed:
            return
        self._closed = True
        if self._norms is not None:
            self._norms.close()
        try:
            while self._before_close and not self._engine.control.failed:
                self._before_close.pop()()
        finally:
            self._engine.close()

    def __repr__(self) -> str:
        """Each stage's rank and first module; asks no other rank."""
        order, placement = self.schedule, self.schedule.placement
        sizes = f"{counted(order.ranks, 'rank')}, {counted(order.microbatches, 'microbatch')}"
        lines = [f"Pipeline of {type(self.model).__name__}: {order.name}, {sizes}"]
        for stage, module in enumerate(("", *self.cuts)):
            ranks = " and ".join(f"rank {rank}" for rank in placement.rank_of[stage :: placement.depth])
            lines.append(f"  stage {stage} on {ranks}: from {module or 'the start'}")
        return "\n".join(lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ends_well = isinstance(error, SystemExit) and error.code in (None, 0)
        if error is None or ends_well or self.world.is_local:
            self.close()
        elif not self._engine.control.failed:  # tells the other ranks why nobody will answer them
            self._engine.control.fail(error)
