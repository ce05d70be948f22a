"""A recording cut at every unit: which are alike, what each one holds, sends and keeps, and the profile of all."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock._base.errors import PartitionError
from penstock._base.memory import meta_bytes
from penstock._base.pytree import flatten
from penstock._base.stages import MODEL_INPUT, TensorMeta
from penstock.costs import OPTIMIZER_VALUES, ModelFingerprint, Profile, Tied, UnitCost
from penstock.partition.cut.candidates import Candidate, cut_at, possible_units
from penstock.partition.measure.footprint import Footprint, footprint, run_on_fakes
from penstock.partition.names import public_names
from penstock.partition.nested import input_path
from penstock.partition.recording import Recording
from penstock.partition.stages.stage import Stage, build_stage
from penstock.partition.stages.stage_plans import CutRecording

POSITION_ATTRIBUTES = ("idx", "index", "id", "number", "layer_num", "depth")
"""Attributes whose names end like this say which of several blocks a module is, not what it does."""

WITH_LOSS = -1
"""Stands for the last unit, with a loss after it."""

Footprints = dict[int, Footprint | Exception]
"""What the first unit of each kind takes, by its number, or why it does not run on fake tensors."""


class UnmeasurableError(Exception):
    """The units cannot be run; the text says why."""


class NoStreams:
    """What a unit draws comes from torch's generators, which are restored afterwards."""

    def enter(self, name: str) -> None:
        """Leave the generators alone."""

    def pass_by(self, calls: Mapping[str, int]) -> None:
        """Count nothing."""


@dataclass(frozen=True)
class Pieces:
    """A recording cut before every unit.

    Attributes:
        candidates: where each unit begins.
        split: the recording, cut there.
    """

    model: nn.Module
    candidates: Sequence[Candidate]
    split: CutRecording

    @classmethod
    def from_recording(cls, recording: Recording, model: nn.Module, candidates: Sequence[Candidate]) -> Pieces:
        """Cut at every candidate at which it can be; the others join the one before. Raise UnmeasurableError if the
        units cannot be run alone."""

        def cut_at_units(units: Sequence[Candidate]) -> Pieces:
            return cls(model, units, cut_at(recording, model, [unit.name for unit in units[1:]]))

        try:
            try:
                return cut_at_units(candidates)
            except PartitionError:
                return cut_at_units(possible_units(recording, model, candidates))
        except PartitionError as error:
            raise UnmeasurableError(f"it cannot be cut at every unit: {error}") from error

    @cached_property
    def first_of_kind(self) -> list[int]:
        """For each unit, the first one of its kind, which costs the same."""
        first: dict[Hashable, int] = {}
        return [first.setdefault(kind_key(self.split, index), index) for index in range(self.split.count)]

    def stage(self, index: int) -> Stage:
        """Return a unit as a stage."""
        return build_stage(self.split, self.split.plans[index], index, NoStreams())

    def _crossing_bytes(self) -> list[tuple[int, int]]:
        """Return, for a cut before each unit, the bytes that cross it, and those of the gradients that come back."""
        last: dict[tuple[int, str], tuple[int, TensorMeta]] = {}
        for index, plan in enumerate(self.split.plans):
            last |= {(i.source, i.name): (index, i.meta) for i in plan.inputs if i.source != MODEL_INPUT}
        sent, back = [0] * (self.split.count + 1), [0] * (self.split.count + 1)
        for (source, _), (end, meta) in last.items():
            for totals in (sent, back) if meta.requires_grad else (sent,):
                totals[source + 1] += meta_bytes(meta)
                totals[end + 1] -= meta_bytes(meta)
        return list(zip(accumulate(sent[:-1]), accumulate(back[:-1]), strict=True))

    def footprints(self, *, counts: bool = False) -> Footprints:
        """Return what the first unit of each kind keeps and takes on fake tensors. `counts`: and what it does."""
        results: Footprints = {}
        for index in {*self.first_of_kind}:
            try:
                results[index] = run_on_fakes(self.stage(index).module, self._inputs(index), counts=counts)
            except Exception as error:  # a model's own code may raise anything there
                results[index] = error
        last = self.split.count - 1
        if (with_loss := footprint(self.stage(last).module, self._inputs(last), with_loss=True)) is not None:
            results[WITH_LOSS] = with_loss
        return results

    def _inputs(self, index: int) -> list[TensorMeta]:
        return [value.meta for value in self.split.plans[index].inputs]

    def costs(self, footprints: Footprints) -> list[UnitCost]:
        """Return what is known without running: what crosses before each unit, its parameters, buffers and inputs of
        the model, which of the parameters others hold, too, and its activations and workspace."""
        tensors, unit_costs, crossing = self.split.recording.held, list[UnitCost](), self._crossing_bytes()
        names = [dict.fromkeys(n for node in plan.run for n in self.split.held_by(node)) for plan in self.split.plans]
        uses, previous = Counter(name for unit_names in names for name in unit_names), dict[tuple[int, str], int]()
        columns = zip(self.candidates, self.split.plans, names, self.first_of_kind, strict=True)
        for index, (candidate, plan, local_names, first) in enumerate(columns):
            sizes = {name: tensors[name].numel() * tensors[name].element_size() for name in local_names}
            trained = {name: size if tensors[name].requires_grad else 0 for name, size in sizes.items()}
            memory = _or_zero(footprints[first])
            with_loss = _or_zero(footprints.get(WITH_LOSS, memory)) if index == self.split.count - 1 else memory
            inputs = {(i.source, i.name): size for i, size in zip(plan.inputs, memory.inputs, strict=False)}
            cost = UnitCost(
                candidate.name,
                *(0.0, 0.0, 0.0),
                activation_bytes=memory.kept,
                parameter_bytes=sum(sizes.values()),
                gradient_bytes=sum(trained.values()),
                optimizer_bytes=OPTIMIZER_VALUES * sum(trained.values()),
                boundary_bytes=crossing[index][0],
                boundary_gradient_bytes=crossing[index][1],
                like="" if first == index else self.candidates[first].name,
                operations=memory.operations if first == index else None,
                working_bytes=with_loss.working,
                input_bytes=sum(meta_bytes(i.meta) for i in plan.inputs if i.source == MODEL_INPUT),
                loss_bytes=max(with_loss.kept - memory.kept, 0),
                tied=tuple(Tied(name, sizes[name], trained[name]) for name in local_names if uses[name] > 1),
                shared_bytes=sum(min(size, previous.get(key, 0)) for key, size in inputs.items()),
            )
            unit_costs.append(cost)
            previous = inputs | {(index, o.name): size for o, size in zip(plan.outputs, memory.outputs, strict=False)}
        return unit_costs

    def profile(self, costs: Sequence[UnitCost], args: Sequence[Any], kwargs: Mapping[str, Any], runs: int) -> Profile:
        """Return the profile with these costs."""
        flat, recording = flatten((tuple(args), dict(kwargs))), self.split.recording
        fingerprint, name = compute_fingerprint(self.model, recording.device.type), recording.device.type
        if name == "cuda":
            name = torch.cuda.get_device_name(recording.device)
        elif name == "cpu":
            name = platform.processor() or platform.machine()
        return Profile(
            tuple(costs),
            device=fingerprint.device,
            dtype=fingerprint.dtype,
            parameters=fingerprint.parameters,
            device_name=name,
            inputs={
                input_path(path): f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
                for leaf, path in zip(flat.leaves, flat.paths, strict=True)
                if isinstance(leaf, Tensor)
            },
            torch=torch.__version__,
            threads=torch.get_num_threads(),
            opened=tuple(sorted(recording.unit_spec.opening.names)),
            runs=runs,
        )


def _or_zero(result: Footprint | Exception) -> Footprint:
    return Footprint(0, 0) if isinstance(result, Exception) else result


def compute_fingerprint(model: nn.Module, device: str) -> ModelFingerprint:
    """Return the fingerprint of a profile or plan of this model on such a device. Its dtype is that of most
    elements."""
    parameters = dict(model.named_parameters())
    public = public_names(model, list(parameters))
    elements: Counter[str] = Counter()
    for parameter in parameters.values():
        elements[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    dtype = elements.most_common(1)[0][0] if elements else ""
    return ModelFingerprint({public[name]: tuple(p.shape) for name, p in parameters.items()}, device, dtype)


def kind_key(split: CutRecording, stage: int) -> Hashable:
    """Return a key that is equal for two units only if they run the same: the recorded calls, the work of each, the
    modules that they call, with all their settings, and the shapes of everything."""
    plan = split.plans[stage]
    numbers = {node: number for number, node in enumerate(plan.received)}
    called = []
    for node in plan.run:
        numbers[node] = len(numbers)
        fact = split.facts[node]
        arguments = repr(fx.map_arg((node.args, node.kwargs), lambda argument: f"%{numbers[argument]}"))
        target = tuple(_module_key(split.model.get_submodule(name)) for name in fact.units) or _target_key(split, node)
        called.append((target, arguments, fact.work, fact.meta, fact.modes))
    received = tuple(value.meta for value in plan.inputs)
    returned = tuple((numbers[node], value.meta) for node, value in zip(plan.returned, plan.outputs, strict=True))
    return tuple(called), received, returned


def _target_key(split: CutRecording, node: fx.Node) -> Hashable:
    fact = split.facts[node]
    if fact.kind in ("parameter", "buffer", "constant"):
        tensor = split.recording.held.get(str(node.target))
        return (fact.kind, str(node.target)) if tensor is None else (fact.kind, *_tensor_key(tensor))
    return node.op, str(node.target)


def _module_key(module: nn.Module) -> Hashable:
    """Return a key for what a module does: the classes, settings and shapes of all modules in it. Of a fraction only
    whether it is 0 matters: a dropout's rate costs nothing."""
    return tuple(
        (
            name,
            type(inner),
            tuple(
                (key, value != 0 if isinstance(value, float) else value)
                for key, value in sorted(vars(inner).items())  # plain attributes, `training` among them
                if _is_plain(value) and not key.endswith(POSITION_ATTRIBUTES)
            ),
            tuple(
                (k, _tensor_key(t))
                for slots in (inner._parameters, inner._buffers)
                for k, t in slots.items()
                if t is not None
            ),
        )
        for name, inner in module.named_modules()
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


def _tensor_key(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad
