"""Real ranks with batches of which some microbatches take another branch than others, or that are in other layouts.

Only the first stage's rank has the input, so it tells the others which way each microbatch goes.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mesh_jobs import mesh_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import penstock
from penstock.schedule import Schedule, generate
from penstock.testing.nccl import nccl_rules
from scaffolding.branching import MASKED, PLAIN, TWICE, Branching, batch_of, cuts, several_kinds
from scaffolding.by_hand import step_by_hand
from scaffolding.models import squared_error
from scaffolding.ranks import Ranks
from scaffolding.representatives import long_after
from test_layouts import DIMS, batch, by_graphs, entropy, graph_net, graphs, recurrent

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


# -- batches in other layouts -----------------------------------------------------------------------------------------


def verify_graphs(rank: int) -> tuple[bool, str, str]:
    """Whether all is equal, in words, and what the whole batch says."""
    args, target = graphs()
    options: dict[str, Any] = {"split_fn": by_graphs, "merge_fn": torch.cat, "microbatches": 4}
    report = penstock.verify(graph_net, args, target=target, loss_fn=F.cross_entropy, **options)
    assert report.full_batch is not None
    return report.ok, report.summary(), report.full_batch.verdict


def replicas_in_dimension_1(rank: int) -> tuple[bool, str]:
    """Each of two replicas_in_dimension_1 has rows of its own, along dimension 1; 7 rows do not divide by 3."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    args, kwargs, target = batch(14)
    mine = slice(7 * mesh.get_local_rank("dp"), 7 * (mesh.get_local_rank("dp") + 1))
    x, state = args[0][:, mine], tuple(s[:, mine] for s in args[1])
    report = penstock.verify(
        recurrent,
        (x, state),
        kwargs,
        target=target[:, mine],
        loss_fn=entropy,
        batch_dims=DIMS,
        microbatches=3,
        mesh=mesh,
    )
    return report.ok, report.summary()


def train_graphs(rank: int) -> list[Any]:
    """Steps of changing batches, of which each rank passes only what it needs, and predictions, on every rank. The
    function that cuts looks at inputs and targets on both ends."""
    args, target = graphs()
    found: list[Any] = []
    options: dict[str, Any] = {"loss": F.cross_entropy, "split_fn": by_graphs, "microbatches": 4}
    with penstock.pipeline(graph_net(), args, **options) as pipe:
        for sizes in ((3, 5, 2, 4, 4, 1, 6), (2, 2), (3, 5, 2, 4, 4, 1, 6)):
            args, target = graphs(sizes)
            given = args if pipe.needs_inputs else ()
            result = pipe.step(*given, target=target if pipe.needs_targets else None)
            found += [float(result.loss), pipe.predict(*given, outputs="all")]
        found.append((pipe.needs_inputs, pipe.needs_targets))
    return found


def test_batches_of_graphs_are_verified(ranks2: Ranks) -> None:
    for ok, summary, whole in ranks2.run(verify_graphs):
        assert ok, summary
        assert whole == "close"


def test_replicas_with_the_batch_in_dimension_1(ranks4: Ranks) -> None:
    for ok, summary in ranks4.run(replicas_in_dimension_1):
        assert ok, summary


def test_changing_batches_are_those_of_one_process(ranks3: Ranks, one_thread: None) -> None:
    """Of tensors: test_layouts.py, in one process."""
    alone = train_graphs(0)
    for rank, found in enumerate(ranks3.run(train_graphs)):
        for mine, other in zip(found[:6], alone[:6], strict=True):
            assert torch.equal(torch.as_tensor(mine), torch.as_tensor(other))
        assert found[6] == ((True, True), (False, False), (True, True))[rank]
