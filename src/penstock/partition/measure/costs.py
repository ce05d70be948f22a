"""What the units of a recording cost, put together from runs of one unit of each kind."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from penstock.balance import OPTIMIZER_VALUES, SPLIT_SECONDS, Operations, Profile, Tied, UnitCost
from penstock.compat import storage_of
from penstock.errors import PartitionError
from penstock.partition.cut.balance import Candidate, cut_positions
from penstock.partition.cut.inseparable import joined, spans
from penstock.partition.measure.alike import kind_of
from penstock.partition.recording.recording import Recording
from penstock.partition.stages.split import CutRecording
from penstock.partition.stages.stage import Stage, build_stage
from penstock.partition.units.chain import public_names
from penstock.partition.values.memory import meta_bytes
from penstock.partition.values.objects import input_path
from penstock.stages import MODEL_INPUT, Input, TensorMeta
from penstock.trees import flatten


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


@dataclass(frozen=True, slots=True)
class Saved:
    """What a forward keeps for its backward, besides parameters and buffers.

    Attributes:
        bytes: of all.
        inputs, outputs: those of each input and each result that is kept itself; 0 of the others.
    """

    bytes: int
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, sizes: Mapping[int, int], own: Collection[int], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> Saved:
        """From the sizes of what was saved, by `storage_of`; `own`: the parameters' and buffers'."""
        kept = {storage: size for storage, size in sizes.items() if storage not in own}
        into, out = ([kept.get(storage_of(value), 0) for value in values] for values in (inputs, outputs))
        return cls(sum(kept.values()), tuple(into), tuple(out))


class Run(Protocol):
    """A unit that ran.

    Attributes:
        outputs: what it returned.
        saved: what its forward kept for its backward, besides parameters and buffers.
    """

    outputs: Sequence[Tensor]
    saved: Saved

    def times(self) -> Times:
        """What it took."""

    def operations(self) -> Operations | None:
        """What it did, if that was counted."""


@dataclass(frozen=True)
class Like:
    """A unit that is of the same kind as an earlier one."""

    stage: int


R = TypeVar("R", bound=Run)


def cut_finely(
    recording: Recording, model: nn.Module, units: Sequence[Candidate]
) -> tuple[list[Candidate], CutRecording]:
    """The recording cut at every unit at which it can be. Raises UnmeasurableError if its units cannot be run alone."""
    try:
        return _finest_cut(recording, model, units)
    except PartitionError as error:
        raise UnmeasurableError(f"it cannot be cut at every unit: {error}") from error


def first_runs(
    split: CutRecording, values: dict[tuple[int, str], Tensor], run: Callable[[Stage, Sequence[Tensor]], Run]
) -> dict[int, Run | Like]:
    """Runs one unit of each kind, in order, on what earlier ones made."""
    first_of: dict[Hashable, int] = {}
    runs: dict[int, Run | Like] = {}
    for index, plan in enumerate(split.plans):
        like = first_of.setdefault(kind_of(split, index), index)
        if like == index:
            inputs = [values[i.source, i.name] for i in plan.inputs]
            made = runs[index] = run(build_stage(split, plan, index, NoStreams()), inputs)
            outputs = made.outputs
        else:
            runs[index] = Like(like)
            outputs = [values[like, value.name] for value in split.plans[like].outputs]
        values |= {(index, value.name): made for value, made in zip(plan.outputs, outputs, strict=True)}
    return runs


def run_of(runs: Mapping[int, R | Like], index: int) -> R:
    """The run of a unit, or of the one of its kind that ran."""
    run = runs[index]
    run = runs[run.stage] if isinstance(run, Like) else run
    assert not isinstance(run, Like)
    return run


def _shared(split: CutRecording, runs: Mapping[int, Run | Like]) -> list[int]:
    """For each unit, the bytes of what it and the one before it both keep: its inputs."""
    found, before = [], dict[tuple[int, str], int]()
    for index, plan in enumerate(split.plans):
        saved = run_of(runs, index).saved
        inputs = {(i.source, i.name): size for i, size in zip(plan.inputs, saved.inputs, strict=True)}
        found.append(sum(min(size, before.get(key, 0)) for key, size in inputs.items()))
        before = inputs | {(index, o.name): size for o, size in zip(plan.outputs, saved.outputs, strict=True)}
    return found


def unit_costs(kept: Sequence[Candidate], split: CutRecording, runs: Mapping[int, Run | Like]) -> tuple[UnitCost, ...]:
    """What each unit costs."""
    crossing = _crossing([plan.inputs for plan in split.plans])
    shared = _shared(split, runs)
    found: list[UnitCost] = []
    for index, unit in enumerate(kept):
        run, one = run_of(runs, index), runs[index]
        like = kept[one.stage].name if isinstance(one, Like) else ""
        times = run.times()
        sent, back = crossing[index]
        cost = UnitCost(
            unit.name,
            times.forward,
            times.input_gradient,
            times.weight_gradient,
            activation_bytes=run.saved.bytes,
            shared_bytes=shared[index],
            boundary_bytes=sent,
            boundary_gradient_bytes=back,
            spread=times.spread,
            like=like,
            recompute_seconds=times.again,
            operations=None if like else run.operations(),
        )
        if times.split is not None:
            apart: dict[str, Any] = dict(zip(SPLIT_SECONDS, times.split, strict=True))
            cost = replace(cost, **apart)
        found.append(cost)
    return tuple(with_tensors(found, split))


def with_tensors(units: Sequence[UnitCost], split: CutRecording) -> list[UnitCost]:
    """The units with their parameters and buffers, and those among them that others have too."""
    held, found = split.recording.held, []
    names = [dict.fromkeys(name for node in plan.run for name in split.held_by(node)) for plan in split.plans]
    count = Counter(name for each in names for name in each)
    for unit, own in zip(units, names, strict=True):
        sizes = {name: held[name].numel() * held[name].element_size() for name in own}
        trained = {name: size if held[name].requires_grad else 0 for name, size in sizes.items()}
        total, tied = sum(trained.values()), tuple(Tied(n, sizes[n], trained[n]) for n in own if count[n] > 1)
        found.append(
            replace(
                unit,
                parameter_bytes=sum(sizes.values()),
                gradient_bytes=total,
                optimizer_bytes=OPTIMIZER_VALUES * total,
                tied=tied,
            )
        )
    return found


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
    costs: tuple[UnitCost, ...],
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


def _finest_cut(
    recording: Recording, model: nn.Module, units: Sequence[Candidate]
) -> tuple[list[Candidate], CutRecording]:
    """The candidates at which the recording can be cut, all at once, and the recording cut there.

    The weight of the others goes to the candidate before them. Raises PartitionError if not even one cut is possible.
    """
    kept = joined(units, spans(recording, model))
    try:
        return kept, _cut(recording, model, kept)
    except PartitionError:
        possible = [kept[0]]
        for unit in kept[1:]:
            if _can_cut(recording, model, [kept[0], unit]):
                possible.append(unit)
            else:
                possible[-1] = replace(possible[-1], weight=possible[-1].weight + unit.weight)
        return possible, _cut(recording, model, possible)


def _cut(recording: Recording, model: nn.Module, units: Sequence[Candidate]) -> CutRecording:
    cuts = [unit.name for unit in units[1:]]
    split = CutRecording(recording, model, cuts, cut_positions(recording, model, cuts))
    _ = split.plans  # raises if it cannot be cut there
    return split


def _can_cut(recording: Recording, model: nn.Module, units: Sequence[Candidate]) -> bool:
    try:
        _cut(recording, model, units)
    except PartitionError:
        return False
    return True
