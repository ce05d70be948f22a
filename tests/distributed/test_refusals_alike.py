"""What every rank refuses, every rank says by itself: one that is ahead does not end those that are about to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock
from penstock.distributed.failure_detector import Timeouts
from penstock.runtime.execute.control import Control
from scaffolding.models import squared_error
from scaffolding.ranks import Ranks
from scaffolding.representatives import long_after

pytestmark = pytest.mark.distributed


BEAT_SECONDS = 0.02
LATE_SECONDS = 0.1
"""In which a rank that seems to wait leaves, if another has failed."""


def _materialize(name: str, module: nn.Module) -> None:
    if dist.get_rank() == 0:
        raise penstock.ArgumentError(f"no values for {name}")


CASES: dict[str, dict[str, Any]] = {
    "cuts": {"cuts": ["no such module"]},
    "copies": {"schedule": "chimera", "parallelize": lambda stage: None},
    "compiled": {"compile": {"backend": "eager"}, "parallelize": lambda stage: None},
    "keepings": {"recompute": {7: "always"}},
    "one rank": {"materialize": _materialize},
}


@contextmanager
def _late(control: Control, what: str, peers: tuple[int, ...]) -> Iterator[None]:
    """As `waiting_for`, of a process that is slow to go on."""
    with _waiting_for(control, what, peers):
        yield
        time.sleep(LATE_SECONDS)


_waiting_for = Control.waiting_for


def refused(rank: int, case: str) -> tuple[str, float]:
    """What this rank says, and after how many seconds."""
    torch.manual_seed(0)
    with torch.device("meta" if case == "one rank" else "cpu"):
        model = [nn.Linear(4, 4) for _ in range(4)]
    slow = rank == dist.get_world_size() - 1
    x = torch.randn(8, 4)
    begin = time.monotonic()
    with (
        patch("penstock.pipe.build.Timeouts", partial(Timeouts, beat_seconds=BEAT_SECONDS)),
        patch.object(Control, "waiting_for", _late if slow else _waiting_for),
    ):
        try:
            penstock.pipeline(model, (x,), loss=squared_error, microbatches=4, **CASES[case])
        except penstock.PenstockError as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "", 0.0


@pytest.mark.parametrize("case", long_after(1, *(case for case in CASES if case != "one rank")))
def test_every_rank_raises_its_own_refusal(ranks2: Ranks, case: str) -> None:
    first, *others = ranks2.run(refused, case)
    assert first[0].startswith(("ArgumentError", "PartitionError"))
    assert all(said.split(" for stage ")[0] == first[0].split(" for stage ")[0] for said, _ in others)


def test_what_one_rank_refuses_ends_the_others_with_its_words(ranks2: Ranks) -> None:
    (own, _), (other, seconds) = ranks2.run(refused, "one rank")
    assert own == "ArgumentError: no values for 0"
    assert other == f"RankFailedError: rank 1 stops: rank 0 failed outside of a step: {own}"
    assert seconds < 10
