"""How one device trains on a batch's microbatches, in plain torch: an oracle that shares no code with Penstock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class ByHand(NamedTuple):
    """Each microbatch's output and loss, and the total loss. The gradients are in the model."""

    outputs: list[Any]
    losses: list[Tensor]
    total: Tensor


def sizes_by_hand(rows: int, microbatches: int) -> list[int]:
    """The sizes of the microbatches: as even as possible, larger ones first."""
    return [(rows - k + microbatches - 1) // microbatches for k in range(microbatches)]


def step_by_hand(
    model: nn.Module,
    args: Sequence[Tensor],
    target: Tensor,
    loss: Callable[[Any, Any], Tensor],
    microbatches: int,
    weights: Sequence[float] | None = None,
) -> ByHand:
    """Runs forward and backward for each microbatch in turn. `weights` default to each one's share of the rows."""
    sizes = sizes_by_hand(len(target), microbatches)
    weights = [size / sum(sizes) for size in sizes] if weights is None else weights
    pieces = [[part.clone() for part in torch.split(tensor, sizes)] for tensor in (*args, target)]
    outputs, losses, terms = [], [], []
    for weight, (*inputs, wanted) in zip(weights, zip(*pieces, strict=True), strict=True):
        output = model(*inputs)
        value = loss(output, wanted)
        value.backward(torch.tensor(weight, device=value.device))
        outputs.append(output.detach().clone())
        losses.append(value.detach())
        terms.append(value.detach() * weight)
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return ByHand(outputs, losses, total)


def assert_steps_by_hand(
    pipe: Any,
    reference: nn.Module,
    batches: Iterable[Sequence[Tensor]],
    loss: Callable[[Any, Any], Tensor],
    microbatches: int,
    *,
    but: Sequence[str] = (),
) -> None:
    """Asserts that a step with each batch, inputs and a target, has the loss, gradients and buffers of one device."""
    for *inputs, target in batches:
        pipe.model.zero_grad()
        reference.zero_grad()
        expected = step_by_hand(reference, inputs, target, loss, min(microbatches, len(target)))
        assert torch.equal(pipe.step(*inputs, target=target).loss, expected.total)
        assert_same_gradients(pipe.model, reference, but=but)
        for (name, a), (_, b) in zip(pipe.model.named_buffers(), reference.named_buffers(), strict=True):
            assert torch.equal(a, b), name


def assert_same_gradients(one: nn.Module, other: nn.Module, *, but: Sequence[str] = ()) -> None:
    """Asserts bitwise equal gradients, or none in both models; those in `but` within 1e-6 of their largest entry."""
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is None or b.grad is None:
            continue
        if name in but:
            assert (a.grad - b.grad).abs().max() <= 1e-6 * b.grad.abs().max(), name
        else:
            assert torch.equal(a.grad, b.grad), name
