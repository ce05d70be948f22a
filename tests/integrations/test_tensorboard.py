"""What a step's figures look like to TensorBoard: the event files are read back."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

import penstock
from penstock.integrations.tensorboard import StepWriter
from scaffolding import small


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_every_figure_is_written_where_it_is_known(tmp_path: Path) -> None:
    x, y = small.batch()
    clock = map(float, count(start=0, step=2))
    losses, norms = [], []
    with (
        penstock.pipeline(
            small.mlp(), (x,), ranks=2, microbatches=4, loss=lambda o, t: (o - t).square().mean()
        ) as pipe,
        StepWriter(tmp_path, clock=lambda: next(clock)) as writer,
    ):
        for step in range(3):
            result = pipe.step(x, target=y, timeline=step > 0)
            norms.append(float(pipe.clip_grad_norm_(1.0)))
            losses.append(float(result.loss))
            if step == 1:  # as if each rank had a process of its own
                assert result.timeline is not None
                result = replace(result, timeline=replace(result.timeline, in_turns=False))
                bubble = result.timeline.bubble_rate
            writer.add(pipe.step_count, result, rows=len(x), tokens=50, gradient_norm=norms[-1])
    shown = read(tmp_path)
    assert shown.pop("loss") == list(zip((1, 2, 3), map(pytest.approx, losses), strict=True))
    assert shown.pop("gradient_norm") == list(zip((1, 2, 3), map(pytest.approx, norms), strict=True))
    assert shown.pop("bubble") == [(2, pytest.approx(bubble))]
    assert shown.pop("time/step") == [(2, 2.0), (3, 2.0)]
    assert shown.pop("rate/rows") == [(2, len(x) / 2), (3, len(x) / 2)]
    assert shown.pop("rate/tokens") == [(2, 25.0), (3, 25.0)]
    assert shown == {}


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'penstock\[tensorboard\]'"):
        StepWriter(tmp_path)
