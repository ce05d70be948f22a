"""What ranks run for `test_layout_ranks`: batches in other layouts, and pipelines that are spoiled on one rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import penstock
from test_layouts import DIMS, batch, by_graphs, entropy, graph_net, graphs, recurrent


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


def train_and_predict(rank: int) -> list[Any]:
    """Steps of changing batches, of which each rank passes only what it needs; and predictions, on every rank."""
    args, kwargs, target = batch()
    found: list[Any] = []
    with penstock.pipeline(recurrent(), args, kwargs, loss=entropy, batch_dims=DIMS, microbatches=4) as pipe:
        for many in (11, 3, 11):
            args, kwargs, target = batch(many)
            given = (args, kwargs) if pipe.needs_inputs else ((), {})
            result = pipe.step(*given[0], target=target if pipe.needs_targets else None, **given[1])
            found += [float(result.loss), pipe.predict(*given[0], outputs="all", **given[1])["logits"]]
    return found


def train_graphs(rank: int) -> list[Any]:
    """The same with a function that cuts, which looks at inputs and targets on both ends."""
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
