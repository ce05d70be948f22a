"""Replays one step of the unsplit model, microbatch by microbatch, from the pipeline's state before it.

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

from penstock._base.pytree import flatten, leaf_tensors, unflatten
from penstock.verification.blame.data import Data
from penstock.verification.comparison import compare
from penstock.verification.first_difference import BACKWARD, FORWARD, ModuleTrace, ValueKey
from penstock.verification.rounding_bounds import RoundingBounds

TOLERANCE = 1e-3
"""Relative difference allowed between the scales of two microbatches' losses."""


@dataclass(slots=True)
class Replayed:
    """The unsplit model's values in a step.

    Attributes:
        trace: of all its modules, in dataflow order.
        scales: for each microbatch, the pipeline's gradient of the loss over the right one; None if it is
            no multiple, or none was recorded.
        buffers: after the step.
        expected: gradients.
        sizes: for each entry of a gradient, the sum of its terms' sizes.
    """

    trace: ModuleTrace
    last: ValueKey | None
    scales: dict[int, float | None]
    outputs: list[Any]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    expected: dict[str, Tensor] = field(default_factory=dict)
    sizes: dict[str, Tensor] = field(default_factory=dict)

    def scaled(self, name: str) -> dict[int, Tensor]:
        """Return the microbatches' terms of a gradient, with the right weights."""
        return {k: t.double() / (self.scales.get(k) or 1.0) for k, t in self.trace.terms.get(name, {}).items()}


class Replay:
    """The unsplit model and its loss."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor] | None) -> None:
        self.model, self._loss = model, loss

    @property
    def tensors(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        return named | dict(self.model.named_buffers(remove_duplicate=False))

    def step(
        self,
        data: Data,
        before: Mapping[str, Tensor],
        gradients: Mapping[ValueKey, Tensor],
        random: Mapping[tuple[str, int, int], Tensor],
        autocast: str = "",
    ) -> Replayed:
        """Replay a step on the unsplit model.

        Args:
            before: parameters and buffers.
            gradients: the pipeline's.
            random: the generator's state at the beginning of each call of a module.
            autocast: its dtype, if it is on.
        """
        parameters = dict(self.model.named_parameters())
        outputs = self.module_outputs(*data.inputs(0))
        order, keys = [*dict.fromkeys(key.module for key in outputs)], list[ValueKey]()
        for key, value in gradients.items():  # except those of a stage whose output is the loss itself
            reference = outputs.get(key._replace(kind=FORWARD[1], microbatch=0)) if key.kind == BACKWARD else None
            keys += [key] if reference is not None and reference.dim() == value.dim() else []
        last = max(keys, key=lambda p: (order.index(p.module), p.call), default=None)
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.grad = None
                if name in before:
                    tensor.copy_(before[name])
        tied = {name for name in parameters if len(self.aliases(name)) > 1}
        sizes = RoundingBounds({name: parameters[name] for name in tied}, tied)
        device = next(iter(parameters.values())).device.type
        context = torch.autocast(device, getattr(torch, autocast.rpartition(".")[2])) if autocast else nullcontext()
        result = Replayed(ModuleTrace(0, order, random=dict(random)), last, {}, [])
        trace, last_outputs = result.trace, defaultdict[int, list[Any]](list)
        with ExitStack() as stack:
            stack.enter_context(trace.attach(self.model, parameters))
            stack.enter_context(sizes.measuring())
            if last is not None:
                module = self.model.get_submodule(last.module)
                keep = lambda *call: last_outputs[trace.microbatch].append(call[2])  # noqa: E731
                stack.callback(module.register_forward_hook(keep).remove)
            with context:
                for k in range(len(data.rows)):
                    trace.begin(k)
                    args, kwargs = data.inputs(k)
                    result.outputs.append(self.model(*args, **kwargs))
                roots = [_differentiable_leaves(output) for output in result.outputs]
                grads = [[torch.ones_like(tensor) for tensor in root] for root in roots]
                if data.target is not None or self._loss is None:  # else unknown: the pipeline's are used
                    grads = self.loss_gradients(result.outputs, data.cut(data.target, torch.cat([*data.rows])))
            result.buffers = {name: value.detach().clone() for name, value in self.model.named_buffers()}
            for k, (root, grad) in enumerate(zip(roots, grads, strict=True)):
                if last is not None:
                    last_leaves = _differentiable_leaves(last_outputs[k][last.call])
                    grad = [*torch.autograd.grad(root, last_leaves, grad, retain_graph=True, materialize_grads=True)]
                    root = last_leaves
                    recorded = [gradients.get(last._replace(microbatch=k, leaf=i)) for i in range(len(last_leaves))]
                    result.scales[k] = None if recorded[0] is None else find_scale(recorded[0], grad[0])
                    if result.scales[k] is not None:
                        grad = [c if r is None else r.to(c) for r, c in zip(recorded, grad, strict=True)]
                trace.begin(k, backward=True)
                for tensor in root:
                    sizes.watch(tensor)
                torch.autograd.backward(root, grad)
        trace.uses = sizes.uses
        for name in self.tensors:
            terms = next((terms for alias in self.aliases(name) if (terms := [*result.scaled(alias).values()])), [])
            if terms:
                stacked = torch.stack(terms)
                result.expected[name], result.sizes[name] = stacked.sum(0), stacked.abs().sum(0)
        return result

    def module_outputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[ValueKey, Tensor]:
        """Return the outputs of modules, in the order in which they end."""
        trace = ModuleTrace(0, [name for name, _ in self.model.named_modules()])
        with torch.no_grad(), trace.attach(self.model, {}):
            self.model(*args, **kwargs)
        return {key: value for key, value in trace.values.items() if key.kind == FORWARD[1]}

    def aliases(self, name: str) -> list[str]:
        """Return all names of a tensor."""
        tensors = self.tensors
        return [alias for alias, tensor in tensors.items() if tensor is tensors[name]]

    def loss_gradients(self, outputs: Sequence[Any], target: Any) -> list[list[Tensor]]:
        """Return the gradients of these microbatches' loss with respect to the floating-point leaves of each output."""
        leaves = [[t.detach().requires_grad_() for t in _differentiable_leaves(output)] for output in outputs]
        merged = [torch.cat(g) if g[0].dim() else torch.stack(g).mean() for g in zip(*leaves, strict=True)]
        flat = flatten(outputs[0])
        values = iter(merged)
        output_leaves = [next(values) if isinstance(x, Tensor) and x.requires_grad else x for x in flat.leaves]
        output = unflatten(output_leaves, flat.structure)
        own_loss = output if isinstance(output, Tensor) else getattr(output, "loss", leaf_tensors(output)[0])
        loss = own_loss if self._loss is None else self._loss(output, target)
        grads = iter(torch.autograd.grad(loss, [leaf for group in leaves for leaf in group], materialize_grads=True))
        return [[next(grads) for _ in group] for group in leaves]


def find_scale(value: Tensor, expected: Tensor) -> float | None:
    """Return the factor of which a value is a multiple of the expected one, up to rounding; None if it is none."""
    value, expected = value.detach().cpu(), expected.detach().cpu()
    if value.shape != expected.shape or not expected.any():
        return 1.0 if value.shape == expected.shape and not value.any() else None
    wide_value, wide_expected = value.double(), expected.double()
    scale = float((wide_value * wide_expected).sum() / (wide_expected * wide_expected).sum())
    comparison = compare("gradient", "", (), value, (wide_expected * scale).to(value.dtype), exact=False)
    is_close = (wide_value - wide_expected * scale).abs().max() <= TOLERANCE / 10 * wide_value.abs().max()
    return scale if scale and (comparison.ok or is_close) else None


def _differentiable_leaves(output: Any) -> list[Tensor]:
    return [tensor for tensor in leaf_tensors(output) if tensor.requires_grad]
