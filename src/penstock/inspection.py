"""What a split of a model would look like: its stages, what crosses between them, what they share. Nothing is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from penstock.errors import ArgumentError
from penstock.partition import Balance, Partition, Partitioner
from penstock.partition._compat import flatten, unflatten
from penstock.partition.chance.gate import Gate
from penstock.runtime.batch import Cut, Microbatches, check_enough
from penstock.runtime.batch_dims import BatchDims, Dim
from penstock.runtime.cutting import Cutting, Merge, Split
from penstock.runtime.outline import telling_rows
from penstock.stages import MODEL_INPUT, TensorMeta, gradient_routes, ties
from penstock.words import counted


@dataclass(frozen=True, slots=True)
class StageFound:
    """One stage.

    Attributes:
        index: its number.
        begins: the name of the module that it begins with; empty for stage 0.
        work_share: its part of the model's work (floating-point operations and bytes moved, forward and backward).
        parameters: how many numbers its parameters have, tied ones included.
        parameter_share: its part of the model's parameters; one that stages share counts on the first of them.
        parameter_bytes: their size.
        trained: how many of them take a gradient.
        buffers: the names of the buffers that it holds.
        updated: those that the forward updates.
        draws: the names of the modules on it that draw random numbers.
        inputs: the names of the model's inputs that it uses.
        modules: the names of the modules that run on it, none within another.
        activation_bytes: what a microbatch keeps on it from its forward to its backward, parameters and buffers aside;
            None where that cannot be seen.
    """

    index: int
    begins: str
    work_share: float
    parameters: int
    parameter_share: float
    parameter_bytes: int
    trained: int
    buffers: tuple[str, ...]
    updated: tuple[str, ...]
    draws: tuple[str, ...]
    inputs: tuple[str, ...]
    modules: tuple[str, ...]
    activation_bytes: int | None


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor that goes from one stage to another.

    Attributes:
        source, target: the stages. Where target - source > 1 it skips those between.
        value: its name in the recording.
        module: the module that made it; empty for the model itself, and for an input of the model.
        source_line: `file:line` in the code; empty for an input, and for what a whole module returned.
        shape, dtype, bytes: for the first microbatch.
        takes_gradient: whether a gradient comes back.
    """

    source: int
    target: int
    value: str
    module: str
    source_line: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    takes_gradient: bool


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter that several stages hold: each a replica, with its gradients added up."""

    name: str
    stages: tuple[int, ...]
    parameters: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found.

    Attributes:
        model: the class of the model.
        parameters, parameter_bytes: of the unsplit model, each parameter once.
        microbatches: into how many the batch is cut; bytes and shapes are those of the first.
        stages, crossings, ties: see there.
        branches: `file:line` of each place where the forward reads the values of an input, and what it read. The split
            holds for batches that read the same.
        notes: what the user should know about the recording.
    """

    model: str
    parameters: int
    parameter_bytes: int
    microbatches: int
    stages: tuple[StageFound, ...]
    crossings: tuple[Crossing, ...]
    ties: tuple[Tie, ...]
    branches: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def skips(self) -> tuple[Crossing, ...]:
        """What passes over at least one stage."""
        return tuple(crossing for crossing in self.crossings if crossing.target - crossing.source > 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


class _NoStreams:
    """Random sources for a split that is not run."""

    def enter(self, name: str) -> None:
        raise AssertionError(f"{name} was run")

    def pass_by(self, calls: Mapping[str, int]) -> None:
        raise AssertionError(f"{list(calls)} were left out")


def inspect(
    model: nn.Module | Sequence[nn.Module],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    stages: int = 2,
    microbatches: int | None = None,
    batch_dims: BatchDims | Dim = None,
    split: Split | None = None,
    merge: Merge | None = None,
    cuts: Sequence[str] | None = None,
    leaves: Sequence[str] | None = None,
    opens: Sequence[str] | None = None,
    balance: Balance = "flops",
) -> Inspection:
    """Records a model's forward for one batch and cuts it, as `penstock.pipeline` would.

    Args:
        model, args, kwargs: a module, or a list of layers, and its inputs.
        stages: how many.
        microbatches: into how many the batch is cut. All are recorded, so that what one of them cannot do is refused,
            and the first is told of. None: the batch is one, or, where it is cut already, as many as it has.
        batch_dims, split, merge, cuts, leaves, opens, balance: as `penstock.pipeline` takes them.

    Raises:
        ArgumentError: an argument is wrong by itself.
        ShapeError: the batch cannot be cut so.
        PartitionError: the model cannot be recorded or cut; the text names the module, the line and the remedy.
    """
    cut = _cut(tuple(args), dict(kwargs or {}), microbatches, Cutting.of(batch_dims, split, merge))
    partitioner = Partitioner(
        model, stages, cuts, leaves, opens=opens, streams=_NoStreams(), balance=balance, sees_saved=True
    )
    with torch.enable_grad(), telling_rows(cut.sizes):
        partition, *_ = [partitioner(*unflatten(piece.leaves, piece.structure)) for piece in cut.pieces]
    every = list(partitioner.model.parameters())
    parameters = sum(p.numel() for p in every)
    return Inspection(
        model=type(model).__name__ if isinstance(model, nn.Module) else counted(len(model), "layer"),
        parameters=parameters,
        parameter_bytes=sum(p.numel() * p.element_size() for p in every),
        microbatches=len(cut.pieces),
        stages=tuple(_stage(partition, index, parameters) for index in range(len(partition.stages))),
        crossings=_crossings(partition),
        ties=_ties(partition),
        branches=tuple(f"{guard.source_line} reads {guard.expected!r}" for guard in partition.guards),
        notes=partition.notes,
    )


def _cut(args: tuple[Any, ...], kwargs: dict[str, Any], microbatches: int | None, cutting: Cutting) -> Cut:
    """What is recorded. Raises what `penstock.pipeline` raises for it."""
    if microbatches is not None and microbatches < 1:
        raise ArgumentError(f"microbatches={microbatches}: expected at least 1")
    cutting.check(args, kwargs)
    count = max((len(leaf) for leaf in flatten((args, kwargs)).leaves if isinstance(leaf, Microbatches)), default=1)
    count = microbatches or count
    divided = cutting.divide(args, kwargs, None, count, "example", 1)
    cut = cutting.cut(args, kwargs, divided, count, "example", None, 1)
    check_enough(cut, count)
    return cut


def _stage(partition: Partition, index: int, parameters: int) -> StageFound:
    stage = partition.stages[index]
    own = list(stage.parameters.values())
    earlier = {name for before in partition.stages[:index] for name in before.parameters}
    first = sum(p.numel() for name, p in stage.parameters.items() if name not in earlier)
    inside = {id(module) for module in stage.module.modules()}
    return StageFound(
        index=index,
        begins=partition.cuts[index - 1] if index else "",
        work_share=partition.work[index] / (sum(partition.work) or 1),
        parameters=sum(p.numel() for p in own),
        parameter_share=first / (parameters or 1),
        parameter_bytes=sum(p.numel() * p.element_size() for p in own),
        trained=sum(p.numel() for p in own if p.requires_grad),
        buffers=stage.meta.buffers,
        updated=stage.meta.updated,
        draws=tuple(name for name, module in partition.drawing_modules.items() if id(module) in inside),
        inputs=tuple(value.name for value in stage.meta.inputs if value.source == MODEL_INPUT),
        modules=_modules(partition, index),
        activation_bytes=partition.saved[index] if partition.saved else None,
    )


def _modules(partition: Partition, index: int) -> tuple[str, ...]:
    module = partition.stages[index].module
    names: dict[str, None] = {}
    for node in module.graph.nodes:
        if node.op == "call_module":
            called = module.get_submodule(str(node.target))
            inside = called.inside.graph.nodes if isinstance(called, Gate) else (node,)
            names.update({str(n.target): None for n in inside if n.op == "call_module"})
    return tuple(names)


def _crossings(partition: Partition) -> tuple[Crossing, ...]:
    metas = [stage.meta for stage in partition.stages]
    routes = gradient_routes(metas)
    found = []
    for stage in metas:
        for value in stage.inputs:
            if value.source == MODEL_INPUT:
                continue
            origin = partition.origins[value.name]
            found.append(
                Crossing(
                    source=value.source,
                    target=stage.index,
                    value=value.name,
                    module=origin.module,
                    source_line=origin.source_line,
                    shape=value.meta.shape,
                    dtype=value.meta.dtype,
                    bytes=_bytes(value.meta),
                    takes_gradient=(value.source, value.name) in routes,
                )
            )
    return tuple(sorted(found, key=lambda crossing: (crossing.source, crossing.target)))


def _bytes(meta: TensorMeta) -> int:
    dtype: torch.dtype = getattr(torch, meta.dtype)
    return prod(meta.shape) * dtype.itemsize


def _ties(partition: Partition) -> tuple[Tie, ...]:
    shared = ties([stage.meta for stage in partition.stages])
    return tuple(
        Tie(name, holders, partition.stages[holders[0]].parameters[name].numel()) for name, holders in shared.items()
    )
