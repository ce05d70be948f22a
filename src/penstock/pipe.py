"""A model that is split over ranks, and its training and evaluation steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from penstock.errors import ArgumentError, ScheduleError
from penstock.groups import OptionsOf, parameter_groups
from penstock.partition import Balance, Partition
from penstock.partition._compat import flatten
from penstock.result import SharedLoss, StepResult
from penstock.runtime import batch as batches
from penstock.runtime import compiled
from penstock.runtime.compiled import Compile
from penstock.runtime.engine import Engine, Job, TransportChoice, draws_in_glue
from penstock.runtime.loss import Loss, LossHead, Reduction, checked_scale, weights
from penstock.runtime.materialize import Materialize
from penstock.runtime.program import Feed, model_inputs
from penstock.runtime.split_model import SplitModel
from penstock.runtime.streams import Streams
from penstock.schedule import (
    Schedule,
    add_communication,
    check,
    drop_backward,
    forward_only,
    reduce_ties,
    stages_with_backward,
)
from penstock.stages import StageMeta, backward_links, forward_links, needs_backward
from penstock.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Options:
    """What a pipeline is made with besides the model, its processes and the schedule; see `pipeline`."""

    loss: Loss | None = None
    reduction: Reduction = "mean"
    cuts: Sequence[str] | None = None
    leaves: Sequence[str] | None = None
    balance: Balance = "parameters"
    devices: Sequence[torch.device | str] | torch.device | str | None = None
    share_loss: bool = True
    transport: TransportChoice = "auto"
    materialize: Materialize | None = None
    seed: int | None = None
    compile: Compile = False
    check_finite: bool = False


class Pipeline:
    """A model that is split over ranks. Made by `pipeline`; ended by `close`, or by leaving a `with` block.

    Attributes:
        schedule: what every rank does, communication included.
        world: the processes.
        step_count: steps so far; keys the random streams, so that it belongs to what a checkpoint restores.
        loss_scale: of the last step: what its gradients are multiplied with.
    """

    def __init__(
        self, engine: Engine, split: SplitModel, order: Schedule, sizes: tuple[int, ...], options: Options
    ) -> None:
        self.world = engine.world
        self.step_count = 0
        self.loss_scale = 1.0
        self._engine = engine
        self._split = split
        self._order = order
        self._sizes = sizes
        self._options = options
        self._closed = False
        self._jobs: dict[Any, Job] = {}
        self.schedule = self._job(training=True).schedule

    # -- training -------------------------------------------------------------------------------------------------

    def step(
        self,
        *args: Any,
        target: Any = None,
        outputs: bool = False,
        timeline: bool = False,
        loss_scale: float = 1.0,
        **kwargs: Any,
    ) -> StepResult:
        """Forward and backward of one batch. Gradients are added to `.grad`, as `loss.backward()` would.

        Every rank calls it. Only ranks where `needs_inputs` (`needs_targets`) is true look at the inputs (the target).

        Args:
            args, kwargs: the model's inputs, shaped as the example.
            target: what `loss` takes besides the model's output.
            outputs: keep the model's outputs, for `result.outputs`.
            timeline: note what every rank does when, for `result.timeline`.
            loss_scale: gradients are multiplied with it, the loss that is reported is not; see `penstock.GradScaler`.

        Raises:
            ShapeError: the batch is not shaped as the example.
            ArgumentError: a target is missing, or the loss is no scalar.
            PipelineFailure: another rank failed.
        """
        self.loss_scale = checked_scale(loss_scale)
        result = self._run(args, kwargs, target, training=True, outputs=outputs, timeline=timeline)
        self.step_count += 1
        return result

    def evaluate(
        self, *args: Any, target: Any = None, outputs: bool = False, timeline: bool = False, **kwargs: Any
    ) -> StepResult:
        """Forward of one batch in evaluation mode. No gradient and no buffer is touched, and the mode is restored."""
        modes = [(module, module.training) for module in self._split.modules()]
        buffers = [(buffer, buffer.detach().clone(), buffer._version) for buffer in self._split.buffers()]
        try:
            for module, _ in modes:
                module.training = False
            return self._run(args, kwargs, target, training=False, outputs=outputs, timeline=timeline)
        finally:
            for module, mode in modes:
                module.training = mode
            for buffer, before, version in buffers:
                if buffer._version != version:
                    with torch.no_grad():
                        buffer.copy_(before)

    # -- what this process holds ------------------------------------------------------------------------------------

    @property
    def needs_inputs(self) -> bool:
        """Whether this process must pass the model's inputs: it runs the first stage."""
        return bool(self._ranks_of(self._order.placement.is_first) & set(self._engine.ranks))

    @property
    def needs_targets(self) -> bool:
        """Whether this process must pass the target: it runs the last stage, and something looks at targets."""
        return self.has_outputs and (self._options.loss is not None or callable(self._options.reduction))

    @property
    def has_outputs(self) -> bool:
        """Whether this process runs the last stage, from which outputs and losses come."""
        return bool(self._ranks_of(self._order.placement.is_last) & set(self._engine.ranks))

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
        return tuple(stage.meta for stage in self._split.partitions(training=True)[0].stages)

    @property
    def code(self) -> str:
        """The stages' forward functions, as Python."""
        return self._split.partitions(training=True)[0].code

    @property
    def notes(self) -> tuple[str, ...]:
        """What recording the model had to say, and what the schedule and compiled stages cost in exactness."""
        inexact = [violation.text for violation in check(self.schedule) if not violation.fatal]
        partition = self._split.partitions(training=True)[0]
        draws = bool(partition.drawing_modules) or self.draws_in_glue
        return (*partition.notes, *inexact, *compiled.notes_of(self._options.compile, self.schedule, draws=draws))

    @property
    def split_share(self) -> dict[int, float]:
        """For each stage of this process whose backward the schedule splits: how much of it waits for W, as the share
        of the elements of its trained parameters whose gradient does. Known after a step; the rest is done at I."""
        programs = self._job(training=True).programs
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
            ArgumentError: the options are no dict, or hold parameters.
        """
        return parameter_groups(self.all_parameters(), self.named_parameters(), options_of)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their norm, over all ranks, is at most `max_norm`. Every rank calls it.

        `torch.nn.utils.clip_grad_norm_(pipe.parameters())` would take each rank's own norm. Here a tied parameter
        counts once, and norms are added in the unsplit model's order: the same bits for any number of ranks.

        Returns the norm before clipping, a scalar on the CPU.
        """
        norms: dict[str, Tensor] = {}
        held = [(name, p.grad) for name, p in self.named_parameters() if p.grad is not None]
        for part in self.gather({name: torch.linalg.vector_norm(grad).cpu() for name, grad in held}):
            norms.update(part)
        ordered = [norms[name] for name, _ in self.all_parameters() if name in norms]
        total = torch.linalg.vector_norm(torch.stack(ordered)) if ordered else torch.zeros(())
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for _, grad in held:
            grad.mul_(factor.to(grad.device))
        return total

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers of this process's stages, by their names in the unsplit model."""
        return iter(self._split.held_buffers())

    def state_dict(self) -> dict[str, Tensor]:
        """The parameters and persistent buffers of this process's stages, by their names in the unsplit model.

        A tied parameter has its first name. The tensors are the live ones. See `penstock.checkpoint` for all ranks'.
        """
        persistent = set(self.all_names())
        return {
            name: tensor.detach()
            for name, tensor in (*self.named_parameters(), *self.named_buffers())
            if name in persistent
        }

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Copies values into what this process holds. `state` may be of the whole unsplit model.

        Raises:
            ArgumentError: a shape differs; or, with `strict`, something that is held is not in `state`, or something in
                `state` is not of the model.
        """
        own, names = self.state_dict(), set(self.model.state_dict())
        missing = [name for name in own if name not in state]
        unexpected = [name for name in state if name not in names]
        if strict and (missing or unexpected):
            lacks, has = (", ".join(some[:4]) or "nothing" for some in (missing, unexpected))
            raise ArgumentError(
                f"the state lacks {lacks}, and has {has} that the model has not; give the state of this model, or "
                "strict=False"
            )
        for name, tensor in own.items():
            if name not in state:
                continue
            if state[name].shape != tensor.shape:
                raise ArgumentError(
                    f"{name} has shape {tuple(state[name].shape)} in the state and {tuple(tensor.shape)} in the model"
                )
            tensor.copy_(state[name])

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

    def all_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Every parameter of the unsplit model, each once; those that no stage uses as well."""
        return self._split.all_parameters()

    def all_names(self) -> list[str]:
        """Every parameter and persistent buffer of the unsplit model, each once, by its first name."""
        return self._split.all_names()

    def default_kwargs(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """What is passed to the model besides the caller's inputs (`use_cache=False` for models of `transformers`)."""
        return self._split.default_kwargs(args, kwargs)

    def split_batch(self, tree: Any) -> list[Any]:
        """The microbatches of one batch, as `step` makes them: each tensor in memory of its own."""
        return batches.split(tree, self._sizes, "batch", self.device)

    @contextmanager
    def drawing(self) -> Iterator[Streams]:
        """The random streams of the present step: to run the unsplit model with the masks that the pipeline draws."""
        streams = self._engine.streams
        with streams.drawing(self.step_count, tuple(self._engine.devices)):
            yield streams

    @property
    def control_group(self) -> ProcessGroup | None:
        """A gloo group of the pipeline's processes, for what is no part of a step; None where this process is alone."""
        return self._engine.control_group

    def gather(self, value: Any) -> list[Any]:
        """One object from each process, given to all of them. A collective: every rank calls it."""
        return self._engine.gather(value)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Removes hooks, ends the watchdog, gives back process groups. The parameters stay."""
        if not self._closed:
            self._closed = True
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ends_well = isinstance(error, SystemExit) and error.code in (None, 0)
        if error is None or ends_well or self.world.is_local:
            self.close()
        elif not self._engine.failed:  # tells the other ranks why nobody will answer them
            self._engine.fail(error)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        *,
        training: bool,
        outputs: bool,
        timeline: bool,
    ) -> StepResult:
        if self._closed:
            raise ArgumentError("this pipeline was closed; make a new one")
        try:
            job = self._job(training=training)
            feed = self._feed(job, args, kwargs, target, outputs)
            moments = self._engine.run(job, feed, self.step_count, timed=timeline)
            return self._result(job, outputs, moments if timeline else None)
        except BaseException as error:
            cause = self._engine.fail(error)
            if cause is error:
                raise
            raise cause from None  # the cause is on another rank; what it did to this one only hides it

    def _job(self, *, training: bool) -> Job:
        key = (training, self._split.signature())
        if key not in self._jobs:
            partitions = self._split.partitions(training=training)
            schedule = self._lowered(partitions[0], training=training)
            options = self._options
            self._jobs[key] = self._engine.bind(
                partitions,
                schedule,
                options.loss,
                training=training,
                compile=options.compile,
                check_finite=options.check_finite,
            )
        return self._jobs[key]

    def _lowered(self, partition: Partition, *, training: bool) -> Schedule:
        """The schedule as it is run: communication, tied gradients, and nothing that frozen stages do not need."""
        metas = [stage.meta for stage in partition.stages]
        if training:
            order = drop_backward(self._order, [meta.index for meta in metas if not needs_backward(meta)])
            order = add_communication(order, forward_links(metas), backward_links(metas))
            order = reduce_ties(order, [group.stages for group in self._split.tie_groups])
            _refuse_untrained(order, metas)
        else:
            order = add_communication(forward_only(self._order), forward_links(metas), ())
        refuse_illegal(order)
        return order

    def _ranks_of(self, end: Callable[[int], bool]) -> set[int]:
        """The ranks of the pipelines' first (or last) stages."""
        placement = self._order.placement
        return {placement.rank_of[stage] for stage in range(placement.stages) if end(stage)}

    def _device_of(self, end: Callable[[int], bool]) -> torch.device:
        """Where this process's first (or last) stage is."""
        return self._engine.devices[min(self._ranks_of(end) & set(self._engine.ranks))]

    def _feed(self, job: Job, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, outputs: bool) -> Feed:
        inputs: list[dict[int, Tensor]] = []
        if self.needs_inputs:
            given = flatten((args, kwargs))
            job.partitions[0].check_structure(given)
            positions = model_inputs(job.partitions[0].stages[0].meta)
            pieces = batches.split_leaves(given, self._sizes, "input", self._device_of(self._order.placement.is_first))
            for partition, leaves in zip(job.partitions, pieces, strict=True):
                inputs.append(dict(zip(positions, partition.select(leaves), strict=True)))
        if not self.has_outputs:
            return Feed(inputs, loss_scale=self.loss_scale)
        targets = self._targets(job, target, kwargs)
        weighted = weights("mean" if targets is None else self._options.reduction, self._sizes, targets or ())
        return Feed(inputs, targets, weighted, outputs, self.loss_scale)

    def _targets(self, job: Job, target: Any, kwargs: dict[str, Any]) -> Sequence[Any] | None:
        if target is None:
            if self._options.loss is not None:
                if not job.training:
                    return None
                raise ArgumentError(
                    "target=None, but this rank runs the last stage and loss= is a function of the output and the "
                    "target; pass target=... where pipe.needs_targets is true"
                )
            target = kwargs.get("labels")  # for a reduction that weighs a model's own loss
        return batches.split(target, self._sizes, "target", self._device_of(self._order.placement.is_last))

    def _result(self, job: Job, outputs: bool, moments: Mapping[int, Any] | None) -> StepResult:
        here = self.has_outputs
        shared = self._shared_loss(job.head)
        losses = tuple(loss for loss in job.head.losses if loss is not None) if here else ()
        timeline = None
        if moments is not None:
            rows = {rank: row for part in self._engine.gather(moments) for rank, row in part.items()}
            timeline = Timeline.from_nanoseconds([rows[rank] for rank in range(self.world.ranks)])
        return StepResult(losses, timeline, shared, tuple(job.head.outputs) if outputs and here else None)

    def _shared_loss(self, head: LossHead) -> SharedLoss:
        """The loss on its way to every rank: from the last stage of each pipeline the terms of its microbatches."""
        placement = self._order.placement
        sources = {placement.rank_of[stage]: stage for stage in range(placement.stages) if placement.is_last(stage)}
        if len(sources) == 1 or self.world.is_local:
            parts = {placement.rank_of[-1]: [head.total()] if self.has_outputs else [None]}
        else:
            parts = {rank: head.terms(self._order.numbers_on(stage)) for rank, stage in sources.items()}
        shared = SharedLoss(list(parts.values()))
        if self._options.share_loss:
            for rank, buffer in zip(parts, shared.buffers, strict=True):
                shared.waits.append(self._engine.share(buffer, rank))
        return shared


def _refuse_untrained(order: Schedule, metas: Sequence[StageMeta]) -> None:
    trained = stages_with_backward(order)
    untrained = [meta.index for meta in metas if needs_backward(meta) and meta.index not in trained]
    if untrained:
        raise ScheduleError(
            f"schedule {order.name!r} has no backward for stage {untrained[0]}, which holds parameters to train or "
            "hands a gradient on; give a schedule with its backward, or freeze what is not to be trained"
        )


def refuse_illegal(order: Schedule) -> None:
    """Raises ScheduleError for a schedule that cannot be run."""
    wrong = [violation for violation in check(order) if violation.fatal]
    if wrong:
        raise ScheduleError(f"schedule {order.name!r} cannot be run: " + "; ".join(v.text for v in wrong[:3]))
