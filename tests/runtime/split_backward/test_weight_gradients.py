"""The gradient of every form of call has autograd's bits and strides, whatever the shapes, strides and addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.runtime.exact.rules import SavedTensor
from penstock.runtime.split_backward.weight_gradients import PLANNERS, MatrixProduct, evaluate
from penstock.runtime.split_backward.weight_uses import DeferredGrads, _find_node, parameter_ids

SIZES = st.integers(1, 70)
LAYOUTS = ["plain", "transposed", "shifted", "narrowed"]
AFTERWARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda y: y,
    "nonlinear": lambda y: y.tanh() * y,
    "transposed": lambda y: y.transpose(0, -1).contiguous().flatten()[1:],
    "expanded": lambda y: y.mean(),
}


def lay(x: Tensor, how: str) -> Tensor:
    """The same values in other places."""
    if how == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if how == "shifted":
        return torch.empty(x.numel() + 3)[3:].view(x.shape).copy_(x)
    if how == "narrowed":
        return torch.cat([x, x], -1)[..., : x.shape[-1]]
    return x


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def compare(call: Any, *args: Any, after: str = "nonlinear", **kwargs: Any) -> bool:
    """Asserts that the gradients put off, and those that were not, are autograd's. False if nothing can be put off."""
    leaves = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.requires_grad]
    expected = call(*args, **kwargs)
    value = AFTERWARDS[after](expected)
    seed = torch.randn(value.shape)
    wanted = dict(zip(map(id, leaves), torch.autograd.grad(value, leaves, seed), strict=True))
    plan = PLANNERS[call](*args, **kwargs)
    if plan is None:
        return False
    result = plan.run(*(weight.detach() for weight in plan.weights))
    assert same_bits(result.detach(), expected.detach())
    others = [leaf for leaf in leaves if all(leaf is not weight for weight in plan.weights)]
    kept: list[Tensor] = []
    if result.requires_grad:
        node = _find_node(result, plan)
        assert node is not None
        node.register_prehook(lambda grads: kept.append(grads[0]))
    else:
        result.requires_grad_().register_hook(kept.append)
        others = [result]
        wanted[id(result)] = torch.autograd.grad(AFTERWARDS[after](result), result, seed)[0]
        kept.clear()
    for other, grad in zip(others, torch.autograd.grad(AFTERWARDS[after](result), others, seed), strict=True):
        assert same_bits(grad, wanted[id(other)])
    with torch.no_grad():
        found = plan.gradients(kept[0], *plan.saved)
    for weight, term in zip(plan.weights, found, strict=True):
        grad = evaluate(term)
        assert same_bits(grad, wanted[id(weight)])
        assert grad.stride() == wanted[id(weight)].stride()
        if isinstance(term, MatrixProduct):
            total = torch.randn_like(weight.detach())
            added = total + grad
            term.add_to(total)
            assert (total - added).abs().max() <= 1e-5 * (1 + grad.abs().max())
    return True


@given(
    shape=st.lists(st.integers(1, 12), min_size=0, max_size=2),
    rows=SIZES,
    inner=SIZES,
    outer=SIZES,
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
    after=st.sampled_from(list(AFTERWARDS)),
    bias=st.booleans(),
    gives=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_products(
    shape: list[int], rows: int, inner: int, outer: int, layouts: tuple[str, str], after: str, bias: bool, gives: bool
) -> None:
    torch.manual_seed(rows * inner + outer)
    x = lay(torch.randn(*shape, rows, inner), layouts[0]).requires_grad_(gives)
    weight = lay(torch.randn(outer, inner), layouts[1]).requires_grad_()
    matrix = lay(torch.randn(inner, outer), layouts[1]).requires_grad_()
    b = torch.randn(outer).requires_grad_() if bias else None
    is_put_off = x.dim() == 2 or x.is_contiguous()
    assert compare(F.linear, x, weight, b, after=after) == is_put_off
    assert compare(Tensor.matmul, x, matrix, after=after) == is_put_off
    if x.dim() == 2:
        assert compare(torch.mm, x, matrix, after=after)
        assert compare(torch.addmm, torch.randn(outer) if b is None else b, x, matrix, after=after)


@given(
    dims=st.integers(1, 3),
    transposed=st.booleans(),
    groups=st.sampled_from([1, 1, 2, 3]),
    channels=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.integers(0, 1),
    dilation=st.integers(1, 2),
    bias=st.booleans(),
    gives=st.booleans(),
    channels_last=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_convolutions(
    dims: int,
    transposed: bool,
    groups: int,
    channels: tuple[int, int],
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    bias: bool,
    gives: bool,
    channels_last: bool,
) -> None:
    torch.manual_seed(kernel)
    into, out = (groups * count for count in channels)
    x = torch.randn(2, into, *[7] * dims)
    if channels_last and dims == 2:
        x = x.contiguous(memory_format=torch.channels_last)
    weight = torch.randn((into, out // groups) if transposed else (out, into // groups), requires_grad=True)
    weight = torch.randn(*weight.shape, *[kernel] * dims, requires_grad=True)
    b = torch.randn(out, requires_grad=True) if bias else None
    call = getattr(F, f"conv{'_transpose' if transposed else ''}{dims}d")
    x.requires_grad_(gives)
    assert compare(call, x, weight, b, stride, (padding,) * dims, groups=groups, dilation=dilation)


@given(
    rows=st.integers(1, 50),
    width=st.integers(1, 40),
    shape=st.lists(st.integers(1, 9), max_size=3),
    padding=st.sampled_from([None, 0, -1]),
    by_frequency=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_embeddings(rows: int, width: int, shape: list[int], padding: int | None, by_frequency: bool) -> None:
    ids, weight = torch.randint(0, rows, shape), torch.randn(rows, width, requires_grad=True)
    assert compare(F.embedding, ids, weight, padding, None, 2.0, by_frequency)


@given(
    inner=st.integers(1, 10),
    outer=st.integers(1, 10),
    ends=st.lists(st.integers(0, 20), min_size=0, max_size=4),
    turned=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_products_of_groups(inner: int, outer: int, ends: list[int], turned: bool) -> None:
    torch.manual_seed(inner)
    offsets = torch.tensor([*sorted(ends), 20], dtype=torch.int32)
    inner, outer = 4 * inner, 4 * outer  # the kernel wants multiples of 16 bytes
    weights = torch.randn(len(offsets), *((outer, inner) if turned else (inner, outer)))
    matrices = (weights.transpose(-2, -1) if turned else weights).requires_grad_()
    assert compare(torch._grouped_mm, torch.randn(20, inner, requires_grad=True), matrices, offs=offsets)


def test_what_is_not_put_off() -> None:
    x, weight, matrix = (torch.randn(shape, requires_grad=True) for shape in [(3, 4), (5, 4), (4, 5)])
    ids, table = torch.tensor([1, 2]), torch.randn(7, 3, requires_grad=True)
    image, kernel = torch.randn(1, 2, 6, 6), torch.randn(3, 2, 3, 3, requires_grad=True)
    assert PLANNERS[F.linear](x, weight) is not None
    assert PLANNERS[F.linear](x[0], weight) is None
    assert PLANNERS[torch.addmm](torch.zeros(5), x, matrix, alpha=2) is None
    assert PLANNERS[torch.addmm](torch.zeros(5), x, matrix, beta=0.5) is None
    assert PLANNERS[torch.matmul](x, torch.randn(2, 4, 5)) is None
    assert PLANNERS[F.embedding](ids, table, max_norm=1.0) is None
    assert PLANNERS[F.embedding](ids, table, sparse=True) is None
    assert PLANNERS[F.conv2d](image, kernel, padding="same") is None
    assert PLANNERS[F.conv2d](image[0], kernel) is None


def test_an_input_that_was_updated_in_place_is_refused() -> None:
    x, weight = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True)
    plan = PLANNERS[F.linear](x, weight)
    assert plan is not None
    call = DeferredGrads(
        plan.weights,
        parameter_ids(plan.weights),
        plan.gradients,
        tuple(map(SavedTensor.of, plan.saved)),
        torch.ones(3, 5),
    )
    call.terms()
    x.view(-1)[0] = 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        call.terms()
