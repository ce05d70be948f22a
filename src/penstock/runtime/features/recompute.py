"""Runs forwards again in backward: whole stages, for some microbatches, or every n-th layer of a stage.

The first run of a stage is an ordinary one whose graph is dropped, rather than one under `no_grad`, where some modules
use other kernels, with other bits. The peak is the same, since the second run also builds the graph of one microbatch.

A layer runs again just before its own backward: `torch.utils.checkpoint` reruns it inside the stage's one backward, so
gradients are added as usual. What that leaves to its callers is done here: buffers are updated once, and inputs that
are updated in place later are copied first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from penstock._base.errors import ArgumentError, PartitionError
from penstock._base.formatting import name_stages, named
from penstock._base.pytree import flatten, map_tensors, unflatten
from penstock._base.stages import StageMeta
from penstock.partition import INPUT_OVERWRITTEN
from penstock.partition.state.block_state import refuse_again
from penstock.runtime.exact import rules as exact
from penstock.runtime.exact.rules import Keeper, SavedTensor
from penstock.runtime.features.feature import Feature, MakeFeature, Recompute, Rerun, StageContext, recorded_code
from penstock.runtime.front_end import Stage
from penstock.runtime.microbatch_kinds import merge_kinds
from penstock.schedule import Action, Op, Schedule
from penstock.schedule.activations import recomputed_microbatches

ChooseKept = Callable[[Sequence[int]], Collection[int]]
"""Chooses, from a stage's microbatches in the order in which they run, those that keep their forward."""

KEPT_FORWARDS: Mapping[str, ChooseKept] = {
    "except_last": lambda forwards: forwards[-1:],
    "always": lambda forwards: (),
}
"""What each policy that only chooses microbatches keeps."""


def notes(policies: Sequence[Recompute], order: Schedule) -> list[str]:
    """Return the notes on which forwards run again: one line for all stages that do the same.

    Args:
        policies: one per stage of the model.
        order: the schedule, with or without communication.
    """
    stages_by_text: dict[str, list[int]] = {}
    for stage, rank in enumerate(order.placement.rank_of):
        policy = policies[stage % len(policies)]
        if policy == "never":
            continue
        forwards = sum(action.stage == stage and action.op is Op.F for action in order.rows[rank])
        if isinstance(policy, int):
            text = f"layers 0, {policy}, {2 * policy}, ... run again in backward on "
        elif isinstance(policy, str) and policy in KEPT_FORWARDS:
            reruns = len(recomputed_microbatches(KEPT_FORWARDS[policy], order.rows[rank], stage))
            text = f"{reruns} of {forwards} forwards run again in backward on "
        else:
            text = "its own choice of forwards runs again in backward, out of those on "
        name = named(policy).__qualname__ if callable(policy) else repr(policy)
        stages_by_text.setdefault(f"recompute={name}: {text}", []).append(stage)
    return [f"{text}{name_stages(indices)}" for text, indices in stages_by_text.items()]


class BufferCopies(NamedTuple):
    """Copies of buffers, and the places of these buffers."""

    places: Sequence[tuple[nn.Module, str]]
    copies: Sequence[Tensor]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Temporarily makes the copies the modules' buffers, so that they are updated instead."""
        originals = [part._buffers[name] for part, name in self.places]
        try:
            for (part, name), copy in zip(self.places, self.copies, strict=True):
                part._buffers[name] = copy
            yield
        finally:
            for (part, name), buffer in zip(self.places, originals, strict=True):
                part._buffers[name] = buffer


class Buffers:
    """The buffers that the forward of some modules updates, so that it can run again on their earlier values.

    The second run must neither count a batch twice nor see what later microbatches left: it works on copies.
    """

    def __init__(self, modules: Iterable[nn.Module], updated: Iterable[Tensor]) -> None:
        updated_ids = {id(buffer) for buffer in updated}
        self._slots = [
            (part, name)
            for part in {part: None for module in modules for part in module.modules()}
            for name, buffer in part._buffers.items()
            if buffer is not None and id(buffer) in updated_ids
        ]

    def copy(self) -> BufferCopies:
        """Copy the current buffers. A buffer in several places has one copy."""
        buffers = [part._buffers[name] for part, name in self._slots]
        copies = {id(b): exact.copy_as(exact.Layout.of(b), b) for b in buffers if b is not None}
        return BufferCopies(self._slots, [copies[id(buffer)] for buffer in buffers])


class RecomputedStage(Feature):
    """Runs the whole stage again in backward, for some microbatches.

    Args:
        stages: the stage as each microbatch runs it.
        microbatches: those whose forward runs again.
        overwritten: for each microbatch, the positions of inputs that this stage or a later one updates.
        offload: moves what is kept to the host.
    """

    @classmethod
    def keeping(cls, kept: ChooseKept) -> MakeFeature:
        """Build a kind of recomputation, for `recompute=`: run all forwards again but those that `kept` chooses, and
        those directly followed by their backward."""

        def of(stage: StageContext) -> Feature | None:
            return cls.rerunning(stage, recomputed_microbatches(kept, stage.row, stage.index))

        of.__qualname__ = f"{cls.__qualname__}.keeping"
        return of

    @classmethod
    def rerunning(cls, stage: StageContext, microbatches: Collection[int]) -> Self | None:
        """Run these microbatches' forwards again; None if there are none."""
        if not microbatches:
            return None
        changed = [
            overwritten_inputs(microbatch_stage.meta, [s.meta for s in partition.stages])
            for microbatch_stage, partition in zip(stage.stages, stage.binding.partitions, strict=True)
        ]
        return cls(stage.stages, microbatches, changed, stage.keeper)

    def __init__(
        self,
        stages: Sequence[Stage],
        microbatches: Collection[int],
        overwritten: Sequence[Collection[int]],
        keeper: Keeper | None,
    ) -> None:
        modules = {stage.module: None for stage in stages}
        use = merge_kinds(stages)
        refuse_again(use.meta.index, use.remembered)
        self._microbatches = frozenset(microbatches)
        self._overwritten = overwritten
        self._keeper = keeper
        self._buffers = Buffers(modules, updated_buffers(use))

    def applies(self, hook: str, at: int | Action) -> bool:
        """`keep` to the forwards that run again."""
        return hook != "keep" or at in self._microbatches

    def keep(self, microbatch: int, args: Sequence[Any]) -> Rerun | None:
        """Keep the arguments, and the buffers that the forward updates."""
        saved = [self._keep(microbatch, *arg) for arg in enumerate(args)]
        return _StageRerun(saved, self._buffers.copy())

    def _keep(self, microbatch: int, position: int, arg: Any) -> Callable[[], Any]:
        """Return what gives the argument again."""
        if not isinstance(arg, Tensor):
            return lambda: arg
        if position in self._overwritten[microbatch]:
            arg = exact.copy_as(exact.Layout.of(arg), arg)
        saved = None if self._keeper is None else self._keeper.save_argument(arg, microbatch)
        return partial(_share, SavedTensor.of(arg)) if saved is None else saved.get


class _StageRerun(NamedTuple):
    """One forward to run again: its arguments, and the earlier state of the buffers it updates."""

    saved: Sequence[Callable[[], Any]]
    buffers: BufferCopies

    def args(self) -> list[Any]:
        return [get() for get in self.saved]

    def as_before(self) -> AbstractContextManager[None]:
        return self.buffers.in_place()


def _share(saved: SavedTensor) -> Tensor:
    """Return a kept tensor in the form that the forward takes: another one, in the same memory."""
    tensor = saved.get()
    return exact.share_memory(tensor, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def updated_buffers(stage: Stage) -> list[Tensor]:
    """Return the buffers that a stage's forward updates, or may update.

    Raises:
        PartitionError: it updates a parameter.
    """
    for name in stage.meta.updated:
        if name in stage.parameters:
            raise PartitionError(
                f"recompute: the forward of stage {stage.meta.index} updates parameter {name!r} in place, so that "
                f"running it again would give something else; choose recompute={{{stage.meta.index}: 'never'}}"
            )
    return [stage.buffers[name] for name in (*stage.meta.updated, *stage.may_update)]


def overwritten_inputs(meta: StageMeta, stages: Sequence[StageMeta]) -> list[int]:
    """Return the positions of a stage's inputs that any stage updates in place: stages of one rank share their
    memory."""
    names = {i.name for stage in stages for i in stage.inputs if i.mutated}
    return [position for position, i in enumerate(meta.inputs) if i.name in names]


class RecomputedLayers(Feature):
    """Runs layers 0, n, 2n, ... of the stage again in backward.

    Args:
        every: n.
    """

    @classmethod
    def of(cls, stage: StageContext) -> RecomputedLayers | None:
        """Build the feature if `recompute=` is a number. Raise ArgumentError if another choice excludes it."""
        if not stage.training or not isinstance(stage.recompute, int):
            return None
        if stage.binding.compile is not None:
            raise ArgumentError(
                f"recompute={stage.recompute} runs layers again within the stage's code, whose surroundings torch's "
                f"compiler loses; with compile= choose recompute={{{stage.index}: 'always'}}, or 'except_last'"
            )
        return cls(stage.recompute)

    def __init__(self, every: int) -> None:
        self._every = every

    def rewrite(self, stages: Sequence[Stage]) -> Sequence[Stage]:
        """Return the stages with such layers; stages that are recorded alike share one."""
        rewritten = {id(stage): replace(stage, module=with_recomputed_layers(stage, self._every)) for stage in stages}
        for stage in rewritten.values():
            if stage.frame is not None:
                stage.frame.adopt(stage.module)
        return [rewritten[id(stage)] for stage in stages]


def with_recomputed_layers(stage: Stage, every: int) -> fx.GraphModule:
    """Return the stage's code, with layers 0, n, 2n, ... recomputed in backward.

    A layer is a module with parameters that the code calls as a whole, in the order of the calls.

    Raises:
        ArgumentError: the stage has parameters, but no layers.
    """
    graph = fx.Graph()
    code = recorded_code(stage, f"recompute={every}")
    graph.output(graph.graph_copy(code.graph, {}))
    module = fx.GraphModule(code, graph, code.__class__.__name__)
    updated = updated_buffers(stage)
    modules = ((node, module.get_submodule(str(node.target))) for node in graph.nodes if node.op == "call_module")
    calls = [node for node, called in modules if any(True for _ in called.parameters())]
    if stage.parameters and not calls:
        raise ArgumentError(
            f"recompute={every}: the code of stage {stage.meta.index} calls no module with parameters as a whole, and "
            f"so has no layers; choose another policy for it, such as recompute={{{stage.meta.index}: 'always'}}"
        )
    refuse_again(stage.meta.index, stage.remembered, {str(node.target) for node in calls[::every]})
    for number, node in enumerate(calls[::every]):
        layer = module.get_submodule(str(node.target))
        node.target = f"recomputed_{number}"
        copies = node.meta.get(INPUT_OVERWRITTEN, False)
        recomputed = RecomputedLayer(layer, Buffers([layer], updated), copies=copies)
        module.add_submodule(node.target, recomputed)
    module.recompile()
    return module


class RecomputedLayer(nn.Module):
    """A layer that runs again in backward.

    Args:
        copies: whether to keep copies of its inputs, because they are updated in place before it runs again.
    """

    def __init__(self, layer: nn.Module, buffers: Buffers, *, copies: bool) -> None:
        super().__init__()
        self.layer = layer
        self._buffers_of_layer = buffers
        self._copies = copies

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.layer(*args, **kwargs)
        call = _Call(self.layer, tuple(kwargs), self._buffers_of_layer.copy())
        values = (*args, *kwargs.values())
        flat = flatten(values, empty=True)
        if not self._copies and _are_same(flat.leaves, values):  # tensors and plain values
            return call.checkpointed(values)
        call.first_values = values  # objects that the first run may change are passed on unchanged
        if self._copies:
            tensors = [leaf for leaf in flat.leaves if isinstance(leaf, Tensor)]
            call.takes_gradient = [tensor.requires_grad for tensor in tensors]
            copies = [exact.copy_as(exact.Layout.of(x), x) if isinstance(x, Tensor) else x for x in flat.leaves]
            flat = flat._replace(leaves=copies)
        return call.checkpointed(unflatten(flat.leaves, flat.structure))


class _Call:
    """A call of a layer, which `checkpoint` makes twice, or more often if its backward calls autograd itself.

    Attributes:
        first_values: the arguments of the first run, if copies are kept for the others.
        takes_gradient: one per tensor among the arguments, if copies are kept.
    """

    def __init__(self, layer: nn.Module, names: Sequence[str], buffers: BufferCopies) -> None:
        self._layer, self._names, self._buffers = layer, names, buffers
        self.first_values: Sequence[Any] | None = None
        self.takes_gradient: Sequence[bool] | None = None
        self._runs_again = False

    def checkpointed(self, values: Sequence[Any]) -> Any:
        """Make the first run, and prepare for running again on what is kept.

        The second run continues to its end, although it has the last activation earlier: then whatever the layer does
        after that in Python (`self.busy = False`, `handle.remove()`) is done before the next microbatch.
        """
        return checkpoint(self, *values, use_reentrant=False, early_stop=False)

    def __call__(self, *values: Any) -> Any:
        runs_again, self._runs_again = self._runs_again, True
        if self.first_values is not None:
            values, self.first_values = tuple(self.first_values), None
        elif self.takes_gradient is not None:
            flags = iter(self.takes_gradient)
            values = map_tensors(lambda tensor: as_graph_value(tensor, next(flags)), values)
        positional = len(values) - len(self._names)
        with self._buffers.in_place() if runs_again else nullcontext():
            return self._layer(*values[:positional], **dict(zip(self._names, values[positional:], strict=True)))


def _are_same(leaves: Sequence[Any], values: Sequence[Any]) -> bool:
    """Whether the leaves are the given values themselves, without containers: a list of one tensor has one leaf too."""
    return len(leaves) == len(values) and all(map(operator.is_, leaves, values))


def as_graph_value(value: Tensor, takes_gradient: bool) -> Tensor:
    """Make a kept copy a value of a graph again, which may be updated in place."""
    if not takes_gradient:
        return value
    anchor = torch.empty(0, device=value.device, requires_grad=True)
    return exact.as_graph_input(anchor, value.detach())[0]
