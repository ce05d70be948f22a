"""A profile says what the runtime adds to each action."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from penstock._base.errors import ArgumentError
from penstock.costs import read_profile
from penstock.pipe import profiling


def test_a_profile_on_a_cpu_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {
        profiling.FEW_MICROBATCHES: 1.0,
        profiling.MANY_MICROBATCHES: 1.0
        + (1.0 + 2 * 0.25) * (profiling.MANY_MICROBATCHES - profiling.FEW_MICROBATCHES) * 4,
    }
    monkeypatch.setattr(profiling, "_step_seconds", seconds.__getitem__)
    monkeypatch.setattr(profiling, "_shortest", lambda _: 1.0)
    monkeypatch.setattr(profiling, "_update_seconds", lambda values, _: 3.0 + 2.0**-30 * values)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    drawn = torch.get_rng_state()
    found = penstock.profile(layers, (torch.randn(2, 8, generator=torch.Generator()),), budget_seconds=0.0)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert found.action_seconds == 0.25
    assert found.optimizer_byte_seconds == 2.0**-33  # two values of four bytes each
    found.save(tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == found
    given = json.loads((tmp_path / "profile.json").read_text())
    with pytest.raises(ArgumentError, match="action_seconds=-1"):
        penstock.Profile.from_dict({**given, "action_seconds": -1})
    del given["action_seconds"]
    assert penstock.Profile.from_dict(given).action_seconds is None


def test_a_pipeline_with_nothing_to_do_and_an_optimizers_step_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 <= profiling.action_seconds() < 1
    cpu = torch.device("cpu")
    assert 0 < profiling._update_seconds(2**10, cpu) < profiling._update_seconds(2**21, cpu) < 1
    monkeypatch.setattr(profiling, "_shortest", lambda step: (step(), 1.0)[1])  # nothing but its launch
    assert profiling.optimizer_byte_seconds(cpu) == 0.0


def test_an_accelerators_caches_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []
    monkeypatch.setattr(profiling, "_update_seconds", lambda values, _: timed.append(values) or 1.0 / values)
    assert profiling.optimizer_byte_seconds(torch.device("cuda")) == 0.0  # the longer step was the faster
    assert sorted(timed) == [2**24, 2**25]
