"""A model's stages for one signature of its inputs. They also convert arguments to tensors, and tensors to a result."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx, nn

from penstock._base.errors import PartitionError, ShapeError
from penstock._base.formatting import list_names
from penstock._base.pytree import unflatten
from penstock.partition.nested import Constant, fill_in, input_path
from penstock.partition.recording import Guard, RandomSource, Recording
from penstock.partition.stages.stage import Stage, build_stage
from penstock.partition.stages.stage_plans import CutRecording
from penstock.partition.state.loss_values import Left, in_place
from penstock.partition.state.settings import read_contents
from penstock.partition.units import has_forward
from penstock.simulate.costs import LinkCost, StageCost

Leaf = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was made.

    Attributes:
        module: the qualified name of the innermost module around it; empty for the model itself.
        source_line: `file:line` in the user's code; empty for inputs and for results of whole modules.
    """

    module: str
    source_line: str


@dataclass(frozen=True)
class Partition:
    """A model cut into stages.

    Attributes:
        stages: the stages, in order. Stage 0 receives every input tensor that any stage uses; the last stage returns
            the tensors of the model's result.
        drawing_modules: the modules inside blocks that draw random numbers, or may, by qualified name.
        may_draw: the names of those that did not when they were recorded, on made-up inputs.
        draw_offsets: for each stage, how often each drawing module is called on the stages before it.
        cuts: the names of the modules at which stages 1.. begin.
        work: each stage's work, including its backward; see `count_work`.
        costs: what a microbatch costs on each stage, by the profile that decided where to cut; empty if none did.
        link: what a message between two stages was taken to cost.
        notes: what the user should know about the recording.
        origins: for each value that enters or leaves a stage, by name, where it was made.
        is_foreign: whether the forward draws from Python's or numpy's generators.
        guards: what the forward read from its integer inputs' values; the partition holds for inputs that give the same
            readings.
        left: what the forward leaves in attributes and shared objects, except what the last stage itself leaves.
        elsewhere: parameters, and buffers that the forward updates, that are not on the last stage.
        reorders_gradients: whether gradients, apart from tied ones, may be added in a different order from the unsplit
            model's.
    """

    stages: tuple[Stage, ...]
    drawing_modules: Mapping[str, nn.Module]
    may_draw: frozenset[str]
    draw_offsets: tuple[Mapping[str, int], ...]
    cuts: tuple[str, ...]
    work: tuple[int, ...]
    notes: tuple[str, ...]
    origins: Mapping[str, Origin]
    guards: tuple[Guard, ...]
    is_foreign: bool
    input_order: tuple[int, ...]
    result_structure: Any
    result_leaves: tuple[int | Constant, ...]
    left: tuple[Left, ...] = ()
    reorders_gradients: bool = False
    costs: tuple[StageCost, ...] = ()
    link: LinkCost | None = None
    elsewhere: Mapping[str, Tensor] = field(default_factory=dict)
    overwritten: frozenset[str] = frozenset()
    """The paths of input tensors that the forward updates in place."""

    def holds(self, leaves: Sequence[Any]) -> bool:
        """Whether the forward reads the same from these leaves of (args, kwargs) as it did when recorded."""
        return all(guard.holds(leaves) for guard in self.guards)

    def joined(self, other: Partition) -> Partition | None:
        """Return one partition for both if they differ only in shapes, inside stages, that no code reads."""
        pairs = zip(self.guards, other.guards, strict=False)
        guards = tuple(g if g.expected == o.expected else replace(g, expected=None) for g, o in pairs)
        if guards == self.guards or any(guard.expected is None and not guard.is_unread_shape for guard in guards):
            return None
        is_same = [s.meta for s in self.stages] == [s.meta for s in other.stages] and self.code == other.code
        return replace(self, guards=guards) if is_same else None

    def arrange(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Return the tensors that stage 0 receives, in its order, from leaves of (args, kwargs) that are as
        recorded."""
        return [leaves[i] for i in self.input_order]

    def build_output(self, leaves: Sequence[Tensor]) -> Any:
        """Build the model's own result (a tensor, a dict, a ModelOutput) from the last stage's outputs."""
        count = len(self.stages[-1].meta.outputs)
        if len(leaves) != count:
            raise ShapeError(f"the model's result is made of {count} tensors, not {len(leaves)}")
        return unflatten(fill_in(self.result_leaves, leaves), self.result_structure)

    def leaving(self, leaves: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Return a context for the loss function, in which everything that the forward leaves is in its place, built
        from the last stage's outputs."""
        return in_place(self.left, leaves) if self.left else nullcontext()

    @property
    def code(self) -> str:
        """The code of all stages, as Python text."""
        return "\n\n".join(stage.code for stage in self.stages)


def describe(leaf: object) -> Leaf:
    """Describe a leaf of the inputs as a hashable value: a tensor's shape, dtype and so on, or the leaf itself."""
    if isinstance(leaf, Tensor):
        # the stride of a dimension of size 1 means nothing
        stride = tuple(s if n > 1 else 0 for s, n in zip(leaf.stride(), leaf.shape, strict=True))
        return "tensor", tuple(leaf.shape), leaf.dtype, stride, leaf.requires_grad, leaf.device
    try:
        hash(leaf)
    except TypeError:
        return "object", type(leaf), id(leaf), read_contents(leaf)
    return "constant", type(leaf), leaf, read_contents(leaf)


def build_partition(split: CutRecording, streams: RandomSource, paths: Sequence[str]) -> Partition:
    """Build the stages of a recording that is cut. `paths`: of the leaves of (args, kwargs)."""
    recording, stages = split.recording, build_stages(split, streams)
    placeholders = {node.name: position for node, position in recording.inputs.items()}
    return Partition(
        stages=stages,
        drawing_modules=recording.drawing,
        may_draw=recording.may_draw,
        draw_offsets=split.draw_offsets(),
        cuts=tuple(split.cuts),
        work=split.work(),
        notes=(*recording.notes, *_unused_note(recording, stages)),
        origins=_origins(recording, stages),
        guards=recording.guards,
        is_foreign=recording.is_foreign,
        input_order=tuple(placeholders[i.name] for i in stages[0].meta.inputs),
        result_structure=recording.result_structure,
        result_leaves=recording.result_leaves,
        left=tuple(entry for entry in recording.left if not split.last_has(entry.units)),
        reorders_gradients=split.crosses_twice(),
        elsewhere=_find_elsewhere(recording, stages),
        overwritten=frozenset(input_path(paths[number]) for number in recording.overwritten),
    )


def build_stages(split: CutRecording, streams: RandomSource) -> tuple[Stage, ...]:
    """Build the stages, and check that they hold everything that training needs."""
    stages = tuple(build_stage(split, plan, index, streams) for index, plan in enumerate(split.plans))
    _check_complete(split, stages)
    return stages


def _find_elsewhere(recording: Recording, stages: Sequence[Stage]) -> dict[str, Tensor]:
    """Return the parameters and updated buffers that are not on the last of several stages."""
    last = {id(t) for t in (*stages[-1].parameters.values(), *stages[-1].buffers.values())}
    updated = {id(stage.buffers[name]) for stage in stages for name in stage.meta.updated if name in stage.buffers}
    tensors = recording.held.items() if len(stages) > 1 else ()
    return {
        name: tensor
        for name, tensor in tensors
        if id(tensor) not in last and (isinstance(tensor, nn.Parameter) or id(tensor) in updated)
    }


def _origins(recording: Recording, stages: Sequence[Stage]) -> dict[str, Origin]:
    """Return where the values that cross between stages, or enter or leave the model, were made."""
    names = {v.name for s in stages for v in s.meta.inputs} | {v.name for s in stages for v in s.meta.outputs}
    origins = {}
    for node, fact in recording.facts.items():
        if node.name in names:
            if node.target is operator.getitem and isinstance(producer := node.args[0], fx.Node):
                maker = recording.facts[producer]  # a part of a result was made by the unit that returned it
                fact = maker if maker.kind == "unit" else fact
            origins[node.name] = Origin(fact.scope, "" if fact.kind in ("unit", "input") else fact.source_line)
    return origins


def _check_complete(split: CutRecording, stages: Sequence[Stage]) -> None:
    """Raise PartitionError if a parameter or buffer that training needs is on no stage, and name it."""
    recording = split.recording
    on_stages = {id(t) for stage in stages for t in (*stage.parameters.values(), *stage.buffers.values())}
    absent = [name for name in recording.held if name in recording.needed and id(recording.held[name]) not in on_stages]
    used = {name for node in recording.facts for name in split.held_by(node)}
    absent += [name for name in recording.held if name in recording.touched - used and name not in absent]
    if absent:
        raise PartitionError(
            f"the forward uses {list_names(absent)}, but no recorded call does, so that no stage would have "
            f"{'it' if len(absent) == 1 else 'them'}. {_remedy(split.model, absent)}"
        )


def _remedy(model: nn.Module, absent: Sequence[str]) -> str:
    scope = absent[0].rpartition(".")[0]
    while scope and not (has_forward(model.get_submodule(scope)) and all(n.startswith(f"{scope}.") for n in absent)):
        scope = scope.rpartition(".")[0]
    if not scope:  # the model's own forward uses them, and it cannot run as a whole
        return (
            "Give the part of the model that uses them a module of its own, with the layers that they are for in it, "
            "and name it in leaf_modules=[...]: it runs as a whole then"
        )
    return f"Pass leaf_modules={[scope]}, or a module around it: the one whose forward uses them has to run as a whole"


def _unused_note(recording: Recording, stages: Sequence[Stage]) -> tuple[str, ...]:
    """Return the notes on parameters that no stage holds because the forward does not use them."""
    on_stages = {id(p) for stage in stages for p in stage.parameters.values()}
    unused = [name for name, p in recording.held.items() if isinstance(p, nn.Parameter) and id(p) not in on_stages]
    if not unused:
        return ()
    return (f"the forward does not use {list_names(unused)}: on no stage",)
