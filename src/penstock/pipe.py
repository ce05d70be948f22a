"""A model that is split over ranks, and its training and evaluation steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from penstock.errors import ArgumentError, ScheduleError
from penstock.partition import Balance, Partition
from penstock.result import SharedLoss, StepResult
from penstock.runtime import batch as batches
from penstock.runtime.distribution import local, whole
from penstock.runtime.engine import Engine, Job, TransportChoice, draws_in_glue
from penstock.runtime.jobs import Call, Jobs, Known
from penstock.runtime.loss import Loss, Reduction, weights
from penstock.runtime.materialize import Materialize
from penstock.runtime.outline import Outline
from penstock.runtime.outputs import Wanted, bring, code_of, join
from penstock.runtime.program import Feed, model_inputs
from penstock.runtime.split_model import SplitModel
from penstock.runtime.streams import Streams
from penstock.schedule import (
    Schedule,
    add_communication,
    add_sharding,
    check,
    drop_backward,
    first_microbatches,
    forward_only,
    reduce_replicas,
    reduce_ties,
    stages_with_backward,
    whole_last_backward,
)
from penstock.stages import StageMeta, backward_links, forward_links, needs_backward
from penstock.timeline import Timeline

if TYPE_CHECKING:
    from penstock.runtime.frame import Parallelize


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
    parallelize: Parallelize | None = None
    seed: int | None = None


class Pipeline:
    """A model that is split over ranks. Made by `pipeline`; ended by `close`, or by leaving a `with` block.

    Attributes:
        schedule: what every rank does for a batch like the example, communication included.
        world: the processes.
        step_count: steps so far; keys the random streams, so that it belongs to what a checkpoint restores.
    """

    def __init__(
        self, engine: Engine, split: SplitModel, order: Schedule, example: batches.Cut, options: Options
    ) -> None:
        self.world = engine.world
        self.step_count = 0
        self._engine = engine
        self._split = split
        self._order = order
        self._options = options
        self._closed = False
        self._before_close: list[Callable[[], None]] = []
        engine.streams.first_microbatch = engine.world.replica * order.microbatches
        self._rows = sum(example.sizes)
        self._jobs = Jobs(engine, split, self._bind, order.placement.rank_of[0])
        self.schedule = self._jobs.add(example, Outline.of(example), training=True).job.schedule

    # -- training -------------------------------------------------------------------------------------------------

    def step(
        self, *args: Any, target: Any = None, outputs: Wanted = False, timeline: bool = False, **kwargs: Any
    ) -> StepResult:
        """Forward and backward of one batch. Gradients are added to `.grad`, as `loss.backward()` would.

        Every rank calls it. Only ranks where `needs_inputs` (`needs_targets`) is true look at the inputs (the target).

        Args:
            args, kwargs: the model's inputs: tensors with the batch in their first dimension, `Microbatches`, scalars
                and plain values. Where their shapes, dtypes or plain values are new, the model is recorded again.
            target: what `loss` takes besides the model's output; cut as the inputs are.
            outputs: keep the model's outputs, for `result.outputs`: True where the last stage is, "all" on every rank,
                a number on the rank of that number. Every rank says the same, or True and False.
            timeline: note what every rank does when, for `result.timeline`; on every rank alike.

        Raises:
            ShapeError: tensors disagree on the number of rows.
            PartitionError: the model cannot be recorded for this batch.
            ArgumentError: a target is missing, the loss is no scalar, or the ranks do not make the same call.
            PipelineFailure: another rank failed.
        """
        result = self._run(args, kwargs, target, training=True, outputs=outputs, timeline=timeline)
        self.step_count += 1
        return result

    def evaluate(
        self, *args: Any, target: Any = None, outputs: Wanted = False, timeline: bool = False, **kwargs: Any
    ) -> StepResult:
        """Forward of one batch in evaluation mode. No gradient and no buffer is touched, and the mode is restored.

        Takes what `step` takes. Without a target there is no loss, unless the model computes its own.
        """
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

    def predict(self, *args: Any, outputs: Wanted = True, **kwargs: Any) -> Any:
        """The model's output for a whole batch, in evaluation mode, as the unsplit model would return it: the
        microbatches' outputs, put together along their first dimension.

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
        return None if result._outputs is None else join(result.outputs, result.sizes)

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
        """What recording the model had to say, and what the schedule costs in exactness."""
        inexact = [violation.text for violation in check(self.schedule) if not violation.fatal]
        return (*self._split.partitions(training=True)[0].notes, *inexact)

    @property
    def split_share(self) -> dict[int, float]:
        """For each stage of this process whose backward the schedule splits: how much of it waits for W, as the share
        of the elements of its trained parameters whose gradient does. Known after a step; the rest is done at I."""
        programs = next((job.programs for job in reversed(list(self._jobs)) if job.training), ())
        runners = (runner for program in programs for runner in program.runners.values())
        return {runner.meta.index: runner.split.share for runner in runners if runner.split is not None}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this process's stages, each once, by their names in the unsplit model."""
        return iter(self._split.held_parameters())

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this process's stages. A rank without any gets an empty one: optimizers want some."""
        held = [parameter for _, parameter in self.named_parameters()]
        return iter(held or [nn.Parameter(torch.empty(0, device=self.device))])

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their norm, over all ranks, is at most `max_norm`. Every rank calls it.

        `torch.nn.utils.clip_grad_norm_(pipe.parameters())` would take each rank's own norm. Here a tied parameter
        counts once, and norms are added in the unsplit model's order: the same bits for any number of ranks.

        Returns the norm before clipping, a scalar on the CPU.
        """
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
        own, names = self.state_dict(), {*self.model.state_dict(), *self.all_names()}
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

    def first_names(self) -> dict[str, str]:
        """For every name of a parameter or buffer in the unsplit model, tied ones' too, that of its first."""
        return self._split.names()

    def default_kwargs(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """What is passed to the model besides the caller's inputs (`use_cache=False` for models of `transformers`)."""
        return self._split.default_kwargs(args, kwargs)

    def split_batch(self, tree: Any, like: Any = None) -> list[Any]:
        """The microbatches of one batch, as `step` makes them: each tensor in memory of its own.

        Args:
            like: the batch whose rows are counted, where `tree` is a target that may have none.
        """
        inputs = tree if like is None else like
        return batches.split(tree, self._cut(inputs, "batch", self.device).sizes, "batch", self.device)

    @contextmanager
    def drawing(self) -> Iterator[Streams]:
        """The random streams of the present step: to run the unsplit model with the masks that the pipeline draws."""
        streams = self._engine.streams
        with streams.drawing(self.step_count, tuple(self._engine.devices)):
            yield streams

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all: it prints, and it writes what is written once."""
        return self.world.is_first

    @property
    def control_group(self) -> ProcessGroup | None:
        """A gloo group of the pipeline's processes, for what is no part of a step; None where this process is alone."""
        return self._engine.control_group

    def gather(self, value: Any) -> list[Any]:
        """One object from each process of the mesh, given to all of them. A collective: every rank calls it."""
        return self._engine.gather(value)

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Around a wait for all other ranks outside of a step: if one is lost, this rank says so and ends."""
        return self._engine.waiting(what)

    # -- the end ------------------------------------------------------------------------------------------------------

    def before_close(self, act: Callable[[], None]) -> None:
        """`close` calls `act` before it gives anything back: for what goes on beside the steps. All ranks call it."""
        self._before_close.append(act)

    def close(self) -> None:
        """Removes hooks, ends the watchdog, gives back process groups. The parameters stay."""
        if self._closed:
            return
        self._closed = True
        try:
            while self._before_close and not self._engine.failed:
                self._before_close.pop()()
        finally:
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
        outputs: Wanted,
        timeline: bool,
    ) -> StepResult:
        if self._closed:
            raise ArgumentError("this pipeline was closed; make a new one")
        try:
            call = Call(training, code_of(outputs, self.world.ranks), timeline)
            first = self._order.placement.is_first
            cut = self._cut((args, kwargs), "input", self._device_of(first)) if self.needs_inputs else None
            known = self._jobs.next(cut, call)
            feed = self._feed(known, cut, target, kwargs, outputs is not False)
            moments = self._engine.run(known.job, feed, self.step_count, timed=timeline)
            return self._result(known, feed, call, moments)
        except BaseException as error:
            cause = self._engine.fail(error)
            if cause is error:
                raise
            raise cause from None  # the cause is on another rank; what it did to this one only hides it

    def _cut(self, tree: Any, what: str, device: torch.device) -> batches.Cut:
        return batches.cut(tree, self._order.microbatches, what, device, pipelines=self._order.placement.pipelines)

    def _bind(self, partitions: Sequence[Partition], training: bool) -> Job:
        order = first_microbatches(self._order, len(partitions))
        schedule = self._lowered(order, partitions[0], training=training)
        return self._engine.bind(partitions, schedule, self._options.loss, self._split.sharded, training=training)

    def _lowered(self, order: Schedule, partition: Partition, *, training: bool) -> Schedule:
        """The schedule as it is run: communication, tied gradients, and nothing that frozen stages do not need."""
        metas = [stage.meta for stage in partition.stages]
        if training:
            order = whole_last_backward(order, self._split.sharded_stages)
            order = drop_backward(order, [meta.index for meta in metas if not needs_backward(meta)])
            order = add_communication(order, forward_links(metas), backward_links(metas))
            order = reduce_ties(order, [group.stages for group in self._split.tie_groups])
            if self.world.data_parallel > 1:
                order = reduce_replicas(order, {meta.index for meta in metas if meta.trainable}, self._order)
            _refuse_untrained(order, metas)
        else:
            order = add_communication(forward_only(order), forward_links(metas), ())
        order = add_sharding(order, self._split.sharded_stages)
        refuse_illegal(order)
        return order

    def _ranks_of(self, end: Callable[[int], bool]) -> set[int]:
        """The ranks of the pipelines' first (or last) stages."""
        placement = self._order.placement
        return {placement.rank_of[stage] for stage in range(placement.stages) if end(stage)}

    def _device_of(self, end: Callable[[int], bool]) -> torch.device:
        """Where this process's first (or last) stage is."""
        return self._engine.devices[min(self._ranks_of(end) & set(self._engine.ranks))]

    def _feed(
        self, known: Known, cut: batches.Cut | None, target: Any, kwargs: dict[str, Any], keep_outputs: bool
    ) -> Feed:
        inputs: list[dict[int, Tensor]] = []
        if cut is not None:
            positions = model_inputs(known.job.partitions[0].stages[0].meta)
            inputs = [dict(zip(positions, given, strict=True)) for given in self._jobs.inputs(known, cut)]
        if not self.has_outputs:
            return Feed(inputs)
        targets = self._targets(known, target, kwargs)
        weighted = self._weights("mean" if targets is None else self._options.reduction, known.sizes, targets or ())
        return Feed(inputs, targets, weighted, keep_outputs)

    def _weights(self, reduction: Reduction, sizes: Sequence[int], targets: Sequence[Any]) -> list[float]:
        """Of the microbatches' losses, in the batch of all replicas."""
        replicas, engine = self._engine.replicas, self._engine
        if replicas is None:
            return weights(reduction, sizes, targets)
        mean = partial(replicas.mean, watched=engine.watchdog)
        return weights(reduction, sizes, targets, self.world.data_parallel, mean)

    def _targets(self, known: Known, target: Any, kwargs: dict[str, Any]) -> Sequence[Any] | None:
        if target is None:
            if self._options.loss is not None:
                if not known.job.training:
                    return None
                raise ArgumentError(
                    "target=None, but this rank runs the last stage and loss= is a function of the output and the "
                    "target; pass target=... where pipe.needs_targets is true"
                )
            target = kwargs.get("labels")  # for a reduction that weighs a model's own loss
        return batches.split(target, known.sizes, "target", self._device_of(self._order.placement.is_last))

    def _result(self, known: Known, feed: Feed, call: Call, moments: Mapping[int, Any]) -> StepResult:
        job = known.job
        shared = self._shared_loss(job)
        losses = tuple(loss for loss in job.head.losses if loss is not None) if self.has_outputs else ()
        timeline = None
        if call.timeline:
            rows = {rank: row for part in self._engine.gather_line(moments) for rank, row in part.items()}
            timeline = Timeline.from_nanoseconds([rows[rank] for rank in range(self.world.ranks)])
        outputs = tuple(job.head.outputs) if feed.keep_outputs else None
        if call.outputs:
            outputs = bring(self._engine, job.schedule, outputs, call.outputs)
        return StepResult(losses, timeline, known.sizes, shared, outputs)

    def _shared_loss(self, job: Job) -> SharedLoss:
        """The loss on its way to every rank: from the last stage of each pipeline the terms of its microbatches."""
        if self.world.data_parallel > 1 and self._options.share_loss:
            return self._summed_loss(job)
        placement, head = job.schedule.placement, job.head
        sources = {placement.rank_of[stage]: stage for stage in range(placement.stages) if placement.is_last(stage)}
        if len(sources) == 1 or self.world.is_local:
            parts = {placement.rank_of[-1]: [head.total()] if self.has_outputs else [None]}
        else:
            parts = {rank: head.terms(job.schedule.numbers_on(stage)) for rank, stage in sources.items()}
        shared = SharedLoss(list(parts.values()))
        if self._options.share_loss:
            for rank, buffer in zip(parts, shared.buffers, strict=True):
                shared.waits.append(self._engine.share(buffer, rank))
        return shared

    def _summed_loss(self, job: Job) -> SharedLoss:
        """The loss of all replicas, on its way to every process: a sum in which each microbatch has its own place."""
        placement, first = job.schedule.placement, self.world.replica * self._order.microbatches
        terms: list[Tensor | None] = [None] * (self._order.microbatches * self.world.data_parallel)
        for stage in range(placement.stages):
            if placement.is_last(stage) and placement.rank_of[stage] in self._engine.ranks and self.world.share == 0:
                numbers = job.schedule.numbers_on(stage)
                terms[first + numbers.start : first + numbers.stop] = job.head.terms(numbers)
        shared = SharedLoss([terms], self.world.data_parallel)
        shared.waits.append(self._engine.share_sum(shared.buffers[0]))
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
