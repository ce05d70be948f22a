"""Parameter groups by the unsplit model's names: the training of one device, the same groups on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import penstock
from distributed.group_jobs import CUTS, Seen, model, options_of, train
from penstock._base.errors import ArgumentError
from scaffolding.ranks import Ranks
from scaffolding.small import batch

KINDS = [(0.1, 0.001), (0.0, 0.001), (0.0, 0.01), (0.1, 0.01)]
"""Weight decay and rate, as the unsplit model's parameters first have them."""


def by_hand(steps: int = 3) -> dict[str, torch.Tensor]:
    net = model()
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay, "lr": rate} for decay, rate in KINDS]
    for name, parameter in net.named_parameters():
        options = options_of(name, parameter)
        if options is not None:
            groups[KINDS.index((options["weight_decay"], options["lr"]))]["params"].append(parameter)
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        for x, y in zip(*(t.chunk(4) for t in batch(8)), strict=True):
            (F.mse_loss(net(x.clone()), y.clone()) / 4).backward()
        optimizer.step()
        scheduler.step()
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def assert_same(seen: list[Seen], expected: dict[str, torch.Tensor], steps: int = 3) -> None:
    weights = {name: tensor for one in seen for name, tensor in one.weights.items()}
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, expected[name]), name
    for one in seen:
        assert one.options == [(decay, pytest.approx(rate * 0.5**steps)) for decay, rate in KINDS]


@pytest.mark.distributed
def test_every_rank_has_the_same_groups_some_of_them_empty(ranks2: Ranks, ranks4: Ranks, tmp_path: Path) -> None:
    seen = ranks4.run(train, None, str(tmp_path), 2)
    assert [one.sizes for one in seen] == [[1, 1, 2, 0], [0, 0, 2, 1], [0, 0, 1, 1], [0, 0, 0, 0]]
    assert_same(seen, by_hand(2), 2)
    assert_same(ranks2.run(train, None, str(tmp_path), 4), by_hand(4), 4)  # goes on from the checkpoint of four


@pytest.mark.parametrize("options", [0.1, {"params": []}])
def test_options_are_a_dict_without_parameters(options: Any) -> None:
    x, _ = batch(8)
    with penstock.pipeline(model(), (x,), ranks=2, microbatches=4, loss=F.mse_loss, cuts=CUTS[2]) as pipe:
        with pytest.raises(ArgumentError, match=r"parameter '0\.weight'.*without 'params'"):
            pipe.parameter_groups(lambda name, parameter: options)
        pipe.model.get_submodule("2").requires_grad_(False)
        (group,) = pipe.parameter_groups(lambda name, parameter: {})
        trained = {id(p) for p in pipe.model.parameters() if p.requires_grad}
        assert {id(p) for p in group["params"]} == trained  # what takes no gradient is left out
        with pytest.raises(ArgumentError, match=r"parameter_groups\(3\): expected a function of a parameter's name"):
            pipe.parameter_groups(3)  # type: ignore[arg-type]
