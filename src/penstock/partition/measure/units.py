"""A recording cut at every unit: what each one holds, sends and keeps, and the profile of all."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.errors import PartitionError
from penstock._base.stages import MODEL_INPUT, TensorMeta
from penstock._base.trees import flatten
from penstock.costs import OPTIMIZER_VALUES, MadeFor, Profile, Tied, UnitCost
from penstock.partition.cut.balance import Candidate, cut_at, joined, spans
from penstock.partition.measure.footprint import Footprint, footprint, on_fakes
from penstock.partition.measure.kinds import kind_of
from penstock.partition.recording.recording import Recording
from penstock.partition.stages.split import CutRecording
from penstock.partition.stages.stage import Stage, build_stage
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


@dataclass(frozen=True)
class Units:
    """A recording cut before every unit.

    Attributes:
        places: where each unit begins.
        split: the recording, cut there.
    """

    model: nn.Module
    places: Sequence[Candidate]
    split: CutRecording

    @classmethod
    def of(cls, recording: Recording, model: nn.Module, candidates: Sequence[Candidate]) -> Units:
        """Cut at every candidate at which it can be; the others join the one before. Raises UnmeasurableError if the
        units cannot be run alone."""
        kept = joined(candidates, spans(recording, model))

        def cut_before(units: Sequence[Candidate]) -> CutRecording:
            return cut_at(recording, model, [unit.name for unit in units])

        def can_be_cut_before(unit: Candidate) -> bool:
            try:
                cut_before([unit])
            except PartitionError:
                return False
            return True

        try:
            try:
                return cls(model, kept, cut_before(kept[1:]))
            except PartitionError:
                kept = [kept[0], *filter(can_be_cut_before, kept[1:])]
                return cls(model, kept, cut_before(kept[1:]))
        except PartitionError as error:
            raise UnmeasurableError(f"it cannot be cut at every unit: {error}") from error

    @cached_property
    def first_of_kind(self) -> list[int]:
        """For each unit, the first one of its kind, which costs the same."""
        first: dict[Hashable, int] = {}
        return [first.setdefault(kind_of(self.split, index), index) for index in range(self.split.count)]

    def stage(self, index: int) -> Stage:
        """A unit as a stage."""
        return build_stage(self.split, self.split.plans[index], index, NoStreams())

    @cached_property
    def costs(self) -> list[UnitCost]:
        """What is known without running anything: what crosses before each unit, its parameters, buffers and inputs of
        the model, and the former that others hold, too."""
        held, found, crossing = self.split.recording.held, [], self._crossing()
        names = [dict.fromkeys(n for node in plan.run for n in self.split.held_by(node)) for plan in self.split.plans]
        count = Counter(name for each in names for name in each)
        columns = zip(self.places, self.split.plans, names, self.first_of_kind, strict=True)
        for index, (place, plan, own, first) in enumerate(columns):
            sizes = {name: held[name].numel() * held[name].element_size() for name in own}
            trained = {name: size if held[name].requires_grad else 0 for name, size in sizes.items()}
            cost = UnitCost(
                place.name,
                *(0.0, 0.0, 0.0),
                parameter_bytes=sum(sizes.values()),
                gradient_bytes=sum(trained.values()),
                optimizer_bytes=OPTIMIZER_VALUES * sum(trained.values()),
                boundary_bytes=crossing[index][0],
                boundary_gradient_bytes=crossing[index][1],
                like="" if first == index else self.places[first].name,
                input_bytes=sum(meta_bytes(i.meta) for i in plan.inputs if i.source == MODEL_INPUT),
                tied=tuple(Tied(name, sizes[name], trained[name]) for name in own if count[name] > 1),
            )
            found.append(cost)
        return found

    def _crossing(self) -> list[tuple[int, int]]:
        """For a cut before each unit: the bytes that cross it, and those of the gradients that come back."""
        last: dict[tuple[int, str], tuple[int, TensorMeta]] = {}
        for index, plan in enumerate(self.split.plans):
            last |= {(i.source, i.name): (index, i.meta) for i in plan.inputs if i.source != MODEL_INPUT}
        sent, back = [0] * (self.split.count + 1), [0] * (self.split.count + 1)
        for (source, _), (end, meta) in last.items():
            for totals in (sent, back) if meta.requires_grad else (sent,):
                totals[source + 1] += meta_bytes(meta)
                totals[end + 1] -= meta_bytes(meta)
        return list(zip(accumulate(sent[:-1]), accumulate(back[:-1]), strict=True))

    def with_memory(self, *, counts: bool = False) -> tuple[list[UnitCost], dict[str, Exception]]:
        """The costs with what units keep and take on fake tensors, and with `counts` what they do, too. Also, by name,
        why that is not known of some: they do not run on fake tensors, so that it counts as nothing."""
        found, unknown = list[UnitCost](), dict[str, Exception]()
        seen = {first: self._on_fakes(first, counts=counts) for first in {*self.first_of_kind}}
        known = {first: Footprint(0, 0) if isinstance(own, Exception) else own for first, own in seen.items()}
        columns = zip(self.costs, self.first_of_kind, self.shared_bytes(known), strict=True)
        for index, (cost, first, shared) in enumerate(columns):
            own, error = known[first], seen[first]
            if isinstance(error, Exception):
                unknown[cost.name] = error
            whole = own
            if index == self.split.count - 1:
                metas = [value.meta for value in self.split.plans[index].inputs]
                whole = footprint(self.stage(index).module, metas, with_loss=True) or own
            found.append(
                replace(
                    cost,
                    activation_bytes=own.kept,
                    working_bytes=whole.working,
                    loss_bytes=max(whole.kept - own.kept, 0),
                    shared_bytes=shared,
                    operations=None if cost.like else own.operations,
                )
            )
        return found, unknown

    def shared_bytes(self, of_kinds: Mapping[int, Footprint]) -> list[int]:
        """For each unit, the bytes of what it and the one before it both keep: its inputs. `of_kinds`: what the first
        unit of each kind keeps."""
        found, before = [], dict[tuple[int, str], int]()
        for index, (plan, first) in enumerate(zip(self.split.plans, self.first_of_kind, strict=True)):
            own = of_kinds[first]
            inputs = {(i.source, i.name): size for i, size in zip(plan.inputs, own.inputs, strict=False)}
            found.append(sum(min(size, before.get(key, 0)) for key, size in inputs.items()))
            before = inputs | {(index, o.name): size for o, size in zip(plan.outputs, own.outputs, strict=False)}
        return found

    def _on_fakes(self, index: int, *, counts: bool) -> Footprint | Exception:
        try:
            return on_fakes(
                self.stage(index).module, [value.meta for value in self.split.plans[index].inputs], counts=counts
            )
        except Exception as error:  # a model's own code may raise anything there
            return error

    def profile(self, costs: Sequence[UnitCost], args: Sequence[Any], kwargs: Mapping[str, Any], runs: int) -> Profile:
        """The profile with these costs."""
        flat, recording = flatten((tuple(args), dict(kwargs))), self.split.recording
        made_for = identity(self.model, recording.device.type)
        return Profile(
            tuple(costs),
            device=made_for.device,
            dtype=made_for.dtype,
            parameters=made_for.parameters,
            device_name=_name_of(recording.device),
            inputs={
                input_path(path): f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
                for leaf, path in zip(flat.leaves, flat.paths, strict=True)
                if isinstance(leaf, Tensor)
            },
            torch=torch.__version__,
            threads=torch.get_num_threads(),
            opened=tuple(sorted(recording.opening.names)),
            runs=runs,
        )


def identity(model: nn.Module, device: str) -> MadeFor:
    """What a profile or a plan of this model on such a device is made for. Its dtype is that of most elements."""
    parameters = dict(model.named_parameters())
    public = public_names(model, list(parameters))
    elements: Counter[str] = Counter()
    for parameter in parameters.values():
        elements[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    dtype = elements.most_common(1)[0][0] if elements else ""
    return MadeFor({public[name]: tuple(p.shape) for name, p in parameters.items()}, device, dtype)


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine() if device.type == "cpu" else device.type
