"""Schedules and timelines draw themselves in notebooks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.report.svg import make_panel, svg
from penstock.schedule import Action, Op, Placement, Row, Schedule, generate
from penstock.schedule.timeline import Timeline
from penstock.simulate import StageCost, simulate


@pytest.fixture
def timeline() -> Timeline:
    return simulate(generate("gpipe", 2, 2), StageCost(0.002, 0.002, 0.002))


def test_a_notebook_shows_the_picture(timeline: Timeline) -> None:
    schedule = generate("zb-v", 2, 4)
    assert schedule._repr_html_() == svg([make_panel(schedule)], "slots")
    assert timeline._repr_html_() == svg([make_panel(timeline)])
    assert "2 ranks, 18 ms; bubble 33.3%" in svg([make_panel(timeline)])


def test_a_notebook_does_not_wait_for_what_takes_long() -> None:
    row = Row.of(Op.F, 0, range(100_001))
    how = "penstock.report.svg([penstock.report.make_panel(schedule)], 'slots')"
    said = f"<pre>100,001 actions; {how} draws them, in a while</pre>"
    assert Schedule("long", Placement.loop(1), 100_001, [row])._repr_html_() == said


def test_a_schedule_that_cannot_run_is_shown_as_text() -> None:
    stuck = Schedule("stuck", Placement.loop(1), 1, [[Action.parse("0B0"), Action.parse("0F0")]])
    assert stuck._repr_html_() is None


def test_schedules_load_what_draws_them_only_when_asked() -> None:
    code = (
        "import sys; from penstock.schedule import generate; s = generate('gpipe', 2, 2); "
        "assert not [m for m in sys.modules if m.startswith(('penstock.report', 'torch', 'numpy'))]; "
        "assert s._repr_html_().startswith('<svg'); "
        "assert not [m for m in sys.modules if m.startswith(('torch', 'numpy'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
