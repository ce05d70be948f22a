"""The loss of each microbatch on the last stage, and the weights that make their sum the batch's own loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from penstock._base.errors import ArgumentError, is_number
from penstock.runtime.exact import rules as exact
from penstock.runtime.exact.streams import Streams
from penstock.runtime.front_end import Partition
from penstock.runtime.loss.functions import Loss, adds_up, is_torch_loss, may_draw, uses_target
from penstock.runtime.loss.loss_tensors import LossGuard, check_graph
from penstock.runtime.microbatch_kinds import distinct

Reduction = Literal["mean", "sum"] | Callable[[Any], float | Tensor]
"""How the loss reduces a batch: a mean over its rows, a sum, or a function of a microbatch's target that gives the
weight of its mean (such as the number of tokens that count)."""


def weights(
    reduction: Reduction,
    sizes: Sequence[int],
    targets: Sequence[Any],
    replicas: int = 1,
    mean: Callable[[float], float] = float,
) -> list[float]:
    """Return the factor for each microbatch's loss, such that the weighted losses add up to the whole batch's loss.

    If several replicas each have part of the batch, the mean of their sums is the batch's loss.

    Args:
        reduction: see `Reduction`.
        sizes: rows in each microbatch.
        targets: each microbatch's target; used only if the reduction is a function.
        replicas: the number of replicas.
        mean: returns the mean over the replicas of the numbers that they pass in.

    Raises:
        ArgumentError: a function has no target, or the weights are negative or all zero.
    """
    if reduction == "sum":
        return [float(replicas)] * len(sizes)
    if reduction != "mean" and any(target is None for target in targets):
        raise ArgumentError(
            "reduction is a function of the target, but the step has none: pass target=, also where the model computes "
            "the loss from inputs of other names than labels"
        )
    raw = [float(size) for size in sizes] if reduction == "mean" else [float(reduction(target)) for target in targets]
    total = mean(sum(raw))
    if any(weight < 0 or weight != weight for weight in raw) or total == 0:
        raise ArgumentError(
            f"reduction: the weights of the microbatches' targets are {raw}; "
            "expected non-negative numbers that are not all zero (a batch in which no token counts has no mean)"
        )
    return exact.seeds(raw, total)


def check_sums(loss: Loss | None, reduction: Reduction, kwargs: Mapping[str, Any], microbatches: int) -> None:
    """Raise ArgumentError if losses that add up would be averaged: those of a model that divides by
    `num_items_in_batch`, as the Trainer of transformers has them."""
    adds_up = microbatches > 1 and kwargs.get("num_items_in_batch") is not None and not uses_target(loss)
    if adds_up and reduction != "sum":
        raise ArgumentError(
            "num_items_in_batch, but reduction is not 'sum': the losses that a model divides by it add up to the "
            "batch's; pass reduction='sum' to penstock.pipeline, or no such number if the model ignores it"
        )


def checked_value(loss: Any, output: object, function: Loss | None) -> Tensor:
    """Check the result of a loss function, or, without one, the model's own loss.

    Raises:
        ArgumentError: it is not a scalar.
    """
    if loss is None and function is None:
        raise ArgumentError(
            f"loss_fn=None, but the model's output ({type(output).__name__}) contains no scalar loss; "
            "pass loss_fn=..., or give the model what it needs to compute its own (labels=...)"
        )
    loss = extract_loss(loss)
    if isinstance(loss, Tensor):
        if loss.numel() == 1 and loss.dim() <= 1:
            return loss
        returned, remedy = f"a tensor of shape {list(loss.shape)}", "reduce it"
    elif loss is None:
        returned, remedy = "None", "return it"
    else:
        returned, remedy = type(loss).__name__, "return the tensor itself, without item() or float()"
    raise ArgumentError(f"loss(output, target) returned {returned}; expected a scalar tensor: {remedy}")


def no_gradient_error() -> ArgumentError:
    """Build the error for a loss without a graph although parameters should be trained."""
    return ArgumentError(
        "the loss takes no gradient, so nothing would be trained; return a loss that is computed from the model's "
        "output, without detach() or no_grad"
    )


def check_grad_enabled(call: str) -> None:
    """Raise ArgumentError if gradients are switched off where they are to be computed."""
    if not torch.is_grad_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise ArgumentError(
            f"{call} was called under torch.{mode}(), but computes gradients; call it outside, or use pipe.evaluate or "
            "pipe.predict, which run forwards only"
        )


class LossHead:
    """What follows the last stage: the model's output, its loss, and the seed of backward.

    `begin_step` gives it a step's targets and weights; `losses` and `outputs` are in order of microbatch.

    Args:
        loss: the user's loss; None if the model computes its own.
        partitions: one per microbatch; they build the model's output from what leaves the last stage.
        streams: random streams; the loss function has one for each microbatch.
        required: whether there must be a loss.
        pipelines: how many copies of the last stage there are.
    """

    def __init__(
        self,
        loss: Loss | None,
        partitions: Sequence[Partition],
        streams: Streams,
        *,
        required: bool,
        pipelines: int = 1,
    ) -> None:
        self._loss = loss
        variants = distinct(partitions)
        self._partitions = partitions
        self._streams = streams
        self._required = required
        self._seeds: dict[tuple[float, torch.dtype], Tensor] = {}
        last_stages = [stage for partition in variants for stage in partition.stages[-1:]]
        last_ids = {id(t) for stage in last_stages for t in (*stage.parameters.values(), *stage.buffers.values())}
        elsewhere = {id(tensor): name for partition in variants for name, tensor in partition.elsewhere.items()}
        self._elsewhere = {key: name for key, name in elsewhere.items() if key not in last_ids}
        self._checked = not self._elsewhere
        # With several copies of the last stage, each calls the loss for a part of the batch.
        self._fixed_buffers = {n: b for stage in last_stages for n, b in stage.buffers.items() if pipelines > 1}
        self.adds_up: bool | None = None
        """Whether the loss is a sum over samples; None: no step has trained yet."""
        self.names: Sequence[str] = ()
        """The parts that `terms` and `totals` have."""
        self.begin_step(None, (), keep_outputs=False)

    def begin_step(
        self, targets: Sequence[Any] | None, weights: Sequence[float], keep_outputs: bool, scale: float = 1.0
    ) -> None:
        """Begin a step. Without targets (in evaluation) only a model that computes its own loss has one.

        All gradients are `scale` times those of the loss; the reported loss is not scaled.
        """
        self._targets, self._weights, self._keep_outputs, self._scale = targets, weights, keep_outputs, scale
        self._draws = may_draw(self._loss)  # a hook may have been added since the last step
        self._draws_foreign = self._draws and not is_torch_loss(self._loss)
        self._seeds.clear()
        self.losses: list[Tensor | None] = [None] * len(weights)
        self.parts: list[dict[str, Tensor]] = [{} for _ in weights]
        """What each microbatch's loss consists of, if the loss function returns that, too."""
        self.outputs: list[Any] = [None] * len(weights)

    def __call__(self, microbatch: int, leaves: Sequence[Tensor]) -> Tensor | None:
        """Compute a microbatch's loss. Return what backward starts from, with its graph; None if there is no loss."""
        partition = self._partitions[microbatch]
        returned = output = partition.build_output(leaves)
        loss: Any = None
        if self._loss is None:
            loss = model_loss(output)
        elif self._targets is not None:
            returned = self._call_loss(microbatch, output, leaves)
            loss = returned if type(returned) is Tensor else extract_loss(returned)
            if not self._checked and isinstance(loss, Tensor):
                check_graph(loss, self._elsewhere)
                self._checked = True
        if loss is None and not self._required:
            return None
        if type(loss) is not Tensor or loss.dim():
            loss = checked_value(loss, output, self._loss)
        if self.adds_up is None and loss.requires_grad:
            self.adds_up = adds_up(loss)
        self.losses[microbatch] = loss.detach().clone()  # `mse_loss` leaves it in memory as large as the output
        if returned is not loss:
            self.parts[microbatch] = dict(_scalars(returned, loss))
        weight = self._weights[microbatch]
        return loss if weight else backward_root(loss, weight, leaves)

    def _call_loss(self, microbatch: int, output: Any, leaves: Sequence[Tensor]) -> Any:
        """What the user's loss function returns for a microbatch."""
        assert self._loss is not None
        assert self._targets is not None
        if self._draws:
            self._streams.begin_loss(microbatch, foreign=self._draws_foreign)
        target, left_values = self._targets[microbatch], self._partitions[microbatch].left
        if self._checked and not left_values and not self._fixed_buffers:
            return self._loss(output, target)
        versions = [buffer._version for buffer in self._fixed_buffers.values()]
        with (
            self._partitions[microbatch].leaving(leaves),
            nullcontext() if self._checked else LossGuard(self._elsewhere),
        ):
            returned = self._loss(output, target)
        for (name, buffer), version in zip(self._fixed_buffers.items(), versions, strict=True):
            if buffer._version != version:
                raise ArgumentError(
                    f"the loss updates its buffer {name!r} (a moving average, as in DINO), but this schedule has "
                    "several copies of the last stage, each of which calls the loss for a part of the batch only; use "
                    "a schedule with one copy (dualpipe-v for dualpipe)"
                )
        return returned

    def keep(self, microbatch: int, leaves: list[Tensor | None]) -> None:
        """Keep a microbatch's output, if the step is to. Empties `leaves`."""
        if self._keep_outputs:
            detached = [leaf for leaf in exact.detach_or_copy(leaves) if leaf is not None]
            self.outputs[microbatch] = self._partitions[microbatch].build_output(detached)

    def seed(self, microbatch: int) -> Tensor | None:
        """Return the gradient that the microbatch's backward starts from: the weight of its loss, times the scale."""
        loss = self.losses[microbatch]
        assert loss is not None
        key = (self._weights[microbatch], loss.dtype)
        seed = self._seeds.get(key)
        if seed is None or seed.shape != loss.shape:
            seed = self._seeds[key] = torch.full_like(loss, self._weights[microbatch] * self._scale)
        return seed

    def has_weight(self, microbatch: int) -> bool:
        """Whether a microbatch's loss counts in the batch's: its weight is not 0."""
        return self._weights[microbatch] != 0

    def terms(self, microbatches: Sequence[int]) -> Sequence[Tensor | None]:
        """Return what some microbatches add to the batch's loss, in order, each followed by what it adds to the parts;
        None for a loss that is elsewhere."""
        if not self.losses:
            return [None] * len(microbatches) * (1 + len(self.names))
        return [weighted_sum([row[k]], [self._weights[k]]) for k in microbatches for row in self._rows()]

    def totals(self) -> list[Tensor | None]:
        """Return the batch's loss, and its parts: each the weighted sum, ascending by microbatch."""
        return [weighted_sum(row, self._weights) for row in self._rows()]

    def _rows(self) -> list[Sequence[Tensor | None]]:
        return [self.losses, *([parts.get(name) for parts in self.parts] for name in self.names)]


def weighted_sum(losses: Sequence[Tensor | None], weights: Sequence[float]) -> Tensor | None:
    """Return the sum of the losses times their weights, ascending by microbatch; None if there are no losses.

    A loss of weight 0 is left out: a mean over no tokens is NaN.
    """
    total: Tensor | None = None
    for loss, weight in zip(losses, weights, strict=True):
        if loss is None:
            return None
        if weight == 0:
            continue
        term = loss.reshape(()) * weight
        total = term if total is None else total + term
    return total


def backward_root(loss: Tensor, weight: float, leaves: Sequence[Tensor]) -> Tensor:
    """Return what a microbatch's backward starts from: its loss.

    If its weight is 0, the loss may be NaN, and 0 * NaN is NaN; so it is then a zero made from the model's output.
    """
    if weight != 0:
        return loss
    trained = [leaf for leaf in leaves if leaf is not loss and leaf.requires_grad]
    if not trained:
        return loss
    zero = torch.stack([leaf.sum().to(loss) for leaf in trained]).sum() * 0
    return zero.reshape(loss.shape)


def checked_scale(scale: float) -> float:
    """Check the factor for a step's loss. Raise ArgumentError unless it is a positive, finite number."""
    if not (is_number(scale) and 0 < scale < math.inf):
        raise ArgumentError(
            f"loss_scale={scale!r}: expected a positive, finite number, such as scaler.get_scale() of a "
            "penstock.GradScaler"
        )
    return float(scale)


def model_loss(output: Any) -> Tensor | None:
    """Return the loss that a model computed itself: `output.loss`, `output["loss"]`, an output that is a scalar, or the
    one scalar of a tuple or list that requires a gradient (the only scalar, if nothing requires one)."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if loss is output and isinstance(output, (tuple, list)):
        scalars = [value for value in output if _is_scalar(value)]
        trained = [value for value in scalars if value.requires_grad]
        candidates = trained if torch.is_grad_enabled() else scalars
        return candidates[0] if len(candidates) == 1 else None
    return loss if _is_scalar(loss) else None


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()


def extract_loss(returned: Any) -> Any:
    """Return the loss in what a loss function returned: the entry "loss", or else the first."""
    if isinstance(returned, Tensor):
        return returned
    entries = dict(_entries(returned))
    return entries.get("loss", next(iter(entries.values()))) if entries else returned


def _scalars(value: Any, loss: Any, path: tuple[str, ...] = (), depth: int = 2) -> Iterator[tuple[str, Tensor]]:
    """Yield all other scalars in it, without their graphs, by name: "ce" for `(loss, {"ce": ...})`, "1" for `(loss,
    ce)`."""
    if value is loss and depth:  # deeper it is a part, too: `loss, {"ce": loss}`
        return
    if is_number(value):
        value = torch.tensor(value, dtype=torch.float64)
    if isinstance(value, Tensor):
        if not value.dim() and not value.is_complex():
            value = value.detach().clone()
            yield ".".join(path), value if value.is_floating_point() else value.double()
    elif depth:
        for key, part in _entries(value):
            yield from _scalars(part, loss, (*(p for p in path if not p.isdecimal()), key), depth - 1)


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a container, and the fields of an object, by name."""
    if isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, (tuple, list)):
        yield from zip(getattr(value, "_fields", map(str, range(len(value)))), value, strict=True)
    else:
        yield from getattr(value, "__dict__", {}).items()
