"""The calls whose weight gradient can wait for W and, for each, the expression that autograd's own formula computes.

The same kernels run on the same operands, with the same strides, so the bits are those of a full backward
(see torch's derivatives.yaml; tests/runtime/split_backward/test_weight_gradients.py compares them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock._base.gradients import gradient_dtype
from penstock.runtime.exact import rules as exact
from penstock.schedule import Schedule

_MM = frozenset({"AddmmBackward0", "MmBackward0"})
_GROUPED_MM = frozenset({"GroupedMmBackward0"})
_CONVOLUTION = frozenset({"ConvolutionBackward0"})
_EMBEDDING = frozenset({"EmbeddingBackward0"})


class MatrixProduct(NamedTuple):
    """A matrix product, not yet computed; `transposed`: its transpose is meant."""

    first: Tensor
    second: Tensor
    transposed: bool = False

    def value(self) -> Tensor:
        """Return the product, in memory of its own."""
        product = self.first.mm(self.second)
        return product.t() if self.transposed else product

    def add_to(self, total: Tensor) -> None:
        """Add the product to a matrix in place, without memory for the product."""
        (total.t() if self.transposed else total).addmm_(self.first, self.second)


Term = Tensor | MatrixProduct
"""A term of a weight's gradient."""


def evaluate(term: Term) -> Tensor:
    """Return a term's value."""
    return term.value() if isinstance(term, MatrixProduct) else term


def adds_in_place(devices: Iterable[torch.device], schedule: Schedule) -> bool:
    """Whether W adds a product to `.grad` without rounding it first, on one of these devices."""
    return schedule.splits and not all(map(exact.computes_apart, devices))


def notes(devices: Iterable[torch.device], schedule: Schedule) -> tuple[str, ...]:
    """Return the notes for users on products that W adds in place."""
    if not adds_in_place(devices, schedule):
        return ()
    return ("W adds products to .grad in place, which rounds otherwise than a whole backward does (close, not equal)",)


class DeferredCall(NamedTuple):
    """A call whose weight gradients are put off.

    Attributes:
        input: the argument on which the weights work.
        saved: what W needs of the forward.
        weights: the weight, and the bias if one kernel computes both gradients.
        run: makes the call with weights that have no graph.
        nodes: the possible names of autograd's node for the call.
        gradients: computes the weights' gradients from the gradient that reaches that node, and what was kept.
    """

    input: Tensor
    saved: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    run: Callable[..., Tensor]
    nodes: frozenset[str]
    gradients: Callable[..., Sequence[Term]]


Planner = Callable[..., DeferredCall | None]
"""Takes the arguments of a call; returns None if the gradient of its weight cannot wait."""


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> DeferredCall | None:
    """`F.linear`: a product with the transposed weight."""
    if options or weight.dim() != 2 or not _is_matrix(input):
        return None
    by_rows = weight.stride(1) == 1 and weight.stride(0) == weight.shape[1]  # then its transpose is column-major

    def gradients(grad: Tensor, x: Tensor) -> Sequence[Term]:
        first = _rows(x)
        grad = _rows_of_gradient(grad, first)
        return (MatrixProduct(grad.t(), first) if by_rows else MatrixProduct(first.t(), grad, transposed=True),)

    return DeferredCall(input, (input,), (weight,), lambda w: F.linear(input, w, bias), _MM, gradients)


def matmul(input: Tensor, other: Tensor, **options: Any) -> DeferredCall | None:
    """`input @ weight`, including inputs of more than two dimensions, which torch folds into one product."""
    if options or not isinstance(other, Tensor) or other.dim() != 2 or not _is_matrix(input):
        return None

    def gradients(grad: Tensor, x: Tensor) -> Sequence[Term]:
        return (_second_matrix_gradient(grad, _rows(x), other),)

    return DeferredCall(input, (input,), (other,), lambda w: torch.matmul(input, w), _MM, gradients)


def mm(input: Tensor, mat2: Tensor, **options: Any) -> DeferredCall | None:
    """`torch.mm(input, weight)`."""
    return matmul(input, mat2, **options)


def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **scales: Any) -> DeferredCall | None:
    """`torch.addmm(bias, input, weight)`, as in the Conv1D of `transformers`."""
    if any(scale != 1 for scale in scales.values()) or not _is_matrix(mat1):
        return None

    def gradients(grad: Tensor, x: Tensor) -> Sequence[Term]:
        return (_second_matrix_gradient(grad, x, mat2),)

    return DeferredCall(mat1, (mat1,), (mat2,), lambda w: torch.addmm(input, mat1, w), _MM, gradients)


def grouped_mm(input: Tensor, mat2: Tensor, *, offs: Tensor | None = None, **options: Any) -> DeferredCall | None:
    """`torch._grouped_mm(input, weights, offs=...)`: each group of rows times its own matrix, as experts do."""
    if offs is None or any(value is not None for value in options.values()) or (input.dim(), mat2.dim()) != (2, 3):
        return None

    def gradients(grad: Tensor, first: Tensor, offs: Tensor) -> Sequence[Tensor]:
        if _is_column_major(mat2):
            return (torch._grouped_mm(grad.transpose(-2, -1), first, offs=offs).transpose(-2, -1),)
        return (torch._grouped_mm(first.transpose(-2, -1), grad, offs=offs),)

    return DeferredCall(
        input, (input, offs), (mat2,), lambda w: torch._grouped_mm(input, w, offs=offs), _GROUPED_MM, gradients
    )


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> DeferredCall | None:
    """`F.embedding` with a dense gradient."""
    if max_norm is not None or sparse:
        return None
    rows = weight.shape[0]
    padding = -1 if padding_idx is None else padding_idx % rows

    def run(w: Tensor) -> Tensor:
        return F.embedding(input, w, padding_idx, None, norm_type, scale_grad_by_freq, False)

    def gradients(grad: Tensor, ids: Tensor) -> Sequence[Tensor]:
        return (torch.ops.aten.embedding_dense_backward(grad, ids, rows, padding, scale_grad_by_freq),)

    return DeferredCall(input, (input,), (weight,), run, _EMBEDDING, gradients)


class _Shifts(NamedTuple):
    """How a convolution's kernel moves, with one number per dimension."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    output_padding: Sequence[int]


def _convolution(call: Callable[..., Tensor], dims: int, *, transposed: bool) -> Planner:
    """Build a form for `F.conv1d` and the like. One kernel may compute the gradients of weight and bias, so both
    wait."""

    def plan(input: Tensor, weight: Tensor, bias: Tensor | None, shifts: _Shifts, groups: int) -> DeferredCall | None:
        if any(isinstance(shift, str) for shift in shifts) or input.dim() != dims + 2:
            return None
        shifts = _Shifts(*(_per_dim(shift, dims) for shift in shifts))
        with_bias = bias is not None and bias.requires_grad
        bias_sizes = None if bias is None else list(bias.shape)

        def run(w: Tensor, b: Tensor | None = bias) -> Tensor:
            if transposed:
                return call(input, w, b, shifts.stride, shifts.padding, shifts.output_padding, groups, shifts.dilation)
            return call(input, w, b, shifts.stride, shifts.padding, shifts.dilation, groups)

        def gradients(grad: Tensor, x: Tensor, kernel: Tensor) -> Sequence[Tensor]:
            _, weight_grad, bias_grad = torch.ops.aten.convolution_backward(
                grad, x, kernel, bias_sizes, shifts.stride, shifts.padding, shifts.dilation, transposed,
                shifts.output_padding, groups, [False, True, with_bias],
            )  # fmt: skip
            return (weight_grad, bias_grad) if with_bias else (weight_grad,)

        weights = (weight, bias) if bias is not None and with_bias else (weight,)
        return DeferredCall(input, (input, weight), weights, run, _CONVOLUTION, gradients)

    def convolution(
        input: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
        groups: int = 1,
    ) -> DeferredCall | None:  # fmt: skip
        return plan(input, weight, bias, _Shifts(stride, padding, dilation, 0), groups)  # type: ignore[arg-type]

    def transposed_convolution(
        input: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
        groups: int = 1, dilation: Any = 1,
    ) -> DeferredCall | None:  # fmt: skip
        return plan(input, weight, bias, _Shifts(stride, padding, dilation, output_padding), groups)

    return transposed_convolution if transposed else convolution


def lower_call(planner: Planner, call: DeferredCall, args: Any, kwargs: Mapping[str, Any]) -> DeferredCall | None:
    """Return the call in the precision in which autocast runs it. Its gradients are cast back, as in autograd; where
    the weight's dtype holds them as they are, by whoever adds them.

    Autocast itself casts all other arguments, and finds these already cast. Whatever it would cast once for several
    calls (it caches a leaf's cast) is not cast here, so this is None if that is the input.
    """
    dtype = torch.get_autocast_dtype(call.input.device.type)
    casts = {id(weight): weight.detach().to(dtype).requires_grad_(weight.requires_grad) for weight in call.weights}
    if call.input.dtype != dtype:
        if call.input.is_leaf and call.input.requires_grad:
            return None
        casts[id(call.input)] = call.input.to(dtype)
    low = planner(
        *(casts.get(id(arg), arg) for arg in args), **{key: casts.get(id(arg), arg) for key, arg in kwargs.items()}
    )
    if low is None:
        return None

    def gradients(grad: Tensor, *saved: Tensor) -> Sequence[Term]:
        return cast_back(low.gradients(grad, *saved), call.weights, dtype)

    def run(*_: Tensor) -> Tensor:
        return low.run(*(weight.detach() for weight in low.weights))

    return low._replace(weights=call.weights, run=run, gradients=gradients)


def cast_back(terms: Sequence[Term], weights: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Term]:
    """Return a call's terms in the dtypes of its weights. Where those hold them as they are, whoever adds them
    casts."""
    is_exact = [torch.promote_types(dtype, weight.dtype) == weight.dtype for weight in weights]
    pairs = zip(terms, weights, is_exact, strict=True)
    return [term if fits else evaluate(term).to(weight.dtype) for term, weight, fits in pairs]


def sum_terms(parameter: Tensor, terms: Sequence[Tensor]) -> Tensor:
    """Return the sum of a parameter's terms in one microbatch, in the dtype in which its gradient accumulates."""
    total = terms[0]
    if len(terms) > 1:
        total = total.to(gradient_dtype(parameter))
    for term in terms[1:]:
        total += term
    return total


def _per_dim(shift: int | Sequence[int], dims: int) -> list[int]:
    if isinstance(shift, int):
        return [shift] * dims
    return list(shift) * (dims if len(shift) == 1 else 1)


def _is_matrix(x: Tensor) -> bool:
    """Whether torch multiplies a tensor as one matrix, whichever arguments take a gradient.

    Whether torch folds a non-contiguous tensor depends on whether the weight takes one, so that does not count.
    """
    return x.is_floating_point() and (x.dim() == 2 or (x.dim() > 2 and x.is_contiguous()))


def _rows(x: Tensor) -> Tensor:
    """Return an input in two dimensions."""
    return x if x.dim() == 2 else x.view(x.shape[:-1].numel(), x.shape[-1])


def _rows_of_gradient(grad: Tensor, first: Tensor) -> Tensor:
    """Return the gradient of a product in two dimensions, with as many rows as its first matrix has."""
    return grad if grad.dim() == 2 else grad.reshape(len(first), grad.shape[-1])


def _second_matrix_gradient(grad: Tensor, first: Tensor, second: Tensor) -> MatrixProduct:
    """Return the gradient of `second` in `first @ second`: torch's `mm_mat2_grad`, which looks at strides."""
    grad = _rows_of_gradient(grad, first)
    if _is_column_major(second):
        return MatrixProduct(grad.t(), first, transposed=True)
    return MatrixProduct(first.t(), grad)


def _is_column_major(matrix: Tensor) -> bool:
    return matrix.stride(-2) == 1 and matrix.stride(-1) == matrix.shape[-2]


def _convolutions(*, transposed: bool) -> dict[Any, Planner]:
    calls: tuple[Any, ...] = (F.conv1d, F.conv2d, F.conv3d)
    if transposed:
        calls = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
    return {call: _convolution(call, dims, transposed=transposed) for dims, call in enumerate(calls, 1)}


PLANNERS: Mapping[Any, Planner] = {
    F.linear: linear,
    torch.matmul: matmul,
    Tensor.matmul: matmul,
    Tensor.__matmul__: matmul,
    torch.mm: mm,
    Tensor.mm: mm,
    torch.addmm: addmm,
    Tensor.addmm: addmm,
    torch._grouped_mm: grouped_mm,
    F.embedding: embedding,
    **_convolutions(transposed=False),
    **_convolutions(transposed=True),
}
"""The forms, by the called function."""

UNLOWERED = frozenset({F.embedding, torch._grouped_mm})
"""The functions that autocast leaves alone."""
