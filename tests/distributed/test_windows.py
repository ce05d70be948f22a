"""Sharded stages that are gathered within a window, in real processes: the same bits, less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import window_jobs
from window_jobs import Seen

from scaffolding.ranks import Ranks

pytestmark = pytest.mark.distributed


def run(ranks: Ranks, window: int | None, steps: int = 2, rows: list[int] | None = None, **options: Any) -> list[Seen]:
    return ranks.run(window_jobs.train, window, steps, rows or [6, 6], options)


@pytest.mark.parametrize(("schedule", "chunks", "window"), [("interleaved-1f1b", 3, 2), ("zb-v", 2, 1), ("1f1b", 1, 1)])
def test_a_window_changes_no_bit(ranks4: Ranks, schedule: str, chunks: int, window: int) -> None:
    options = {"schedule": schedule, "chunks": chunks, "layers": 2 * chunks, "microbatches": 3}
    plain, windowed = run(ranks4, None, **options), run(ranks4, window, **options)
    for one, other in zip(plain, windowed, strict=True):
        assert [float(loss) for loss in other.losses] == [float(loss) for loss in one.losses]
        assert other.gradients.keys() == one.gradients.keys()
        assert all(torch.equal(gradient, one.gradients[name]) for name, gradient in other.gradients.items())
        assert torch.equal(other.evaluated, one.evaluated)
        print(other.schedule, other.gathered[:20], other.left)
