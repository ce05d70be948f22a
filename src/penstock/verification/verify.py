"""Verification: pipelined steps against the unsplit model on the same microbatches, value by value.

Compares outputs, loss, every parameter's gradient and every buffer in every step, and skips none. What one stage
holds must be equal to the bit when that can be promised (on CPU, in float32 or float64); what several stages hold is
added in another order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock._base.aliases import PIPELINE_ALIASES, accept_aliases, suggest_argument
from penstock._base.errors import PartitionError, warn
from penstock._base.formatting import one_line, printable_line
from penstock._base.pytree import leaf_tensors, map_tensors
from penstock._base.stages import ties
from penstock.partition.stages.stage import Gate
from penstock.pipe import verified
from penstock.pipe.build import pipeline
from penstock.pipe.options import Options, has_values, validate_inputs
from penstock.pipe.pipeline import Pipeline
from penstock.runtime.batch.cut import Cutting, Microbatch
from penstock.runtime.batch.example import default_count, rotate
from penstock.runtime.features.feature import NOTHING, Context, Feature, StageContext
from penstock.runtime.gradients.dtensors import copy_into, gather_full
from penstock.runtime.loss.functions import Loss
from penstock.runtime.loss.loss import Reduction, check_grad_enabled
from penstock.runtime.step.results import StepResult
from penstock.schedule import MICROBATCHES, Action, Op, Schedule
from penstock.schedule.lowering import resolve_order
from penstock.verification.comparison import Comparison, Difference, VerificationReport, compare, merge_rows
from penstock.verification.first_difference import ROUNDING, ModuleTrace, first_difference, usual_factors
from penstock.verification.reference import (
    IN_EVALUATION,
    Expected,
    Reference,
    SumRule,
    compiles,
    grad_inputs,
    reference,
    trainable,
)
from penstock.verification.reference_copy import ModelAndLoss, copy_values, set_values, with_reference
from penstock.verification.states import States

STEPS = 3
"""The first step agrees on layouts, and its messages take a different path from all later ones. The second finds state
that the first left, on other values. In the third, weights have changed."""

Batches = Sequence[Microbatch] | Callable[[int], Microbatch]
"""The batches of the steps after the first."""


Traces = tuple[ModuleTrace, ModuleTrace]
"""The traces of the pipeline and of the unsplit model."""


@accept_aliases(**PIPELINE_ALIASES)
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
    full_batch: bool = True,
    batches: Batches | None = None,
    **options: Any,
) -> VerificationReport:
    """Take three training steps through a pipeline and with the unsplit model, and compare everything in each: one, one
    on other values and an evaluation of them, and one after the weights have changed as an optimizer changes them. What
    passes is remembered: pipelines of the same model, schedule and options are then verified.

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
        full_batch: also compare with the unsplit model on the whole batch, and say why if it differs:
            `VerificationReport.full_batch`. If the batch is cut along the wrong dimension the report is not ok.
        batches: what the second and third step take, of other lengths perhaps: a list of `penstock.Microbatch(args,
            kwargs, target)`, or a function that takes the step's number (2, 3) and returns one. None: the same
            samples, in another order in the second step.
        options: the other arguments of `penstock.pipeline`; microbatches defaults to 8, or to the number of rows in a
            smaller batch.

    Raises:
        ArgumentError: the model or its loss cannot be made or copied so that there are two.
    """
    parameters = {**inspect.signature(pipeline).parameters, **inspect.signature(verify).parameters}
    for name in options.keys() - parameters.keys():
        raise TypeError(f"verify() has no argument {name}={suggest_argument(name, parameters)}")
    check_grad_enabled("penstock.verify")
    args, kwargs = validate_inputs(args, kwargs)
    first = Microbatch(tuple(args), kwargs, target)
    return Verification(*with_reference(model, loss_fn), first, options, reduction, exact, full_batch, batches).report(
        schedule
    )


@dataclass(slots=True)
class Verification:
    """Verifies two equal models under one schedule after the other. The unsplit model's steps are computed once
    per number of microbatches and summation rule; units are measured once per number of stages."""

    split: ModelAndLoss
    unsplit: ModelAndLoss
    first_batch: Microbatch
    options: Mapping[str, Any]
    reduction: Reduction = "mean"
    exact: bool | None = None
    full_batch: bool = True
    batches: Batches | None = None
    references: dict[Hashable, Reference] = field(default_factory=dict)
    step_batches: dict[int, list[Microbatch]] = field(default_factory=dict)
    initial_values: dict[str, Tensor] = field(default_factory=dict)
    cuts: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def report(self, schedule: str | Schedule) -> VerificationReport:
        """Verify a schedule. If anything differs, repeat the steps to find the first difference."""
        report, steps = self._run_steps(schedule, None)
        if not report.differing or not steps:
            return report
        step = report.differing[0].step or 1
        try:
            repeated, _ = self._run_steps(schedule, (ModuleTrace(step), ModuleTrace(step)))
        except Exception:  # hooks may fail: report without the first difference
            return report
        first = repeated.first
        if first is None or repeated.differing[:1] != report.differing[:1]:  # it was by chance
            return report
        errors = [max((row.max_difference / (row.max_reference or 1.0) for row in rows), default=0.0) for rows in steps]
        grows = first.shape == ROUNDING and all(after > 1.5 * before for before, after in pairwise(errors))
        return replace(report, first=replace(first, shape=f"{ROUNDING}, which grows step by step") if grows else first)

    def _run_steps(
        self, schedule: str | Schedule, traces: Traces | None
    ) -> tuple[VerificationReport, list[list[Comparison]]]:
        """Take all steps. Return each one's rows, too, if a second pass may find where differences begin.

        Args:
            traces: record what modules compute, in the pipeline and in the unsplit model.
        """
        args, kwargs = self.first_batch.args, dict(self.first_batch.kwargs)
        options = {**self.options, "schedule": schedule, "loss_fn": self.split.loss, "reduction": self.reduction}
        cutting = Cutting.of(*map(options.get, ("batch_dims", "split_fn", "merge_fn")))
        if isinstance(schedule, str) and options.get("microbatches") is None and has_values((args, kwargs)):
            options["microbatches"] = default_count(cutting, (args, kwargs))
        for model in (self.split, self.unsplit) if self.initial_values else ():
            set_values(model.model, self.initial_values)
        for module, reference_module in zip(self.split.model.modules(), self.unsplit.model.modules(), strict=True):
            module.training = reference_module.training  # in case that a step left it otherwise
        self.initial_values = self.initial_values or copy_values(self.unsplit.model)
        m, features = options.get("microbatches") or MICROBATCHES, tuple(options.get("features", ()))
        depth = _count_measured_stages(options)
        options |= {"cuts": self.cuts[depth]} if depth in self.cuts else {}
        if m not in self.step_batches:
            self.step_batches[m] = list(_all_batches(self.first_batch, self.batches, cutting, m))
        batches = self.step_batches[m]
        with States(*self.split) as states:
            options["features"] = (
                *features,
                lambda stage: _StateSwitch(states, traces[0] if traces else None, stage),
            )
            with pipeline(self.split.model, args, kwargs, **options, verify=False) as pipe:
                rule, rank = SumRule(pipe), pipe.world.rank
                key = pipe.schedule.microbatches, rule.key
                self.cuts |= {depth: pipe.cuts} if depth else {}
                states.home = pipe.schedule.placement.rank_of[-1] if rank is None else rank
                for trace in traces or ():
                    trace.order = list(_unit_names([stage.module for stage in pipe.session.partition.stages]))
                states.enter(states.home)
                expected = None if traces else self.references.get(key)
                if expected is None:
                    details = traces[1] if traces else None, self.full_batch and not traces
                    expected = reference(self.unsplit, pipe, rule, batches, self.reduction, options, *details)
                if not traces:
                    self.references[key] = expected
                report, steps = self._compare_steps(pipe, rule, batches, expected, states, traces)
                return report, steps if pipe.world.is_local and not compiles(pipe) else []

    def _compare_steps(
        self,
        pipe: Pipeline,
        rule: SumRule,
        batches: Sequence[Microbatch],
        expected: Reference,
        states: States,
        traces: Traces | None,
    ) -> tuple[VerificationReport, list[list[Comparison]]]:
        is_divided = len(pipe.world.column) > len(pipe.world.replicas)  # layers, which adds in another order
        exact = expected.exact and not compiles(pipe) and not is_divided if self.exact is None else self.exact
        notes = [note for note in pipe.notes if note != verified.UNVERIFIED]
        steps, losses = list[list[Comparison]](), list[float]()
        first: Difference | None = None
        for step, batch in enumerate(batches, 1):
            if step == len(batches):
                _update(pipe, expected.updated)
            tensors = chain(pipe.named_parameters(), pipe.named_buffers(), grad_inputs(batch).items())
            for _, tensor in tensors:
                tensor.grad = None
            is_traced = traces is not None and traces[0].step == step
            with traces[0].attach(pipe.model, {}) if traces and is_traced else nullcontext():
                result = pipe.step(*batch.args, target=batch.target, outputs=True, **batch.kwargs)
            states.enter(states.home)
            step_rows = _compare_all(pipe, rule, result, batch, expected.steps[step - 1], exact)
            if traces and is_traced:
                gradients = {name: tensor.grad for name, tensor in trainable(pipe.named_parameters(), pipe).items()}
                factors = usual_factors(
                    pipe.schedule.microbatches, pipe.world.data_parallel, pipe.session.rows, batch.target
                )
                first = first_difference(*traces, gradients, step_rows, factors, exact)
            losses.append(float(result.loss))
            evaluated = expected.evaluated
            if step == len(batches) - 1 and isinstance(evaluated, Exception):
                reason = printable_line(one_line(evaluated), 200)
                notes.append(f"evaluation was not compared: the unsplit model raises {reason}")
            elif step == len(batches) - 1 and isinstance(evaluated, Expected):
                try:
                    evaluation = pipe.evaluate(*batch.args, target=batch.target, outputs=True, **batch.kwargs)
                    step_rows += _compare_all(pipe, rule, evaluation, batch, evaluated, exact, label=IN_EVALUATION)
                except PartitionError as error:
                    notes.append(f"evaluation was not compared: {error}")
            steps.append([row if row.ok else replace(row, step=step) for row in step_rows])
        rows = tuple(merge_rows(row for rows in steps for row in rows).values())
        schedule, world = pipe.schedule, pipe.world
        sizes = world.ranks, len(pipe.stages), schedule.microbatches, losses[0], exact, world.data_parallel
        report = VerificationReport(rows, schedule.name, *sizes, len(steps), expected.full_batch, tuple(notes), first)
        if not report.ok:
            verified.verified_fingerprints.discard(pipe.session.fingerprint())
        elif traces is None:
            verified.verified_fingerprints.add(pipe.session.fingerprint())
        return report, steps


def _count_measured_stages(options: Mapping[str, Any]) -> int:
    """Return the number of stages, if cuts are found by measuring; else 0."""
    fixed = (options.get(name) for name in ("cuts", "memory_limit", "link_cost", "plan"))
    ranks, is_balanced_otherwise = options.get("ranks"), options.get("balance", "time") != "time"
    if ranks is None or is_balanced_otherwise or any(value is not None for value in fixed):
        return 0
    return resolve_order(
        options["schedule"], ranks, options.get("microbatches"), options.get("stages_per_rank")
    ).placement.depth


def _update(pipe: Pipeline, values: Mapping[str, Tensor]) -> None:
    """Give the pipeline's weights new values in place, as an optimizer does."""
    torch.clear_autocast_cache()  # of casts of the weights as they were
    with torch.no_grad():
        for name, parameter in trainable(pipe.named_parameters(), pipe).items():
            if name in values:
                copy_into(parameter, values[name])


def _all_batches(first: Microbatch, later: Batches | None, cutting: Cutting, microbatches: int) -> Iterator[Microbatch]:
    """Yield the batches of all steps. Inputs that take a gradient are leaves."""
    for step in range(1, STEPS + 1):
        batch = first
        if step > 1 and later is not None:
            batch = later(step) if callable(later) else later[(step - 2) % len(later)]
        elif step == 2:
            batch = rotate(cutting, first, microbatches)
        leaves = map_tensors(lambda x: x.detach().requires_grad_(x.requires_grad), (batch.args, dict(batch.kwargs)))
        yield batch._replace(args=leaves[0], kwargs=leaves[1])


def _compare_all(
    pipe: Pipeline,
    rule: SumRule,
    result: StepResult,
    batch: Microbatch,
    expected: Expected,
    exact: bool,
    label: str = "",
) -> list[Comparison]:
    """Compare the values of all processes after a step or an evaluation, in the model's order. Values of none are
    missing."""
    rows: list[Comparison] = []

    def add_row(kind: str, name: str, stages: tuple[int, ...], value: Tensor | None, dtype: torch.dtype | None) -> None:
        key, grad_name = (kind, name), name if kind == "gradient" else ""
        correct, noise, dtype = expected.values.get(key), expected.noise.get(key, 0.0), expected.lowered or dtype
        terms, rounded = expected.terms.get(grad_name), expected.rounded.get(grad_name)
        reason = rule.loss if kind == "loss" else rule.reordered.get(grad_name, "")
        rows.append(compare(kind, name, stages, value, correct, exact, reason, terms, dtype, rounded, noise))

    schedule = pipe.schedule
    last_stages = tuple(stage for stage in range(schedule.stages) if schedule.placement.is_last(stage))
    for k, output in enumerate(result.outputs or () if pipe.has_outputs else ()):
        if output is None and len(last_stages) > 1:
            continue  # on the rank of another copy's last stage
        last = next(stage for stage in last_stages if k in schedule.numbers_on(stage))
        for index, leaf in enumerate(leaf_tensors(output)):
            name = f"{index} of microbatch {pipe.world.replica * schedule.microbatches + k}{label}"
            add_row("output", name, (last,), leaf, None)
    if pipe.has_outputs and ("loss", f"loss{label}") in expected.values:
        add_row("loss", f"loss{label}", last_stages, result.loss, None)
    stages_by_name = {name: (stage.index,) for stage in pipe.stages for name in (*stage.parameters, *stage.buffers)}
    holders: dict[str, tuple[int, ...]] = stages_by_name | ties(pipe.stages)
    if not label:
        for name, tensor in trainable(pipe.named_parameters(), pipe).items():
            grad = None if tensor.grad is None else gather_full(tensor.grad)
            add_row("gradient", name, holders[name], grad, tensor.dtype)
        for name, tensor in grad_inputs(batch).items() if pipe.needs_inputs and pipe.world.data_parallel == 1 else ():
            add_row("gradient", name, (0,), tensor.grad, None)
        for name, buffer in pipe.named_buffers():
            add_row("buffer", name, holders[name], gather_full(buffer), None)
    merged_rows = merge_rows(row for part in pipe.all_gather_object(rows) for row in part)
    keys = dict.fromkeys((*expected.values, *merged_rows))
    return [merged_rows.get(key) or compare(*key, (), None, expected.values[key], True) for key in keys]


_FIXED_OPTIONS = ("loss_fn", "cuts", "balance", "memory_limit", "link_cost", "seed", "run_dir")
"""Options that the pipeline has already decided, or that do not affect results."""


def first_step(model: nn.Module, loss_fn: Any, mesh: DeviceMesh | None) -> Callable[..., None]:
    """Return a function that verifies a pipeline with its first batch, on copies of model and loss that are made now.

    Every rank calls it, with the pipeline and the batch. It raises VerificationError on all of them if a value differs.
    """
    reference = with_reference(model, loss_fn)[1]

    def verify_with(pipe: Pipeline, args: Any, kwargs: Any, target: Any) -> None:
        requires_grad = {name: parameter.requires_grad for name, parameter in pipe.model.named_parameters()}
        for name, parameter in reference.model.named_parameters():
            parameter.requires_grad_(requires_grad[name])
        if not pipe.world.is_local:
            args, kwargs, target = _gather_batch(pipe, args, kwargs, target)
        names = [option.name for option in fields(Options) if option.init and option.name not in _FIXED_OPTIONS]
        options: dict[str, Any] = {name: getattr(pipe.session.options, name) for name in names}
        options |= {"schedule": pipe.session.order, "ranks": pipe.world.ranks, "mesh": mesh, "cuts": pipe.cuts}
        options |= {"target": target, "loss_fn": reference.loss, "seed": pipe.seed}
        report = verify(reference.model, args, kwargs, **options)
        report.raise_if_failed()
        full_batch = report.full_batch
        if pipe.world.is_first and full_batch is not None and full_batch.verdict == "warning":
            warn(f"pipeline(verify=True): {full_batch.text}")

    return verify_with


def _gather_batch(pipe: Pipeline, args: Any, kwargs: Any, target: Any) -> tuple[Any, Any, Any]:
    """Return the batch of this replica, from those of its processes that read it."""
    local = ((args, kwargs) if pipe.needs_inputs else None, target if pipe.needs_targets else None)
    on_cpu = map_tensors(lambda x: x.detach().cpu().requires_grad_(x.requires_grad), local)
    gathered = pipe.session.control.gather_pipeline(on_cpu)
    args, kwargs = next(inputs for inputs, _ in gathered if inputs is not None)
    return args, kwargs, next((label for _, label in gathered if label is not None), None)


class _StateSwitch(Feature):
    """Enters the state of a stage's rank before each action, and begins the action in the trace."""

    def __init__(self, states: States, trace: ModuleTrace | None, stage: StageContext) -> None:
        self._states, self._trace, self._stage = states, trace, stage.index
        self._rank = stage.binding.schedule.placement.rank_of[stage.index]

    def around(self, action: Action) -> Context:
        self._states.enter(self._rank)
        if self._trace is not None and action.microbatch is not None:
            self._trace.begin(action.microbatch, self._stage, backward=action.op is not Op.F)
        return NOTHING


def _unit_names(codes: Sequence[nn.Module]) -> Iterator[str]:
    """Yield the names of the modules that stages call as units, in order; names may repeat."""
    for code in codes:
        for node in code.graph.nodes if isinstance(code, fx.GraphModule) else ():
            if node.op == "call_module":
                module = code.get_submodule(str(node.target))
                yield from _unit_names([module.inside]) if isinstance(module, Gate) else [str(node.target)]
