"""What the unsplit model does with the pipeline's microbatches and random streams: the values to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.gradients import gradient_dtype
from penstock.marks import NOW, computing
from penstock.partition.values.objects import input_path
from penstock.pipe.build import build
from penstock.pipe.options import Options
from penstock.pipe.pipeline import Pipeline
from penstock.proof.another_order import reordered_in
from penstock.proof.comparison import WholeBatch, noise
from penstock.proof.draws import OwnDraws
from penstock.proof.term_sizes import TermSizes, measuring_roundings
from penstock.proof.twins import Made
from penstock.proof.whole_batch import Whole
from penstock.runtime.batch.cutting import Cutting, Microbatch
from penstock.runtime.exact import rules as exact_rules
from penstock.runtime.loss.functions import checked_loss, saying_what_is_missing
from penstock.runtime.loss.loss import (
    Loss,
    Reduction,
    checked_value,
    no_gradient,
    own_loss,
    root_of,
    weighted_sum,
    weights,
)
from penstock.runtime.processes.world import World
from penstock.runtime.split_backward.weight_gradients import adds_in_place
from penstock.schedule import generate
from penstock.stages import needs_backward, ties
from penstock.trees import flatten, leaf_tensors

STEPS = 2
"""The first step agrees on layouts, and its messages take a different path from all later ones: both are compared."""


@dataclass(frozen=True, slots=True)
class Expected:
    """One step of the unsplit model. `outputs`: the tensor leaves of each microbatch's output, of all replicas;
    `gradients`: those of parameters, and of buffers and inputs that require one; `buffers`: what the first replica's
    part leaves, as in DistributedDataParallel; `terms`: how large the terms are of gradients that a pipeline adds up in
    another order; `rounded`: what adding up rounds, of those to which a pipeline adds terms that it does not round
    first; `lowered`: autocast's dtype if stages are compiled under it; `noise`: how far each value then is from one
    without; `inputs`: the inputs that require a gradient.
    """

    outputs: list[list[Tensor]]
    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    terms: Mapping[str, Tensor] = field(default_factory=dict)
    rounded: Mapping[str, Tensor] = field(default_factory=dict)
    lowered: torch.dtype | None = None
    noise: Mapping[tuple[str, str], float] = field(default_factory=dict)
    inputs: Mapping[str, Tensor] = field(default_factory=dict)

    def values(self) -> dict[tuple[str, str], Tensor | None]:
        """All that is compared, by kind and name."""
        outputs = {f"{i} of microbatch {k}": t for k, leaves in enumerate(self.outputs) for i, t in enumerate(leaves)}
        of: Any = {"output": outputs, "loss": {"loss": self.loss}, "gradient": self.gradients, "buffer": self.buffers}
        return {(kind, name): value for kind, named in of.items() for name, value in named.items()}


@dataclass(frozen=True, slots=True)
class Reference:
    """What the unsplit model does."""

    steps: list[Expected]
    can_be_exact: bool
    whole_batch: WholeBatch | None


def reference(
    made: Made, pipe: Pipeline, batch: Microbatch, reduction: Reduction, options: Mapping[str, Any], whole_batch: bool
) -> Reference:
    """Runs the unsplit model's own forward, microbatch by microbatch, with the pipeline's random streams."""
    replicas, loss = pipe.world.data_parallel, saying_what_is_missing(checked_loss(made.loss))
    given = batch if replicas == 1 else dict(pipe.gather((pipe.world.replica, batch)))[0]
    mine = pipe.session.split_batch(batch.args, dict(batch.kwargs), batch.target, _uncut_device(batch))
    parts = {0: mine} if replicas == 1 else dict(pipe.gather((pipe.world.replica, mine)))
    pieces = [piece for replica in range(replicas) for piece in parts[replica]]
    alone = build(
        made.model,
        ((), {}),
        World(1),
        generate("naive", 1, len(pieces)),
        Options(
            loss_fn=loss,
            reduction=reduction,
            split=lambda *_: pieces,
            leaves=options.get("leaves"),
            opens=options.get("opens"),
            devices=pipe.device,
            materialize=options.get("materialize"),
            seed=pipe.seed,
            deferred_batch_norm=options.get("deferred_batch_norm", False),
            gradient_dtype=options.get("gradient_dtype"),
        ),
    )
    with alone:
        sizes, fused = _term_sizes(alone, pipe), _added_in_place(alone, pipe)
        flat = flatten((batch.args, dict(batch.kwargs)) if replicas == 1 else ())
        leaves = zip(flat.paths, flat.leaves, strict=True)
        inputs = {f"input {input_path(p)}": x for p, x in leaves if isinstance(x, Tensor) and x.requires_grad}
        run = partial(_step, alone, loss, reduction, replicas, sizes, fused, inputs)
        before = {name: buffer.detach().clone() for name, buffer in alone.named_buffers()}
        steps = [run() for _ in range(STEPS)]
        parameters = alone.session.all_parameters()
        exact = all(p.device.type == "cpu" and p.dtype in (torch.float32, torch.float64) for _, p in parameters)
        whole = None
        if whole_batch:
            rows = sum(piece.rows or 0 for piece in parts[0])
            cutting = Cutting.of(options.get("batch_dims"), options.get("split"), options.get("merge"))
            whole = Whole(alone, given._replace(rows=rows), cutting, parts[0], loss, reduction).compare()
        if options.get("compile") and torch.is_autocast_enabled(pipe.device.type):
            steps = _with_noise(alone, steps, before, run)
        return Reference(steps, exact, whole)


def _with_noise(
    alone: Pipeline, steps: Sequence[Expected], before: Mapping[str, Tensor], run: Callable[[], Expected]
) -> list[Expected]:
    """What autocast costs the unsplit model itself: the same steps without it, from the same state."""
    alone.step_count -= len(steps)
    with torch.no_grad():
        for name, buffer in alone.named_buffers():
            buffer.copy_(before[name])
    lowered = torch.get_autocast_dtype(alone.device.type)
    with torch.autocast(alone.device.type, enabled=False):
        return [replace(step, lowered=lowered, noise=noise(step.values(), run().values())) for step in steps]


def _uncut_device(batch: Microbatch) -> torch.device:
    """The device of the batch: what crosses to other replicas stays there."""
    leaves = flatten((batch.args, dict(batch.kwargs))).leaves
    return next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))


def _term_sizes(alone: Pipeline, pipe: Pipeline) -> TermSizes:
    """Measures the terms of the gradients that the pipeline adds up in another order."""
    reordered = reordered_in(pipe)
    known = {name: tensor for name, tensor in trained(alone.session.all_parameters(), alone) if name in reordered}
    one_copy = pipe.stages[: len(pipe.stages) // pipe.schedule.placement.pipelines]
    return TermSizes(known, by_use=ties(one_copy))


def _added_in_place(alone: Pipeline, pipe: Pipeline) -> dict[str, Tensor]:
    """The matrices to whose gradients W adds terms in place, where these are so coarse that it shows."""
    if not adds_in_place(pipe.session.engine.devices, pipe.schedule):
        return {}
    coarse = (torch.bfloat16, torch.float16)
    known = trained(alone.session.all_parameters(), alone)
    return {n: p for n, p in known if p.requires_grad and p.dim() == 2 and gradient_dtype(p) in coarse}


def _step(
    alone: Pipeline,
    loss: Loss | None,
    reduction: Reduction,
    replicas: int,
    sizes: TermSizes,
    fused: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
) -> Expected:
    forget_gradients(alone, inputs)
    with sizes.measuring() as terms, measuring_roundings(fused) as rounded:
        outputs, total = _run_unsplit(alone, loss, reduction, replicas, sizes)
    alone.step_count += 1
    return Expected(
        [[tensor.detach() for tensor in leaf_tensors(output)] for output in outputs],
        total,
        {n: _kept(t.grad) for n, t in (*trained(alone.session.all_parameters(), alone), *inputs.items())},
        {name: buffer.detach().clone() for name, buffer in alone.named_buffers()},
        terms,
        rounded,
        inputs=inputs,
    )


def _nothing(*, again: bool = False) -> AbstractContextManager[None]:
    return nullcontext()


def _kept(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()


def trained(parameters: Iterable[tuple[str, Tensor]], pipe: Pipeline) -> list[tuple[str, Tensor]]:
    """Parameters, and the buffers that require a gradient."""
    return [*parameters, *((name, buffer) for name, buffer in pipe.named_buffers() if buffer.requires_grad)]


def forget_gradients(pipe: Pipeline, inputs: Mapping[str, Tensor]) -> None:
    for _, tensor in (*trained(pipe.session.all_parameters(), pipe), *inputs.items()):
        tensor.grad = None


def _run_unsplit(
    alone: Pipeline, loss: Loss | None, reduction: Reduction, replicas: int, sizes: TermSizes
) -> tuple[list[Any], Tensor]:
    """Outputs and loss of one step; afterwards buffers are as the first replica leaves them."""
    pieces, session = alone.session.split_batch((), {}), alone.session
    partitions = session.split.partitions(training=True) if session.draws_in_glue else ()
    weighted = weights(reduction, [piece.rows or 0 for piece in pieces], [piece.target for piece in pieces])
    outputs: list[Any] = []
    losses: list[Tensor] = []
    first: dict[str, Tensor] = {}
    deferring = alone.session.steps.deferring_norms()
    with alone.session.drawing() as streams, deferring as norms, computing(None, None):
        for k, (args, given, target, _) in enumerate(pieces):
            kwargs = dict(given)
            streams.begin(k, {})
            first_replica = k * replicas < len(pieces)  # whose buffers count
            NOW.stage, NOW.microbatch = 0, k % (len(pieces) // replicas)
            own = OwnDraws(alone.model, streams, partitions[k]).drawing if partitions else _nothing
            with own(), norms.forward(k, runs_again=False) if norms and first_replica else nullcontext():
                output = alone.model(*args, **{**kwargs, **alone.session.default_kwargs(args, kwargs)})
            streams.begin_loss(k)
            value = checked_value(own_loss(output) if loss is None else loss(output, target), output, loss)
            streams.begin(k, {}, again=True)
            root = root_of(value, weighted[k], leaf_tensors(output))
            sizes.watch(root)
            if root.requires_grad:
                with own(again=True), exact_rules.outside_autocast(value.device.type):
                    root.backward(torch.full_like(value, weighted[k]))  # type: ignore[no-untyped-call]
            elif any(map(needs_backward, alone.stages)):
                raise no_gradient()
            losses.append(value.detach())
            outputs.append([tensor.detach().clone() for tensor in leaf_tensors(output)])
            if (k + 1) * replicas == len(pieces):
                first = {name: buffer.detach().clone() for name, buffer in alone.named_buffers()}
        with torch.no_grad():
            for name, buffer in alone.named_buffers():
                buffer.copy_(first[name])  # deferred norms are committed after this
    total = weighted_sum(losses, weighted)
    assert total is not None
    return outputs, total.cpu()
