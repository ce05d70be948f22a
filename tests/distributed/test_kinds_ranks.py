"""Real ranks with batches of which some microbatches take another branch of the forward than others.

Only the first stage's rank has the input, so it tells the others which way each microbatch goes.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from mesh_jobs import mesh_of

import penstock
from penstock.schedule import Schedule, generate
from penstock.testing.nccl import nccl_rules
from scaffolding.branching import MASKED, PLAIN, TWICE, Branching, batch_of, cuts, several_kinds
from scaffolding.by_hand import step_by_hand
from scaffolding.models import squared_error
from scaffolding.ranks import Ranks
from scaffolding.representatives import long_after

pytestmark = pytest.mark.distributed


def train(rank: int, order: Schedule, transport: str, rules: bool, tied: bool) -> list[str]:
    """What differs from one device, in words."""
    with nccl_rules() if rules else nullcontext():
        return steps(order, transport, tied=tied)


def steps(order: Schedule, transport: str, *, tied: bool, **options: Any) -> list[str]:
    torch.manual_seed(0)
    model, m = Branching(order.placement.depth, tied=tied), order.microbatches
    reference, wrong = copy.deepcopy(model), list[str]()
    batches = [batch_of(ways, seed) for seed, ways in enumerate(several_kinds(m))]
    options |= {"schedule": order, "cuts": cuts(order.placement.depth), "transport": transport, "loss": squared_error}
    with penstock.pipeline(model, batches[0][:2], **options) as pipe:
        held, wanted = dict(pipe.named_parameters()), dict(reference.named_parameters())
        for number, (x, mask, y) in enumerate((*batches, *batches)):
            model.zero_grad()
            reference.zero_grad()
            expected = step_by_hand(reference, (x, mask), y, squared_error, m)
            loss = pipe.step(x, mask, target=y).loss
            if loss is None or not torch.equal(loss, expected.total):
                wrong.append(f"step {number}: loss")
            wrong += [f"step {number}: {what}" for what in differing(held, wanted, order, tied)]
    return wrong


def replicas(rank: int, schedule: str) -> list[str]:
    """What differs from one device where each of two replicas' microbatches are of other kinds than the other's."""
    torch.manual_seed(0)
    m, mesh = 3, mesh_of((2, 2), ("dp", "pp"))
    model, options = Branching(2), {"schedule": schedule, "cuts": cuts(2), "loss": squared_error, "microbatches": m}
    reference, wrong = copy.deepcopy(model), list[str]()
    parts = [batch_of(ways, seed) for seed, ways in enumerate([(MASKED, PLAIN, TWICE), (TWICE, MASKED, PLAIN)])]
    whole = tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))
    x, mask, y = parts[rank // 2]
    with penstock.pipeline(model, (x, mask), mesh=mesh, **options) as pipe:
        for number in range(2):
            model.zero_grad()
            reference.zero_grad()
            expected = step_by_hand(reference, whole[:2], whole[2], squared_error, 2 * m)
            loss = pipe.step(x, mask, target=y).loss
            if loss is None or not torch.allclose(loss, expected.total):
                wrong.append(f"step {number}: loss")
            for name, parameter in pipe.named_parameters():
                grad = dict(reference.named_parameters())[name].grad
                if parameter.grad is None or grad is None or not torch.allclose(parameter.grad, grad, atol=1e-6):
                    wrong.append(f"step {number}: {name}")
    return wrong


def differing(held: dict[str, Any], wanted: dict[str, Any], order: Schedule, tied: bool) -> list[str]:
    """The parameters whose gradients differ: in a bit, or by more than rounding where several stages hold them."""
    found = []
    for name, parameter in held.items():
        mine, other = parameter.grad, wanted[name].grad
        if mine is None or other is None:
            found += [name] if mine is not other else []
        elif order.placement.pipelines > 1 or (tied and name == "layers.0.linear.weight"):
            found += [name] if (mine - other).abs().max() > 1e-6 * other.abs().max() else []
        else:
            found += [] if torch.equal(mine, other) else [name]
    return found


MICROBATCHES = 6

SHORT = [("1f1b", 2, 1, False, True), ("zb-v", 2, 2, True, False)]
LONG = [
    ("interleaved-1f1b", 4, 2, False, True),
    ("chimera", 4, 1, True, False),
]


@pytest.mark.parametrize(("schedule", "p", "chunks", "rules", "tied"), long_after(len(SHORT), *SHORT, *LONG))
def test_each_microbatch_goes_its_way(
    schedule: str, p: int, chunks: int, rules: bool, tied: bool, request: pytest.FixtureRequest
) -> None:
    """Over shared memory, and over gloo under NCCL's rules."""
    ranks: Ranks = request.getfixturevalue(f"ranks{p}")
    order, transport = generate(schedule, p, MICROBATCHES, chunks), "distributed" if rules else "auto"
    assert ranks.run(train, order, transport, rules, tied) == [[]] * p


def test_replicas_have_microbatches_of_other_kinds_than_each_other(ranks4: Ranks) -> None:
    assert ranks4.run(replicas, "zb-h1") == [[]] * 4
