"""The training that the preset emulates: it is a training, sums what the preset says, and its times are whole."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from penstock.demo import mlp_training
from penstock.errors import ArgumentError
from penstock.fabric.presets import preset
from penstock.fabric.workload import Workload
from scaffolding.ranks import Ranks, RanksError

STEPS, BATCH = 4, 8


def train(rank: int, steps: int = STEPS, batch: int = BATCH) -> mlp_training.Training | None:
    return mlp_training.train_mlp(steps, batch, warmup=0, images=mlp_training.random_images(), offset_ns=1000 * rank)


def by_hand(ranks: int) -> list[float]:
    """One process with all ranks' rows."""
    data, targets, _ = mlp_training.random_images()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = mlp_training.classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order, losses = torch.Generator().manual_seed(0), []
    for _ in range(STEPS):
        rows = torch.randperm(len(data), generator=order)[: ranks * BATCH]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data[rows]), targets[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.distributed
def test_ranks_train_as_one_process_does_and_note_each_layer(ranks2: Ranks):
    first, second = ranks2.run(train)
    assert second is None
    assert first.losses == pytest.approx(by_hand(2), rel=1e-5)
    assert len(set(first.losses)) == STEPS
    assert first.start_ns.shape == first.end_ns.shape == first.compute_ns.shape == (STEPS, 4, 2)
    assert (first.end_ns > first.start_ns).all()
    assert (first.start_ns[:, 1:] > first.end_ns[:, :-1]).all()
    assert (first.compute_ns[:, 1:] == first.start_ns[:, 1:] - first.end_ns[:, :-1]).all()
    assert (first.compute_ns > 0).all()
    assert (first.after_ns > 0).all()


@pytest.mark.distributed
def test_its_emulation_has_the_presets_sizes_and_its_own_times(ranks2: Ranks):
    training = ranks2.run(train)[0]
    workload = training.workload()
    assert [(t.name, t.bytes) for t in workload.transfers] == [(t.name, t.bytes) for t in preset("mlp").transfers]
    assert [t.compute_seconds for t in workload.transfers] == pytest.approx(
        [np.median(training.compute_ns[:, layer]) / 1e9 for layer in range(4)]
    )
    assert Workload.from_dict(workload.to_dict()) == workload


def train_and_keep(rank: int) -> tuple[mlp_training.Training | None, list[list[tuple[int, ...]]]]:
    kept: list[list[tuple[int, ...]]] = []
    training = mlp_training.train_mlp(STEPS, BATCH, warmup=1, images=mlp_training.random_images(), keep=kept.append)
    return training, kept


@pytest.mark.distributed
def test_each_step_is_kept_as_it_ends(ranks2: Ranks):
    (training, kept), (_, nothing) = ranks2.run(train_and_keep)
    assert nothing == []
    assert [{row[0] for row in rows} for rows in kept] == [{step} for step in range(STEPS)]
    rows = [row for rows in kept for row in rows]
    assert len(rows) == STEPS * 4 * 2
    for step, layer, rank, start, end in rows:
        assert (start, end) == (training.start_ns[step, layer, rank], training.end_ns[step, layer, rank])


@pytest.mark.distributed
def test_a_batch_that_the_data_cannot_give(ranks2: Ranks):
    with pytest.raises(RanksError, match="at most 898 rows a rank"):
        ranks2.run(train, 1, 1000)


def test_without_a_process_group():
    with pytest.raises(ArgumentError, match="init_process_group"):
        mlp_training.train_mlp(1)


def test_layers_are_summed_as_the_preset_says():
    sizes: list[int] = []
    steps = mlp_training._Steps(0, 0.1, lambda flat: sizes.append(flat.numel() * 4))
    data, targets, _ = mlp_training.random_images()
    for _ in range(2):
        steps.step(data[:2], targets[:2])
    assert sizes == [t.bytes for t in preset("mlp").transfers] * 2


def test_digits_are_scaled_up_or_random(monkeypatch):
    images, targets, source = mlp_training.digits()
    assert images.shape == mlp_training.random_images()[0].shape == (1797, 784)
    assert (float(images.min()), sorted(set(targets.tolist()))) == (0.0, list(range(10)))
    assert images.max() <= 1
    assert "scikit-learn" in source
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert mlp_training.digits()[2] == "random images"
    assert torch.equal(mlp_training.digits()[0], mlp_training.random_images()[0])
