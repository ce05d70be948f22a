"""What the ranks of test_shared_modules.py run: a generator and a discriminator, each with a pipeline."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock._base.errors import PenstockError
from scaffolding.refusals import refusal_of

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


def taking(rank: int, closed: bool) -> str:
    """What a second pipeline says that frees a layer which the first runs on both ranks; the first goes on then."""
    generator, critic = networks()
    noise, real = data()[0]
    with penstock.pipeline(Judging(generator, critic), (noise, real), loss=tells, cuts=["critic.2"]) as judging:
        if closed:
            judging.close()
        try:
            with penstock.pipeline(Judged(generator, critic), (noise,), loss=fools) as judged:
                judged.step(noise, target=noise)
            return ""
        except PenstockError as error:
            judging.step(noise, real, target=noise)
            return str(error)
