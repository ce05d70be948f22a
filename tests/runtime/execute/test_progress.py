"""Events on a device, recorded as the host goes on: by them the watchdog sees where it is, and a timeline is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock
from penstock.distributed.failure import OUTSIDE, DeviceLag, Position
from penstock.distributed.watchdog import Watchdog
from penstock.runtime.execute import clock
from penstock.runtime.execute.clock import Progress
from penstock.schedule import Op
from scaffolding import stand_in
from scaffolding.ranks import Ranks
from scaffolding.stand_in import DEVICE, on_the_device


def timed_steps() -> dict[str, dict[str, int]]:
    """What a step without a timeline takes, and the first and the second with one; `actions`: how many there are."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(8, 4)
    taken = {}
    with penstock.pipeline(
        model, (x,), ranks=2, microbatches=4, loss=F.mse_loss, devices=DEVICE, schedule="zb-h1"
    ) as pipe:
        for _ in range(6):
            pipe.step(x, target=x)
        for name, timeline in (("plain", False), ("first", True), ("second", True)):
            stand_in.calls.clear()
            stand_in.waits.clear()
            result = pipe.step(x, target=x, timeline=timeline)
            taken[name] = {**stand_in.calls, **stand_in.waits}
        assert result.timeline is not None
        assert all(span.start_seconds <= span.end_seconds for span in result.timeline)
        assert all(result.timeline.busy_seconds(rank) > 0 for rank in range(2))
        assert sum(span.action.op is Op.W for span in result.timeline) == 8
        taken["actions"] = {"all": len(result.timeline)}
    return taken


POSITIONS = [Position(f"0F{number}") for number in range(40)]


def _followed() -> tuple[Progress, Watchdog]:
    watchdog = Watchdog()
    return Progress(torch.device(DEVICE, 0), watchdog), watchdog


def hangs() -> None:
    """The host goes on; the device stays where it hangs, until it goes on too."""
    followed, watchdog = _followed()
    assert watchdog.device() is None
    for number, position in enumerate(POSITIONS[:6]):
        if number == 3:
            stand_in.hang()  # in what follows position 2: the event at its end was not recorded yet
        followed.position = position
        assert watchdog.position == position
    assert watchdog.device() == DeviceLag(POSITIONS[2], "0F1")
    stand_in.go_on()
    assert watchdog.device() is None


def used_again() -> None:
    """Events are made once. The host may go on by more than there are, and is then only known to be ahead."""
    with mock.patch.object(clock, "RING_SIZE", 8):
        followed, watchdog = _followed()
        before = stand_in.calls["Event"]
        for position in POSITIONS:
            followed.position = position
            assert watchdog.device() is None
        stand_in.hang()
        for position in POSITIONS:
            followed.position = position
        behind = watchdog.device()
        assert behind is not None
        assert behind.position in POSITIONS
        stand_in.go_on()
        assert watchdog.device() is None
        assert stand_in.calls["Event"] == before


def failed() -> None:
    """A device that has failed tells nothing: what it last told stands."""
    followed, watchdog = _followed()
    stand_in.hang()
    followed.position = POSITIONS[0]
    followed.position = POSITIONS[1]
    seen = watchdog.device()
    assert seen == DeviceLag(OUTSIDE)
    followed.position = POSITIONS[2]
    with mock.patch.object(stand_in.Event, "query", side_effect=RuntimeError("an illegal memory access")):
        assert watchdog.device() == seen
    stand_in.go_on()


def events_of_a_step() -> dict[str, int]:
    """How often a steady step of a process that is one of several records events, by what is made and done."""
    dist_like = Watchdog()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(4, 4)
    with penstock.pipeline(model, (x,), ranks=2, microbatches=2, loss=F.mse_loss, devices=DEVICE) as pipe:
        engine = pipe.session.engine
        plain = stand_in.calls.copy()
        pipe.step(x, target=x)
        assert stand_in.calls == plain, "a single process has no one to tell"
        engine._watched = Progress(engine.devices[0], dist_like)
        made = stand_in.calls.copy()
        pipe.step(x, target=x)
        counted: dict[str, Any] = stand_in.calls - made
        positions = sum(1 + (each.wait is not None) for each in pipe.session.steps.first.actions)
        return {"beyond": counted["record"] - positions, "made": counted["Event"], "asked": counted["query"]}


ANCHORS = 3
"""The waits at the end of a step: one for its work, and two more, for an idle device, that compare the two clocks."""


@pytest.mark.parametrize("job", [hangs, used_again, failed])
def test_where_the_device_is(device_rank: Ranks, job: Callable[[], None]) -> None:
    device_rank.run(on_the_device, job)


def test_a_step_records_an_event_where_a_position_ends(device_rank: Ranks) -> None:
    """And at its beginning and end, for what comes before and for its last sends."""
    (counted,) = device_rank.run(on_the_device, events_of_a_step)
    assert counted == {"beyond": 3, "made": 0, "asked": 0}


def test_a_timed_step_records_three_events_an_action_and_waits_at_its_end(device_rank: Ranks) -> None:
    """Two ranks of one process each have a clock, and so each wait."""
    (taken,) = device_rank.run(on_the_device, timed_steps)
    actions = taken["actions"]["all"]
    used = {"record": 3 * actions + 2 * ANCHORS, "elapsed_time": 3 * actions, "event": 2 * ANCHORS}
    assert taken["plain"] == {}
    assert taken["first"] == {"Event": 3 * actions + 2 * ANCHORS, **used}
    assert taken["second"] == used
