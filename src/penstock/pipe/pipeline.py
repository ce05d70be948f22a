"""A model split over ranks, and its training and evaluation steps."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Tensor, nn

from penstock._base.aliases import accept_old_names, suggest_argument
from penstock._base.errors import ArgumentError
from penstock._base.formatting import pluralize
from penstock._base.stages import StageMeta
from penstock.partition.names import public_name, unwrapped
from penstock.pipe.optimizing import OptionsOf, clip, parameter_groups
from penstock.pipe.session import Session
from penstock.pipe.verified import UNVERIFIED, verified_fingerprints
from penstock.runtime.batch.cut import Batch
from penstock.runtime.features import compiled, deferred_norm, offload, recompute
from penstock.runtime.loss.loss import check_grad_enabled, checked_scale
from penstock.runtime.model.remote_tensors import WRITE_ALL
from penstock.runtime.model.state_dicts import evaluating, load_into
from penstock.runtime.split_backward import weight_gradients
from penstock.runtime.split_backward.backward import SplitBackward
from penstock.runtime.step.bound_schedules import OutputsOption
from penstock.runtime.step.results import StepResult
from penstock.schedule import check, summary


@accept_old_names(
    is_first="is_main_process",
    gather="all_gather_object",
    split_share="deferred_weight_grad_fraction",
    code="stage_code",
)
class Pipeline:
    """A model split over ranks. Made by `pipeline`; ended by `close`, or by leaving a `with` block.

    Attributes:
        schedule: what every rank does for a batch like the example, communication included.
        world: the processes.
        loss_scale: of the last step: its gradients are multiplied by it.
        session: what checkpoints and proofs work with; not for users.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.world = session.engine.world
        self.schedule = session.schedule
        self.loss_scale = 1.0

    # -- training -------------------------------------------------------------------------------------------------

    def step(
        self,
        *args: Any,
        target: Any = None,
        outputs: OutputsOption = False,
        timeline: bool = False,
        loss_scale: float = 1.0,
        **kwargs: Any,
    ) -> StepResult:
        """Forward and backward of one batch. Gradients are added to `.grad`, as `loss.backward()` would.

        Every rank calls it. Only ranks where `needs_inputs` (`needs_targets`) is true read the inputs (the target).

        Args:
            args, kwargs: the model's inputs: tensors with the batch in their first dimension (or where `batch_dims`
                says), `Microbatches`, scalars and plain values; with `split_fn`, whatever it takes. If their shapes,
                dtypes or plain values are new, the model is recorded again.
            target: what `loss` takes besides the model's output; cut like the inputs. None if it takes nothing.
            outputs: keep the model's outputs, for `result.outputs`: True where the last stage is, "all" on every rank,
                a number on the rank of that number. Every rank passes the same; only True and False may mix.
            timeline: record what every rank does when, for `result.timeline`; the same on every rank.
            loss_scale: gradients are multiplied by it, the reported loss is not; see `penstock.GradScaler`.

        Raises:
            ShapeError: tensors disagree on the number of rows.
            PartitionError: the model cannot be recorded for this batch.
            ArgumentError: a target is missing, the loss is not a scalar, the ranks do not make the same call, or
                gradients are switched off (`torch.no_grad`): see `evaluate`.
            RankFailedError: another rank failed.
            VerificationError: with `verify=True`, in the first step: a value is not the unsplit model's.
        """
        self.session.check_open()
        check_grad_enabled("pipe.step")
        _check_misspelled(self, kwargs)
        scale = checked_scale(loss_scale)
        if (verify := self.session.first_step) is not None:
            if not self.verified:
                verify(self, args, kwargs, target)
            self.session.first_step = None  # and the copy of the model with it
        number, recorder = self.session.step_count, self.session.recorder
        timed = recorder is not None and recorder.begin(number + 1, self.session.fingerprint)
        result = self.session.steps.run_batch(
            number,
            Batch(args, kwargs, target),
            training=True,
            outputs=outputs,
            timeline=timeline or timed,
            loss_scale=scale,
        )
        self.loss_scale = scale
        self.session.step_count += 1
        self.session.accept_gradients()
        if recorder is not None:
            recorder.end(number + 1, result, self.session.engine.allocated)
        return result if timeline or not timed else replace(result, timeline=None)

    def evaluate(
        self, *args: Any, target: Any = None, outputs: OutputsOption = False, timeline: bool = False, **kwargs: Any
    ) -> StepResult:
        """Forward of one batch with the model, and a loss that is a module, in evaluation mode. Touches no gradient and
        no buffer, and restores the mode.

        Takes what `step` takes. Without a target there is no loss, unless the model computes its own.
        """
        return self._evaluate(Batch(args, kwargs, target), outputs=outputs, timeline=timeline)

    def _evaluate(self, batch: Batch, **options: Any) -> StepResult:
        self.session.check_open()
        _check_misspelled(self, batch.kwargs, predicts=not options.get("evaluates", True))
        with evaluating(self.session.model_parts, self.session.options.loss):
            return self.session.steps.run_batch(self.step_count, batch, training=False, **options)

    def predict(self, *args: Any, outputs: OutputsOption = True, **kwargs: Any) -> Any:
        """Return the model's output for a whole batch, in evaluation mode, as the unsplit model would return it: the
        microbatches' outputs, joined along their first dimension, as `batch_dims` says, or by `merge_fn`.

        Args:
            args, kwargs: as for `step`.
            outputs: who gets it: True: the ranks where `has_outputs` is true; "all": every rank; a number: that rank.
                All other ranks get None.

        Raises:
            ArgumentError: the schedule has two copies of the model, and outputs=True.
            ShapeError: an output cannot be joined: it is a scalar, has other than its microbatch's rows, or
                lengths differ. `evaluate(..., outputs=True)` gives each microbatch's own.
        """
        target, timeline = kwargs.pop("target", None), kwargs.pop("timeline", False)
        batch = Batch(args, kwargs, target)
        result = self._evaluate(batch, outputs=outputs, timeline=timeline, evaluates=False)
        return (
            None if result._outputs is None else self.session.steps.cutting.merge_outputs(result.outputs, result.sizes)
        )

    # -- what this process holds ------------------------------------------------------------------------------------

    @property
    def step_count(self) -> int:
        """Steps so far; keys the random streams, so a checkpoint must restore it."""
        return self.session.step_count

    @step_count.setter
    def step_count(self, count: int) -> None:
        self.session.step_count = count

    @property
    def global_batch(self) -> int:
        """Rows of a whole batch like the example, over all replicas: rows of a microbatch * microbatches * replicas."""
        return self.session.rows * self.world.data_parallel

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside it, steps do not average gradients over the replicas; the next step outside averages them all.

        For accumulation over several steps, like `DistributedDataParallel.no_sync`. Until then `.grad` is the replica's
        own. Without replicas it changes nothing.
        """
        replicas = self.session.engine.replicas
        was_active = replicas is None or replicas.active
        if replicas is not None:
            replicas.active = False
        try:
            yield
        finally:
            if replicas is not None:
                replicas.active = was_active

    @property
    def needs_inputs(self) -> bool:
        """Whether this process must pass the model's inputs: it runs the first stage, or the last one and `split_fn=`
        cuts the target, too."""
        return self.session.steps.needs_inputs

    @property
    def needs_targets(self) -> bool:
        """Whether this process must pass the target: something looks at targets, and it runs the last stage, or the
        first one with `split_fn=`, which cuts both."""
        return self.session.steps.needs_targets

    @property
    def has_outputs(self) -> bool:
        """Whether this process runs the last stage, from which outputs and losses come."""
        return self.session.steps.has_outputs

    @property
    def model(self) -> nn.Module:
        """The model, or the chain of the given layers. Stages of other processes are on the meta device."""
        return self.session.model_parts.model

    @property
    def cuts(self) -> tuple[str, ...]:
        """The call that each stage but the first begins with. Fit for `cuts=`."""
        return self.session.model_parts.cuts

    @property
    def stages(self) -> tuple[StageMeta, ...]:
        """What enters, leaves and lives on each stage, of all ranks."""
        return tuple(stage.meta for stage in self.session.partition.stages)

    @property
    def stage_code(self) -> str:
        """The stages' forward functions, as Python."""
        return self.session.partition.code

    @property
    def verified(self) -> bool:
        """Whether this model, schedule and options have passed `penstock.verify`: in this process, or in the run that
        `run_dir=` continues."""
        return self.session.fingerprint() in verified_fingerprints

    @property
    def notes(self) -> tuple[str, ...]:
        """Whether this is unverified; notes from the recording, what runs again in backward, what schedule, compile and
        offload cost, and a staged transport."""
        inexact = [violation for violation in check(self.schedule) if not violation.fatal]
        order_notes = [summary(inexact, 1)] if inexact else []
        rows, count, requested = self.session.rows, self.schedule.microbatches, self.session.order.microbatches
        if count < requested:
            order_notes.append(f"a batch of {rows} rows like the example makes {count} microbatches, not {requested}")
        partition = self.session.partition
        draws = bool(partition.drawing_modules) or self.session.draws_outside_modules
        options, order = self.session.options, self.session.order
        compiling = compiled.compile_notes(self.session.compile, draws=draws, blocks=self.session.has_compiled_blocks)
        unsplit = compiled.empty_w_notes([stage for stage, split in self._splits().items() if split.has_empty_w])
        deferred = deferred_norm.notes(partition.stages) if options.deferred_batch_norm else ()
        recomputed = recompute.notes(self.session.recompute, order)
        on_host = [device.type == "cpu" for device in self.session.engine.devices]
        offloaded = offload.notes(self.session.offload, order, on_host)
        adding = weight_gradients.notes(self.session.engine.devices, self.schedule)
        return (
            *(() if self.verified else (UNVERIFIED,)),
            *partition.notes,
            *options.cutting.notes,
            *options.loss_notes,
            *self.session.model_parts.loss_notes,
            *order_notes,
            *compiling,
            *unsplit,
            *deferred,
            *recomputed,
            *offloaded,
            *adding,
            *self.session.engine.notes,
        )

    @property
    def deferred_weight_grad_fraction(self) -> dict[int, float]:
        """For each stage of this process whose backward the schedule splits: how much of it waits for W, as the
        fraction of its trained parameters' elements whose gradients do. Known after a step; I does the rest."""
        return {stage: split.share for stage, split in self._splits().items()}

    def _splits(self) -> dict[int, SplitBackward]:
        latest_first = reversed(list(self.session.bound_schedules))
        stages = next((bound.stages for bound in latest_first if bound.training), ())
        return {stage.index: stage.split_backwards[0] for stage in stages if stage.split_backwards}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this process's stages, without duplicates, by their names in the unsplit model; and,
        on the last stage, what the loss trains (a learned temperature, centers of classes), by names that begin with
        "loss."."""
        return iter(self.session.model_parts.held_parameters())

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this process's stages. A rank without any gets an empty one for its optimizer."""
        local_parameters = [parameter for _, parameter in self.named_parameters()]
        return iter(local_parameters or [nn.Parameter(torch.empty(0, device=self.device))])

    def parameter_groups(self, options_of: OptionsOf) -> list[dict[str, Any]]:
        """Return the groups for an optimizer: the same number, in the same order, on every rank; some may be empty on
        this one.

        Args:
            options_of: takes a parameter's name in the unsplit model and the parameter (for other ranks' parameters,
                only the shape), and returns its options, `{"weight_decay": 0.0}`; None leaves it out. It is not called
                for parameters that require no gradient: those are left out.

        Raises:
            ArgumentError: the options are not a dict, or hold parameters.
        """
        return parameter_groups(self.session.model_parts.all_parameters(), self.named_parameters(), options_of)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """Scale all gradients so that their norm, over all ranks, is at most `max_norm`. Every rank calls it.

        `torch.nn.utils.clip_grad_norm_(pipe.parameters())` would take each rank's own norm. Here a tied parameter
        counts once, and norms are added in the unsplit model's order: the same bits for any number of ranks.

        Args:
            max_norm, norm_type, error_if_nonfinite: as for torch's.
            foreach: taken for torch's sake; it makes no difference.

        Returns the norm before clipping, a scalar on the CPU.

        Raises:
            ArgumentError: an argument is wrong; or the last step was within `no_sync`: replicas' gradients differ.
            RuntimeError: on every rank, with `error_if_nonfinite`, if the norm is NaN or infinite; gradients stay.
        """
        if not (foreach is None or isinstance(foreach, bool)):
            raise ArgumentError(f"foreach={foreach!r}: expected True, False or None")
        self.session.require_synced_gradients("clip_grad_norm_")
        gradients = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        order = [name for name, _ in self.session.model_parts.all_parameters()]
        total = clip(gradients, order, self.all_gather_object, max_norm, norm_type, error_if_nonfinite)
        self.session.accept_gradients()
        return total

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of this process's stages, by their names in the unsplit model."""
        return iter(self.session.model_parts.held_buffers())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the parameters and persistent buffers of this process's stages, by their names in the unsplit model.

        A tied parameter has its first name. Rank 0 holds what no stage uses. The tensors are live. See
        `penstock.checkpoint` for all ranks'.
        """
        unused = self.session.model_parts.held_unused()
        tensors: dict[str, Tensor] = dict((*self.named_parameters(), *self.named_buffers(), *unused))
        return {name: tensors[name].detach() for name in self.session.model_parts.all_names() if name in tensors}

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Copy values into what this process holds. `state` may be that of the whole unsplit model alone.

        Raises:
            ArgumentError: a shape differs; or, with `strict`, something that this process holds is missing in `state`,
                or something in `state` does not belong to the model.
        """
        names, state = self.session.model_parts.names(), {public_name(self.model, name): state[name] for name in state}
        local = {name: tensor for name, tensor in self.state_dict().items() if name in state or name in names}
        known_names = {*map(unwrapped, self.model.state_dict()), *self.session.model_parts.all_names()}
        load_into(local, state, known_names, strict=strict)

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode on every module, as `nn.Module.train` does."""
        self.session.model_parts.model.train(mode)
        return self

    def eval(self) -> Self:
        """`train(False)`."""
        return self.train(False)

    @property
    def seed(self) -> int:
        """The seed of the random streams."""
        return self.session.engine.streams.seed

    @property
    def device(self) -> torch.device:
        """The device on which this process computes; if it drives several ranks, the first one's."""
        return self.session.device

    @property
    def is_main_process(self) -> bool:
        """Whether this process speaks for all: it prints, and it writes what is written once."""
        return self.world.is_first

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return one object from each process of the mesh. A collective: every rank calls it."""
        return self.session.control.gather(value)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove hooks, end the watchdog and release process groups. The parameters stay."""
        self.session.close()

    def __repr__(self) -> str:
        """Return each stage's rank and first module; ask no other rank."""
        order, placement = self.schedule, self.schedule.placement
        sizes = f"{pluralize(order.ranks, 'rank')}, {pluralize(order.microbatches, 'microbatch')}"
        status = ", verified" if self.verified else ", unverified"
        status += "" if self.session.control.staging is None else ", staged transport"
        lines = [f"Pipeline of {type(self.model).__name__}: {order.name}, {sizes}{status}"]
        for stage, module in enumerate(("", *self.cuts)):
            ranks = " and ".join(f"rank {rank}" for rank in placement.rank_of[stage :: placement.depth])
            lines.append(f"  stage {stage} on {ranks}: from {module or 'the start'}")
        return "\n".join(lines)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise an error that names what to copy or save instead: Lightning's WeightAveraging copies the module that
        holds the pipeline."""
        raise ArgumentError(
            "a pipeline cannot be copied or pickled, nor can an object that holds one: its threads and process groups "
            "belong to this process. To average the weights, use torch.optim.swa_utils.AveragedModel(pipe.model); to "
            f"copy the model, copy.deepcopy(pipe.model); to write it, {WRITE_ALL}"
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Lead from what other libraries offer to what takes its place."""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{suggest_argument(name, ())}"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__!r} object is not callable{suggest_argument('__call__', ())}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ends_well = isinstance(error, SystemExit) and error.code in (None, 0)
        failure, control = None if ends_well else error, self.session.control
        if failure is not None and not control.failed:  # so that the other ranks learn the cause
            control.fail(failure)
        if failure is None or self.world.is_local:
            self.close()


def _check_misspelled(pipe: Pipeline, kwargs: Mapping[str, Any], *, predicts: bool = False) -> None:
    """Raise TypeError for an argument that the model does not take, if it resembles one of the step's own."""
    if not kwargs or pipe.session.options.split_fn is not None:
        return
    accepted = inspect.signature(pipe.model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        return
    for name in kwargs.keys() - accepted.keys():
        hint = suggest_argument(name, ("target", "outputs", "timeline", "loss_scale"))
        if predicts and "target=" in hint:
            raise TypeError(
                f"the model takes no argument {name}=, and predict() needs the model's inputs only; omit it"
            )
        if hint:
            raise TypeError(f"neither a step nor the model takes an argument {name}={hint}")
