"""What the units of a recording cost, and what they are: those of one kind cost the same.

`kind_of` says which run the same code on the same shapes, so that one has to be measured for all of them.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from penstock._base.stages import MODEL_INPUT, Input, TensorMeta
from penstock._base.trees import flatten
from penstock.costs import OPTIMIZER_VALUES, SPLIT_SECONDS, Profile, Tied, UnitCost
from penstock.errors import PartitionError
from penstock.partition.cut.balance import Candidate, cut_at, joined, spans
from penstock.partition.measure.footprint import Footprint
from penstock.partition.recording.recording import Recording
from penstock.partition.stages.split import CutRecording
from penstock.partition.units.chain import public_names
from penstock.partition.values.memory import meta_bytes
from penstock.partition.values.objects import input_path


class UnmeasurableError(Exception):
    """The units cannot be run; the text says why."""


class NoStreams:
    """What a unit draws comes from torch's generators, which are restored afterwards."""

    def enter(self, name: str) -> None:
        """Draws go on."""

    def pass_by(self, calls: Mapping[str, int]) -> None:
        """Nothing is counted."""


class SplitTimes(NamedTuple):
    """What a unit takes, in seconds, if a runtime splits its backward."""

    forward: float
    input_gradient: float
    weight_gradient: float


class Times(NamedTuple):
    """What a unit takes, in seconds; `spread` as a fraction, `again` None if the forward was not timed by itself."""

    forward: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0
    spread: float = 0.0
    again: float | None = None
    split: SplitTimes | None = None


def cut_finely(
    recording: Recording, model: nn.Module, units: Sequence[Candidate]
) -> tuple[list[Candidate], CutRecording]:
    """The recording cut at every unit at which it can be. Raises UnmeasurableError if its units cannot be run alone."""
    kept = joined(units, spans(recording, model))
    try:
        try:
            return kept, _cut_before(recording, model, kept[1:])
        except PartitionError:
            kept = [kept[0], *(unit for unit in kept[1:] if _can_cut_before(recording, model, unit))]
            return kept, _cut_before(recording, model, kept[1:])
    except PartitionError as error:
        raise UnmeasurableError(f"it cannot be cut at every unit: {error}") from error


def _cut_before(recording: Recording, model: nn.Module, units: Sequence[Candidate]) -> CutRecording:
    return cut_at(recording, model, [unit.name for unit in units])


def _can_cut_before(recording: Recording, model: nn.Module, unit: Candidate) -> bool:
    try:
        _cut_before(recording, model, [unit])
    except PartitionError:
        return False
    return True


def first_of_kind(split: CutRecording) -> list[int]:
    """For each unit, the first one of its kind."""
    first_of: dict[Hashable, int] = {}
    return [first_of.setdefault(kind_of(split, index), index) for index in range(split.count)]


def unit_costs(kept: Sequence[Candidate], split: CutRecording, first: Sequence[int]) -> list[UnitCost]:
    """The units with what crosses before them, their parameters and buffers, and those that others have too.

    `first`: from `first_of_kind`.
    """
    crossing = _crossing([plan.inputs for plan in split.plans])
    held, found = split.recording.held, []
    names = [dict.fromkeys(name for node in plan.run for name in split.held_by(node)) for plan in split.plans]
    count = Counter(name for each in names for name in each)
    for index, (unit, own, (sent, back)) in enumerate(zip(kept, names, crossing, strict=True)):
        sizes = {name: held[name].numel() * held[name].element_size() for name in own}
        trained = {name: size if held[name].requires_grad else 0 for name, size in sizes.items()}
        total, tied = sum(trained.values()), tuple(Tied(n, sizes[n], trained[n]) for n in own if count[n] > 1)
        cost = UnitCost(
            unit.name,
            *(0.0, 0.0, 0.0),
            parameter_bytes=sum(sizes.values()),
            gradient_bytes=total,
            optimizer_bytes=OPTIMIZER_VALUES * total,
            boundary_bytes=sent,
            boundary_gradient_bytes=back,
            like="" if first[index] == index else kept[first[index]].name,
            tied=tied,
        )
        found.append(cost)
    return found


def shared_bytes(split: CutRecording, kept: Sequence[Footprint]) -> list[int]:
    """For each unit, the bytes of what it and the one before it both keep: its inputs."""
    found, before = [], dict[tuple[int, str], int]()
    for index, (plan, own) in enumerate(zip(split.plans, kept, strict=True)):
        inputs = {(i.source, i.name): size for i, size in zip(plan.inputs, own.inputs, strict=False)}
        found.append(sum(min(size, before.get(key, 0)) for key, size in inputs.items()))
        before = inputs | {(index, o.name): size for o, size in zip(plan.outputs, own.outputs, strict=False)}
    return found


def with_times(cost: UnitCost, times: Times) -> UnitCost:
    """A unit that takes these times."""
    apart: dict[str, Any] = dict(zip(SPLIT_SECONDS, times.split or (), strict=False))
    return replace(
        cost,
        forward_seconds=times.forward,
        input_gradient_seconds=times.input_gradient,
        weight_gradient_seconds=times.weight_gradient,
        spread=times.spread,
        recompute_seconds=times.again,
        **apart,
    )


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


def profile_of(
    recording: Recording,
    model: nn.Module,
    costs: Sequence[UnitCost],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    runs: int,
) -> Profile:
    """The profile of a recording with these costs."""
    flat = flatten((tuple(args), dict(kwargs)))
    described = {
        input_path(path): f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        for leaf, path in zip(flat.leaves, flat.paths, strict=True)
        if isinstance(leaf, Tensor)
    }
    of_model = identity(model)
    return Profile(
        tuple(costs),
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


NUMBERS_OF_PLACES = ("idx", "index", "id", "number", "layer_num", "depth")
"""Attributes whose names end like this say which of several blocks a module is, not what it does."""


def kind_of(split: CutRecording, stage: int) -> Hashable:
    """A value that is equal for two units only if they run the same: the recorded calls, the work of each, the modules
    that they call, with all their settings, and the shapes of everything."""
    plan = split.plans[stage]
    numbers: dict[fx.Node, int] = {}
    for node in plan.received:
        numbers[node] = len(numbers)
    calls = []
    for node in plan.run:
        numbers[node] = len(numbers)
        fact = split.facts[node]
        modules = tuple(_module(split.model.get_submodule(name)) for name in fact.units)
        target = modules or _target(split, node)
        given = fx.map_arg((node.args, node.kwargs), lambda n: _Number(numbers[n]))
        calls.append((target, _plain(given), fact.work, fact.meta, fact.modes))
    received = tuple(value.meta for value in plan.inputs)
    returned = tuple((numbers[node], value.meta) for node, value in zip(plan.returned, plan.outputs, strict=True))
    return tuple(calls), received, returned


class _Number(int):
    """A node, by its number among those of its stage."""


def _target(split: CutRecording, node: fx.Node) -> Hashable:
    fact = split.facts[node]
    if fact.kind in ("parameter", "buffer", "constant"):
        tensor = split.recording.held.get(str(node.target))
        return (fact.kind, str(node.target)) if tensor is None else (fact.kind, *_tensor(tensor))
    return node.op, str(node.target)


def _module(module: nn.Module) -> Hashable:
    """What a module does: the classes, settings and shapes of all modules in it."""
    return tuple(
        (
            name,
            type(inner),
            inner.training,
            _settings(inner),
            tuple((key, _tensor(tensor)) for key, tensor in inner._parameters.items() if tensor is not None),
            tuple((key, _tensor(tensor)) for key, tensor in inner._buffers.items() if tensor is not None),
        )
        for name, inner in module.named_modules()
    )


def _settings(module: nn.Module) -> Hashable:
    """Its plain attributes. Of a fraction only whether it is 0 matters: a dropout's rate costs nothing."""
    return tuple(
        (name, value != 0 if isinstance(value, float) else value)
        for name, value in sorted(vars(module).items())
        if _is_plain(value) and not name.endswith(NUMBERS_OF_PLACES)
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


def _tensor(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad


def _plain(value: Any) -> Hashable:
    """Arguments as a hashable value; what cannot be hashed is itself only."""
    if isinstance(value, _Number):
        return "node", int(value)
    if isinstance(value, (tuple, list)):
        return type(value).__name__, tuple(map(_plain, value))
    if isinstance(value, dict):
        return "dict", tuple((key, _plain(item)) for key, item in value.items())
    if isinstance(value, slice):
        return "slice", _plain((value.start, value.stop, value.step))
    try:
        hash(value)
    except TypeError:
        return "object", id(value)
    return type(value), value
