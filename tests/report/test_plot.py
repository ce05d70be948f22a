"""Schedules and timelines draw themselves: in notebooks, and with matplotlib."""

from __future__ import annotations

import subprocess
import sys

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from penstock._base.errors import MissingExtraError, ScheduleError
from penstock.report.colors import LIGHT, shade
from penstock.report.svg import make_panel, svg
from penstock.schedule import Action, Op, Placement, Row, Schedule, generate
from penstock.schedule.describe import Kind
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
    with pytest.raises(ScheduleError):
        stuck.plot(Figure().subplots())


def test_schedules_load_what_draws_them_only_when_asked() -> None:
    code = (
        "import sys; from penstock.schedule import generate; s = generate('gpipe', 2, 2); "
        "assert not [m for m in sys.modules if m.startswith(('penstock.report', 'matplotlib', 'torch', 'numpy'))]; "
        "assert s._repr_html_().startswith('<svg'); "
        "assert not [m for m in sys.modules if m.startswith(('matplotlib', 'torch', 'numpy'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_plot_draws_each_action_in_its_color() -> None:
    schedule = generate("zb-h1", 2, 3)
    axes = Figure(figsize=(9, 3)).subplots()
    assert schedule.plot(axes) is axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert axes.get_title(loc="left").startswith("zb-h1: 2 ranks, 3 microbatches; bubble")
    assert axes.get_xlabel() == "slots"
    fills = {to_hex(color) for bars in axes.collections for color in bars.get_facecolor()}
    assert fills == {LIGHT.fills[Kind.WAIT]} | {
        shade(LIGHT, kind, 0, number) for kind in (Kind.F, Kind.I, Kind.W) for number in (0, 1)
    }
    assert sorted(text.get_text() for text in axes.texts) == sorted("012" * 6)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "forward", "input gradient", "weight gradient", "idle",
    ]  # fmt: skip


def test_plot_is_in_proportion_to_time(timeline: Timeline) -> None:
    axes = timeline.plot(Figure(figsize=(9, 3)).subplots())
    assert axes.get_xlim() == (0, timeline.makespan_seconds)
    assert axes.get_xlabel() == "ms"
    starts = {round(path.vertices[:, 0].min(), 6) for bars in axes.collections for path in bars.get_paths()}
    assert starts == {0.0, *(round(span.start_seconds, 6) for span in timeline)}


def test_plot_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock._base.errors.importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"plot\(\): this needs matplotlib, pip install 'penstock\[plot\]'"):
        generate("gpipe", 2, 2).plot()
