"""Compiled stages split their backward: they leave the gradients of a whole compiled one, and as much of it waits for W
as in stages that are not compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock._base.errors import PartitionError
from penstock.runtime.split_backward.compiled_products import SplittingBackend
from scaffolding.models import TRANSFORMERS
from scaffolding.small import WIDTH, batch

pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")

SAME_BITS = {"backend": "aot_eager"}
WHOLE, SPLIT = "1f1b", "zb-h1"

DEFAULTS: dict[str, Any] = {"ranks": 1, "microbatches": 3, "loss": F.mse_loss}

Grads = dict[str, Tensor | None]


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> None:
    torch.compiler.reset()


class Many(nn.Module):
    """Products of all kinds: one of a tied weight, one of computed integers, one whose result is updated in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.tied = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.tied.weight = self.embed.weight
        self.wide, self.narrow = nn.Linear(8, 12), nn.Parameter(torch.randn(12, 8))
        self.convolution, self.norm, self.dropout = nn.Conv1d(8, 8, 3, padding=1), nn.LayerNorm(8), nn.Dropout(0.1)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids % 11)
        h = self.wide(x).relu_()
        x = self.dropout(x + torch.addmm(self.bias, h.flatten(0, 1), self.narrow).view_as(x))
        x = x + self.convolution(x.transpose(1, 2)).transpose(1, 2)
        return self.tied(self.frozen(self.norm(x)))


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(30, (6, 5)), torch.randn(6, 5, 11)


def trained(
    model: nn.Module,
    schedule: str,
    compile: Mapping[str, Any] | bool,
    *,
    data: tuple[Tensor, Tensor],
    autocast: bool = False,
    steps: int = 2,
    **options: Any,
) -> tuple[Grads, dict[int, float], tuple[str, ...]]:
    """The gradients that two steps leave in a copy of a model, what waited for W, and the pipeline's notes."""
    model, (x, y) = copy.deepcopy(model), data
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        penstock.pipeline(model, (x,), schedule=schedule, compile=compile, **(DEFAULTS | options)) as pipe,
    ):
        for _ in range(steps):
            pipe.step(x, target=y)
        return {name: p.grad for name, p in model.named_parameters()}, pipe.deferred_weight_grad_fraction, pipe.notes


def assert_equal(mine: Grads, its: Grads) -> None:
    assert mine.keys() == its.keys()
    for name, grad in mine.items():
        other = its[name]
        assert (grad is None) == (other is None), name
        if grad is not None and other is not None:
            assert grad.dtype == other.dtype, name
            assert torch.equal(grad, other), (name, (grad - other).abs().max())


def test_the_gradients_are_those_of_a_whole_compiled_backward() -> None:
    torch.manual_seed(0)
    model, data = Many(), tokens()
    whole, none, _ = trained(model, WHOLE, SAME_BITS, data=data, autocast=True)
    split, share, notes = trained(model, SPLIT, SAME_BITS, data=data, autocast=True)
    _, uncompiled, _ = trained(model, SPLIT, False, data=data, steps=1, autocast=True)
    assert none == {}
    assert_equal(split, whole)
    assert share == uncompiled
    assert min(share.values()) > 0.8
    assert not any("deferred_weight_grad_fraction" in note for note in notes)


def test_offloaded_graphs_that_are_compiled_while_gradients_of_another_dtype_are_there() -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))).bfloat16()
    options: dict[str, Any] = {"schedule": SPLIT, "compile": {"backend": "eager"}, "grad_dtype": torch.float32}
    batches = [torch.randn(8, length, WIDTH).bfloat16() for length in (3, 3, 5)]
    found = []
    for offload in (False, True):
        torch.compiler.reset()
        model = copy.deepcopy(blocks)
        with penstock.pipeline(
            model, (batches[0],), ranks=2, microbatches=4, loss=F.mse_loss, offload=offload, **options
        ) as pipe:
            for x in batches:
                pipe.step(x, target=x)
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert_equal(*found)


class Sizes(nn.Module):
    """A product with a batch's own number of rows, one with twice as many, and a size that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(torch.cat([h, h.tanh()])).view(2, -1, WIDTH).sum(0)


def test_sizes_that_change_are_followed() -> None:
    torch.manual_seed(0)
    model, graphs = Sizes(), list[Any]()

    def counting(module: Any, examples: Any) -> Any:
        graphs.append(module)
        from torch._dynamo import lookup_backend

        return lookup_backend("aot_eager")(module, examples)

    compiled, twin = torch.compile(model, backend=SplittingBackend(counting), dynamic=True), copy.deepcopy(model)
    for rows in (4, 6, 3):
        x = torch.randn(rows, WIDTH)
        compiled(x).square().sum().backward()
        twin(x).square().sum().backward()
    assert len(graphs) == 1
    assert all(name in graphs[0].code for name in ("tapped", "tap_0"))
    assert_equal({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in twin.named_parameters()})


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)


class Also(TwoLayers):
    """Uses a weight otherwise, too: it is left to the compiler."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * self.a.weight.square().mean()


class Again(TwoLayers):
    """Has a checkpoint of its own."""

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = checkpoint(self.a, self.b(x), use_reentrant=False)
        return h.tanh()


class Routed(TwoLayers):
    """Has an expert that gets no rows."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.a(x[:, None, :][:0]) @ self.b.weight
        return x * WIDTH + self.a(x) + rows.sum()


class Breaks(nn.Module):
    """One weight in two graphs of the compiler; outside of them in Python, if `outside`."""

    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.a, self.b, self.outside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), outside

    @torch.compiler.disable
    def between(self, x: Tensor) -> Tensor:
        return self.a(x) if self.outside else x.tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.between(self.a(self.b(x)))))


ONE = WIDTH / (WIDTH + 1)


@pytest.mark.parametrize(
    ("make", "expected", "exact"),
    [
        (Also, 0.5, True),
        (Again, 1.0, True),
        (Routed, 1.0, True),
        (lambda: nn.Sequential(Breaks(False), Breaks(False)), ONE, False),
        (lambda: nn.Sequential(Breaks(True), Breaks(True)), ONE / 2, False),
    ],
    ids=["used otherwise, too", "in a checkpoint", "no rows", "in several graphs", "and outside of them"],
)
def test_odd_uses_of_a_weight(make: Callable[[], nn.Module], expected: float, exact: bool) -> None:
    torch.manual_seed(0)
    model, data = make(), batch(6)
    whole, _, _ = trained(model, WHOLE, SAME_BITS, data=data)
    split, share, _ = trained(model, SPLIT, SAME_BITS, data=data)
    assert share == {0: pytest.approx(expected)}
    if exact:
        assert_equal(split, whole)
    for name, grad in split.items():
        torch.testing.assert_close(grad, whole[name], rtol=1e-6, atol=1e-6)


class Force(nn.Module):
    """Adds the gradient of an energy, as models of molecules do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.b(self.a(z).tanh()).sum(), z, create_graph=True)
        return x + force


def test_a_gradient_with_a_graph_in_the_forward_is_refused_or_right() -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(Force(), nn.Linear(WIDTH, WIDTH)), batch(6)
    whole, _, _ = trained(model, WHOLE, {"backend": "eager"}, data=data)
    compiled = {"backend": "eager"}
    if torch.__version__ >= "2.15":  # compiles it so that it can be split
        assert_equal(trained(model, SPLIT, compiled, data=data)[0], whole)
    else:
        with pytest.raises(PartitionError, match=r"create_graph=True.*leave compile= out"):
            trained(model, SPLIT, compiled, data=data, steps=1)
    uncompiled, _, _ = trained(model, SPLIT, False, data=data)
    assert_equal(uncompiled, whole)


def test_the_order_of_microbatches_does_not_matter_to_what_waits() -> None:
    schedule = penstock.schedule.Schedule.parse(
        "by hand: 3 microbatches, stages on ranks 0\nrank 0: 0F0 0F1 0F2 0I2 0I0 0I1 0W0 0W1 0W2"
    )
    torch.manual_seed(0)
    data, model = tokens(), Many().eval()
    model.dropout.p = 0.0
    whole, _, _ = trained(model, WHOLE, SAME_BITS, data=data)
    other: Any = schedule
    split, share, _ = trained(model, other, SAME_BITS, data=data, microbatches=None)
    assert_equal(split, whole)
    assert share[0] > 0.8


@pytest.mark.long  # most of `Many`, which has all kinds of products, does above
def test_most_of_a_transformer_waits() -> None:
    """Of one that verifies: `test_compiled_stages_give_the_bits_of_one_device` of `test_compile.py`."""
    case = TRANSFORMERS["llama"]()
    kwargs = {key: value for key, value in case.kwargs.items() if key != "attention_mask"}
    options: dict[str, Any] = {"ranks": 2, "microbatches": 2, "schedule": SPLIT, "compile": SAME_BITS}
    with penstock.pipeline(case.model, case.args, kwargs, loss_fn=case.loss, **options) as pipe:
        pipe.step(*case.args, **kwargs)
        assert min(pipe.deferred_weight_grad_fraction.values()) > 0.8, pipe.deferred_weight_grad_fraction
