"""Whether the microbatches of a batch make what the whole batch does, and if not, why.

A pipeline's loss is made of its microbatches' losses. That equals the batch's loss only if rows do not depend on each
other and the loss is a mean over them. Both are tested here on the unsplit model: with the whole batch at once, then
with batch norm and dropout off and in double precision, so that what remains is not rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.errors import ArgumentError
from penstock.marks import NOW, computing
from penstock.partition.state.reach import Reach
from penstock.pipe.pipeline import Pipeline
from penstock.proof.comparison import WholeBatch
from penstock.runtime.batch.batch_dims import Dims
from penstock.runtime.batch.cutting import Cutting, Microbatch
from penstock.runtime.batch.microbatches import Microbatches, split
from penstock.runtime.loss.loss import Loss, Reduction, no_loss, own_loss, weighted_sum, weights
from penstock.runtime.loss.of_torch import advice, padding
from penstock.runtime.loss.parts import loss_in
from penstock.trees import flatten, leaf_tensors, map_tensors, unflatten
from penstock.words import shortened

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5}
"""How much losses may differ through rounding, over the largest of them; 2e-2 in half precision."""

_QUIET_TOLERANCE = 1e-7
"""The same in double precision, with nothing random: a larger difference is not rounding."""

_WHOLE = Dims("batch", (("", None),))

_UNLESS = "If that is meant, pass whole_batch=False"

_TOGETHER = (
    "keep those that belong together next to each other in the batch, so that a microbatch has all of them, pass them "
    "as two inputs that are cut alike (chosen and rejected), or cut the batch yourself with split="
)
"""What to do about samples that a loss or a model compares."""


@dataclass(frozen=True, slots=True)
class _Ran:
    """The results of some microbatches: their losses make `loss`."""

    loss: float
    largest: float
    outputs: list[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """One replica's batch and the unsplit model.

    Attributes:
        alone: a pipeline of one rank; its model's values are changed.
        batch: the whole batch, uncut.
        cutting: how the microbatches came about.
        pieces: the microbatches.
    """

    alone: Pipeline
    batch: Microbatch
    cutting: Cutting
    pieces: Sequence[Microbatch]
    loss: Loss | None
    reduction: Reduction

    def compare(self) -> WholeBatch | None:
        """The verdict; None if there is no whole batch besides its pieces."""
        leaves = flatten((self.batch.args, dict(self.batch.kwargs), self.batch.target)).leaves
        if len(self.pieces) < 2 or any(isinstance(leaf, Microbatches) for leaf in leaves):
            return None
        try:
            whole = self._run([self.batch])
        except Exception as error:  # from the user's code: some models take no more than a microbatch
            told = f"the model raised on the whole batch ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
            if self.cutting.split is not None:
                told = "the model takes what split= makes of a batch, so that there is no whole batch to compare with"
            return WholeBatch(float("nan"), float("nan"), "missing", told)
        parts = self._run(self.pieces)
        if not math.isfinite(parts.loss) and not math.isfinite(whole.loss):
            return WholeBatch(parts.loss, whole.loss, "explained", "what is not finite cannot be compared")
        if _close(parts, whole, self._tolerance):
            return WholeBatch(parts.loss, whole.loss, "close")
        try:
            verdict, why = self._explain()
        except Exception as error:  # from the user's code, called in a way that it did not expect
            verdict, why = "warning", f"the cause could not be found ({type(error).__name__}: {error})"
        return WholeBatch(parts.loss, whole.loss, verdict, why)  # type: ignore[arg-type]

    @property
    def _tolerance(self) -> float:
        return _TOLERANCES.get(next((p.dtype for _, p in self.alone.session.all_parameters()), torch.float32), 2e-2)

    def _explain(self) -> tuple[str, str]:
        model, drawing = self.alone.model, self.alone.session.drawing_modules
        updated = [name for stage in self.alone.stages for name in stage.updated]
        norms = {n: m for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training}
        glue = list(model.modules()) if self.alone.session.draws_in_glue else []
        with _off([*drawing.values(), *norms.values(), *glue]):
            wide = self._widened()
            tolerance = _QUIET_TOLERANCE if wide else 10 * self._tolerance
            run = partial(self._run, wide=wide)
            parts, whole = run(self.pieces), run([self.batch])
            if _close(parts, whole, tolerance):
                return self._meant(norms, drawing, updated)
            reach = Reach(model)
            if run([self.batch]).loss != whole.loss and (kept := reach.names_changed()):
                return "explained", f"the forward changes what it keeps from call to call: {shortened(kept)}"
            if run([self.batch], stream=1).loss != whole.loss:
                return "explained", "the model draws random numbers, which cannot be switched off"
            depend = self._rows_depend(parts.outputs, whole.outputs[0])
            losses = self._losses(run)
            slack = tolerance * whole.largest
            is_sum = self.reduction == "mean" and abs(sum(losses) - whole.loss) <= 1e-6 * abs(whole.loss)
            if is_sum and not depend:
                return "warning", "the loss is a sum over rows; pass reduction='sum'"
            beyond = not min(losses) - slack <= whole.loss <= max(losses) + slack
            if depend is False:
                return "warning", self._no_mean(whole, beyond=beyond, wide=wide)
            elsewhere = self._along_another(run, whole, tolerance)
            if elsewhere:
                return "different", elsewhere
            if self._agree_in_evaluation(run, tolerance):
                return "explained", "something in the model that acts in training alone, and looks at several rows"
        if depend is None:
            return "warning", (
                "rows of the batch depend on each other (is the batch in dimension 1? see batch_dims=; if pairs of "
                f"them are compared, {_TOGETHER})" + ("" if beyond else ", or the loss weights them (see reduction=)")
            )
        if self.cutting.inputs.stated or self.cutting.split is not None:
            return "warning", f"rows of the batch depend on each other, as batch_dims= or split= cuts it: {_TOGETHER}"
        sequence_first = self._sequence_first()
        return "different" if sequence_first else "warning", (
            "rows of the batch depend on each other. Is the batch in dimension 1? Then pass batch_dims=1"
            + (f"{sequence_first}. {_UNLESS}" if sequence_first else f". Or does it compare samples? Then {_TOGETHER}")
        )

    def _meant(
        self, norms: Mapping[str, nn.Module], drawing: Mapping[str, nn.Module], updated: Sequence[str]
    ) -> tuple[str, str]:
        """The verdict if microbatches do what the batch does once all of this is off."""
        found = [
            *([f"batch norm ({_listed(norms)}) takes its statistics from the rows that it sees"] if norms else []),
            *([f"random numbers ({_listed(drawing)}) are drawn for each microbatch"] if drawing else []),
        ]
        if not found and updated:
            found = [f"the forward updates buffers ({_listed(updated)}) from microbatch to microbatch"]
        return ("explained", "; ".join(found)) if found else ("close", "")

    def _rows_depend(self, parts: Sequence[Any], whole: Any) -> bool | None:
        """Whether outputs of microbatches differ from the whole's rows; None if that cannot be determined."""
        try:
            if self.cutting.merge is not None:
                pairs = list(zip(leaf_tensors(self.cutting.merge(list(parts))), leaf_tensors(whole), strict=True))
            else:
                pairs = list(self._joined(parts, whole))
        except Exception:  # from the user's merge, or because outputs are not alike
            return None
        pairs = [(mine, other) for mine, other in pairs if mine.shape == other.shape and other.dim()]
        return any(not _same(mine, other) for mine, other in pairs) if pairs else None

    def _joined(self, parts: Sequence[Any], whole: Any) -> Iterator[tuple[Tensor, Tensor]]:
        flats, flat = [flatten(part) for part in parts], flatten(whole)
        columns = zip(*(one.leaves for one in flats), strict=True)
        for column, leaf, path in zip(columns, flat.leaves, flat.paths, strict=True):
            dim = self.cutting.output.of(path)
            if isinstance(leaf, Tensor) and isinstance(dim, int) and -leaf.dim() <= dim < leaf.dim():
                sizes = [part.shape[dim] for part in column]
                if sum(sizes) == leaf.shape[dim]:
                    yield torch.cat(list(column), dim), leaf

    def _losses(self, run: Any) -> list[float]:
        """Those of the microbatches, each by itself, but not of ones in which no target counts."""
        found = [math.nan]
        for piece in self.pieces:
            with suppress(ArgumentError):
                found.append(run([piece]).loss)
        return [*filter(math.isfinite, found)] or found

    def _no_mean(self, whole: _Ran, *, beyond: bool, wide: bool) -> str:
        """Why losses do not make that of the batch. `beyond`: no weights make it of them, as for CLIP, whose loss grows
        with the number of samples."""
        if beyond or self._loss_compares(whole.outputs[0], wide=wide):
            return (
                "the outputs agree, but in the loss samples depend on each other (pairs, a contrastive loss), and each "
                f"microbatch has only its own: {_TOGETHER}"
            )
        advised = padding(self.loss, [piece.target for piece in self.pieces], [p.rows or 1 for p in self.pieces])
        return (
            "the outputs agree, so that the loss is not a mean over rows: it weights them (masked targets, weights of "
            "classes), and gradients are those of the microbatches' losses; "
            f"{advice(self.loss, self.reduction) or advised or 'pass reduction= what gives the weight of a microbatch'}"
        )

    def _loss_compares(self, output: Any, *, wide: bool) -> bool:
        """Whether a sample's gradient depends on other samples' outputs. For this, half of them are mixed with their
        neighbors': one of each pair next to each other, and of some pair in two halves. False if that cannot be
        determined.
        """
        flat, target = flatten(output), _owned(_wide(self.batch) if wide else self.batch, self.alone.device).target
        floats = {i for i, x in enumerate(flat.leaves) if isinstance(x, Tensor) and x.is_floating_point() and x.dim()}
        dims = {i: dim for i in floats if isinstance(dim := self.cutting.output.of(flat.paths[i]), int)}
        odd = {i: [k.bit_count() % 2 == 1 for k in range(flat.leaves[i].shape[dim])] for i, dim in dims.items()}

        def gradients(*, mixed: bool) -> list[Tensor]:
            """Those of the samples that are never mixed."""
            leaves = list(flat.leaves)
            for i, dim in dims.items():
                rows = leaves[i].movedim(dim, 0).clone()
                if mixed:
                    rows[odd[i]] = (rows + rows.roll(1, 0))[odd[i]] / 2
                leaves[i] = rows.movedim(0, dim).requires_grad_()
            with torch.enable_grad(), self.alone.session.drawing() as streams:
                streams.begin_loss(0)
                value = loss_in(self.loss(unflatten(leaves, flat.structure), target))  # type: ignore[misc]
                found = torch.autograd.grad(value, [leaves[i] for i in dims], materialize_grads=True)
            return [g.movedim(dim, 0)[~torch.tensor(odd[i])] for g, (i, dim) in zip(found, dims.items(), strict=True)]

        try:
            return not all(map(_same, gradients(mixed=False), gradients(mixed=True)))
        except Exception:  # from the user's loss, or there is none
            return False

    def _along_another(self, run: Any, whole: _Ran, tolerance: float) -> str:
        """What to say about a batch whose rows are independent along dimension 1; empty if they are not."""
        inputs = (self.batch.args, dict(self.batch.kwargs))
        try:
            halves = _halves(inputs, self.batch.target)
            if halves is None:
                return ""
            parts = run(halves)
            agree = _agree_somewhere(parts.outputs, whole.outputs[0])
            if agree is False or (agree is None and not _close(parts, whole, tolerance)):
                return ""
        except Exception:  # the model, its loss or its outputs do not allow it: then nothing is known
            return ""
        return (
            "rows along dimension 0 depend on each other, and along dimension 1 they do not: the batch is in dimension "
            f"1; pass batch_dims=1, or what holds for each input, target and output{self._sequence_first()}. {_UNLESS}"
        )

    def _sequence_first(self) -> str:
        kinds = (nn.RNNBase, nn.MultiheadAttention)
        named = self.alone.model.named_modules()
        found = [f"{type(m).__name__} {n!r}" for n, m in named if isinstance(m, kinds) and not m.batch_first]
        return f" ({_listed(found)}: batch_first=False)" if found else ""

    def _agree_in_evaluation(self, run: Any, tolerance: float) -> bool:
        modes = {module: module.training for module in self.alone.model.modules()}
        self.alone.model.eval()
        try:
            return _close(run(self.pieces), run([self.batch]), tolerance)
        except Exception:  # models may return something else in evaluation
            return False
        finally:
            for module, mode in modes.items():
                module.training = mode

    def _widened(self) -> bool:
        """Whether the model could be converted to double precision, and runs that way."""
        model = self.alone.model
        parameters = [(parameter, parameter.data) for parameter in model.parameters()]
        buffers = [(module, dict(module.named_buffers(recurse=False))) for module in model.modules()]
        model.double()
        try:
            self._run([self.batch], wide=True)
        except Exception:  # float32 is written into its code
            for parameter, data in parameters:
                parameter.data = data
            for module, named in buffers:
                for name, buffer in named.items():
                    setattr(module, name, buffer)
            return False
        return True

    def _run(self, pieces: Sequence[Microbatch], *, stream: int = 0, wide: bool = False) -> _Ran:
        """Forward and loss of each piece, all from the same buffers, which are left as they were."""
        alone, loss = self.alone, self.loss
        outputs: list[Any] = []
        losses: list[Tensor] = []
        before = [(buffer, buffer.detach().clone()) for buffer in alone.model.buffers() if not buffer.is_meta]
        pieces = [_owned(_wide(piece) if wide else piece, alone.device) for piece in pieces]
        wanted = [piece.kwargs.get("labels") if loss is None else piece.target for piece in pieces]
        weighted = weights(self.reduction, [piece.rows or 1 for piece in pieces], wanted)
        with alone.session.drawing() as streams, computing(0, 0):
            for k, (args, kwargs, target, _) in enumerate(pieces):
                NOW.microbatch = k
                streams.begin(stream + k, {})
                output = alone.model(*args, **{**kwargs, **alone.session.default_kwargs(args, dict(kwargs))})
                streams.begin_loss(stream + k)
                value = own_loss(output) if loss is None else loss_in(loss(output, target))
                if value is None:
                    raise no_loss(output)
                losses.append(value.detach().reshape(()))
                outputs.append(map_tensors(Tensor.detach, output))
                with torch.no_grad():
                    for buffer, was in before:
                        buffer.copy_(was)
        total = weighted_sum(losses, weighted)
        assert total is not None
        counted = [abs(float(loss)) for loss, weight in zip(losses, weighted, strict=True) if weight]
        return _Ran(float(total), max(counted), outputs)


@contextmanager
def _off(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Puts just these modules, not their children, in evaluation mode."""
    before = [(module, module.training) for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


def _close(parts: _Ran, whole: _Ran, tolerance: float) -> bool:
    return abs(parts.loss - whole.loss) <= tolerance * max(parts.largest, whole.largest)


def _same(mine: Tensor, other: Tensor) -> bool:
    if not mine.is_floating_point():
        return torch.equal(mine, other)
    scale = float(other.abs().max()) if other.numel() else 0.0
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-3}.get(other.dtype, 5e-2)
    return torch.allclose(mine, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _agree_somewhere(parts: Sequence[Any], whole: Any) -> bool | None:
    """Whether outputs of pieces, joined along some dimension, are the whole's; None if no dimension fits."""
    found: list[bool] = []
    for column, leaf in zip(zip(*map(leaf_tensors, parts), strict=True), leaf_tensors(whole), strict=True):
        dims = [d for d in range(leaf.dim()) if sum(part.shape[d] for part in column) == leaf.shape[d]]
        joined = [torch.cat(column, d) for d in dims if len({(*p.shape[:d], *p.shape[d + 1 :]) for p in column}) == 1]
        if joined:
            found.append(any(_same(one, leaf) for one in joined if one.shape == leaf.shape))
    return all(found) if found else None


def _halves(inputs: Any, target: Any) -> list[Microbatch] | None:
    """The batch in two, cut along dimension 1 wherever that has the most common size."""
    flat = flatten((*inputs, target))
    rows = next((leaf.shape[1] for leaf in flat.leaves if isinstance(leaf, Tensor) and leaf.dim() > 1), 0)
    if rows < 2:
        return None
    sizes = (rows - rows // 2, rows // 2)

    def cut(leaf: Any) -> Sequence[Any]:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return (leaf, leaf)
        dim = 1 if leaf.dim() > 1 and leaf.shape[1] == rows else 0
        return torch.split(leaf, list(sizes), dim) if leaf.shape[dim] == rows else (leaf, leaf)

    columns = zip(*map(cut, flat.leaves), strict=True)
    return [
        Microbatch._make((*unflatten(column, flat.structure), size))
        for column, size in zip(columns, sizes, strict=True)
    ]


def _owned(piece: Microbatch, device: torch.device) -> Microbatch:
    tree = (piece.args, dict(piece.kwargs), piece.target)
    return Microbatch._make((*split(tree, (1,), "batch", device, _WHOLE)[0], piece.rows))


def _wide(piece: Microbatch) -> Microbatch:
    tree = (piece.args, dict(piece.kwargs), piece.target)
    return Microbatch._make((*map_tensors(lambda x: x.double() if x.is_floating_point() else x, tree), piece.rows))


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    some = list(names)
    return ", ".join(some[:3]) + (f" and {len(some) - 3} more" if len(some) > 3 else "")
