"""Runs every n-th layer of a stage again just before its own backward, so that its activations need not be kept.

`torch.utils.checkpoint` reruns it inside the stage's one backward, so gradients are added as usual. This file does what
that leaves to its callers: buffers are updated once, and inputs that are updated in place later are copied first.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from penstock._base.errors import ArgumentError
from penstock._base.trees import flatten, map_tensors, unflatten
from penstock.partition import INPUT_OVERWRITTEN
from penstock.partition.state.remembered import refuse_again
from penstock.runtime.exact import rules as exact
from penstock.runtime.features.context import StageContext
from penstock.runtime.features.feature import Feature, recorded_code
from penstock.runtime.features.recompute import BufferCopies, Buffers, updated_buffers
from penstock.runtime.front_end import Stage


class RecomputedLayers(Feature):
    """Runs layers 0, n, 2n, ... of the stage again in backward.

    Args:
        every: n.
    """

    @classmethod
    def of(cls, stage: StageContext) -> RecomputedLayers | None:
        """If `recompute=` is a number. Raises ArgumentError if another choice excludes it."""
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
        """The stages with such layers; stages that are recorded alike share one."""
        again = {id(stage): replace(stage, module=with_recomputed_layers(stage, self._every)) for stage in stages}
        for stage in again.values():
            if stage.frame is not None:
                stage.frame.adopt(stage.module)
        return [again[id(stage)] for stage in stages]


def with_recomputed_layers(stage: Stage, every: int) -> fx.GraphModule:
    """The stage's code, with layers 0, n, 2n, ... run again in backward.

    A layer is a module with parameters that the code calls as a whole, in the order of the calls.

    Raises:
        ArgumentError: the stage has parameters, but no layers.
    """
    graph = fx.Graph()
    code = recorded_code(stage, f"recompute={every}")
    graph.output(graph.graph_copy(code.graph, {}))
    module = fx.GraphModule(code, graph, code.__class__.__name__)
    updated = updated_buffers(stage)
    calls = [node for node in graph.nodes if node.op == "call_module" and _has_parameters(module, node)]
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
        again = RunsAgain(layer, Buffers([layer], updated), copies=copies)
        module.add_submodule(node.target, again)
    module.recompile()
    return module


class RunsAgain(nn.Module):
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
        given = (*args, *kwargs.values())
        flat = flatten(given, empty=True)
        if not self._copies and _are(flat.leaves, given):  # tensors and plain values
            return call.checkpointed(given)
        call.first = given  # objects that the first run may change are passed on unchanged
        if self._copies:
            tensors = [leaf for leaf in flat.leaves if isinstance(leaf, Tensor)]
            call.takes_gradient = [tensor.requires_grad for tensor in tensors]
            copies = [exact.copy_as(exact.Layout.of(x), x) if isinstance(x, Tensor) else x for x in flat.leaves]
            flat = flat._replace(leaves=copies)
        return call.checkpointed(unflatten(flat.leaves, flat.structure))


class _Call:
    """A call of a layer, which `checkpoint` makes twice, or more often if its backward calls autograd itself.

    Attributes:
        first: the arguments of the first run, if copies are kept for the others.
        takes_gradient: one per tensor among the arguments, if copies are kept.
    """

    def __init__(self, layer: nn.Module, names: Sequence[str], buffers: BufferCopies) -> None:
        self._layer, self._names, self._buffers = layer, names, buffers
        self.first: Sequence[Any] | None = None
        self.takes_gradient: Sequence[bool] | None = None
        self._runs_again = False

    def checkpointed(self, kept: Sequence[Any]) -> Any:
        """Makes the first run, and prepares for running again on what is kept.

        The second run continues to its end, although it has the last activation earlier: then whatever the layer does
        after that in Python (`self.busy = False`, `handle.remove()`) is done before the next microbatch.
        """
        return checkpoint(self, *kept, use_reentrant=False, early_stop=False)

    def __call__(self, *given: Any) -> Any:
        runs_again, self._runs_again = self._runs_again, True
        if self.first is not None:
            given, self.first = tuple(self.first), None
        elif self.takes_gradient is not None:
            flags = iter(self.takes_gradient)
            given = map_tensors(lambda tensor: received(tensor, next(flags)), given)
        positional = len(given) - len(self._names)
        with self._buffers.in_place() if runs_again else nullcontext():
            return self._layer(*given[:positional], **dict(zip(self._names, given[positional:], strict=True)))


def _are(leaves: Sequence[Any], given: Sequence[Any]) -> bool:
    """Whether the leaves are the given values themselves, without containers: a list of one tensor has one leaf too."""
    return len(leaves) == len(given) and all(map(operator.is_, leaves, given))


def received(value: Tensor, takes_gradient: bool) -> Tensor:
    """Makes a kept copy a value of a graph again, which may be updated in place."""
    if not takes_gradient:
        return value
    anchor = torch.empty(0, device=value.device, requires_grad=True)
    return exact.receive(anchor, value.detach())[0]


def _has_parameters(module: nn.Module, node: fx.Node) -> bool:
    return any(True for _ in module.get_submodule(str(node.target)).parameters())
