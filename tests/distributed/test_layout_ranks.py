"""Real processes with batches in other layouts, and `verify` where one of them is wrong in one step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import penstock
from scaffolding.ranks import Ranks
from test_layouts import DIMS, batch, by_graphs, entropy, graph_net, graphs, recurrent

pytestmark = pytest.mark.distributed


def verify_graphs(rank: int) -> tuple[bool, str, str]:
    """Whether all is equal, in words, and what the whole batch says."""
    args, target = graphs()
    options: dict[str, Any] = {"split_fn": by_graphs, "merge_fn": torch.cat, "microbatches": 4}
    report = penstock.verify(graph_net, args, target=target, loss_fn=F.cross_entropy, **options)
    assert report.full_batch is not None
    return report.ok, report.summary(), report.full_batch.verdict


def replicas(rank: int) -> tuple[bool, str]:
    """Each of two replicas has rows of its own, along dimension 1; 7 rows do not divide by 3."""
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
    for ok, summary in ranks4.run(replicas):
        assert ok, summary


def test_changing_batches_are_those_of_one_process(ranks3: Ranks) -> None:
    """Of tensors: test_layouts.py, in one process."""
    alone = train_graphs(0)
    for rank, found in enumerate(ranks3.run(train_graphs)):
        for mine, other in zip(found[:6], alone[:6], strict=True):
            assert torch.equal(torch.as_tensor(mine), torch.as_tensor(other))
        assert found[6] == ((True, True), (False, False), (True, True))[rank]
