"""The proof: one pipelined step against the unsplit model on the same microbatches, value by value.

Compares outputs, loss, every parameter's gradient and every buffer, and skips none. What one stage holds must be equal
to the bit where that can be promised (on CPU, in float32 or float64); what several stages hold is added in another
order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.api import build, pipeline
from penstock.comparison import Report, Row, compare
from penstock.errors import ArgumentError
from penstock.options import Options
from penstock.partition._compat import flatten, unflatten
from penstock.pipe import Pipeline
from penstock.runtime import batch as batches
from penstock.runtime import exact as exact_rules
from penstock.runtime.distribution import whole
from penstock.runtime.loss import Loss, Reduction, own_loss, root_of, weighted_sum, weights
from penstock.runtime.world import World
from penstock.schedule import Schedule, generate
from penstock.stages import ties

STEPS = 2
"""Only the last one is compared: the first agrees on layouts, and its messages take another way than all others."""


def verify(
    model: nn.Module | Sequence[nn.Module],
    args: Sequence[Any] = (),
    target: Any = None,
    loss: Loss | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    reduction: Reduction = "mean",
    exact: bool | None = None,
    schedule: str | Schedule = "1f1b",
    **options: Any,
) -> Report:
    """Runs a training step through a pipeline and on the unsplit model, and compares everything.

    The model is taken over, as by `penstock.pipeline`, and left without gradients of its own; give a copy to keep it.

    Under torchrun every rank calls it with the same arguments, and gets the same report. On a mesh with replicas each
    passes its own part of the batch, and the unsplit model runs on all parts.

    Args:
        model, args, kwargs, target, loss, reduction, schedule: as for `penstock.pipeline` and `Pipeline.step`.
        exact: demand equality to the bit; None: on CPU, in float32 or float64, without compiled stages and without
            tensor parallelism. Otherwise the tolerances of `torch.testing.assert_close` hold.
        options: the other arguments of `penstock.pipeline`.
    """
    kwargs = dict(kwargs or {})
    original = copy.deepcopy(model if isinstance(model, nn.Module) else list(model))
    with pipeline(model, args, kwargs, loss=loss, reduction=reduction, schedule=schedule, **options) as pipe:
        for _ in range(STEPS):
            _forget_gradients(pipe)
            result = pipe.step(*args, target=target, outputs=True, **kwargs)
        total = result.loss
        parts = dict(pipe.gather((pipe.world.replica, _Batch(tuple(args), kwargs, target))))
        batch = _joined([parts[replica] for replica in range(pipe.world.data_parallel)], pipe.schedule.microbatches)
        expected = _reference(original, pipe, batch, loss, reduction, options)
        if exact is None:
            divided = len(pipe.world.column) > len(pipe.world.replicas)  # layers, which adds in another order
            exact = expected.can_be_exact and not options.get("compile") and not divided
        outputs = result.outputs if pipe.has_outputs else None
        rows = [row for part in pipe.gather(_compare(pipe, outputs, total, expected, exact)) for row in part]
        return Report(
            tuple(_complete(rows, expected)),
            pipe.schedule.name,
            pipe.world.ranks,
            len(pipe.stages),
            pipe.schedule.microbatches,
            float(total),
            exact,
            pipe.world.data_parallel,
        )


@dataclass(frozen=True, slots=True)
class _Batch:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any


def _joined(parts: Sequence[_Batch], microbatches: int) -> _Batch:
    """The batch of all replicas, which divides into the same microbatches."""
    if len(parts) == 1:
        return parts[0]
    rows = batches.rows_of((parts[0].args, parts[0].kwargs), "input")
    if rows % microbatches:
        raise ArgumentError(
            f"a replica's batch has {rows} rows in {microbatches} microbatches; to verify replicas, give batches that "
            "divide evenly"
        )

    def join(*leaves: Any) -> Any:
        return torch.cat(leaves) if isinstance(leaves[0], Tensor) and leaves[0].dim() else leaves[0]

    trees = [flatten((part.args, part.kwargs, part.target)) for part in parts]
    leaves = [join(*column) for column in zip(*(tree.leaves for tree in trees), strict=True)]
    return _Batch(*unflatten(leaves, trees[0].structure))


@dataclass(frozen=True, slots=True)
class _Reference:
    """One step of the unsplit model. `outputs` are the tensor leaves of each microbatch's output, of all replicas;
    `buffers` what the first replica's part leaves, as in DistributedDataParallel."""

    outputs: list[list[Tensor]]
    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    can_be_exact: bool


def _reference(
    model: nn.Module | Sequence[nn.Module],
    pipe: Pipeline,
    batch: _Batch,
    loss: Loss | None,
    reduction: Reduction,
    options: Mapping[str, Any],
) -> _Reference:
    """Runs the unsplit model's own forward, microbatch by microbatch, with the pipeline's random streams.

    Where the model draws outside of any module that is called, its own forward cannot be told which stream to use:
    there the reference is the recorded model on one rank.
    """
    replicas = pipe.world.data_parallel
    alone = build(
        model,
        (batch.args, batch.kwargs),
        World(1),
        generate("naive", 1, pipe.schedule.microbatches * replicas),
        Options(
            loss=loss,
            reduction=reduction,
            leaves=options.get("leaves"),
            opens=options.get("opens"),
            devices=pipe.device,
            materialize=options.get("materialize"),
            seed=pipe.seed,
            deferred_batch_norm=options.get("deferred_batch_norm", False),
        ),
    )
    with alone:
        for _ in range(STEPS):
            _forget_gradients(alone)
            if alone.draws_in_glue:
                if replicas > 1 and any(stage.updated for stage in alone.stages):
                    raise ArgumentError(
                        "this model updates buffers, and draws random numbers outside of any module that is called; "
                        "there is no reference for it with replicas: verify it on a mesh without"
                    )
                result = alone.step(*batch.args, target=batch.target, outputs=True, **batch.kwargs)
                outputs, total = list(result.outputs), result.loss
            else:
                outputs, total = _run_unsplit(alone, batch, loss, reduction, replicas)
                alone.step_count += 1
        parameters = alone.all_parameters()
        return _Reference(
            [_tensors(output) for output in outputs],
            total,
            {name: parameter.grad for name, parameter in parameters},
            dict(alone.named_buffers()),
            all(p.device.type == "cpu" and p.dtype in (torch.float32, torch.float64) for _, p in parameters),
        )


def _forget_gradients(pipe: Pipeline) -> None:
    for _, parameter in pipe.all_parameters():
        parameter.grad = None


def _run_unsplit(
    alone: Pipeline, batch: _Batch, loss: Loss | None, reduction: Reduction, replicas: int
) -> tuple[list[Any], Tensor]:
    """Outputs and loss of one step, after which buffers are as the first of the replicas leaves them."""
    pieces = alone.split_batch((batch.args, batch.kwargs))
    target = batch.kwargs.get("labels") if batch.target is None else batch.target
    targets = alone.split_batch(target, like=(batch.args, batch.kwargs))
    sizes = [batches.rows_of(piece, "input") for piece in pieces]
    weighted = weights(reduction, sizes, targets)
    outputs: list[Any] = []
    losses: list[Tensor] = []
    first: dict[str, Tensor] = {}
    with alone.drawing() as streams, alone.deferring() as norms:
        for k, (args, kwargs) in enumerate(pieces):
            streams.begin(k, {})
            if norms is not None and k * replicas < len(pieces):
                norms.begin(k)  # of the first replica alone, whose buffers count
            output = alone.model(*args, **{**kwargs, **alone.default_kwargs(args, kwargs)})
            streams.begin_loss(k)
            value = own_loss(output) if loss is None else loss(output, targets[k])
            assert value is not None
            streams.begin(k, {}, again=True)
            if norms is not None:
                norms.pause()
            root = root_of(value, weighted[k], _tensors(output))
            with exact_rules.outside_autocast(value.device.type):
                root.backward(torch.full_like(value, weighted[k]))  # type: ignore[no-untyped-call]
            losses.append(value.detach())
            outputs.append(output)
            if (k + 1) * replicas == len(pieces):
                first = {name: buffer.clone() for name, buffer in alone.named_buffers()}
        for name, buffer in alone.named_buffers():
            buffer.copy_(first[name])  # deferred norms are committed behind this
    total = weighted_sum(losses, weighted)
    assert total is not None
    return outputs, total.cpu()


def _compare(
    pipe: Pipeline, outputs: Sequence[Any] | None, loss: Tensor, expected: _Reference, exact: bool
) -> list[Row]:
    """The rows of what this process holds."""
    order = pipe.schedule
    lasts = [stage for stage in range(order.stages) if order.placement.is_last(stage)]
    rows = []
    first = pipe.world.replica * order.microbatches
    if outputs is not None:
        for k, output in enumerate(outputs):
            reference = expected.outputs[first + k]
            last = next(stage for stage in lasts if k in order.numbers_on(stage))
            if output is None and len(lasts) > 1:
                continue  # on the rank of another copy's last stage
            for index, (mine, other) in enumerate(zip(_tensors(output), reference, strict=True)):
                rows.append(compare("output", f"{index} of microbatch {first + k}", (last,), mine, other, exact))
        rows.append(compare("loss", "loss", tuple(lasts), loss, expected.loss, exact))
    shared = ties(pipe.stages)
    holders = {name: (stage.index,) for stage in pipe.stages for name in (*stage.parameters, *stage.buffers)} | shared
    over = "terms of several replicas, added in another order" if pipe.world.data_parallel > 1 else ""
    why = "terms of several stages, added in another order"
    for name, parameter in pipe.named_parameters():
        rows.append(
            compare(
                "gradient",
                name,
                holders[name],
                None if parameter.grad is None else whole(parameter.grad),
                expected.gradients[name],
                exact,
                why if name in shared else over,
            )
        )
    for name, buffer in pipe.named_buffers():
        rows.append(compare("buffer", name, holders[name], whole(buffer), expected.buffers[name], exact))
    return rows


def _complete(rows: Sequence[Row], expected: _Reference) -> Iterator[Row]:
    """Every comparison once, in the model's order; what no stage holds is compared as absent."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        known = found.setdefault((row.kind, row.name), row)
        if known.ok and not row.ok:
            found[row.kind, row.name] = row
    for k, output in enumerate(expected.outputs):
        for index, reference in enumerate(output):
            name = f"{index} of microbatch {k}"
            yield found.get(("output", name)) or compare("output", name, (), None, reference, True)
    yield found["loss", "loss"]
    for name, gradient in expected.gradients.items():
        yield found.get(("gradient", name)) or compare("gradient", name, (), None, gradient, True)
    for name, buffer in expected.buffers.items():
        yield found.get(("buffer", name)) or compare("buffer", name, (), None, buffer, True)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(tree).leaves if isinstance(leaf, Tensor)]
