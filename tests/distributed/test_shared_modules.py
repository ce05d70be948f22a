"""Two pipelines over the same modules, each with its own optimizer, as for a GAN."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from scaffolding.ranks import Ranks
from scaffolding.refusals import refusal_of
from scaffolding.representatives import long_after

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


def differing(rank: int, first: str, cut: str, schedule: str) -> tuple[list[str], tuple[str, ...]]:
    """This rank's parameters that are not those of plain torch after some steps of both; the second pipeline's cuts.

    Args:
        first: the pipeline that is made first, and is cut at `cut`.
    """
    generator, critic = networks()
    options: dict[str, Any] = {"microbatches": MICROBATCHES, "schedule": schedule}
    noise, real = data()[0]
    makes = {
        "judging": partial(penstock.pipeline, Judging(generator, critic), (noise, real), loss=tells, **options),
        "judged": partial(penstock.pipeline, Judged(generator, critic), (noise,), loss=fools, **options),
    }
    with makes.pop(first)(cuts=cut.split()) as one, next(iter(makes.values()))() as two:
        judging, judged = (one, two) if first == "judging" else (two, one)
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
        return [name for name, value in mine.items() if not torch.equal(value, expected[name])], two.cuts


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


JUDGED = ("judged", "generator.2 generator.4 critic.0", "interleaved-1f1b")


@pytest.mark.parametrize(("first", "cut", "schedule"), long_after(1, ("judging", "generator.2", "zb-h1"), JUDGED))
def test_a_generator_and_a_discriminator_train_as_in_plain_torch(
    ranks2: Ranks, first: str, cut: str, schedule: str
) -> None:
    """The second pipeline is cut by itself so that each rank runs what it has."""
    for wrong, cuts in ranks2.run(differing, first, cut, schedule):
        assert not wrong
        assert len(cuts) == len(cut.split())
        assert cuts[-1] == cut.split()[-1]


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
