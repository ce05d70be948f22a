"""The values to compare with: the unsplit model's, on the pipeline's microbatches and random streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock._base.gradients import gradient_dtype
from penstock._base.marks import NOW, computing
from penstock._base.memory import same_bits
from penstock._base.pytree import flatten, leaf_tensors
from penstock._base.stages import needs_backward, ties
from penstock.distributed.world import World
from penstock.partition.given_model import default_kwargs
from penstock.partition.nested import input_path
from penstock.pipe.build import build
from penstock.pipe.options import Options
from penstock.pipe.pipeline import Pipeline
from penstock.runtime.batch.cut import Batch, Cutting, Microbatch
from penstock.runtime.batch.outline import Outline
from penstock.runtime.exact import rules as exact_rules
from penstock.runtime.exact.streams import Streams
from penstock.runtime.execute.engine import draws_outside_modules
from penstock.runtime.front_end import Partition
from penstock.runtime.loss.functions import checked_loss, explain_missing_target, uses_target
from penstock.runtime.loss.loss import (
    Reduction,
    backward_root,
    checked_value,
    model_loss,
    no_gradient_error,
    weighted_sum,
    weights,
)
from penstock.runtime.model.state_dicts import evaluating
from penstock.runtime.split_backward.weight_gradients import adds_in_place
from penstock.schedule import generate
from penstock.verification.comparison import FullBatchCheck, Key, measure_noise
from penstock.verification.draws import ReferenceDraws
from penstock.verification.first_difference import ModuleTrace
from penstock.verification.full_batch import FullBatch
from penstock.verification.reference_copy import ModelAndLoss
from penstock.verification.rounding_bounds import RoundingBounds
from penstock.verification.states import RECORDING, States

IN_EVALUATION = " in evaluation"
OWNER = "the unsplit model"


@dataclass(frozen=True, slots=True)
class Expected:
    """One step of the unsplit model, or an evaluation.

    Attributes:
        values: all that is compared, by kind and name: the tensor leaves of each microbatch's output, of all replicas;
            the loss; gradients of parameters, and of buffers and inputs that require one; and buffers as the first
            replica's part leaves them, as in DistributedDataParallel.
        terms: how large the terms are of gradients that a pipeline adds up in another order.
        rounded: bounds on rounding, for gradients to which a pipeline adds terms that it does not round first.
        lowered, noise: if stages are compiled under autocast, its dtype, and how far values are from those without.
    """

    values: dict[Key, Tensor | None]
    terms: Mapping[str, Tensor] = field(default_factory=dict)
    rounded: Mapping[str, Tensor] = field(default_factory=dict)
    lowered: torch.dtype | None = None
    noise: Mapping[Key, float] = field(default_factory=dict)


class Reference(NamedTuple):
    """The steps of the unsplit model; an evaluation of the batch before the last, or the error that it raises; the
    parameters in the last step; and whether results may be bitwise identical."""

    steps: Sequence[Expected]
    evaluated: Expected | Exception
    updated: Mapping[str, Tensor]
    exact: bool
    full_batch: FullBatchCheck | None


class SumRule:
    """How a pipeline sums gradients, as far as a reference depends on it.

    Attributes:
        reordered: the gradients whose terms it adds up in another order than the unsplit model does, and why.
        loss: why it adds up those of the loss in another order; empty if it does not.
        by_use: those of them that each stage sums over its own uses.
        in_place: whether W adds terms to matrices' gradients in place, which shows if these are coarse.
    """

    def __init__(self, pipe: Pipeline) -> None:
        stages = pipe.stages
        self.loss = "terms of several replicas, added in another order" if pipe.world.data_parallel > 1 else ""
        branch = "a branch may be skipped, so two values that cross a cut are one: terms added in another order"
        reason = self.loss or (branch if pipe.session.reorders_gradients else "")
        names = [name for stage in stages if reason for name in (*stage.parameters, *stage.buffers)]
        tied = dict.fromkeys(ties(stages), "terms of several stages, added in another order")
        self.reordered = dict.fromkeys(names, reason) | tied
        self.by_use = frozenset(ties(stages[: len(stages) // pipe.schedule.placement.pipelines]))
        self.in_place = adds_in_place(pipe.session.engine.devices, pipe.schedule)
        self.key = frozenset(self.reordered), self.by_use, self.in_place


def reference(
    unsplit: ModelAndLoss,
    pipe: Pipeline,
    rule: SumRule,
    batches: Sequence[Microbatch],
    reduction: Reduction,
    options: Mapping[str, Any],
    trace: ModuleTrace | None = None,
    full_batch: bool = False,
) -> Reference:
    """Take the pipeline's steps with the model's own forward, microbatch by microbatch, on the same random streams.
    `trace` records module values in one of them."""
    # Hooks and draws of compiled code are others. Plain code may use `torch.cond`, which compiles to train.
    with States(*unsplit) as states, torch.compiler.set_stance("force_eager" if compiles(pipe) else "default"):
        runner = _ReferenceRunner(unsplit, pipe, rule, states, batches[0], reduction, options)
        states.enter(OWNER)
        with runner.single:
            *earlier, last = batches
            steps = [runner.step(batch, step, trace) for step, batch in enumerate(earlier, 1)]
            evaluation, updated = runner.evaluate(earlier[-1]), _take_step(runner.trained)
            steps.append(runner.step(last, len(batches), trace))
            exact_dtypes = (torch.float32, torch.float64)
            exact = all(p.device.type == "cpu" and p.dtype in exact_dtypes for p in runner.trained.values())
            return Reference(steps, evaluation, updated, exact, runner.full_batch(batches[0]) if full_batch else None)


def compiles(pipe: Pipeline) -> bool:
    """Whether any of its stages is compiled."""
    return pipe.session.compile is not False or pipe.session.has_compiled_blocks


class _ReferenceRunner:
    """The unsplit model, run by a pipeline of one rank."""

    def __init__(
        self, unsplit: ModelAndLoss, pipe: Pipeline, rule: SumRule, states: States, batch: Microbatch, *settings: Any
    ) -> None:
        self._pipe, self._states, (self._reduction, self._options) = pipe, states, settings
        self._loss = explain_missing_target(checked_loss(unsplit.loss))
        self._replicas = _replica_pieces(pipe, batch)
        option_names = ("leaf_modules", "split_inside", "materialize", "grad_dtype", "deferred_batch_norm")
        options = Options(
            loss_fn=self._loss,
            reduction=self._reduction,
            split_fn=lambda *_: self._pieces,
            devices=pipe.device,
            seed=pipe.seed,
            **{name: self._options[name] for name in option_names if name in self._options},
        )
        self.single = build(unsplit.model, ((), {}), World(1), generate("naive", 1, len(self._pieces)), options)
        self._draws_random = bool(self.single.session.drawing_modules) or self.single.session.draws_outside_modules
        self.trained = trainable(self.single.session.model_parts.all_parameters(), self.single)
        half_dtypes = (torch.bfloat16, torch.float16)
        matrices = [n for n, p in self.trained.items() if p.requires_grad and p.dim() == 2 and rule.in_place]
        rounding = {name for name in matrices if gradient_dtype(self.trained[name]) in half_dtypes}
        measured = {n: t for n, t in self.trained.items() if n in rule.reordered or n in rounding}
        self._terms, self._reordered = RoundingBounds(measured, rule.by_use, rounding), rule.reordered

    @property
    def _pieces(self) -> list[Microbatch]:
        """The microbatches of all replicas."""
        return [piece for part in self._replicas for piece in part]

    def step(self, batch: Microbatch, step: int, trace: ModuleTrace | None) -> Expected:
        """Forward and backward of one batch. Gradients are this step's alone."""
        self._replicas = _replica_pieces(self._pipe, batch)
        inputs = grad_inputs(batch) if len(self._replicas) == 1 else {}
        trace = trace if trace is not None and trace.step == step else None
        expected = self._with_noise(partial(self._step, inputs, trace))
        self.single.step_count += 1
        for tensor in inputs.values():
            tensor.grad = None
        return expected

    def evaluate(self, batch: Microbatch) -> Expected | Exception:
        """Run a batch in evaluation mode; return the results, or the error that the model raised."""
        self._replicas = _replica_pieces(self._pipe, batch)
        try:
            with evaluating(self.single.session.model_parts, self._loss), torch.no_grad():
                return self._with_noise(lambda: Expected(self._run(training=False)))
        except Exception as error:  # from the user's code
            return error

    def full_batch(self, batch: Microbatch) -> FullBatchCheck | None:
        """Run a batch at once."""
        self._replicas = _replica_pieces(self._pipe, batch)
        if len(self._replicas) > 1:
            batch = dict(self._pipe.all_gather_object((self._pipe.world.replica, batch)))[0]
        cutting = Cutting.of(*map(self._options.get, ("batch_dims", "split_fn", "merge_fn")))
        full = batch._replace(rows=sum(piece.rows or 0 for piece in self._replicas[0]))
        return FullBatch(self.single, full, cutting, self._replicas[0], self._loss, self._reduction).compare()

    def _step(self, inputs: Mapping[str, Tensor], trace: ModuleTrace | None) -> Expected:
        for tensor in (*self.trained.values(), *inputs.values()):
            tensor.grad = None
        tracing = trace.attach(self.single.model, self.trained) if trace is not None else nullcontext()
        with self._terms.measuring() as sizes, tracing:
            values = self._run(training=True, trace=trace)
        if trace is not None:
            trace.uses = self._terms.uses
        # A forward may have a buffer require a gradient from then on (vector_quantize_pytorch's VectorQuantize).
        self.trained |= trainable(self.single.session.model_parts.all_parameters(), self.single)
        grads = {("gradient", n): _copy(t.grad) for n, t in (*self.trained.items(), *inputs.items())}
        buffers = {("buffer", name): _copy(buffer) for name, buffer in self.single.named_buffers()}
        terms = {name: size for name, size in sizes.items() if name in self._reordered}
        return Expected({**values, **grads, **buffers}, terms, self._terms.rounded)

    def _with_noise(self, run: Callable[[], Expected]) -> Expected:
        """Run. If stages are compiled under autocast, also measure the noise of autocast on the unsplit model."""
        device, buffers = self.single.device.type, self.single.named_buffers()
        if not (compiles(self._pipe) and torch.is_autocast_enabled(device)):
            return run()
        buffers_before = {name: buffer.detach().clone() for name, buffer in buffers}
        with torch.autocast(device, enabled=False):
            full = run()
        self._set_buffers(buffers_before)
        low = run()
        return replace(low, lowered=torch.get_autocast_dtype(device), noise=measure_noise(low.values, full.values))

    def _run(self, *, training: bool, trace: ModuleTrace | None = None) -> dict[Key, Tensor | None]:
        """Return outputs and loss of one batch; afterwards buffers are as the first replica leaves them."""
        session, label = self.single.session, "" if training else IN_EVALUATION
        pieces = session.steps.microbatches(Batch(), session.device)
        partitions = self._partitions(training=training)
        weighting = weights(self._reduction, [piece.rows or 0 for piece in pieces], [piece.target for piece in pieces])
        values: dict[Key, Tensor | None] = {}
        losses: list[Tensor] = []
        first_buffers: Mapping[str, Tensor] = {}
        deferring = session.steps.deferring_norms() if training else nullcontext()
        with session.drawing() as streams, deferring as norms, computing(None, None):
            for k, piece in enumerate(pieces):
                draws = ReferenceDraws(self.single.model, streams, partitions[k]).drawing if partitions else _no_draws
                is_first = k * len(self._replicas) < len(pieces)  # of the replicas, whose buffers count
                streams.begin(k, {})
                NOW.stage, NOW.microbatch = 0, k % (len(pieces) // len(self._replicas))
                if trace is not None:
                    trace.begin(k)
                with draws(), norms.forward(k, runs_again=False) if norms and is_first else nullcontext():
                    kwargs = dict(piece.kwargs)
                    kwargs |= default_kwargs(session.model_parts.model, piece.args, kwargs)
                    output = self.single.model(*piece.args, **kwargs)
                streams.begin_loss(k)
                loss = self._loss_of(output, piece.target, training=training)
                if training and loss is not None:
                    if trace is not None:
                        trace.begin(k, backward=True)
                    with draws(backward=True):
                        self._backward(k, loss, weighting[k], output, streams)
                losses += [] if loss is None else [loss.detach()]
                for index, leaf in enumerate(leaf_tensors(output)):
                    values["output", f"{index} of microbatch {k}{label}"] = _copy(leaf)
                if (k + 1) * len(self._replicas) == len(pieces):
                    first_buffers = {name: buffer.detach().clone() for name, buffer in self.single.named_buffers()}
            self._set_buffers(first_buffers)  # deferred norms are committed after this
        if losses and (total := weighted_sum(losses, weighting)) is not None:
            values["loss", f"loss{label}"] = total.cpu()
        return values

    def _partitions(self, *, training: bool) -> Sequence[Partition]:
        """Return the recording of each microbatch, if it is needed to know which stream each draw takes."""
        session = self.single.session
        if not training and not self._draws_random:
            return ()  # recording is the slowest part
        batch = session.steps.cutting.cut(Batch(pieces=tuple(self._pieces)), "batch")
        self._states.enter(RECORDING)
        partitions = session.model_parts.partitions(training=training, outline=Outline.of(batch))
        self._states.enter(OWNER)
        for partition in partitions:
            session.engine.streams.watch(partition.drawing_modules)
            session.engine.streams.seeds_foreign |= partition.is_foreign
        return partitions if any(map(draws_outside_modules, partitions)) else ()

    def _loss_of(self, output: Any, target: Any, *, training: bool) -> Tensor | None:
        """Return the loss; in evaluation, None if it needs a target, and there is none."""
        loss = self._loss
        if uses_target(loss) and target is None and not training:
            return None
        result = model_loss(output) if loss is None else loss(output, target)
        return None if result is None and not training else checked_value(result, output, loss)

    def _backward(self, k: int, loss: Tensor, weight: float, output: Any, streams: Streams) -> None:
        streams.begin(k, {}, is_rerun=True)
        root = backward_root(loss, weight, leaf_tensors(output))
        self._terms.watch(root)
        if root.requires_grad:
            with exact_rules.outside_autocast(loss.device.type):
                root.backward(torch.full_like(loss, weight))  # type: ignore[no-untyped-call]
        elif any(map(needs_backward, self.single.stages)):
            raise no_gradient_error()

    def _set_buffers(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self.single.named_buffers():
                if not same_bits(buffer, values[name]):  # else an evaluation would take it for an update
                    buffer.copy_(values[name])


def _take_step(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Take a small step against the gradients, as an optimizer does. Return what it changed, by name."""
    updated: dict[str, Tensor] = {}
    torch.clear_autocast_cache()  # of casts of the weights as they were
    with torch.no_grad():
        for name, tensor in tensors.items():
            if tensor.grad is not None and tensor.requires_grad:
                step_size = 0.01 * (tensor.abs().mean() + 1e-3)
                tensor -= (tensor.grad.to_dense().sgn().nan_to_num() * step_size).to(tensor.dtype)
                updated[name] = tensor.detach().clone()
    return updated


def trainable(parameters: Iterable[tuple[str, Tensor]], pipe: Pipeline) -> dict[str, Tensor]:
    """Parameters, and the buffers that require a gradient."""
    return {**dict(parameters), **{name: buffer for name, buffer in pipe.named_buffers() if buffer.requires_grad}}


def grad_inputs(batch: Microbatch) -> dict[str, Tensor]:
    """Return the inputs that require a gradient."""
    flat = flatten((batch.args, dict(batch.kwargs)))
    leaves = zip(flat.paths, flat.leaves, strict=True)
    return {f"input {input_path(p)}": x for p, x in leaves if isinstance(x, Tensor) and x.requires_grad}


def _replica_pieces(pipe: Pipeline, batch: Microbatch) -> list[list[Microbatch]]:
    """Return the microbatches of each replica. They stay on the device of the batch."""
    leaves = flatten((batch.args, dict(batch.kwargs))).leaves
    device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
    local = pipe.session.steps.microbatches(Batch(batch.args, batch.kwargs, batch.target), device)
    pieces = {0: local} if pipe.world.data_parallel == 1 else dict(pipe.all_gather_object((pipe.world.replica, local)))
    return [pieces[replica] for replica in range(pipe.world.data_parallel)]


def _no_draws(*, backward: bool = False) -> AbstractContextManager[None]:
    return nullcontext()


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
