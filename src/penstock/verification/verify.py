"""The proof: pipelined steps against the unsplit model on the same microbatches, value by value.

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

from penstock._base.errors import PartitionError
from penstock._base.second_names import OF_PIPELINE, also, nearest
from penstock._base.stages import ties
from penstock._base.trees import leaf_tensors, map_tensors
from penstock._base.words import in_a_line, line_of
from penstock.partition.stages.stage import Gate
from penstock.pipe import verified
from penstock.pipe.build import pipeline
from penstock.pipe.options import Options
from penstock.pipe.pipeline import Pipeline
from penstock.pipe.result import StepResult
from penstock.pipe.validation import has_values, validate_inputs
from penstock.runtime.batch.cutting import Cutting, Microbatch
from penstock.runtime.features.feature import NOTHING, Context, Feature, StageContext
from penstock.runtime.gradients.distribution import copy_into, whole
from penstock.runtime.loss.functions import Loss
from penstock.runtime.loss.loss import Reduction, check_grad_enabled
from penstock.schedule import MICROBATCHES, Action, Op, Schedule
from penstock.schedule.lowering import resolve_order
from penstock.verification.comparison import Comparison, Difference, VerificationReport, compare, merged
from penstock.verification.first_difference import ROUNDING, first_difference, usual_factors
from penstock.verification.reference import (
    IN_EVALUATION,
    Expected,
    Reference,
    Rule,
    compiles,
    inputs_of,
    reference,
    trained,
)
from penstock.verification.states import States
from penstock.verification.trail import Trail
from penstock.verification.twins import Made, set_values, twins, values_of

STEPS = 3
"""The first step agrees on layouts, and its messages take a different path from all later ones. The second finds what
the first left behind, on other values. In the third, weights have changed."""

Batches = Sequence[Microbatch] | Callable[[int], Microbatch]
"""What the steps after the first take."""


Trails = tuple[Trail, Trail]
"""Of the pipeline, and of the unsplit model."""


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
    known = {**inspect.signature(pipeline).parameters, **inspect.signature(verify).parameters}
    for name in options.keys() - known.keys():
        raise TypeError(f"verify() has no argument {name}={nearest(name, known)}")
    check_grad_enabled("penstock.verify")
    args, kwargs = validate_inputs(args, kwargs)
    first = Microbatch(tuple(args), kwargs, target)
    return Verification(*twins(model, loss_fn), first, options, reduction, exact, full_batch, batches).report(schedule)


@dataclass(slots=True)
class Verification:
    """Two models, and what both take, under one schedule after the other. What the unsplit model does is computed once
    for those with as many microbatches that add gradients up alike; units are measured once for as many stages."""

    mine: Made
    other: Made
    first: Microbatch
    options: Mapping[str, Any]
    reduction: Reduction = "mean"
    exact: bool | None = None
    whole_batch: bool = True
    batches: Batches | None = None
    references: dict[Hashable, Reference] = field(default_factory=dict)
    taken: dict[int, list[Microbatch]] = field(default_factory=dict)
    initial: dict[str, Tensor] = field(default_factory=dict)
    cuts: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def report(self, schedule: str | Schedule) -> VerificationReport:
        """Verify one. If anything differs, the same steps are taken again to find where that begins."""
        report, steps = self._pass(schedule, None)
        if not report.differing or not steps:
            return report
        step = report.differing[0].step or 1
        try:
            again, _ = self._pass(schedule, (Trail(step), Trail(step)))
        except Exception:  # hooks are in the way: what is known is reported
            return report
        first = again.first
        if first is None or again.differing[:1] != report.differing[:1]:  # it was by chance
            return report
        worst = [max((row.max_difference / (row.max_reference or 1.0) for row in rows), default=0.0) for rows in steps]
        grows = first.shape == ROUNDING and all(after > 1.5 * before for before, after in pairwise(worst))
        return replace(report, first=replace(first, shape=f"{ROUNDING}, which grows step by step") if grows else first)

    def _pass(
        self, schedule: str | Schedule, trails: Trails | None
    ) -> tuple[VerificationReport, list[list[Comparison]]]:
        """Take all steps. Return each one's rows, too, if a second pass may find where differences begin.

        Args:
            trails: note what modules compute, in the pipeline and in the unsplit model.
        """
        args, kwargs = self.first.args, dict(self.first.kwargs)
        options = {**self.options, "schedule": schedule, "loss_fn": self.mine.loss, "reduction": self.reduction}
        cutting = Cutting.of(*map(options.get, ("batch_dims", "split_fn", "merge_fn")))
        if isinstance(schedule, str) and options.get("microbatches") is None and has_values((args, kwargs)):
            options["microbatches"] = cutting.usual((args, kwargs))
        for made in (self.mine, self.other) if self.initial else ():
            set_values(made.model, self.initial)
        for mine, other in zip(self.mine.model.modules(), self.other.model.modules(), strict=True):
            mine.training = other.training  # in case that a step left it otherwise
        self.initial = self.initial or values_of(self.other.model)
        m, own = options.get("microbatches") or MICROBATCHES, tuple(options.get("features", ()))
        depth = _measured_depth(options)
        options |= {"cuts": self.cuts[depth]} if depth in self.cuts else {}
        given = self.taken.get(m) or self.taken.setdefault(m, list(_batches(self.first, self.batches, cutting, m)))
        with States(self.mine) as states:
            options["features"] = (*own, lambda stage: _Follows(states, trails[0] if trails else None, stage))
            with pipeline(self.mine.model, args, kwargs, **options, verify=False) as pipe:
                rule, rank = Rule(pipe), pipe.world.rank
                key = pipe.schedule.microbatches, rule.key
                self.cuts |= {depth: pipe.cuts} if depth else {}
                states.home = pipe.schedule.placement.rank_of[-1] if rank is None else rank
                for trail in trails or ():
                    trail.order = list(_units_of([stage.module for stage in pipe.session.partition.stages]))
                states.enter(states.home)
                expected = None if trails else self.references.get(key)
                if expected is None:
                    how = trails[1] if trails else None, self.whole_batch and not trails
                    expected = reference(self.other, pipe, rule, given, self.reduction, options, *how)
                if not trails:
                    self.references[key] = expected
                report, steps = self._compared(pipe, rule, given, expected, states, trails)
                return report, steps if pipe.world.is_local and not compiles(pipe) else []

    def _compared(
        self,
        pipe: Pipeline,
        rule: Rule,
        batches: Sequence[Microbatch],
        expected: Reference,
        states: States,
        trails: Trails | None,
    ) -> tuple[VerificationReport, list[list[Comparison]]]:
        divided = len(pipe.world.column) > len(pipe.world.replicas)  # layers, which adds in another order
        exact = expected.exact and not compiles(pipe) and not divided if self.exact is None else self.exact
        notes = [note for note in pipe.notes if not isinstance(note, verified.Unverified)]
        steps, losses = list[list[Comparison]](), list[float]()
        first: Difference | None = None
        for step, batch in enumerate(batches, 1):
            if step == len(batches):
                _update(pipe, expected.updated)
            held = chain(pipe.named_parameters(), pipe.named_buffers(), inputs_of(batch).items())
            for _, tensor in held:
                tensor.grad = None
            follows = trails is not None and trails[0].step == step
            with trails[0].following(pipe.model, {}) if trails and follows else nullcontext():
                result = pipe.step(*batch.args, target=batch.target, outputs=True, **batch.kwargs)
            states.enter(states.home)
            found = _rows(pipe, rule, result, batch, expected.steps[step - 1], exact)
            if trails and follows:
                gradients = {name: tensor.grad for name, tensor in trained(pipe.named_parameters(), pipe).items()}
                counts = usual_factors(
                    pipe.schedule.microbatches, pipe.world.data_parallel, pipe.session.rows, batch.target
                )
                first = first_difference(*trails, gradients, found, counts, exact)
            losses.append(float(result.loss))
            evaluated = expected.evaluated
            if step == len(batches) - 1 and isinstance(evaluated, Exception):
                why = line_of(in_a_line(evaluated), 200)
                notes.append(f"evaluation was not compared: the unsplit model raises {why}")
            elif step == len(batches) - 1 and isinstance(evaluated, Expected):
                try:
                    of = pipe.evaluate(*batch.args, target=batch.target, outputs=True, **batch.kwargs)
                    found += _rows(pipe, rule, of, batch, evaluated, exact, label=IN_EVALUATION)
                except PartitionError as error:
                    notes.append(f"evaluation was not compared: {error}")
            steps.append([row if row.ok else replace(row, step=step) for row in found])
        rows, order, copies = tuple(merged(row for rows in steps for row in rows).values()), pipe.schedule, pipe.world
        sizes = copies.ranks, len(pipe.stages), order.microbatches, losses[0], exact, copies.data_parallel
        report = VerificationReport(rows, order.name, *sizes, len(steps), expected.whole_batch, tuple(notes), first)
        if not report.ok:
            verified.verified_fingerprints.discard(pipe.session.fingerprint())
        elif trails is None:
            verified.verified_fingerprints.add(pipe.session.fingerprint())
        return report, steps


def _measured_depth(options: Mapping[str, Any]) -> int:
    """Return the number of stages, if cuts are found by measuring; else 0."""
    decided = (options.get(name) for name in ("cuts", "memory_limit", "link_cost", "plan"))
    ranks, given = options.get("ranks"), options.get("balance", "time") != "time"
    if ranks is None or given or any(value is not None for value in decided):
        return 0
    return resolve_order(
        options["schedule"], ranks, options.get("microbatches"), options.get("stages_per_rank")
    ).placement.depth


def _update(pipe: Pipeline, values: Mapping[str, Tensor]) -> None:
    """Give the pipeline's weights new values in place, as an optimizer does."""
    torch.clear_autocast_cache()  # of casts of the weights as they were
    with torch.no_grad():
        for name, parameter in trained(pipe.named_parameters(), pipe).items():
            if name in values:
                copy_into(parameter, values[name])


def _batches(first: Microbatch, more: Batches | None, cutting: Cutting, microbatches: int) -> Iterator[Microbatch]:
    """Yield the batches of all steps. Inputs that take a gradient are leaves."""
    for step in range(1, STEPS + 1):
        batch = first
        if step > 1 and more is not None:
            batch = more(step) if callable(more) else more[(step - 2) % len(more)]
        elif step == 2:
            batch = cutting.rotated(first, microbatches)
        leaves = map_tensors(lambda x: x.detach().requires_grad_(x.requires_grad), (batch.args, dict(batch.kwargs)))
        yield batch._replace(args=leaves[0], kwargs=leaves[1])


def _rows(
    pipe: Pipeline, rule: Rule, result: StepResult, batch: Microbatch, expected: Expected, exact: bool, label: str = ""
) -> list[Comparison]:
    """Compare what all processes hold after a step or an evaluation, in the model's order. What none holds is
    missing."""
    rows: list[Comparison] = []

    def judge(kind: str, name: str, stages: tuple[int, ...], mine: Tensor | None, dtype: torch.dtype | None) -> None:
        key, of = (kind, name), name if kind == "gradient" else ""
        terms, rounded, noise = expected.terms.get(of), expected.rounded.get(of), expected.noise.get(key, 0.0)
        value, why, dtype = expected.values.get(key), rule.reordered.get(of, ""), expected.lowered or dtype
        rows.append(compare(kind, name, stages, mine, value, exact, why, terms, dtype, rounded, noise))

    order = pipe.schedule
    lasts = tuple(stage for stage in range(order.stages) if order.placement.is_last(stage))
    for k, output in enumerate(result.outputs or () if pipe.has_outputs else ()):
        if output is None and len(lasts) > 1:
            continue  # on the rank of another copy's last stage
        last = next(stage for stage in lasts if k in order.numbers_on(stage))
        for index, leaf in enumerate(leaf_tensors(output)):
            name = f"{index} of microbatch {pipe.world.replica * order.microbatches + k}{label}"
            judge("output", name, (last,), leaf, None)
    if pipe.has_outputs and ("loss", f"loss{label}") in expected.values:
        judge("loss", f"loss{label}", lasts, result.loss, None)
    own = {name: (stage.index,) for stage in pipe.stages for name in (*stage.parameters, *stage.buffers)}
    holders: dict[str, tuple[int, ...]] = own | ties(pipe.stages)
    if not label:
        for name, tensor in trained(pipe.named_parameters(), pipe).items():
            grad = None if tensor.grad is None else whole(tensor.grad)
            judge("gradient", name, holders[name], grad, tensor.dtype)
        for name, tensor in inputs_of(batch).items() if pipe.needs_inputs and pipe.world.data_parallel == 1 else ():
            judge("gradient", name, (0,), tensor.grad, None)
        for name, buffer in pipe.named_buffers():
            judge("buffer", name, holders[name], whole(buffer), None)
    found = merged(row for part in pipe.all_gather_object(rows) for row in part)
    keys = dict.fromkeys((*expected.values, *found))
    return [found.get(key) or compare(*key, (), None, expected.values[key], True) for key in keys]


_DECIDED = ("loss_fn", "cuts", "balance", "memory_limit", "link_cost", "seed", "run_dir")
"""The options that the pipeline to verify has decided, or that do not concern what it computes."""


def first_step(model: nn.Module, loss_fn: Any, mesh: DeviceMesh | None) -> Callable[..., None]:
    """Return what verifies a pipeline with the batch of its first step, on copies of the model and its loss, made now.

    Every rank calls it, with the pipeline and the batch. It raises VerificationError on all of them if a value differs.
    """
    copy = twins(model, loss_fn)[1]

    def verify_with(pipe: Pipeline, args: Any, kwargs: Any, target: Any) -> None:
        trains = {name: parameter.requires_grad for name, parameter in pipe.model.named_parameters()}
        for name, parameter in copy.model.named_parameters():
            parameter.requires_grad_(trains[name])
        if not pipe.world.is_local:
            args, kwargs, target = _given_to_all(pipe, args, kwargs, target)
        names = [each.name for each in fields(Options) if each.init and each.name not in _DECIDED]
        options: dict[str, Any] = {name: getattr(pipe.session.options, name) for name in names}
        options |= {"schedule": pipe.session.order, "ranks": pipe.world.ranks, "mesh": mesh, "cuts": pipe.cuts}
        options |= {"target": target, "loss_fn": copy.loss, "seed": pipe.seed, "full_batch": False}
        verify(copy.model, args, kwargs, **options).raise_if_failed()

    return verify_with


def _given_to_all(pipe: Pipeline, args: Any, kwargs: Any, target: Any) -> tuple[Any, Any, Any]:
    """Return the batch of this replica, from those of its processes that read it."""
    mine = ((args, kwargs) if pipe.needs_inputs else None, target if pipe.needs_targets else None)
    there = map_tensors(lambda x: x.detach().cpu().requires_grad_(x.requires_grad), mine)
    line = pipe.session.control.gather_line(there)
    args, kwargs = next(inputs for inputs, _ in line if inputs is not None)
    return args, kwargs, next((label for _, label in line if label is not None), None)


class _Follows(Feature):
    """Enters the state of a stage's rank before each action, which stays until another rank computes, and notes it."""

    def __init__(self, states: States, trail: Trail | None, stage: StageContext) -> None:
        self._states, self._trail, self._stage = states, trail, stage.index
        self._rank = stage.binding.schedule.placement.rank_of[stage.index]

    def around(self, action: Action) -> Context:
        self._states.enter(self._rank)
        if self._trail is not None and action.microbatch is not None:
            self._trail.begin(action.microbatch, self._stage, backward=action.op is not Op.F)
        return NOTHING


def _units_of(codes: Sequence[nn.Module]) -> Iterator[str]:
    """Yield the names of the modules that stages' code runs as a whole, in order; one may come again."""
    for code in codes:
        for node in code.graph.nodes if isinstance(code, fx.GraphModule) else ():
            if node.op == "call_module":
                module = code.get_submodule(str(node.target))
                yield from _units_of([module.inside]) if isinstance(module, Gate) else [str(node.target)]
