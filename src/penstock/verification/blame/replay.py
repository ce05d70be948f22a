"""One step of the unsplit model, microbatch by microbatch, from what the pipeline had before it.

Its loss is that of the whole batch, so no rule for weights of microbatches is assumed. Backward begins with the
pipeline's own gradient of the last module's output, once that is known to be the right one but for its scale: so all
that follows is compared to the bit, and rounding of the loss does not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.trees import flatten, leaf_tensors, unflatten
from penstock.verification.blame.data import Data
from penstock.verification.comparison import compare
from penstock.verification.term_sizes import TermSizes
from penstock.verification.trail import BACKWARD, FORWARD, Place, Trail

SCALE = 1e-3
"""How far the scales of two microbatches' losses may be apart."""


@dataclass(slots=True)
class Replayed:
    """What the unsplit model computes in a step.

    Attributes:
        trail: of all its modules, in dataflow order.
        scales: for each microbatch, what the pipeline's gradient of the loss is times the right one; None if it is
            another gradient, or none was noted.
        buffers: after the step.
        expected: gradients.
        sizes: for each entry of a gradient, the sum of its terms' sizes.
    """

    trail: Trail
    last: Place | None
    scales: dict[int, float | None]
    outputs: list[Any]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    expected: dict[str, Tensor] = field(default_factory=dict)
    sizes: dict[str, Tensor] = field(default_factory=dict)

    def scaled(self, name: str) -> dict[int, Tensor]:
        """Microbatches' terms of a gradient, by the right weights."""
        return {k: t.double() / (self.scales.get(k) or 1.0) for k, t in self.trail.terms.get(name, {}).items()}


class Replay:
    """The unsplit model and its loss."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor] | None) -> None:
        self.model, self._loss = model, loss

    @property
    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        return found | dict(self.model.named_buffers(remove_duplicate=False))

    def step(
        self,
        data: Data,
        before: Mapping[str, Tensor],
        gradients: Mapping[Place, Tensor],
        random: Mapping[tuple[str, int, int], Tensor],
        autocast: str = "",
    ) -> Replayed:
        """Args: `before`: parameters and buffers; `gradients`: the pipeline's; `random`: states of the generator with
        which calls of modules begin; `autocast`: its dtype, if it is on."""
        parameters = dict(self.model.named_parameters())
        left = self.left(*data.inputs(0))
        order, places = [*dict.fromkeys(place.module for place in left)], list[Place]()
        for place, value in gradients.items():  # but for a stage's that leaves the loss itself
            other = left.get(place._replace(what=FORWARD[1], microbatch=0)) if place.what == BACKWARD else None
            places += [place] if other is not None and other.dim() == value.dim() else []
        last = max(places, key=lambda p: (order.index(p.module), p.call), default=None)
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.grad = None
                if name in before:
                    tensor.copy_(before[name])
        tied = {name for name in parameters if len(self.aliases(name)) > 1}
        sizes = TermSizes({name: parameters[name] for name in tied}, tied)
        device = next(iter(parameters.values())).device.type
        cast = torch.autocast(device, getattr(torch, autocast.rpartition(".")[2])) if autocast else nullcontext()
        found = Replayed(Trail(0, order, random=dict(random)), last, {}, [])
        trail, kept = found.trail, defaultdict[int, list[Any]](list)
        with ExitStack() as stack:
            stack.enter_context(trail.following(self.model, parameters))
            stack.enter_context(sizes.measuring())
            if last is not None:
                module = self.model.get_submodule(last.module)
                keep = lambda *given: kept[trail.microbatch].append(given[2])  # noqa: E731
                stack.callback(module.register_forward_hook(keep).remove)
            with cast:
                for k in range(len(data.rows)):
                    trail.begin(k)
                    args, kwargs = data.inputs(k)
                    found.outputs.append(self.model(*args, **kwargs))
                roots = [_trained(output) for output in found.outputs]
                grads = [[torch.ones_like(tensor) for tensor in root] for root in roots]
                if data.target is not None or self._loss is None:  # else not known: whatever the pipeline's are
                    grads = self.right_gradients(found.outputs, data.cut(data.target, torch.cat([*data.rows])))
            found.buffers = {name: value.detach().clone() for name, value in self.model.named_buffers()}
            for k, (root, grad) in enumerate(zip(roots, grads, strict=True)):
                if last is not None:
                    ends = _trained(kept[k][last.call])
                    grad = [*torch.autograd.grad(root, ends, grad, retain_graph=True, materialize_grads=True)]
                    root = ends
                    given = [gradients.get(last._replace(microbatch=k, leaf=i)) for i in range(len(ends))]
                    found.scales[k] = None if given[0] is None else scale_of(given[0], grad[0])
                    if found.scales[k] is not None:
                        grad = [one if mine is None else mine.to(one) for mine, one in zip(given, grad, strict=True)]
                trail.begin(k, backward=True)
                for tensor in root:
                    sizes.watch(tensor)
                torch.autograd.backward(root, grad)
        trail.uses = sizes.uses
        for name in self.tensors:
            terms = next((terms for alias in self.aliases(name) if (terms := [*found.scaled(alias).values()])), [])
            if terms:
                every = torch.stack(terms)
                found.expected[name], found.sizes[name] = every.sum(0), every.abs().sum(0)
        return found

    def left(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Place, Tensor]:
        """Return what modules leave, in the order in which they end."""
        trail = Trail(0, [name for name, _ in self.model.named_modules()])
        with torch.no_grad(), trail.following(self.model, {}):
            self.model(*args, **kwargs)
        return {place: value for place, value in trail.values.items() if place.what == FORWARD[1]}

    def aliases(self, name: str) -> list[str]:
        """Return all names of a tensor."""
        tensors = self.tensors
        return [other for other, tensor in tensors.items() if tensor is tensors[name]]

    def right_gradients(self, outputs: Sequence[Any], target: Any) -> list[list[Tensor]]:
        """Gradients of the loss of all these microbatches by the floating-point leaves of each one's output."""
        leaves = [[t.detach().requires_grad_() for t in _trained(output)] for output in outputs]
        whole = [torch.cat(one) if one[0].dim() else torch.stack(one).mean() for one in zip(*leaves, strict=True)]
        flat = flatten(outputs[0])
        values = iter(whole)
        joined = [next(values) if isinstance(x, Tensor) and x.requires_grad else x for x in flat.leaves]
        output = unflatten(joined, flat.structure)
        own = output if isinstance(output, Tensor) else getattr(output, "loss", leaf_tensors(output)[0])
        total = own if self._loss is None else self._loss(output, target)
        found = iter(torch.autograd.grad(total, [leaf for one in leaves for leaf in one], materialize_grads=True))
        return [[next(found) for _ in one] for one in leaves]


def scale_of(given: Tensor, right: Tensor) -> float | None:
    """Return the factor by which one is the other's multiple, but for rounding; None if it is not."""
    given, right = given.detach().cpu(), right.detach().cpu()
    if given.shape != right.shape or not right.any():
        return 1.0 if given.shape == right.shape and not given.any() else None
    one, other = given.double(), right.double()
    scale = float((one * other).sum() / (other * other).sum())
    row = compare("gradient", "", (), given, (other * scale).to(given.dtype), exact=False)
    is_close = (one - other * scale).abs().max() <= SCALE / 10 * one.abs().max()
    return scale if scale and (row.ok or is_close) else None


def _trained(output: Any) -> list[Tensor]:
    return [tensor for tensor in leaf_tensors(output) if tensor.requires_grad]
