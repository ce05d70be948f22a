"""Measures every unit of a recording: a profile, within a budget of seconds.

Units of one kind are measured once. Each unit gets what the units before it made of made-up inputs (integers are the
example's own). Rounds take all units in turn, so that a busy moment of the machine does not fall on one of them alone.
"""

from __future__ import annotations

import platform
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from penstock.balance import OPTIMIZER_VALUES, Profile, UnitCost
from penstock.errors import PartitionError
from penstock.partition.cut.balance import Candidate
from penstock.partition.measure.alike import kind_of
from penstock.partition.measure.finest import finest_cut
from penstock.partition.measure.running import NoStreams, RunningUnit
from penstock.partition.recording.recording import Recording
from penstock.partition.run.loan import untouched_generators
from penstock.partition.stages.split import CutRecording
from penstock.partition.stages.stage import build_stage
from penstock.partition.state.reach import Reach
from penstock.partition.units.chain import public_names
from penstock.partition.values.memory import meta_bytes
from penstock.partition.values.objects import input_path
from penstock.stages import MODEL_INPUT, Input, TensorMeta
from penstock.trees import flatten
from penstock.words import in_a_line

BUDGET_SECONDS = 1.0
"""How long measuring may take unless somebody says. One run of each kind of unit is made even if it takes longer."""

MOST_ROUNDS = 15
"""More would not make the medians better."""


class UnmeasurableError(Exception):
    """The units cannot be run; the text says why."""


def measure(
    recording: Recording,
    model: nn.Module,
    units: Sequence[Candidate],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    budget_seconds: float = BUDGET_SECONDS,
) -> Profile:
    """The profile of a recording's units. Changes nothing of the model, nor any random generator.

    Args:
        units: the candidates for cuts; those at which no cut is possible join the one before.
        args, kwargs: what was recorded.

    Raises:
        UnmeasurableError: parameters are on the meta device, or a unit raises.
    """
    if any(tensor.is_meta for tensor in recording.held.values()) or recording.device.type == "meta":
        raise UnmeasurableError("its weights are on the meta device")
    if stray := next((each for each in recording.remembered if each.storage is not None), None):
        raise UnmeasurableError(f"its forward updates {stray.text.rstrip(',')}")
    try:
        kept, split = finest_cut(recording, model, units)
    except PartitionError as error:
        raise UnmeasurableError(f"it cannot be cut at every unit: {error}") from error
    reach = Reach(model)
    with torch.enable_grad(), untouched_generators(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first step says the same
        try:
            runners = _first_runs(split, _made_up(recording, args, kwargs))
            runs = _rounds([runner for runner in runners.values() if isinstance(runner, RunningUnit)], budget_seconds)
        except Exception as error:
            raise UnmeasurableError(f"running its units fails ({in_a_line(error)})") from error
        finally:
            reach.restore()
    costs = _costs(kept, split, runners)
    return _profile(recording, model, costs, args, kwargs, runs)


@dataclass(frozen=True)
class _Like:
    """A unit that is of the same kind as an earlier one."""

    stage: int


def _first_runs(split: CutRecording, values: dict[tuple[int, str], Tensor]) -> dict[int, RunningUnit | _Like]:
    """Runs one unit of each kind, in order, on what earlier ones made."""
    recording = split.recording
    held = [tensor for tensor in recording.held.values() if isinstance(tensor, nn.Parameter)]
    written = {id(recording.held[name]) for name in split.updated}
    first_of: dict[Hashable, int] = {}
    runners: dict[int, RunningUnit | _Like] = {}
    for index, plan in enumerate(split.plans):
        like = first_of.setdefault(kind_of(split, index), index)
        if like == index:
            stage = build_stage(split, plan, index, NoStreams())
            unsure = {id(p) for p in stage.parameters.values()} if stage.depends_on_values else set()
            inputs = [values[i.source, i.name] for i in plan.inputs]
            runner = RunningUnit(stage, inputs, held, written | unsure, recording.device)
            runner.first()
            runners[index], outputs = runner, runner.outputs
        else:
            runners[index] = _Like(like)
            outputs = [values[like, value.name] for value in split.plans[like].outputs]
        values |= {(index, value.name): made for value, made in zip(plan.outputs, outputs, strict=True)}
    return runners


def _rounds(runners: Sequence[RunningUnit], budget_seconds: float) -> int:
    """Runs all units again and again until the budget is used up. Returns how often the whole backward was timed."""
    began, runs, longest = time.perf_counter(), 0, 0.0
    for number in range(MOST_ROUNDS):
        start = time.perf_counter()
        if number % 3 == 1:
            for runner in runners:
                if runner.splits:
                    runner.run_input_gradient()
        else:
            for runner in runners:
                runner.run()
            runs += 1
        longest = max(longest, time.perf_counter() - start)
        if time.perf_counter() - began + longest > budget_seconds:
            break
    return runs


def _made_up(recording: Recording, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[tuple[int, str], Tensor]:
    """The model's inputs. Fractions, which a recording does not know, are drawn: garbage may take longer to compute."""
    leaves = flatten((tuple(args), dict(kwargs))).leaves
    generator = torch.Generator().manual_seed(0)
    found = {}
    for node, place in recording.inputs.items():
        value = leaves[place]
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            made = torch.empty_like(value, requires_grad=False)
            value = made.copy_(torch.randn(value.shape, generator=generator))
        found[MODEL_INPUT, node.name] = value
    return found


def _costs(
    kept: Sequence[Candidate], split: CutRecording, runners: Mapping[int, RunningUnit | _Like]
) -> tuple[UnitCost, ...]:
    crossing = _crossing([plan.inputs for plan in split.plans])
    recording = split.recording
    found: list[UnitCost] = []
    for index, (unit, plan) in enumerate(zip(kept, split.plans, strict=True)):
        runner, like = runners[index], ""
        if isinstance(runner, _Like):
            like = kept[runner.stage].name
            runner = runners[runner.stage]
            assert isinstance(runner, RunningUnit)
        forward, input_gradient, weight_gradient, spread = _times(runner)
        names = {name for node in plan.run for name in split.held_by(node)}
        parameters = [t for name in names if isinstance(t := recording.held[name], nn.Parameter)]
        size = sum(t.numel() * t.element_size() for t in parameters)
        trained = sum(t.numel() * t.element_size() for t in parameters if t.requires_grad)
        sent, back = crossing[index]
        found.append(
            UnitCost(
                unit.name,
                forward,
                input_gradient,
                weight_gradient,
                activation_bytes=runner.saved_bytes,
                parameter_bytes=size,
                gradient_bytes=trained,
                optimizer_bytes=OPTIMIZER_VALUES * trained,
                boundary_bytes=sent,
                boundary_gradient_bytes=back,
                spread=spread,
                like=like,
            )
        )
    return tuple(found)


def _times(runner: RunningUnit) -> tuple[float, float, float, float]:
    """F, I and W, and the spread of F and the whole backward. I of a unit that has no W is its whole backward."""
    runs = runner.runs
    forward, backward = statistics.median(runs.forward), statistics.median(runs.backward)
    if not runner.splits:
        input_gradient = backward if runner.passes_gradient_on else 0.0
    elif runs.input_gradient:
        input_gradient = min(statistics.median(runs.input_gradient), backward)
    else:
        input_gradient = backward / 2
    whole = [one + other for one, other in zip(runs.forward, runs.backward, strict=True)]
    quarters = statistics.quantiles(whole, n=4, method="inclusive") if len(whole) > 1 else [0.0, 0.0, 0.0]
    middle = forward + backward
    spread = (quarters[2] - quarters[0]) / middle if middle else 0.0
    return forward, input_gradient, backward - input_gradient, spread


def _crossing(inputs: Sequence[Sequence[Input]]) -> list[tuple[int, int]]:
    """For a cut before each unit: the bytes that cross it, and those of the gradients that come back."""
    last: dict[tuple[int, str], int] = {}
    metas: dict[tuple[int, str], TensorMeta] = {}
    for index, received in enumerate(inputs):
        for value in received:
            if value.source != MODEL_INPUT:
                last[value.source, value.name] = index
                metas[value.source, value.name] = value.meta
    sent, back = [0] * (len(inputs) + 1), [0] * (len(inputs) + 1)
    for key, end in last.items():
        size = meta_bytes(metas[key])
        for totals, counts in ((sent, True), (back, metas[key].requires_grad)):
            if counts:
                totals[key[0] + 1] += size
                totals[end + 1] -= size
    return list(zip(accumulate(sent[:-1]), accumulate(back[:-1]), strict=True))


def _profile(
    recording: Recording,
    model: nn.Module,
    costs: tuple[UnitCost, ...],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    runs: int,
) -> Profile:
    flat = flatten((tuple(args), dict(kwargs)))
    described = {
        input_path(path): f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        for leaf, path in zip(flat.leaves, flat.paths, strict=True)
        if isinstance(leaf, Tensor)
    }
    of_model = identity(model)
    return Profile(
        costs,
        device=recording.device.type,
        dtype=of_model.dtype,
        parameters=of_model.parameters,
        device_name=_name_of(recording.device),
        inputs=described,
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        opened=tuple(sorted(recording.opening.names)),
        runs=runs,
    )


def identity(model: nn.Module) -> Identity:
    """What a profile says of its model."""
    parameters = dict(model.named_parameters())
    public = public_names(model, list(parameters))
    elements: Counter[str] = Counter()
    for parameter in parameters.values():
        elements[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    dtype = elements.most_common(1)[0][0] if elements else ""
    return Identity({public[name]: tuple(p.shape) for name, p in parameters.items()}, dtype)


@dataclass(frozen=True, slots=True)
class Identity:
    """The shapes of a model's parameters by name, and the dtype of most of their elements."""

    parameters: Mapping[str, tuple[int, ...]]
    dtype: str


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine() if device.type == "cpu" else device.type
