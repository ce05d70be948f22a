"""Modules that two pipelines share, each with its own optimizer, as for a GAN; and modules that write each result into
memory of their own: what waits, is sent or is kept has other memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from scaffolding.by_hand import step_by_hand
from scaffolding.compared import differences
from scaffolding.models import squared_error
from scaffolding.ranks import Ranks
from scaffolding.refusals import refusal_of
from scaffolding.small import WIDTH

pytestmark = pytest.mark.distributed


STEPS, MICROBATCHES = 3, 4


class Judged(nn.Module):
    """Trains the generator through the discriminator."""

    def __init__(self, generator: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.generator, self.critic = generator, critic

    def forward(self, noise: Tensor) -> Tensor:
        judged: Tensor = self.critic(self.generator(noise))
        return judged


class Judging(Judged):
    """Trains the discriminator on what the generator makes, detached."""

    def forward(self, noise: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        with torch.no_grad():
            made = self.generator(noise)
        return self.critic(made), self.critic(real)


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
    return generator, nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def fools(judged: Tensor, _: object) -> Tensor:
    return F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))


def tells(judged: tuple[Tensor, Tensor], _: object) -> Tensor:
    return F.softplus(judged[0]).mean() + F.softplus(-judged[1]).mean()


def data() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8, 6), torch.randn(8, 5)) for _ in range(STEPS)]


def in_plain_torch() -> dict[str, Tensor]:
    model, other = Judged(*networks()), None
    other = Judging(model.generator, model.critic)
    critics, generators = (torch.optim.Adam(part.parameters(), 0.01) for part in (model.critic, model.generator))
    for noise, real in data():
        critics.zero_grad()
        for some, true in zip(noise.chunk(MICROBATCHES), real.chunk(MICROBATCHES), strict=True):
            tells(other(some.clone(), true.clone()), None).backward(torch.tensor(1 / MICROBATCHES))
        critics.step()
        generators.zero_grad()
        for some in noise.chunk(MICROBATCHES):
            fools(model(some.clone()), None).backward(torch.tensor(1 / MICROBATCHES))
        generators.step()
    return dict(model.state_dict())


def differing(rank: int) -> tuple[list[str], tuple[str, ...]]:
    """This rank's parameters that are not those of plain torch after some steps of both; the second pipeline's cuts."""
    generator, critic = networks()
    options: dict[str, Any] = {"microbatches": MICROBATCHES, "schedule": "zb-h1"}
    noise, real = data()[0]
    first = penstock.pipeline(Judging(generator, critic), (noise, real), loss=tells, cuts=["generator.2"], **options)
    with first as judging, penstock.pipeline(Judged(generator, critic), (noise,), loss=fools, **options) as judged:
        critics, generators = (
            torch.optim.Adam(pipe.parameter_groups(lambda name, _, part=part: {} if part in name else None), 0.01)
            for pipe, part in ((judging, "critic"), (judged, "generator"))
        )
        for noise, real in data():
            critics.zero_grad()
            judging.step(noise, real, target=noise)
            critics.step()
            generators.zero_grad()
            judged.step(noise, target=noise)
            generators.step()
        mine, expected = judged.state_dict(), in_plain_torch()
        return [name for name, value in mine.items() if not torch.equal(value, expected[name])], judged.cuts


def refused(rank: int, first: str, second: str | None) -> str:
    """What a second pipeline says that needs a layer where the first does not have it. Both are cut as given."""
    generator, critic = networks()
    noise, real = data()[0]
    with penstock.pipeline(Judged(generator, critic), (noise,), loss=fools, cuts=[first]):
        judging = Judging(generator, critic)
        return refusal_of(penstock.pipeline, judging, (noise, real), loss=tells, cuts=second and [second])


def taking(rank: int) -> list[str]:
    """What a second pipeline says that frees a layer which the first runs on both ranks, until that is closed."""
    generator, critic = networks()
    noise, real = data()[0]
    judged = partial(refusal_of, penstock.pipeline, Judged(generator, critic), (noise,), loss=fools)
    with penstock.pipeline(Judging(generator, critic), (noise, real), loss=tells, cuts=["critic.2"]) as judging:
        said = [judged()]
        judging.step(noise, real, target=noise)
    return [*said, judged()]


def test_a_generator_and_a_discriminator_train_as_in_plain_torch(ranks2: Ranks) -> None:
    """The second pipeline is cut by itself so that each rank runs what it has."""
    assert ranks2.run(differing) == [([], ("generator.2",))] * 2


@pytest.mark.parametrize(
    ("first", "second", "remedy"),
    [
        ("generator.2", "critic.0", "pass cuts=['generator.2'], so that each rank runs what it has"),
        ("critic.2", None, "make this pipeline first, or pass both cuts="),  # it runs the critic twice
    ],
)
def test_modules_that_two_pipelines_share_are_to_be_on_the_same_ranks(
    ranks2: Ranks, first: str, second: str | None, remedy: str
) -> None:
    for said in ranks2.run(refused, first, second):
        assert "which an earlier pipeline over the same modules holds on another rank; " in said
        assert remedy in said


def test_a_pipeline_that_would_take_what_an_earlier_one_runs_is_refused_when_it_is_made(ranks2: Ranks) -> None:
    """The earlier one runs the critic's first layer on both ranks, and this one on the second alone."""
    for said, then in ranks2.run(taking):
        assert "an earlier pipeline over the same modules still runs it; make this pipeline first" in said
        assert then == ""


# -- modules that write each result into memory of their own ----------------------------------------------------------


ROWS, OWN_STEPS = 16, 2


class Block(nn.Module):
    """A linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.memory: Tensor | None = None

    def kept(self, h: Tensor, name: str = "memory") -> Tensor:
        """Memory of this shape and name, without a graph."""
        memory = getattr(self, name, None)
        memory = torch.zeros_like(h) if memory is None or memory.shape != h.shape else memory.detach()
        setattr(self, name, memory)
        return memory


class Views(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.line(x)
        return self.kept(h).copy_(h).view(-1, 3, 3).flatten(1)


class Out(Block):
    """`out=` is for code without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return self.line(x)
        return torch.addmm(self.line.bias, x, self.line.weight.t(), out=self.kept(x))


class Scratch(torch.autograd.Function):
    """Puts its result and its gradient into memory of the module's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, result: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return result.copy_(x * 3).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return ctx.gradient.copy_(gradient * 3), None, None


class Replay(Scratch):
    """As the backward of a graphed callable: what it writes raises no version, and its result is a view of memory."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.gradient.data.copy_(gradient * 3)
        return ctx.gradient.detach(), None, None


class Graphed(Block):
    """After its layer, so that the layer's weight gradient is of that memory."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.line(x)
        return Replay.apply(h, self.kept(h.detach()), self.kept(h.detach(), "gradient"))  # type: ignore[no-untyped-call]


class OwnGradient(Block):
    """On the second stage, so that its gradient is a message."""

    def forward(self, x: Tensor) -> Tensor:
        return self.line(Scratch.apply(x, self.kept(x.detach()), self.kept(x.detach(), "gradient")))  # type: ignore[no-untyped-call]


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    kind: Callable[[], nn.Module] = globals()[name]
    if name == "OwnGradient":
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(kind(), nn.Tanh(), nn.Linear(WIDTH, WIDTH), kind())


def same_as_by_hand(rank: int, name: str, options: dict[str, Any]) -> list[str]:
    """What differs from plain torch after each of some steps and predictions, as far as this rank knows."""
    model = model_of(name)
    reference = copy.deepcopy(model)
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    found = []
    with penstock.pipeline(model, (x,), loss=squared_error, ranks=2, **{"cuts": ["1"], **options}) as pipe:
        for step in range(OWN_STEPS):
            x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
            result = pipe.train().step(x, target=y, outputs=True)
            expected = step_by_hand(reference, (x,), y, squared_error, options["microbatches"])
            found += [f"step {step}: {what}" for what in differences(pipe, reference, expected.total, result)]
            if pipe.has_outputs and not all(map(torch.equal, result.outputs, expected.outputs)):
                found.append(f"step {step}: outputs")
            with torch.no_grad():
                plain = torch.cat([reference(piece.clone()).clone() for piece in x.chunk(options["microbatches"])])
            predicted = pipe.predict(x)
            if pipe.has_outputs and not torch.equal(predicted, plain):
                found.append(f"step {step}: {(predicted != plain).any(1).sum()} predictions")
    return found


KINDS = ["Views", "Out", "OwnGradient", "Graphed"]


@pytest.mark.parametrize(("kind", "transport"), [*zip(KINDS, ["auto", "distributed"] * 2, strict=True)])
def test_a_message_is_not_overwritten_before_it_has_left(ranks2: Ranks, kind: str, transport: str) -> None:
    options = {"microbatches": 8, "transport": transport}
    assert ranks2.run(same_as_by_hand, kind, options) == [[]] * 2


@pytest.mark.parametrize("kind", ["Views", "Graphed"])
def test_nor_is_what_waits_for_w(kind: str) -> None:
    """`OwnGradient` raises: what its next forward overwrites is needed for a gradient."""
    assert same_as_by_hand(0, kind, {"microbatches": 8, "schedule": "zb-h1"}) == []
    chunks = {"stages_per_rank": 2, "cuts": None}
    assert same_as_by_hand(0, kind, {"microbatches": 8, "schedule": "zb-v", **chunks}) == []


def sent_from_elsewhere(rank: int) -> int:
    """How many messages of a step and a prediction this rank sends from other memory than its stage's results."""
    results: set[int] = set()
    elsewhere = 0
    send = dist.isend

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        if type(output) is Tensor:
            results.add(output.data_ptr())

    def isend(tensor: Tensor, *args: Any, **options: Any) -> Any:
        nonlocal elsewhere
        elsewhere += tensor.data_ptr() not in results
        return send(tensor, *args, **options)

    first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    first.register_forward_hook(note)
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    layers, options = [first, nn.Linear(WIDTH, WIDTH)], {"microbatches": 8, "transport": "distributed"}
    with penstock.pipeline(layers, (x,), loss=squared_error, ranks=2, **options) as pipe:
        for patch in (nullcontext(), mock.patch.object(dist, "isend", isend)):
            with patch:
                pipe.step(x, target=y)
                pipe.predict(x)
    return elsewhere


def test_what_nothing_else_holds_is_sent_from_where_it_is(ranks2: Ranks) -> None:
    """Although backward holds what a tanh returns."""
    assert ranks2.run(sent_from_elsewhere)[0] == 0
