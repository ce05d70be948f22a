"""Whether a batch is the sum of its microbatches, and if not, why.

A pipeline's loss is made of its microbatches' losses. That equals the batch's loss only if rows do not depend on each
other and the loss is a mean over them. Both are tested here on the unsplit model, with the whole batch at once: in
double precision, so that what remains is not rounding, and in evaluation, without batch norm's statistics and dropout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from penstock._base.errors import ArgumentError
from penstock._base.marks import NOW, computing
from penstock._base.trees import flatten, leaf_tensors, map_tensors, unflatten
from penstock._base.words import shortened
from penstock.partition.state.reach import Reach
from penstock.partition.units.chain import default_kwargs
from penstock.pipe.pipeline import Pipeline
from penstock.runtime.batch.batch_dims import Dims, Microbatches
from penstock.runtime.batch.cutting import Cutting, Microbatch
from penstock.runtime.batch.microbatches import split
from penstock.runtime.loss.functions import Loss, padding_advice, reduction_advice
from penstock.runtime.loss.loss import Reduction, extract_loss, model_loss, no_loss_error, weighted_sum, weights
from penstock.runtime.model.state_dicts import evaluating
from penstock.verification.comparison import FullBatchCheck

_WHOLE = Dims("batch", (("", None),))

_TOGETHER = (
    "keep those that belong together next to each other in the batch, so that a microbatch has all of them, pass them "
    "as two inputs that are cut alike (chosen and rejected), or cut the batch yourself with split_fn="
)
"""What to do about samples that a loss or a model compares."""


FLOATS = {torch.float64, torch.float32}


@dataclass(frozen=True, slots=True)
class _Ran:
    """The results of some microbatches: their losses make `loss`."""

    loss: float
    dtype: torch.dtype
    largest: float
    outputs: list[Any]

    @property
    def rounding(self) -> float:
        """What rounding may change of a double loss, or of one that casts: `logits.float()` in transformers."""
        return 1e-6 if self.dtype is torch.float32 else 1e-7

    def is_close(self, other: _Ran) -> bool:
        """Whether two losses differ by no more than rounding, over the largest microbatch's."""
        dtypes = {leaf.dtype for leaf in leaf_tensors(other.outputs) if leaf.is_floating_point()}
        tolerance = self.rounding if dtypes <= {torch.float64} else 2e-5 if dtypes <= FLOATS else 2e-2
        return abs(self.loss - other.loss) <= tolerance * max(self.largest, other.largest)


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """One replica's batch, uncut and in the pieces that `cutting` made of it, and the unsplit model in `alone`."""

    alone: Pipeline
    batch: Microbatch
    cutting: Cutting
    pieces: Sequence[Microbatch]
    loss: Loss | None
    reduction: Reduction

    def compare(self) -> FullBatchCheck | None:
        """Return the verdict; None if there is no whole batch besides its pieces."""
        leaves = flatten((self.batch.args, dict(self.batch.kwargs), self.batch.target)).leaves
        if len(self.pieces) < 2 or any(isinstance(leaf, Microbatches) for leaf in leaves):
            return None
        with suppress(Exception), _widened(self.alone.model):  # float32 may be written into its code
            return self._compare()
        try:
            return self._compare()
        except Exception as error:  # from the user's code: some models take no more than a microbatch
            told = f"the model raised on the whole batch ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
            if self.cutting.split is not None:
                told = (
                    "the model takes what split_fn= makes of a batch, so that there is no whole batch to compare with"
                )
            return FullBatchCheck(math.nan, math.nan, "missing", told)

    def _compare(self) -> FullBatchCheck:
        model, session = self.alone.model, self.alone.session
        whole, parts = self._run([self.batch]), self._run(self.pieces)
        losses = parts.loss, whole.loss
        if not any(map(math.isfinite, losses)):
            return FullBatchCheck(*losses, "explained", "what is not finite cannot be compared")
        if parts.is_close(whole):
            return FullBatchCheck(*losses, "close")
        norms = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]
        drawing = list(session.drawing_modules)
        known = [
            *([f"batch norm ({shortened(norms)}) takes its statistics from the rows that it sees"] if norms else []),
            *([f"random numbers ({shortened(drawing)}) are drawn for each microbatch"] if drawing else []),
        ] or ["something in the model that acts in training alone, and looks at several rows"]
        reach = Reach(model)
        try:
            with evaluating(session.split, self.loss):
                whole, parts = self._run([self.batch]), self._run(self.pieces)
                if parts.is_close(whole):
                    return FullBatchCheck(*losses, "explained", "; ".join(known))
                if self._run([self.batch], stream=1).loss != whole.loss:
                    kept = reach.names_changed()
                    changes = kept and f"the forward changes what it keeps from call to call: {shortened(kept)}"
                    drawn = "the model draws random numbers, which cannot be switched off"
                    return FullBatchCheck(*losses, "explained", changes or drawn)
                return FullBatchCheck(*losses, *self._cause(parts, whole))  # type: ignore[arg-type]
        except Exception as error:  # from the user's code: models may return something else in evaluation
            why = f"the cause could not be found, since evaluation mode raises {type(error).__name__}: {error}"
            return FullBatchCheck(*losses, "warning", why)

    def _cause(self, parts: _Ran, whole: _Ran) -> tuple[str, str]:
        """Return the verdict where nothing is left to chance."""
        depend, each = self._rows_depend(parts.outputs, whole.outputs[0]), [math.nan]
        for piece in self.pieces:
            with suppress(ArgumentError):  # no target counts in it
                each.append(self._run([piece]).loss)
        each = [*filter(math.isfinite, each)] or each
        if not depend and self.reduction == "mean" and abs(sum(each) - whole.loss) <= 1e-6 * abs(whole.loss):
            return "warning", "the loss is a sum over rows; pass reduction='sum'"
        least, most = 1 - whole.rounding, 1 + whole.rounding
        beyond = not min(each) * least <= whole.loss <= max(each) * most  # no weights make it of theirs
        compares = "in the loss samples depend on each other (pairs, a contrastive loss), and each has only its own"
        if depend is False and beyond:
            return "warning", f"the outputs agree, but {compares}: {_TOGETHER}"
        if depend is False:
            targets, sizes = [piece.target for piece in self.pieces], [piece.rows or 1 for piece in self.pieces]
            advised = reduction_advice(self.loss, self.reduction) or padding_advice(self.loss, targets, sizes)
            return "warning", (
                "the outputs agree, so that the loss is not a mean over rows: it weights them (masked targets, weights "
                "of classes), and gradients are those of the microbatches' losses; "
                + (advised or f"pass reduction= what gives the weight of a microbatch. Or {compares}: {_TOGETHER}")
            )
        if self.cutting.inputs.stated or self.cutting.split is not None:
            return (
                "warning",
                f"rows of the batch depend on each other, as batch_dims= or split_fn= cuts it: {_TOGETHER}",
            )
        kinds, named = (nn.RNNBase, nn.MultiheadAttention), self.alone.model.named_modules()
        first = [
            f"{type(m).__name__} {n}: batch_first=False" for n, m in named if isinstance(m, kinds) and not m.batch_first
        ]
        if (along := self._is_along_another(whole)) or (depend and first):
            return "different", (
                f"rows along dimension 0 depend on each other{', and along dimension 1 they do not' if along else ''}: "
                "the batch is in dimension 1; pass batch_dims=1, or what holds for each input, target and output"
                f"{f' ({shortened(first)})' if first else ''}. If that is meant, pass full_batch=False"
            )
        weighted = "" if beyond or depend else ", or the loss weights them (see reduction=)"
        asks = "Is the batch in dimension 1? Then pass batch_dims=1. Or are samples compared? Then"
        return "warning", f"rows of the batch depend on each other{weighted}. {asks} {_TOGETHER}"

    def _rows_depend(self, parts: Sequence[Any], whole: Any) -> bool | None:
        """Whether outputs of microbatches differ from the whole's rows; None if that cannot be determined."""
        flat, merge, pairs = flatten(whole), self.cutting.merge, list[tuple[Tensor, Tensor]]()
        with suppress(Exception):  # from the user's merge, or because outputs are not alike
            merged = leaf_tensors(merge(list(parts))) if merge is not None else []
            columns = zip(*(flatten(part).leaves for part in parts), strict=True)
            for index, (leaf, path, column) in enumerate(zip(flat.leaves, flat.paths, columns, strict=True)):
                dim = self.cutting.output.get(path)
                if isinstance(leaf, Tensor) and leaf.dim() and isinstance(dim, int):
                    pairs.append((merged[index] if merge is not None else torch.cat(column, dim), leaf))
        pairs = [(mine.double(), other.double()) for mine, other in pairs if mine.shape == other.shape]
        if not pairs:
            return None
        small = [1e-6 if other.dtype == torch.float64 else 1e-3 for _, other in pairs]
        return any((m - o).abs().max() > s * o.abs().max() for (m, o), s in zip(pairs, small, strict=True) if o.numel())

    def _is_along_another(self, whole: _Ran) -> bool:
        """Whether two halves along dimension 1 make what the whole batch does."""
        flat = flatten((self.batch.args, dict(self.batch.kwargs), self.batch.target))
        rows = next((leaf.shape[1] for leaf in flat.leaves if isinstance(leaf, Tensor) and leaf.dim() > 1), 0)
        sizes = [rows - rows // 2, rows // 2]

        def half(index: int) -> Microbatch:
            def cut(leaf: Any) -> Any:
                dims = [d for d in (1, 0) if isinstance(leaf, Tensor) and leaf.dim() > d and leaf.shape[d] == rows]
                return torch.split(leaf, sizes, dims[0])[index] if dims else leaf

            return Microbatch._make((*unflatten([*map(cut, flat.leaves)], flat.structure), sizes[index]))

        with suppress(Exception):  # the model or its loss does not allow it: then nothing is known
            return rows > 1 and self._run([half(0), half(1)]).is_close(whole)
        return False

    def _run(self, pieces: Sequence[Microbatch], *, stream: int = 0) -> _Ran:
        """Forward and loss of each piece, all from the same buffers, which are left as they were."""
        alone, loss, outputs, losses = self.alone, self.loss, list[Any](), list[Tensor]()
        before = [(buffer, buffer.detach().clone()) for buffer in alone.model.buffers() if not buffer.is_meta]
        is_wide = all(p.dtype == torch.float64 for p in alone.model.parameters() if p.is_floating_point())
        pieces = [_owned(piece, alone.device, is_wide) for piece in pieces]
        wanted = [piece.kwargs.get("labels") if loss is None else piece.target for piece in pieces]
        weighted = weights(self.reduction, [piece.rows or 1 for piece in pieces], wanted)
        with alone.session.drawing() as streams, computing(0, 0):
            for k, (args, kwargs, target, _) in enumerate(pieces):
                NOW.microbatch = k
                streams.begin(stream + k, {})
                output = alone.model(*args, **{**kwargs, **default_kwargs(alone.model, args, dict(kwargs))})
                streams.begin_loss(stream + k)
                value = model_loss(output) if loss is None else extract_loss(loss(output, target))
                if value is None:
                    raise no_loss_error(output)
                losses.append(value.detach().reshape(()))
                outputs.append(map_tensors(Tensor.detach, output))
                with torch.no_grad():
                    for buffer, was in before:
                        buffer.copy_(was)
        total = weighted_sum(losses, weighted)
        assert total is not None
        counted = [abs(float(loss)) for loss, weight in zip(losses, weighted, strict=True) if weight]
        return _Ran(float(total), losses[0].dtype, max(counted), outputs)


@contextmanager
def _widened(model: nn.Module) -> Iterator[None]:
    """Convert a model to double precision, and back."""
    parameters = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = [(module, dict(module.named_buffers(recurse=False))) for module in model.modules()]
    model.zero_grad()
    model.double()
    try:
        yield
    finally:
        for parameter, data in parameters:
            parameter.data = data
        for module, named in buffers:
            for name, buffer in named.items():
                setattr(module, name, buffer)


def _owned(piece: Microbatch, device: torch.device, is_wide: bool) -> Microbatch:
    """Return the same in memory of its own, and in double precision if the model is."""
    tree: Any = (piece.args, dict(piece.kwargs), piece.target)
    tree = map_tensors(lambda x: x.double() if is_wide and x.is_floating_point() else x, tree)
    return Microbatch._make((*split(tree, (1,), "batch", device, _WHOLE)[0], piece.rows))
