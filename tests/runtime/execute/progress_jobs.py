"""How a rank's watchdog sees its device: jobs for a rank that has the stand-in device."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import penstock
from penstock.distributed.failure import OUTSIDE, DeviceLag, Position
from penstock.distributed.watchdog import Watchdog
from penstock.runtime.execute import clock
from penstock.runtime.execute.clock import Progress, has_events
from scaffolding import stand_in
from scaffolding.stand_in import DEVICE

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
        positions = sum(1 + (each.wait is not None) for each in pipe.session._first.bound.actions)
        return {"beyond": counted["record"] - positions, "made": counted["Event"], "asked": counted["query"]}


def which_devices() -> None:
    assert has_events(torch.device(DEVICE, 0))
    assert not has_events(torch.device("cpu"))
    assert not has_events(torch.device("meta"))
