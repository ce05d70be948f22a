"""Random numbers of Python and numpy in a forward: from keyed streams as torch's are.

That none is frozen in a recording, and that `verify` sees generators of the model's own, is in test_proof_table.py.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from penstock import pipeline, verify
from penstock._base.errors import PartitionError
from penstock.partition.record.known_values import compare_drawn
from penstock.runtime.exact.streams import hash_name, mix
from scaffolding.models import Layers, squared_error
from scaffolding.proofs import proven

SEED = 3


class Noisy(nn.Module):
    """A block that draws inside."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(7, 7), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.draw()


class PassesBy(nn.Module):
    """Leaves its parameters out, by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.5 else x + self.linear(x)


def test_a_block_that_leaves_its_parameters_out_by_chance_is_to_be_taken_apart() -> None:
    """Where it is the first, whether its result takes a gradient differs from what was recorded."""
    x, model = torch.randn(8, 7), nn.Sequential(*(PassesBy() for _ in range(4)), nn.Linear(7, 7))
    options: dict[str, Any] = {"ranks": 2, "microbatches": 4, "cuts": ["1"], "seed": SEED}
    takes_gradient = True
    while takes_gradient:  # until chance has the recording pass the first block by
        pipe = pipeline(model, (x,), loss=squared_error, **options)
        takes_gradient = pipe.stages[1].inputs[0].meta.requires_grad
    with (
        pipe,
        pytest.raises(PartitionError, match=r"'_0' of stage 0 .* by chance, take all .* apart with split_inside="),
    ):
        pipe.step(x, target=x)
    proven(model, x, x, split_inside=["0", "1", "2", "3"], **options)


class Between(Layers):
    """Draws in the forward that is recorded, between two blocks that draw."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x) * random.random())


def test_each_draw_is_what_its_stream_says_and_the_generators_are_left_alone() -> None:
    """Against plain arithmetic with the numbers that the streams of the calls give."""
    x, model = torch.ones(4, 7), Between(7, 2)
    model.layers = nn.ModuleList([Noisy(random.random), Noisy(np.random.rand)])
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    options = {"ranks": 2, "microbatches": 2, "seed": SEED, "loss": squared_error}
    with pipeline(model, (x,), leaf_modules=["layers.0", "layers.1"], **options) as pipe:
        outputs = pipe.step(x, target=x, outputs=True).outputs
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    for k, output in enumerate(outputs):
        first, between, second = (mix(mix(SEED, 0, k), hash_name(name), 0) for name in ("layers.0", "()#0", "layers.1"))
        of_numpy = np.random.RandomState((second & 0xFFFFFFFF, second >> 32))
        hidden = model.layers[0].linear(x[:2]) * random.Random(first).random() * random.Random(between).random()
        expected = model.layers[1].linear(hidden) * of_numpy.rand()
        assert torch.equal(output, expected)


def test_a_number_that_reaches_a_block_is_refused() -> None:
    class Rated(nn.Linear):
        rate = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.rate if self.rate > 0.5 else x

    class Rates(Layers):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                layer.rate = random.random()
                x = layer(x)
            return x

    model = Rates(7, 0)
    model.layers.extend(Rated(7, 7) for _ in range(4))
    with pytest.raises(PartitionError, match="a random number"):
        pipeline(model, (torch.ones(4, 7),), ranks=2, microbatches=2, loss=squared_error)


def mixed_up(output: Tensor, target: Tensor) -> Tensor:
    share, order = random.random() * torch.rand(()), torch.from_numpy(np.random.permutation(len(target)))
    return share * squared_error(output, target) + (1 - share) * squared_error(output, target[order])


def with_a_hook() -> nn.Module:
    """A loss of torch's own, to which the user has added a hook that draws."""
    loss = nn.MSELoss()
    loss.register_forward_hook(lambda module, given, value: value * (random.random() + np.random.rand()))
    return loss


@pytest.mark.parametrize(("schedule", "loss"), [("gpipe", mixed_up), ("dualpipe", with_a_hook())])
def test_a_loss_draws_the_same_under_every_schedule_and_leaves_the_generators_alone(schedule: str, loss: Any) -> None:
    x, target = torch.randn(2, 8, 7, generator=torch.Generator().manual_seed(1))
    losses = []
    for ranks, order in ((1, "naive"), (2, schedule)):
        torch.manual_seed(0)
        model = [nn.Linear(7, 7) for _ in range(4)]
        random.seed(ranks)
        np.random.seed(ranks)
        before = random.getstate(), np.random.get_state()[1].tolist()
        with pipeline(model, (x,), ranks=ranks, schedule=order, microbatches=4, seed=SEED, loss=loss) as pipe:
            losses.append([float(pipe.step(x, target=target).loss) for _ in range(2)])
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1]


@pytest.mark.parametrize("loss", [F.mse_loss, nn.MSELoss()])
def test_only_torchs_generator_is_set_for_a_loss_of_torchs_own(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting numpy's takes as long as a small loss."""
    x = torch.ones(4, 7)
    for each, count in ((loss, 0), (squared_error, 2)):
        with pipeline([nn.Linear(7, 7) for _ in range(2)], (x,), ranks=2, microbatches=2, loss=each) as pipe:
            seeds: list[Any] = []
            with monkeypatch.context() as patch:
                patch.setattr(np.random, "seed", seeds.append)
                pipe.step(x, target=x)
        assert len(seeds) == count


@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge"])
@pytest.mark.parametrize("closed", [False, True])
def test_a_comparison_is_certain_if_no_number_could_change_it(name: str, closed: bool) -> None:
    numbers = [0.0, 0.5, 1 - 2**-24, *([1.0] if closed else [])]
    for bound in (-1, 0.0, 0.5, 1, 1.5):
        outcomes = {getattr(operator, name)(number, bound) for number in numbers}
        outcome = compare_drawn(f"__{name}__", bound, closed=closed)
        assert outcome == (outcomes.pop() if len(outcomes) == 1 else None), bound
        assert compare_drawn(f"{name}_", bound, closed=closed) is None  # in place: it writes what it decides


def test_bigbird() -> None:
    """It chooses its sparse blocks with numpy, inside of its attention."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2}
    sizes |= {"vocab_size": 64, "max_position_embeddings": 64, "block_size": 2, "num_random_blocks": 1}
    config = transformers.BigBirdConfig(**sizes, sep_token_id=2)
    ids = torch.randint(3, 60, (4, 32))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    verify(
        transformers.BigBirdForMaskedLM(config).train(), (), kwargs=inputs, ranks=2, microbatches=2
    ).raise_if_failed()
