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
from torch import Tensor

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
    torch.manual_seed(0)
    model, batches = Branching(order.placement.depth, tied=tied), several_kinds(order.microbatches)
    reordered = {"layers.0.linear.weight"} if tied else set()
    if order.placement.pipelines > 1:
        reordered = {name for name, _ in model.named_parameters()}
    options = {"schedule": order, "transport": transport}
    whole = [batch_of(ways, seed) for seed, ways in enumerate(batches)]
    with nccl_rules() if rules else nullcontext():
        return differing(model, [*zip(whole, whole, strict=True)] * 2, order.microbatches, reordered, options)


def replicas(rank: int, schedule: str) -> list[str]:
    """What differs from one device where each of two replicas' microbatches are of other kinds than the other's."""
    torch.manual_seed(0)
    model = Branching(2)
    parts = [batch_of(ways, seed) for seed, ways in enumerate([(MASKED, PLAIN, TWICE), (TWICE, MASKED, PLAIN)])]
    whole = tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))
    options = {"schedule": schedule, "microbatches": 3, "mesh": mesh_of((2, 2), ("dp", "pp"))}
    reordered = {"", *(name for name, _ in model.named_parameters())}
    return differing(model, [(parts[rank // 2], whole)] * 2, 6, reordered, options)


Batch = tuple[Tensor, ...]


def differing(
    model: Branching,
    batches: list[tuple[Batch, Batch]],
    count: int,
    reordered: set[str],
    options: dict[str, Any],
) -> list[str]:
    """The losses and gradients of steps that differ from one device: in a bit, or, those that are added in another
    order ("" is the loss), by more than rounding. A batch is this process's, and that of one device."""
    reference, wrong = copy.deepcopy(model), list[str]()
    options |= {"cuts": cuts(len(model.layers)), "loss": squared_error}
    with penstock.pipeline(model, batches[0][0][:2], **options) as pipe:
        for number, ((*mine, target), (x, mask, y)) in enumerate(batches):
            model.zero_grad()
            reference.zero_grad()
            wanted = {"": step_by_hand(reference, (x, mask), y, squared_error, count).total}
            found = {"": pipe.step(*mine, target=target).loss}
            held = dict(pipe.named_parameters())
            found |= {name: parameter.grad for name, parameter in held.items()}
            wanted |= {name: p.grad for name, p in reference.named_parameters() if name in held}
            for name, one in found.items():
                other = wanted[name]
                same = one is other
                if one is not None and other is not None:
                    off = float((one - other).abs().max())
                    same = off <= (1e-6 * float(other.abs().max()) if name in reordered else 0.0)
                wrong += [] if same else [f"step {number}: {name or 'loss'}"]
    return wrong


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
