"""The proof: pipelined steps against the unsplit model on the same microbatches, value by value.

Compares outputs, loss, every parameter's gradient and every buffer in every step, and skips none. What one stage
holds must be equal to the bit when that can be promised (on CPU, in float32 or float64); what several stages hold is
added in another order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.pipe.arguments import checked_inputs
from penstock.pipe.build import pipeline
from penstock.pipe.pipeline import Pipeline
from penstock.proof.another_order import reordered_in
from penstock.proof.comparison import Comparison, Report, compare, over_steps
from penstock.proof.reference import Expected, forget_gradients, reference, trained
from penstock.proof.twins import twins
from penstock.runtime.batch.cutting import Cutting, Microbatch
from penstock.runtime.gradients.distribution import whole
from penstock.runtime.loss.loss import Loss, Reduction, check_grad_enabled
from penstock.runtime.step.example import is_whole
from penstock.schedule import Schedule
from penstock.second_names import OF_PIPELINE, also, nearest
from penstock.stages import ties
from penstock.trees import leaf_tensors, map_tensors


@also(**OF_PIPELINE)
def verify(
    model: nn.Module | Sequence[nn.Module] | Callable[[], Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: Any = None,
    schedule: str | Schedule = "1f1b",
    loss_fn: Loss | Callable[[Any], Tensor] | None = None,
    reduction: Reduction = "mean",
    exact: bool | None = None,
    whole_batch: bool = True,
    **options: Any,
) -> Report:
    """Runs two training steps through a pipeline and on the unsplit model, and compares everything in each.

    `verify` takes the model over, as `penstock.pipeline` does, and leaves it without gradients; to keep yours, pass a
    function that makes it, or a copy.

    Under torchrun every rank calls it with the same arguments, and gets the same report. On a mesh with replicas each
    passes its own part of the batch, and the unsplit model runs on all parts.

    Args:
        model: as for `penstock.pipeline`, or a function that makes it, or a tuple of it and its loss. The function is
            called twice, from the same state of all generators. A model is copied; if that is impossible, pass a
            function.
        args, kwargs, target, schedule, loss_fn, reduction: as for `penstock.pipeline` and `Pipeline.step`.
        exact: demand equality to the bit; None: on CPU, in float32 or float64, without compiled stages and without
            tensor parallelism. Otherwise the tolerances of `torch.testing.assert_close` hold, scaled down for tensors
            of small values.
        whole_batch: also compare with the unsplit model on the whole batch, and say why if it differs:
            `Report.whole_batch`. If the batch is cut along the wrong dimension the report is not ok.
        options: the other arguments of `penstock.pipeline`; microbatches defaults to 8, or to the number of rows in a
            smaller batch.

    Raises:
        ArgumentError: the model or its loss cannot be made or copied so that there are two.
    """
    known = {**inspect.signature(pipeline).parameters, **inspect.signature(verify).parameters}
    for name in options.keys() - known.keys():
        raise TypeError(f"verify() has no argument {name}={nearest(name, known)}")
    check_grad_enabled("penstock.verify")
    args, kwargs = checked_inputs(args, kwargs)
    if isinstance(schedule, str) and options.get("microbatches") is None and is_whole((args, kwargs)):
        cutting = Cutting.of(options.get("batch_dims"), options.get("split"), options.get("merge"))
        options["microbatches"] = cutting.usual(args, kwargs)
    mine, other = twins(model, loss_fn)
    options |= {"schedule": schedule, "loss_fn": mine.loss, "reduction": reduction}
    with pipeline(mine.model, args, kwargs, **options) as pipe:
        args, kwargs = map_tensors(lambda x: x.detach().requires_grad_(x.requires_grad), (args, kwargs))
        batch = Microbatch(tuple(args), kwargs, target)
        compiles = pipe.session.compile is not False or pipe.session.has_compiled_blocks
        # Hooks and draws of compiled code are others. Plain code may use `torch.cond`, which compiles to train.
        with torch.compiler.set_stance("force_eager" if compiles else "default"):
            found = reference(other, pipe, batch, reduction, {**options, "compile": compiles}, whole_batch)
        if exact is None:
            divided = len(pipe.world.column) > len(pipe.world.replicas)  # layers, which adds in another order
            exact = found.can_be_exact and not compiles and not divided
        compared = []
        for expected in found.steps:
            forget_gradients(pipe, expected.inputs)
            result = pipe.step(*args, target=target, outputs=True, **kwargs)
            total = result.loss
            outputs = result.outputs if pipe.has_outputs else None
            rows = [row for part in pipe.gather(_compare(pipe, outputs, total, expected, exact)) for row in part]
            compared.append(list(_complete(rows, expected)))
        return Report(
            tuple(over_steps(compared)),
            pipe.schedule.name,
            pipe.world.ranks,
            len(pipe.stages),
            pipe.schedule.microbatches,
            float(total),
            exact,
            pipe.world.data_parallel,
            len(compared),
            found.whole_batch,
            pipe.notes,
        )


def _compare(
    pipe: Pipeline, outputs: Sequence[Any] | None, loss: Tensor, expected: Expected, exact: bool
) -> list[Comparison]:
    """The rows for what this process holds."""
    order = pipe.schedule
    lasts = [stage for stage in range(order.stages) if order.placement.is_last(stage)]
    rows = []

    def judge(
        kind: str, name: str, stages: tuple[int, ...], mine: Tensor | None, other: Tensor | None, **more: Any
    ) -> Comparison:
        more["computed_in"] = expected.lowered or more.get("computed_in")
        return compare(kind, name, stages, mine, other, exact, noise=expected.noise.get((kind, name), 0.0), **more)

    first = pipe.world.replica * order.microbatches
    if outputs is not None:
        for k, output in enumerate(outputs):
            theirs = expected.outputs[first + k]
            last = next(stage for stage in lasts if k in order.numbers_on(stage))
            if output is None and len(lasts) > 1:
                continue  # on the rank of another copy's last stage
            for index, (mine, other) in enumerate(zip(leaf_tensors(output), theirs, strict=True)):
                rows.append(judge("output", f"{index} of microbatch {first + k}", (last,), mine, other))
        rows.append(judge("loss", "loss", tuple(lasts), loss, expected.loss))
    shared = ties(pipe.stages)
    holders = {name: (stage.index,) for stage in pipe.stages for name in (*stage.parameters, *stage.buffers)} | shared
    reordered = reordered_in(pipe)
    for name, parameter in trained(pipe.named_parameters(), pipe):
        rows.append(
            judge(
                "gradient",
                name,
                holders[name],
                None if parameter.grad is None else whole(parameter.grad),
                expected.gradients[name],
                reordered=reordered.get(name, ""),
                terms=expected.terms.get(name),
                computed_in=parameter.dtype,
                rounded=expected.rounded.get(name),
            )
        )
    for name, tensor in expected.inputs.items() if pipe.needs_inputs else ():
        rows.append(judge("gradient", name, (0,), tensor.grad, expected.gradients[name]))
    for name, buffer in pipe.named_buffers():
        rows.append(judge("buffer", name, holders[name], whole(buffer), expected.buffers[name]))
    return rows


def _complete(rows: Sequence[Comparison], expected: Expected) -> Iterator[Comparison]:
    """Every comparison once, in the model's order; what no stage holds counts as absent."""
    found: dict[tuple[str, str], Comparison] = {}
    for row in rows:
        known = found.setdefault((row.kind, row.name), row)
        if known.ok and not row.ok:
            found[row.kind, row.name] = row
    for (kind, name), value in expected.values().items():
        yield found.get((kind, name)) or compare(kind, name, (), None, value, True)
