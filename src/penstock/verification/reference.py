"""What the unsplit model does with the pipeline's microbatches and random streams: the values to compare with."""

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
from penstock._base.stages import needs_backward, ties
from penstock._base.trees import flatten, leaf_tensors
from penstock.distributed.world import World
from penstock.partition.units.chain import default_kwargs
from penstock.partition.values.memory import same_bits
from penstock.partition.values.objects import input_path
from penstock.pipe.build import build
from penstock.pipe.options import Options
from penstock.pipe.pipeline import Pipeline
from penstock.runtime.batch.cutting import Batch, Cutting, Microbatch
from penstock.runtime.batch.outline import Outline
from penstock.runtime.exact import rules as exact_rules
from penstock.runtime.exact.streams import Streams
from penstock.runtime.execute.engine import draws_in_glue
from penstock.runtime.front_end import Partition
from penstock.runtime.loss.functions import OutputLoss, checked_loss, saying_what_is_missing
from penstock.runtime.loss.loss import Reduction, checked_value, no_gradient, own_loss, root_of, weighted_sum, weights
from penstock.runtime.model.state_dicts import evaluating
from penstock.runtime.split_backward.weight_gradients import adds_in_place
from penstock.schedule import generate
from penstock.verification.comparison import FullBatchCheck, Key, measure_noise
from penstock.verification.draws import OwnDraws
from penstock.verification.states import RECORDING, States
from penstock.verification.term_sizes import TermSizes
from penstock.verification.trail import Trail
from penstock.verification.twins import Made
from penstock.verification.whole_batch import Whole

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
        rounded: what adding up rounds, of those to which a pipeline adds terms that it does not round first.
        lowered, noise: if stages are compiled under autocast, its dtype, and how far values are from those without.
    """

    values: dict[Key, Tensor | None]
    terms: Mapping[str, Tensor] = field(default_factory=dict)
    rounded: Mapping[str, Tensor] = field(default_factory=dict)
    lowered: torch.dtype | None = None
    noise: Mapping[Key, float] = field(default_factory=dict)


class Reference(NamedTuple):
    """The steps of the unsplit model; an evaluation of the batch before the last, or what it raises; what
    parameters are in the last step; and whether what a device computes may be the same to the bit."""

    steps: Sequence[Expected]
    evaluated: Expected | Exception
    updated: Mapping[str, Tensor]
    exact: bool
    whole_batch: FullBatchCheck | None


class Rule:
    """How a pipeline adds gradients up, as far as a reference depends on it.

    Attributes:
        reordered: the gradients whose terms it adds up in another order than the unsplit model does, and why.
        by_use: those of them of which each stage adds up its own uses.
        in_place: whether W adds terms to matrices' gradients in place, which shows if these are coarse.
    """

    def __init__(self, pipe: Pipeline) -> None:
        stages, why = pipe.stages, ""
        if pipe.world.data_parallel > 1:
            why = "terms of several replicas, added in another order"
        elif pipe.session.reorders_gradients:
            why = "a branch may be passed by, so that two values that cross a cut are one: terms added in another order"
        names = [name for stage in stages if why for name in (*stage.parameters, *stage.buffers)]
        tied = dict.fromkeys(ties(stages), "terms of several stages, added in another order")
        self.reordered = dict.fromkeys(names, why) | tied
        self.by_use = frozenset(ties(stages[: len(stages) // pipe.schedule.placement.pipelines]))
        self.in_place = adds_in_place(pipe.session.engine.devices, pipe.schedule)
        self.key = frozenset(self.reordered), self.by_use, self.in_place


def reference(
    made: Made,
    pipe: Pipeline,
    rule: Rule,
    batches: Sequence[Microbatch],
    reduction: Reduction,
    options: Mapping[str, Any],
    trail: Trail | None = None,
    whole_batch: bool = False,
) -> Reference:
    """Take the pipeline's steps by the model's own forward, microbatch by microbatch, on the same random streams.
    `trail` notes what modules compute in one of them."""
    # Hooks and draws of compiled code are others. Plain code may use `torch.cond`, which compiles to train.
    with States(made) as states, torch.compiler.set_stance("force_eager" if compiles(pipe) else "default"):
        unsplit = _Unsplit(made, pipe, rule, states, batches[0], reduction, options)
        states.enter(OWNER)
        with unsplit.alone:
            *before, last = batches
            steps = [unsplit.step(batch, step, trail) for step, batch in enumerate(before, 1)]
            evaluated, updated = unsplit.evaluate(before[-1]), _update(unsplit.trained)
            steps.append(unsplit.step(last, len(batches), trail))
            plain = (torch.float32, torch.float64)
            exact = all(p.device.type == "cpu" and p.dtype in plain for p in unsplit.trained.values())
            return Reference(steps, evaluated, updated, exact, unsplit.whole_batch(batches[0]) if whole_batch else None)


def compiles(pipe: Pipeline) -> bool:
    """Whether any of its stages is compiled."""
    return pipe.session.compile is not False or pipe.session.has_compiled_blocks


class _Unsplit:
    """The unsplit model, run by a pipeline of one rank."""

    def __init__(self, made: Made, pipe: Pipeline, rule: Rule, states: States, batch: Microbatch, *how: Any) -> None:
        self._pipe, self._states, (self._reduction, self._options) = pipe, states, how
        self._loss = saying_what_is_missing(checked_loss(made.loss))
        self._parts = _pieces(pipe, batch)
        alike = ("leaf_modules", "split_inside", "materialize", "grad_dtype", "deferred_batch_norm")
        given = Options(
            loss_fn=self._loss,
            reduction=self._reduction,
            split_fn=lambda *_: self._all,
            devices=pipe.device,
            seed=pipe.seed,
            **{name: self._options[name] for name in alike if name in self._options},
        )
        self.alone = build(made.model, ((), {}), World(1), generate("naive", 1, len(self._all)), given)
        self._draws = bool(self.alone.session.drawing_modules) or self.alone.session.draws_outside_modules
        self.trained = trained(self.alone.session.split.all_parameters(), self.alone)
        coarse = (torch.bfloat16, torch.float16)
        matrices = [n for n, p in self.trained.items() if p.requires_grad and p.dim() == 2 and rule.in_place]
        rounding = {name for name in matrices if gradient_dtype(self.trained[name]) in coarse}
        measured = {n: t for n, t in self.trained.items() if n in rule.reordered or n in rounding}
        self._terms, self._reordered = TermSizes(measured, rule.by_use, rounding), rule.reordered

    @property
    def _all(self) -> list[Microbatch]:
        """The microbatches of all replicas."""
        return [piece for part in self._parts for piece in part]

    def step(self, batch: Microbatch, step: int, trail: Trail | None) -> Expected:
        """Forward and backward of one batch. Gradients are this step's alone."""
        self._parts = _pieces(self._pipe, batch)
        inputs = inputs_of(batch) if len(self._parts) == 1 else {}
        trail = trail if trail is not None and trail.step == step else None
        found = self._with_noise(partial(self._step, inputs, trail))
        self.alone.step_count += 1
        for tensor in inputs.values():
            tensor.grad = None
        return found

    def evaluate(self, batch: Microbatch) -> Expected | Exception:
        """Run a batch in evaluation mode; return the results, or the error that the model raised."""
        self._parts = _pieces(self._pipe, batch)
        try:
            with evaluating(self.alone.session.split, self._loss), torch.no_grad():
                return self._with_noise(lambda: Expected(self._run(training=False)))
        except Exception as error:  # from the user's code
            return error

    def whole_batch(self, batch: Microbatch) -> FullBatchCheck | None:
        """Run a batch at once."""
        self._parts = _pieces(self._pipe, batch)
        if len(self._parts) > 1:
            batch = dict(self._pipe.all_gather_object((self._pipe.world.replica, batch)))[0]
        cutting = Cutting.of(*map(self._options.get, ("batch_dims", "split_fn", "merge_fn")))
        whole = batch._replace(rows=sum(piece.rows or 0 for piece in self._parts[0]))
        return Whole(self.alone, whole, cutting, self._parts[0], self._loss, self._reduction).compare()

    def _step(self, inputs: Mapping[str, Tensor], trail: Trail | None) -> Expected:
        for tensor in (*self.trained.values(), *inputs.values()):
            tensor.grad = None
        followed = trail.following(self.alone.model, self.trained) if trail is not None else nullcontext()
        with self._terms.measuring() as sizes, followed:
            values = self._run(training=True, trail=trail)
        if trail is not None:
            trail.uses = self._terms.uses
        # A forward may have a buffer require a gradient from then on (vector_quantize_pytorch's VectorQuantize).
        self.trained |= trained(self.alone.session.split.all_parameters(), self.alone)
        grads = {("gradient", n): _copy(t.grad) for n, t in (*self.trained.items(), *inputs.items())}
        buffers = {("buffer", name): _copy(buffer) for name, buffer in self.alone.named_buffers()}
        terms = {name: size for name, size in sizes.items() if name in self._reordered}
        return Expected({**values, **grads, **buffers}, terms, self._terms.rounded)

    def _with_noise(self, run: Callable[[], Expected]) -> Expected:
        """Runs. Where stages are compiled under autocast, adds what that costs the unsplit model itself."""
        device, buffers = self.alone.device.type, self.alone.named_buffers()
        if not (compiles(self._pipe) and torch.is_autocast_enabled(device)):
            return run()
        before = {name: buffer.detach().clone() for name, buffer in buffers}
        with torch.autocast(device, enabled=False):
            full = run()
        self._set_buffers(before)
        found = run()
        return replace(found, lowered=torch.get_autocast_dtype(device), noise=measure_noise(found.values, full.values))

    def _run(self, *, training: bool, trail: Trail | None = None) -> dict[Key, Tensor | None]:
        """Return outputs and loss of one batch; afterwards buffers are as the first replica leaves them."""
        session, label = self.alone.session, "" if training else IN_EVALUATION
        pieces = session.microbatches(Batch(), session.device)
        partitions = self._partitions(training=training)
        weighted = weights(self._reduction, [piece.rows or 0 for piece in pieces], [piece.target for piece in pieces])
        found: dict[Key, Tensor | None] = {}
        losses: list[Tensor] = []
        first: Mapping[str, Tensor] = {}
        deferring = session.deferring_norms() if training else nullcontext()
        with session.drawing() as streams, deferring as norms, computing(None, None):
            for k, piece in enumerate(pieces):
                own = OwnDraws(self.alone.model, streams, partitions[k]).drawing if partitions else _nothing
                is_first = k * len(self._parts) < len(pieces)  # of the replicas, whose buffers count
                streams.begin(k, {})
                NOW.stage, NOW.microbatch = 0, k % (len(pieces) // len(self._parts))
                if trail is not None:
                    trail.begin(k)
                with own(), norms.forward(k, runs_again=False) if norms and is_first else nullcontext():
                    kwargs = dict(piece.kwargs)
                    kwargs |= default_kwargs(session.split.model, piece.args, kwargs)
                    output = self.alone.model(*piece.args, **kwargs)
                streams.begin_loss(k)
                value = self._loss_of(output, piece.target, training=training)
                if training and value is not None:
                    if trail is not None:
                        trail.begin(k, backward=True)
                    with own(again=True):
                        self._backward(k, value, weighted[k], output, streams)
                losses += [] if value is None else [value.detach()]
                for index, leaf in enumerate(leaf_tensors(output)):
                    found["output", f"{index} of microbatch {k}{label}"] = _copy(leaf)
                if (k + 1) * len(self._parts) == len(pieces):
                    first = {name: buffer.detach().clone() for name, buffer in self.alone.named_buffers()}
            self._set_buffers(first)  # deferred norms are committed after this
        if losses and (total := weighted_sum(losses, weighted)) is not None:
            found["loss", f"loss{label}"] = total.cpu()
        return found

    def _partitions(self, *, training: bool) -> Sequence[Partition]:
        """Return how each microbatch was recorded, if that is needed to know which draws take which stream."""
        session = self.alone.session
        if not training and not self._draws:
            return ()  # recording takes longer than anything else
        cut = session.cut(Batch(pieces=tuple(self._all)), "batch", session.device)
        self._states.enter(RECORDING)
        found = session.split.partitions(training=training, outline=Outline.of(cut))
        self._states.enter(OWNER)
        for partition in found:
            session.engine.streams.watch(partition.drawing_modules)
            session.engine.streams.seeds_foreign |= partition.is_foreign
        return found if any(map(draws_in_glue, found)) else ()

    def _loss_of(self, output: Any, target: Any, *, training: bool) -> Tensor | None:
        """Return the loss; in evaluation, None if it needs a target, and there is none."""
        loss = self._loss
        if loss is not None and target is None and not training and not isinstance(loss, OutputLoss):
            return None
        value = own_loss(output) if loss is None else loss(output, target)
        return None if value is None and not training else checked_value(value, output, loss)

    def _backward(self, k: int, value: Tensor, weight: float, output: Any, streams: Streams) -> None:
        streams.begin(k, {}, again=True)
        root = root_of(value, weight, leaf_tensors(output))
        self._terms.watch(root)
        if root.requires_grad:
            with exact_rules.outside_autocast(value.device.type):
                root.backward(torch.full_like(value, weight))  # type: ignore[no-untyped-call]
        elif any(map(needs_backward, self.alone.stages)):
            raise no_gradient()

    def _set_buffers(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self.alone.named_buffers():
                if not same_bits(buffer, values[name]):  # else an evaluation would take it for an update
                    buffer.copy_(values[name])


def _update(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Take a small step against the gradients, as an optimizer does. Return what it changed, by name."""
    changed: dict[str, Tensor] = {}
    torch.clear_autocast_cache()  # of casts of the weights as they were
    with torch.no_grad():
        for name, tensor in tensors.items():
            if tensor.grad is not None and tensor.requires_grad:
                size = 0.01 * (tensor.abs().mean() + 1e-3)
                tensor -= (tensor.grad.to_dense().sgn().nan_to_num() * size).to(tensor.dtype)
                changed[name] = tensor.detach().clone()
    return changed


def trained(parameters: Iterable[tuple[str, Tensor]], pipe: Pipeline) -> dict[str, Tensor]:
    """Parameters, and the buffers that require a gradient."""
    return {**dict(parameters), **{name: buffer for name, buffer in pipe.named_buffers() if buffer.requires_grad}}


def inputs_of(batch: Microbatch) -> dict[str, Tensor]:
    """Return the inputs that require a gradient."""
    flat = flatten((batch.args, dict(batch.kwargs)))
    leaves = zip(flat.paths, flat.leaves, strict=True)
    return {f"input {input_path(p)}": x for p, x in leaves if isinstance(x, Tensor) and x.requires_grad}


def _pieces(pipe: Pipeline, batch: Microbatch) -> list[list[Microbatch]]:
    """Return the microbatches of each replica. They stay on the device of the batch."""
    leaves = flatten((batch.args, dict(batch.kwargs))).leaves
    device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
    mine = pipe.session.microbatches(Batch(batch.args, batch.kwargs, batch.target), device)
    parts = {0: mine} if pipe.world.data_parallel == 1 else dict(pipe.all_gather_object((pipe.world.replica, mine)))
    return [parts[replica] for replica in range(pipe.world.data_parallel)]


def _nothing(*, again: bool = False) -> AbstractContextManager[None]:
    return nullcontext()


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
