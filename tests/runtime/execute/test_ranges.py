"""A step under torch's profiler names its actions there; one without has nothing to do with profilers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import profiler

import penstock
from penstock.runtime.execute import program
from scaffolding.small import batch, mlp

pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11's


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 4), ("zb-h1", 2)])
def test_a_profile_names_each_action_once(schedule: str, ranks: int) -> None:
    x, y = batch(8)
    with penstock.pipeline(mlp(), (x,), ranks=ranks, microbatches=4, loss=F.mse_loss, schedule=schedule) as pipe:
        pipe.step(x, target=y)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            pipe.step(x, target=y)
        pipe.step(x, target=y)
    seen = Counter(event.name for event in profile.events() if event.name.startswith("penstock "))
    runs = Counter({name: count for name, count in seen.items() if not name.endswith(" waits")})
    assert runs == Counter(f"penstock {action}" for row in pipe.schedule.rows for action in row)
    assert seen["penstock 1F0 waits"] == 1
    inner = [event for event in profile.events() if event.name == "aten::linear"]
    assert all(event.cpu_parent.name.startswith("penstock ") for event in inner)


def test_without_a_profiler_there_are_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(profiler, "record_function", never)
    x, y = batch(8)
    with penstock.pipeline(mlp(), (x,), ranks=2, microbatches=4, loss=F.mse_loss) as pipe:
        pipe.step(x, target=y)


def test_torch_still_says_whether_it_profiles() -> None:
    assert not program.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert program.is_profiling()
    with profiler.emit_nvtx(enabled=False):
        assert not program.is_profiling()
    assert hasattr(profiler, "_is_profiler_enabled")  # else every step pays for ranges


def test_where_torch_does_not_say_every_step_has_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(profiler, "_is_profiler_enabled")
    assert program.is_profiling()
