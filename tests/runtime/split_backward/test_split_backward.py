"""I and W of one stage leave in `.grad` what a whole backward leaves, to the bit and to the stride, whatever the model
does with its weights; and W does as much of it as can wait."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock import Microbatches, pipeline
from penstock.runtime.split_backward.backward import SplitBackward
from penstock.runtime.split_backward.weight_uses import WeightUses
from penstock.schedule import from_csv
from scaffolding.models import Forward

ORDERS = {
    "at once": "F0 I0 W0 F1 I1 W1 F2 I2 W2",
    "late": "F0 F1 I0 F2 I1 W0 I2 W1 W2",
    "at the end": "F0 F1 F2 I0 I1 I2 W0 W1 W2",
    "I out of order": "F0 F1 F2 I2 I1 I0 W0 W1 W2",
    "F out of order": "F2 F0 F1 I0 I1 I2 W0 W1 W2",
    "both out of order": "F1 F0 F2 I1 I2 I0 W0 W1 W2",
}


def loss_of(value: Tensor, _: Any = None) -> Tensor:
    return (value * torch.linspace(-1, 1, value.numel()).view(value.shape)).tanh().sum()


def pipe_of(model: nn.Module, inputs: list[Tensor], order: str) -> Any:
    """A pipeline of one stage, whose code is the model's own forward."""
    schedule = from_csv(",".join(f"0{action}" for action in order.split()))
    options: dict[str, Any] = {"schedule": schedule, "reduction": "sum", "leaf_modules": ["0"]}
    return pipeline(nn.Sequential(model), (Microbatches(inputs),), loss_fn=loss_of, ranks=1, **options)


def split_and_compare(model: nn.Module, inputs: list[Tensor], order: str = "late") -> float:
    """The share that was put off. Some inputs of the same values go through a copy of the model, in plain torch."""
    twin = copy.deepcopy(model)
    copies = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    with pipe_of(model, inputs, ORDERS[order]) as pipe:
        for _ in range(2):  # the first microbatch of the first one is not split; gradients accumulate
            pipe.step(Microbatches(inputs))
            for x in copies:
                loss_of(twin(x.clone())).backward()
            for (name, mine), its in zip(model.named_parameters(), twin.parameters(), strict=True):
                assert type(mine) is nn.Parameter
                assert (mine.grad is None) == (its.grad is None), name
                if mine.grad is not None and its.grad is not None:
                    a, b = mine.grad.to_dense(), its.grad.to_dense()
                    assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), name
                    assert a.stride() == b.stride(), name
        share: float = pipe.deferred_weight_grad_fraction[0]
    for x, other in zip(inputs, copies, strict=True):
        assert (x.grad is None) == (other.grad is None)
        assert x.grad is None or torch.equal(x.grad, other.grad)  # type: ignore[arg-type]
    return share


def noise(*shape: int, gives: bool = True) -> Callable[[], Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda: torch.randn(shape, generator=generator).requires_grad_(gives)


def tokens(vocabulary: int, *shape: int) -> Callable[[], Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda: torch.randint(0, vocabulary, shape, generator=generator)


def three(make: Callable[[], Tensor]) -> list[Tensor]:
    return [make() for _ in range(3)]


# -- models -----------------------------------------------------------------------------------------------------------


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


class OwnProduct(torch.autograd.Function):
    """Its use of the weight cannot be seen from Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight.t(), x.t() @ grads[0]


class Lose(torch.autograd.Function):
    """Gives no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        return None


def experts(m: Any, x: Tensor) -> Tensor:
    """Each row is for the expert that its first value chooses, as a mixture of experts routes it."""
    result = torch.zeros_like(x)
    for number in range(len(m.w)):
        rows = torch.where((x[:, 0].detach() * 10).long().abs() % len(m.w) == number)[0]
        if len(rows):
            result = result.index_add(0, rows, F.linear(F.linear(x[rows], m.w[number]).tanh(), m.v[number]))
    return result


def square(width: int = 33) -> nn.Linear:
    return nn.Linear(33, width, bias=False)


class Row(NamedTuple):
    """A model, what makes one microbatch for it, and the share that waits; None: a part."""

    build: Callable[[], nn.Module]
    make: Callable[[], Tensor] = noise(7, 33)
    share: float | None = 1.0


MODELS: dict[str, Row] = {
    "one weight many times": Row(lambda: Forward(lambda m, x: m.w(m.w(m.w(x).tanh()) * m.w(x)), w=square())),
    "embedding and head tied": Row(
        lambda: Forward(lambda m, x: F.linear(F.linear(m.e(x), m.e.weight).softmax(-1) @ m.e.weight, m.e.weight),
                        e=nn.Embedding(19, 13)),
        tokens(19, 3, 5),
    ),
    "a tied one with another use": Row(
        lambda: Forward(lambda m, x: F.linear(m.e(x), m.e.weight) + m.e.weight.square().sum(), e=nn.Embedding(19, 13)),
        tokens(19, 3, 5),
        0.0,
    ),
    "parts of one weight": Row(
        lambda: Forward(lambda m, x: sum(F.linear(x, w) for w in m.qkv.chunk(3)), qkv=parameter(99, 33)),
        noise(2, 7, 33),
    ),
    "a transposed weight": Row(
        lambda: Forward(lambda m, x: x @ m.w.t() @ m.v.T @ m.u.transpose(0, 1)[:, :20],
                        w=parameter(31, 33), v=parameter(29, 31), u=parameter(27, 29)),
    ),
    "a part and the whole": Row(
        lambda: Forward(lambda m, x: F.linear(F.linear(x, m.w), m.w[:20]), w=parameter(33, 33)), share=0.0
    ),
    "experts": Row(lambda: Forward(experts, w=parameter(4, 29, 33), v=parameter(4, 33, 29)), noise(11, 33)),
    "conv1d of transformers": Row(
        lambda: Forward(lambda m, x: torch.addmm(m.b, x.view(-1, 33), m.w).view(2, 7, 31), w=parameter(33, 31),
                        b=parameter(31)),
        noise(2, 7, 33),
        33 * 31 / (33 * 31 + 31),
    ),
    "what is updated in place": Row(
        lambda: nn.Sequential(nn.Linear(33, 31), nn.ReLU(inplace=True), nn.Linear(31, 31), nn.SELU(inplace=True)),
        noise(2, 7, 33, gives=False),
        None,
    ),
    "convolutions": Row(
        lambda: Forward(lambda m, x: m.c(m.b(F.relu(m.a(x)))), a=nn.Conv2d(3, 5, 3, bias=False),
                        b=nn.BatchNorm2d(5), c=nn.ConvTranspose2d(5, 3, 2, stride=2)),
        noise(2, 3, 7, 7),
        None,
    ),
    "a convolution with its bias": Row(
        lambda: Forward(lambda m, x: F.conv1d(x, m.w, m.b), w=parameter(5, 3, 2), b=parameter(5)), noise(2, 3, 9)
    ),
    "a bias used twice": Row(
        lambda: Forward(lambda m, x: F.conv1d(x, m.w, m.b) + m.b[:, None], w=parameter(5, 3, 2), b=parameter(5)),
        noise(2, 3, 9),
        0.0,
    ),
    "a use that cannot be seen": Row(
        lambda: Forward(lambda m, x: OwnProduct.apply(m.v(F.linear(x, m.w)), m.w),  # type: ignore[no-untyped-call]
                        w=parameter(33, 33), v=square()),
        share=0.5,
    ),
    "attention": Row(lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), noise(3, 5, 8), None),
    "lstm": Row(
        lambda: Forward(lambda m, x: m.a(m.l(x)[0]), l=nn.LSTM(7, 9), a=nn.Linear(9, 9, bias=False)),
        noise(5, 3, 7),
        None,
    ),
    "sparse gradients": Row(lambda: nn.Embedding(19, 13, sparse=True), tokens(19, 3, 5), 0.0),
    "nothing that comes in takes a gradient": Row(
        lambda: Forward(lambda m, x: m.b(m.a(x)), a=square(), b=square()), noise(2, 7, 33, gives=False)
    ),
    "a weight that nothing uses": Row(lambda: Forward(lambda m, x: m.a(x), a=square(), b=square()), share=0.5),
    "a weight under no_grad": Row(lambda: Forward(lambda m, x: m.a(x) + without_graph(m.a, x), a=square())),
    "autocast": Row(lambda: Forward(lambda m, x: autocast(m.b, m.a(x)), a=square(), b=square())),
    "autocast, products by every name": Row(
        lambda: Forward(lambda m, x: autocast(lambda y: torch.addmm(y[0], y @ m.a, m.b.t()).mm(m.c), x),
                        a=parameter(33, 33), b=parameter(33, 33), c=parameter(33, 5)),
    ),
    "autocast, two uses that share a cast": Row(
        lambda: Forward(lambda m, x: autocast(lambda y: m.a(m.a(y)), x), a=square()), share=0.0
    ),
    "autocast, a use that is not seen shares the cast": Row(
        lambda: Forward(lambda m, x: autocast(lambda y: m.a(y) + torch.einsum("ij,kj->ik", y, m.a.weight), x),
                        a=square()),
        share=0.0,
    ),
    "recomputation": Row(
        lambda: Forward(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=False)), a=square(), b=square()), share=0.5
    ),
    "recomputation in a backward of its own": Row(
        lambda: Forward(lambda m, x: m.b(checkpoint(m.a, m.b(x), use_reentrant=True)),
                        a=nn.Sequential(square(), square()), b=square()),
        share=0.0,
    ),
    "a backward inside of the forward": Row(
        lambda: Forward(lambda m, x: x - torch.autograd.grad(m.a(x).tanh().sum(), x, create_graph=True)[0], a=square()),
        share=0.0,
    ),
    "a gradient that is None": Row(
        lambda: Forward(lambda m, x: Lose.apply(m.a(x)) + m.b(x), a=square(), b=square()),  # type: ignore[no-untyped-call]
    ),
    "an update in place of what takes no gradient but for its weight": Row(
        lambda: Forward(lambda m, x: F.linear(m.e(x), m.w, m.b).relu_(), e=nn.Embedding(19, 13).requires_grad_(False),
                        w=parameter(9, 13), b=parameter(9).requires_grad_(False)),
        tokens(19, 3, 5),
    ),
}  # fmt: skip


def without_graph(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return layer(x)


def autocast(layer: Callable[[Tensor], Any], x: Tensor, **options: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, **options):
        result: Tensor = layer(x.view_as(x)).float()  # no stage's input is a leaf
        return result


@pytest.mark.parametrize(
    ("name", "order"),
    [
        *product(MODELS, ["late"]),
        *product(["one weight many times", "attention", "lstm"], ["at once", "at the end"]),
        ("experts", "I out of order"),
        ("attention", "F out of order"),
        ("sparse gradients", "both out of order"),
    ],
)
def test_the_gradients_are_those_of_a_whole_backward(name: str, order: str) -> None:
    torch.manual_seed(0)
    build, make, share = MODELS[name]
    found = split_and_compare(build(), three(make), order)
    if share is None:
        assert 0 < found < 1
    elif "out of order" not in order:
        assert found == pytest.approx(share)


def test_a_microbatch_without_any_use() -> None:
    """Experts that a microbatch does not need get nothing from it."""
    model = Forward(lambda m, x: F.linear(x, m.w) if len(x) > 1 else x.clone(), w=parameter(9, 9))
    split_and_compare(model, [torch.randn(rows, 9).requires_grad_() for rows in (4, 1, 3)], "at the end")


@pytest.mark.filterwarnings("default")  # torch.compile's own
def test_compiled_parts_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(33, 33, bias=False), nn.Linear(33, 33, bias=False))
    model[1].compile(backend="eager")
    compiled = torch.compile(F.linear, backend="eager")
    function = Forward(lambda m, x: compiled(m.a(x), m.w), a=nn.Linear(33, 33, bias=False), w=parameter(33, 33))
    for each in (model, function):
        assert split_and_compare(each, three(noise(4, 33))) == 0.5


@pytest.mark.parametrize("handed_on", [True, False])
def test_a_weight_part_of_which_is_handed_on_cannot_wait(handed_on: bool) -> None:
    weight = parameter(3, 9, 9)
    uses = WeightUses([weight])
    with uses.learning():
        part = weight[0]
        value = F.linear(torch.randn(4, 9), part)
    uses.decide([value.grad_fn, part.grad_fn] if handed_on else [value.grad_fn])
    assert list(uses.can_wait) == ([] if handed_on else [id(weight)])


# -- what is kept, and for how long -----------------------------------------------------------------------------------


class Remember(torch.autograd.Function):
    """Its node keeps an object alive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, thing: object) -> Tensor:
        ctx.thing = thing
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class Thing:
    """Something that a weak reference can point to."""


@pytest.mark.parametrize("call", [lambda m, x: m.b(x), lambda m, x: torch.addmm(m.b.bias, x, m.b.weight)])
def test_i_frees_all_but_what_w_needs_and_w_frees_that(
    call: Callable[[Any, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph: list[weakref.ref[Thing]] = []
    activations: list[weakref.ref[Tensor]] = []

    def model(m: Any, x: Tensor) -> Tensor:
        thing = Thing()
        graph.append(weakref.ref(thing))
        hidden = m.a(Remember.apply(x, thing)).exp()  # type: ignore[no-untyped-call]
        activations.append(weakref.ref(hidden))
        return call(m, hidden.sin() * 2)

    def look(self: SplitBackward, microbatch: int) -> None:
        waiting = [weakref.ref(call.grad) for call in self._put_off[microbatch][0]] if self._put_off else []
        assert waiting or not looked, "the first backward is whole"
        if waiting:
            assert graph[-1]() is None
            assert activations[-1]() is None
        weight_gradients(self, microbatch)
        assert [ref() for ref in waiting] == [None] * len(waiting)
        looked.append(len(waiting))

    looked, weight_gradients = list[int](), SplitBackward.weight_gradients
    monkeypatch.setattr(SplitBackward, "weight_gradients", look)
    inputs = [noise(4, 9)()]
    gc.disable()  # what is freed is freed at once, without cycles
    try:
        with pipe_of(Forward(model, a=nn.Linear(9, 9), b=nn.Linear(9, 9)), inputs, "F0 I0 W0") as pipe:
            for _ in range(2):
                pipe.step(Microbatches(inputs))
    finally:
        gc.enable()
    assert looked[-1] == 2


def test_a_step_that_raises_leaves_parameters_as_they_were_and_puts_nothing_off() -> None:
    model = Forward(lambda m, x: m.a(x), a=nn.Linear(9, 9))
    inputs, twin = three(noise(4, 9)), copy.deepcopy(model)

    def fail(m: Any, x: Tensor) -> Tensor:
        if len(calls) == 2:
            raise ValueError("no")
        calls.append(1)
        return m.a(x)

    calls: list[int] = []
    with pipe_of(model, inputs, ORDERS["late"]) as pipe:
        for _ in range(2):  # before it is learned what can wait, and after
            calls.clear()
            model.function = fail
            with pytest.raises(ValueError, match="no"):
                pipe.step(Microbatches(inputs))
            assert all(type(p) is nn.Parameter for p in model.parameters())
            model.function = twin.function
            pipe.step(Microbatches(inputs))
            for x in inputs:
                loss_of(twin(x.detach())).backward()
            assert torch.equal(model.a.weight.grad, twin.a.weight.grad)
        assert pipe.deferred_weight_grad_fraction[0] > 0.8


class InScratch(torch.autograd.Function):
    """Writes each gradient into the same memory."""

    memory = torch.empty(2, 4)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return InScratch.memory.copy_(grads[0])


class WritesInScratch(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = InScratch.apply(super().forward(input))  # type: ignore[no-untyped-call]
        return output


def doubled(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y.register_hook(lambda grad: 2 * grad)
    return y


@pytest.mark.parametrize("gives", [True, False])
def test_the_gradient_that_is_kept_is_the_one_behind_hooks_and_is_not_overwritten(gives: bool) -> None:
    split_and_compare(Forward(doubled, a=nn.Linear(33, 31, bias=False)), three(noise(2, 7, 33, gives=gives)))
    scratch = nn.Sequential(WritesInScratch(4, 4), WritesInScratch(4, 4))
    assert split_and_compare(scratch, three(noise(2, 4, gives=gives))) > 0
