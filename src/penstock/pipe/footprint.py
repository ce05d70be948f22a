"""How much memory stages and ranks take: what forwards and backwards make on fake tensors, added up by the simulator.

Nothing is computed, and no memory is taken.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.compat import fake_mode, quiet, size_of, storage_of
from penstock.gradients import gradient_bytes
from penstock.partition import Partition
from penstock.partition.run.loan import untouched_generators
from penstock.partition.state.reach import Reach
from penstock.partition.values.memory import meta_bytes
from penstock.runtime.exact import rules as exact
from penstock.schedule import Schedule, drop_backward
from penstock.simulate import StageCost, memory, simulate
from penstock.stages import MODEL_INPUT, TensorMeta, needs_backward
from penstock.trees import flatten


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes that one microbatch takes on a stage, besides parameters, buffers and gradients of parameters.

    Attributes:
        kept: from its forward to its backward, inputs included.
        working: what its forward or its backward takes besides that while it runs, at most.
    """

    kept: int
    working: int


def footprint(module: nn.Module, inputs: Sequence[TensorMeta]) -> Footprint | None:
    """Runs a stage's code and its backward on fake tensors. None if it does not run on these.

    Args:
        module: takes `inputs` and returns its outputs. What its forward leaves behind is taken back.
        inputs: of one microbatch.
    """
    reach = Reach(module)
    try:
        with untouched_generators(), quiet(), fake_mode(), torch.enable_grad():
            return _run(module, inputs)
    except Exception:  # a model's own code may raise anything on fake tensors
        return None
    finally:
        reach.restore()


def _run(module: nn.Module, inputs: Sequence[TensorMeta]) -> Footprint:
    held = {name: _like(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    for tensor in held.values():
        if tensor.requires_grad:  # so that backward adds to it, as in any microbatch but the first
            tensor.grad = torch.empty_like(tensor)
    anchor = torch.empty(0, requires_grad=True)
    with Allocations([anchor, *held.values(), *(t.grad for t in held.values() if t.grad is not None)]) as seen:
        args = [_made(meta) for meta in inputs]
        for position, meta in enumerate(inputs):
            if meta.requires_grad:
                args[position], _ = exact.receive(anchor, args[position])
        given = tuple(args)
        args.clear()
        outputs: list[Tensor] = list(functional_call(module, dict(held), given))
        del given
        in_forward, roots, grads = seen.peak, list[GradientEdge](), list[tuple[Any, ...]]()
        for output in outputs:
            if output.requires_grad:
                roots.append(get_gradient_edge(output))
                grads.append((tuple(output.shape), output.stride(), output.dtype))
        del output
        outputs.clear()
        kept = seen.peak = seen.now
        if roots:
            seeds = [torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in grads]
            torch.autograd.backward(roots, seeds)
        return Footprint(kept, max(in_forward, seen.peak) - kept)


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that operators make, while they live.

    Args:
        known: tensors whose memory does not count.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._living: dict[int, Any] = {storage_of(tensor): None for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in flatten(made).leaves:
            if isinstance(tensor, Tensor) and storage_of(tensor) not in self._living:
                self._count(tensor)
        return made

    def _count(self, tensor: Tensor) -> None:
        number, size = storage_of(tensor), size_of(tensor)

        def gone(_: Any) -> None:
            if self._living.pop(number, None) is not None:
                self.now -= size

        self._living[number] = weakref.ref(tensor.untyped_storage(), gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def _like(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    return made.requires_grad_(tensor.requires_grad)


def _made(meta: TensorMeta) -> Tensor:
    dtype: torch.dtype = getattr(torch, meta.dtype)
    return torch.empty_strided(meta.shape, meta.stride, dtype=dtype)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The bytes that a rank needs in a training step, as predicted.

    Attributes:
        parameters: of its stages, with buffers; what several of them share counts once.
        gradients: of these, in the dtype in which they accumulate.
        activations: what its microbatches keep for their backwards, at most at once.
        working: what a forward or backward takes besides while it runs, at most.
        batch: the batch's pieces that wait for their forward, and targets.
    """

    parameters: int
    gradients: int
    activations: int
    working: int
    batch: int

    @property
    def peak(self) -> int:
        """The most at once. If the backward is split, W is taken to need as much as the forward keeps."""
        return self.parameters + self.gradients + self.activations + self.working + self.batch


def memory_of_ranks(
    partition: Partition, order: Schedule, asked: torch.dtype | None, target_bytes: int, *, runs_again: bool
) -> tuple[RankMemory, ...]:
    """What each rank needs; empty if some stage does not run on fake tensors, or forwards run again and backwards are
    split: what W then needs is not what was kept.

    Args:
        partition: one copy of the model, for one microbatch.
        order: computations only.
        asked: the `gradient_dtype=` of the run.
        target_bytes: the size of the whole batch's target.
        runs_again: every forward runs again in its backward.
    """
    metas = [stage.meta for stage in partition.stages]
    found = [footprint(stage.module, [i.meta for i in stage.meta.inputs]) for stage in partition.stages]
    prints = [each for each in found if each is not None]
    if len(prints) < len(found) or (runs_again and order.splits):
        return ()
    order = drop_backward(order, [meta.index for meta in metas if not needs_backward(meta)])
    given = [sum(meta_bytes(i.meta) for i in meta.inputs if i.source == MODEL_INPUT) for meta in metas]
    if runs_again:
        received = [sum(meta_bytes(i.meta) for i in meta.inputs) for meta in metas]
        prints = [Footprint(own, each.kept + each.working - own) for own, each in zip(received, prints, strict=True)]
    waiting = [max(each.kept - own, 0) for own, each in zip(given, prints, strict=True)]
    costs = [StageCost(1, 1, 1, activation_bytes=held, weight_gradient_bytes=held) for held in waiting]
    peaks = [each.peak_activations for each in memory(order, costs, simulate(order, costs))]
    place, depth = order.placement, order.placement.depth
    ranks = []
    for rank, peak in enumerate(peaks):
        stages = place.stages_on(rank)
        parameters = {(s // depth, id(p)): p for s in stages for p in partition.stages[s % depth].parameters.values()}
        buffers = {(s // depth, id(b)): b for s in stages for b in partition.stages[s % depth].buffers.values()}
        pieces = sum(given[s % depth] * len(place.microbatches_of(s, order.microbatches)) for s in stages)
        targets = sum(target_bytes // place.pipelines for s in stages if place.is_last(s))
        ranks.append(
            RankMemory(
                sum(tensor.nbytes for tensor in (*parameters.values(), *buffers.values())),
                gradient_bytes([p for p in parameters.values() if p.requires_grad], asked),
                int(peak),
                max(prints[s % depth].working for s in stages),
                pieces + targets,
            )
        )
    return tuple(ranks)
