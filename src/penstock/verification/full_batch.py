"""Checks whether a batch is the sum of its microbatches, and finds the reason if not.

A pipeline's loss is made of its microbatches' losses. That equals the batch's loss only if rows do not depend on each
other and the loss is a mean over them. Both are tested here on the unsplit model, with the whole batch at once: in
double precision, so that what remains is not rounding, and in evaluation, without batch norm's statistics and dropout.
A small term of the loss hardly shows in it, but does in gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from penstock._base.errors import ArgumentError
from penstock._base.formatting import list_names
from penstock._base.marks import NOW, computing
from penstock._base.pytree import flatten, leaf_tensors, map_tensors, unflatten
from penstock.partition.given_model import default_kwargs
from penstock.partition.state.reachable import Reach
from penstock.pipe.pipeline import Pipeline
from penstock.runtime.batch.batch_dims import Microbatches
from penstock.runtime.batch.cut import UNCUT, Cutting, Microbatch, cut_by_sizes, move_to
from penstock.runtime.exact.rules import outside_autocast
from penstock.runtime.loss.functions import Loss, padding_advice, reduction_advice
from penstock.runtime.loss.loss import Reduction, backward_root, checked_value, model_loss, weighted_sum, weights
from penstock.runtime.model.state_dicts import evaluating
from penstock.verification.comparison import FullBatchCheck, compare

_REMEDY = (
    "keep those that belong together next to each other in the batch, so that a microbatch has all of them, pass them "
    "as two inputs that are cut alike (chosen and rejected), or cut the batch yourself with split_fn="
)
"""The remedy for samples that a loss or a model compares."""

_SUM = "the loss is a sum over rows; pass reduction='sum'"

_TERM = (
    "a term of the loss looks at all rows of a microbatch (the load-balancing loss of a router): fewer, larger "
    "microbatches come closer to the whole batch"
)


@dataclass(frozen=True, slots=True)
class _Results:
    """The results of some microbatches: their losses make `loss`, and gradients are those of that."""

    loss: float
    dtype: torch.dtype
    largest: float
    outputs: list[Any]
    gradients: dict[str, Tensor]

    @property
    def tolerance(self) -> float:
        """Largest relative difference that is rounding: in double precision, or in a loss that casts (`logits.float()`
        in transformers), or in narrower outputs."""
        narrow = {leaf.dtype for leaf in leaf_tensors(self.outputs) if leaf.is_floating_point()} - {torch.float64}
        in_double = 1e-6 if self.dtype is torch.float32 else 1e-7
        return 2e-2 if narrow - {torch.float32} else 2e-5 if narrow else in_double

    def is_close(self, whole: _Results) -> bool:
        """Whether two losses differ by no more than rounding, over the largest microbatch's."""
        return abs(self.loss - whole.loss) <= whole.tolerance * max(self.largest, whole.largest)

    def worst_gradient(self, whole: _Results) -> tuple[str, int]:
        """Name the gradient that differs most from the whole batch's, and by how much, and count those that agree;
        empty and 0 if all are close.

        Rounding is judged by the largest gradient, too: some are zero in theory, as that of an attention's key bias.
        A difference of less than 1e-5 may be rounding where code casts to float32 within, and changes no training.
        """
        rows = [compare("gradient", n, (), self.gradients[n], grad, exact=True) for n, grad in whole.gradients.items()]
        largest, tolerance = max((row.max_reference for row in rows), default=0.0), max(1e-5, whole.tolerance)
        far = [row for row in rows if row.max_difference > tolerance * (largest + 10 * row.max_reference)]
        if not far:
            return "", 0
        worst = min(far, key=lambda row: row.max_reference / row.max_difference)
        limit = min(tolerance, 0.01 * worst.max_difference / (worst.max_reference or 1.0))
        sized = [row for row in rows if row.max_reference > tolerance * largest]
        return (
            f"the gradient of {worst.name!r} differs most, by {worst.max_difference:.3g} (largest entry of the whole "
            f"batch's: {worst.max_reference:.3g})"
        ), sum(row.max_difference <= limit * row.max_reference for row in sized)


@dataclass(frozen=True, slots=True, eq=False)
class FullBatch:
    """One replica's batch, uncut and in the pieces of `cutting`, and the unsplit model as the pipeline `single`."""

    single: Pipeline
    batch: Microbatch
    cutting: Cutting
    pieces: Sequence[Microbatch]
    loss: Loss | None
    reduction: Reduction

    def compare(self) -> FullBatchCheck | None:
        """Return the verdict; None if the batch has a single piece, or is given in pieces."""
        leaves = flatten((self.batch.args, dict(self.batch.kwargs), self.batch.target)).leaves
        if len(self.pieces) < 2 or any(isinstance(leaf, Microbatches) for leaf in leaves):
            return None
        with suppress(Exception), _in_double_precision(self.single.model):  # float32 may be written into its code
            return self._compare()
        try:
            return self._compare()
        except Exception as error:  # from the user's code: some models take no more than a microbatch
            text = f"the model raised on the whole batch ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
            if self.cutting.split is not None:
                text = "the model takes what split_fn= makes of a batch, so there is no whole batch to compare with"
            return FullBatchCheck(math.nan, math.nan, "missing", text)

    def _compare(self) -> FullBatchCheck:
        model, session = self.single.model, self.single.session
        full, parts = self._run([self.batch], trains=True), self._run(self.pieces, trains=True)
        losses = parts.loss, full.loss
        if not any(map(math.isfinite, losses)):
            return FullBatchCheck(*losses, "explained", "what is not finite cannot be compared")
        is_close, (worst_gradient, num_alike) = parts.is_close(full), parts.worst_gradient(full)
        if is_close and not worst_gradient:
            return FullBatchCheck(*losses, "close")
        check = partial(FullBatchCheck, *losses, gradient=worst_gradient)
        norms = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]
        partitions = session.model_parts.partitions(training=True)
        drawing = [n for n in session.drawing_modules if all(n not in part.may_draw for part in partitions)]
        causes = [
            *([f"batch norm ({list_names(norms)}) takes its statistics from the rows that it sees"] if norms else []),
            *([f"random numbers ({list_names(drawing)}) are drawn for each microbatch"] if drawing else []),
        ] or ["something in the model that acts in training alone, and looks at several rows"]
        reach = Reach(model)
        del full, parts  # and their gradients
        try:
            with evaluating(session.model_parts, self.loss):
                full, parts = self._run([self.batch], trains=is_close), self._run(self.pieces, trains=is_close)
                if parts.is_close(full) and not parts.worst_gradient(full)[0]:
                    return check("explained", "; ".join(causes))
                if self._run([self.batch], stream=1).loss != full.loss:
                    excess = sum(self._run([piece]).loss for piece in self.pieces) - full.loss
                    if self.reduction == "mean" and abs(excess) < 0.1 * abs(parts.loss - full.loss):
                        return check("warning", _SUM)
                    changed = reach.names_changed()
                    reason = changed and f"the forward changes what it keeps from call to call: {list_names(changed)}"
                    random_reason = "the model draws random numbers, which cannot be switched off"
                    return check("explained", reason or random_reason)
                return check(*self._find_cause(parts, full, num_alike))  # type: ignore[arg-type]
        except Exception as error:  # from the user's code: models may return something else in evaluation
            cause = f"the cause could not be found, since evaluation mode raises {type(error).__name__}: {error}"
            return check("warning", cause)

    def _find_cause(self, parts: _Results, full: _Results, num_alike: int) -> tuple[str, str]:
        """Return the verdict of a model that is deterministic. `num_alike`: how many gradients agree in training."""
        rows_depend, losses = self._depends_on_other_rows(parts.outputs, full.outputs[0]), [math.nan]
        if not rows_depend and parts.is_close(full):
            return "warning", f"{_TERM}; gradients are those of the microbatches' losses"
        for piece in self.pieces:
            with suppress(ArgumentError):  # no target counts in it
                losses.append(self._run([piece]).loss)
        losses = [*filter(math.isfinite, losses)] or losses
        if not rows_depend and self.reduction == "mean" and abs(sum(losses) - full.loss) <= 1e-6 * abs(full.loss):
            return "warning", _SUM
        low, high = 1 - full.tolerance, 1 + full.tolerance
        is_outside = not min(losses) * low <= full.loss <= max(losses) * high  # no weights make it of theirs
        pairing = "in the loss samples depend on each other (pairs, a contrastive loss), and each has only its own"
        if rows_depend is False and is_outside:
            return "warning", f"the outputs agree, but {pairing}: {_REMEDY}"
        if rows_depend is False:
            targets, sizes = [piece.target for piece in self.pieces], [piece.rows or 1 for piece in self.pieces]
            hint = reduction_advice(self.loss, self.reduction)
            if self.reduction == "mean":
                hint = hint or padding_advice(self.loss, targets, sizes, self.single.model, self.batch.kwargs)
            text = "the outputs agree, so that the loss is not a mean over rows, and gradients are those of the "
            text += "microbatches' losses: " if hint else f"microbatches' losses ({num_alike} agree): "
            weighing = "it weights them (masked targets, weights of classes)"
            if hint:
                return "warning", f"{text}{weighing}; {hint}"
            if num_alike or self.loss is None:  # weights of rows would change all; labels were counted
                return "warning", f"{text}perhaps {_TERM}. Or {weighing}. Or {pairing}: {_REMEDY}"
            weighing += ": pass reduction= what gives a microbatch's weight"
            return "warning", f"{text}perhaps {weighing}. Or {_TERM}. Or {pairing}: {_REMEDY}"
        if self.cutting.inputs.stated or self.cutting.split is not None:
            text = "rows of the batch depend on each other, as batch_dims= or split_fn= cuts it"
            return "warning", f"{text}: {_REMEDY}"
        if dim1 := self._is_batch_in_dim1(full):
            return "different", (
                "rows along dimension 0 depend on each other, and along dimension 1 they do not: the batch is in "
                "dimension 1; pass batch_dims=1, or what holds for each input, target and output. If that is meant, "
                "pass full_batch=False"
            )
        reason = "" if is_outside or rows_depend else ", or the loss weights them (see reduction=)"
        asks = "Is the batch in dimension 1? Then pass batch_dims=1. Or are" if dim1 is None else "Are"
        return "warning", f"rows of the batch depend on each other{reason}. {asks} samples compared? Then {_REMEDY}"

    def _depends_on_other_rows(self, parts: Sequence[Any], full: Any) -> bool | None:
        """Whether outputs of microbatches differ from those of the full batch; None if that cannot be determined."""
        flat, merge, pairs = flatten(full), self.cutting.merge, list[tuple[Tensor, Tensor]]()
        with suppress(Exception):  # from the user's merge, or because outputs are not alike
            merged = leaf_tensors(merge(list(parts))) if merge is not None else []
            columns = zip(*(flatten(part).leaves for part in parts), strict=True)
            for index, (leaf, path, column) in enumerate(zip(flat.leaves, flat.paths, columns, strict=True)):
                dim = self.cutting.output.get(path)
                if isinstance(leaf, Tensor) and leaf.dim() and isinstance(dim, int):
                    pairs.append((merged[index] if merge is not None else torch.cat(column, dim), leaf))
        alike = [(a, b, 1e-6 if b.dtype == torch.float64 else 1e-3) for a, b in pairs if a.shape == b.shape]
        far = ((a.double() - b).abs().max() > t * b.double().abs().max() for a, b, t in alike if b.numel())
        return any(far) if alike else None

    def _is_batch_in_dim1(self, full: _Results) -> bool | None:
        """Whether two halves along dimension 1 reproduce the full batch, or, as the loss may weight rows, its outputs;
        None if they cannot be computed."""
        flat = flatten((self.batch.args, dict(self.batch.kwargs), self.batch.target))
        rows = next((leaf.shape[1] for leaf in flat.leaves if isinstance(leaf, Tensor) and leaf.dim() > 1), 0)
        sizes = [rows - rows // 2, rows // 2]

        def half(index: int) -> Microbatch:
            def cut(leaf: Any) -> Any:
                dims = [d for d in (1, 0) if isinstance(leaf, Tensor) and leaf.dim() > d and leaf.shape[d] == rows]
                return torch.split(leaf, sizes, dims[0])[index] if dims else leaf

            return Microbatch._make((*unflatten([*map(cut, flat.leaves)], flat.structure), sizes[index]))

        if rows < 2:
            return False
        with suppress(Exception):  # the model or its loss does not allow it: then nothing is known
            parts = self._run([half(0), half(1)])
            columns = [*zip(*map(leaf_tensors, (*parts.outputs, full.outputs[0])), strict=True)]
            alike = (torch.allclose(torch.cat(halves, 1), whole, 1e-3, 1e-5) for *halves, whole in columns)
            return parts.is_close(full) or (bool(columns) and all(alike))
        return None

    def _run(self, pieces: Sequence[Microbatch], *, stream: int = 0, trains: bool = False) -> _Results:
        """Compute forward, loss and, if it `trains`, backward of each piece, all from the same buffers, which are
        restored."""
        single, loss, outputs, losses = self.single, self.loss, list[Any](), list[Tensor]()
        buffers = [(buffer, buffer.detach().clone()) for buffer in single.model.buffers() if not buffer.is_meta]
        is_wide = all(p.dtype == torch.float64 for p in single.model.parameters() if p.is_floating_point())
        pieces = [_copy_microbatch(piece, single.device, is_wide) for piece in pieces]
        trained = {name: p for name, p in single.named_parameters() if p.requires_grad and trains}
        for parameter in trained.values():
            parameter.grad = None
        targets = [piece.kwargs.get("labels") if loss is None else piece.target for piece in pieces]
        loss_weights = weights(self.reduction, [piece.rows or 1 for piece in pieces], targets)
        with single.session.drawing() as streams, computing(0, 0):
            for k, (args, kwargs, target, _) in enumerate(pieces):
                NOW.microbatch = k
                streams.begin(stream + k, {})
                output = single.model(*args, **{**kwargs, **default_kwargs(single.model, args, dict(kwargs))})
                streams.begin_loss(stream + k)
                loss_value = checked_value(model_loss(output) if loss is None else loss(output, target), output, loss)
                losses.append(loss_value.detach().reshape(()))
                root = backward_root(loss_value, loss_weights[k], leaf_tensors(output))
                outputs.append(map_tensors(Tensor.detach, output))
                if trained and root.requires_grad:
                    streams.begin(stream + k, {}, is_rerun=True)
                    with outside_autocast(root.device.type):
                        root.backward(torch.full_like(root, loss_weights[k]))  # type: ignore[no-untyped-call]
                with torch.no_grad():
                    for buffer, saved in buffers:
                        buffer.copy_(saved)
        total = weighted_sum(losses, loss_weights)
        assert total is not None
        sizes = [abs(float(loss)) for loss, weight in zip(losses, loss_weights, strict=True) if weight]
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}
        return _Results(float(total), losses[0].dtype, max(sizes), outputs, gradients)


@contextmanager
def _in_double_precision(model: nn.Module) -> Iterator[None]:
    """Convert a model to double precision, and back."""
    parameters = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = [(module, dict(module.named_buffers(recurse=False))) for module in model.modules()]
    model.zero_grad()
    model.double()
    try:
        yield
    finally:
        for parameter, data in parameters:
            parameter.data, parameter.grad = data, None
        for module, named in buffers:
            for name, buffer in named.items():
                setattr(module, name, buffer)


def _copy_microbatch(piece: Microbatch, device: torch.device, is_wide: bool) -> Microbatch:
    """Copy a microbatch, in double precision if the model is."""
    tree: Any = (piece.args, dict(piece.kwargs), piece.target)
    tree = map_tensors(lambda x: x.double() if is_wide and x.is_floating_point() else x, tree)
    return Microbatch._make((*move_to(cut_by_sizes(tree, (1,), "batch", UNCUT)[0], device), piece.rows))
