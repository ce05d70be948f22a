"""A picture says what the timeline says: each action where and as long as it ran, by its name."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from hypothesis import given, settings

from penstock._base.errors import ArgumentError
from penstock.report.colors import DARK, LIGHT, shade
from penstock.report.svg import make_panel, svg
from penstock.schedule import Action, Op, Placement, Row, Schedule, generate
from penstock.schedule.describe import Kind, describe
from penstock.schedule.timeline import Span, Timeline
from penstock.simulate import LinkCost, StageCost, simulate
from scaffolding.nanoseconds import merged
from scaffolding.some_schedules import generated

NS = "{http://www.w3.org/2000/svg}"


def schedule_svg(schedule: Schedule, timeline: Timeline | None = None, **options: Any) -> str:
    return svg([make_panel(schedule, timeline)], "slots" if timeline is None else "s", **options)


def drawn(text: str) -> list[tuple[str, float, float, float, str | None]]:
    """Each action's words, place and length in pixels, row, and label."""
    found = []
    for group in ET.fromstring(text).iter(f"{NS}g"):
        title, box, label = group.find(f"{NS}title"), group.find(f"{NS}rect"), group.find(f"{NS}text")
        if title is not None and title.text and box is not None:
            x, width, y = (float(box.attrib[name]) for name in ("x", "width", "y"))
            found.append((title.text, x, width, y, None if label is None else label.text))
    return found


def texts(text: str, css: str) -> list[str]:
    return [node.text or "" for node in ET.fromstring(text).iter(f"{NS}text") if node.get("class") == css]


def test_each_action_has_its_words_place_and_label() -> None:
    made = drawn(schedule_svg(generate("gpipe", 2, 2)))
    assert [(words, label) for words, _, _, _, label in made[:4]] == [
        ("forward of microbatch 0, stage 0: 0 to 1", "0"),
        ("forward of microbatch 1, stage 0: 1 to 2", "1"),
        ("backward of microbatch 0, stage 0: 4 to 5", "0"),
        ("backward of microbatch 1, stage 0: 5 to 6", "1"),
    ]
    left, slot = made[0][1], made[1][1] - made[0][1]
    assert made[2][1] == pytest.approx(left + 4 * slot)
    assert len({y for *_, y, _ in made}) == 2


@settings(max_examples=25)
@given(generated(max_ranks=4, max_microbatches=6))
def test_lengths_and_places_are_in_proportion_to_time(schedule: Schedule) -> None:
    timeline = simulate(schedule, StageCost(0.002, 0.001, 0.0015), LinkCost(0.0005))
    made = drawn(schedule_svg(schedule, timeline))
    spans = list(timeline)
    assert len(made) == len(spans)
    left = min(x for _, x, *_ in made)
    scale = max(x - left for _, x, *_ in made) / max(span.start_seconds for span in spans)
    for (words, x, width, *_), span in zip(made, spans, strict=True):
        assert words.startswith(describe(span.action) + ": ")
        assert x == pytest.approx(left + span.start_seconds * scale, abs=0.02)
        assert width == pytest.approx((span.end_seconds - span.start_seconds) * scale, rel=0.2)


def test_labels_fit_and_are_there_for_all_of_a_length_or_none() -> None:
    for microbatches in (8, 12, 24, 60):
        text = schedule_svg(generate("1f1b", 4, microbatches))
        labels = [label for *_, label in drawn(text)]
        assert all(labels) or not any(labels)
        for group in ET.fromstring(text).iter(f"{NS}g"):
            label, box = group.find(f"{NS}text"), group.find(f"{NS}rect")
            if label is not None and box is not None:
                size = float(label.attrib["font-size"])
                assert 8 <= size <= 12
                assert 0.57 * size * len(label.text or "") < float(box.attrib["width"])


def test_colors_are_those_of_the_palette_for_each_background() -> None:
    schedule = generate("zb-v", 2, 4)
    auto, light, dark = (schedule_svg(schedule, background=it) for it in ("auto", "light", "dark"))
    assert "prefers-color-scheme" in auto
    assert "prefers-color-scheme" not in light + dark
    for theme, text, other in ((LIGHT, light, DARK), (DARK, dark, LIGHT)):
        for chunk, parity in ((0, 0), (1, 1)):
            color = shade(theme, Kind.W, chunk, parity)
            assert f".W-{chunk}-{parity}{{fill:{color}}}" in text
            assert f".W-{chunk}-{parity}{{fill:{color}}}" in auto
        assert f".page{{fill:{theme.page}}}" in text
        assert f".page{{fill:{other.page}}}" not in text
    found = re.findall(r'<g class="(\S+)"><title>(\S+) .*microbatch (\d), stage (\d)', light)
    assert {css for css, *_ in found} == {f"{kind}-{c}-{k}" for kind in "FIW" for c in (0, 1) for k in (0, 1)}
    assert {(css[2], stage) for css, _, _, stage in found} == {("0", "0"), ("0", "1"), ("1", "2"), ("1", "3")}


def test_the_legend_has_what_occurs() -> None:
    assert texts(schedule_svg(generate("zb-h1", 2, 4)), "rank")[-4:] == [
        "forward", "input gradient", "weight gradient", "idle",
    ]  # fmt: skip
    assert texts(schedule_svg(generate("zb-v", 2, 4)), "rank")[-1] == "lighter: later chunks"
    assert texts(schedule_svg(generate("chimera", 2, 4)), "rank")[-1] == "lighter: the copy"


def test_messages_lie_below_what_is_computed_meanwhile_and_a_name_is_no_markup() -> None:
    row = [Span(0, Action.parse("0F0"), 0, 2), Span(0, Action.parse("0SEND_F0"), 1, 2)]
    (one, _, _, above, _), (two, _, _, y, label) = drawn(svg([make_panel(merged([row]))]))
    assert one.startswith("forward")
    assert two == "send activations of microbatch 0, stage 0 to stage 1: 1 s to 2 s"
    assert (y > above, label) == (True, None)
    schedule = Schedule("<b>&", Placement.loop(1), 1, [[Action.parse("0F0")]])
    assert texts(schedule_svg(schedule), "title")[0].startswith("<b>&: 1 rank, 1 microbatch; ")


def test_so_many_that_none_has_a_pixel_are_drawn_by_the_pixel() -> None:
    text = schedule_svg(generate("1f1b", 64, 512))
    assert len(text) < 1_000_000
    assert not drawn(text)
    root = ET.fromstring(text)
    rows = [node for node in root.iter(f"{NS}path") if node.get("class", "").endswith("-0-0")]
    assert len(rows) == 128
    # Rank 0 begins with 64 forwards in a row, of 1150 slots on 881 pixels.
    first = re.match(r"M([\d.]+) [\d.]+h(\d+)v", rows[0].attrib["d"])
    assert first is not None
    assert int(first[2]) == pytest.approx(64 / 1150 * 881, abs=1)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"width": 80}, r"width=80: pass at least \d+ pixels"), ({"background": "gray"}, "background='gray': expected")],
)
def test_bad_options(options: dict[str, str], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        schedule_svg(generate("gpipe", 2, 2), **options)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"pass make_panel\(...\) of the Schedule"):
        svg([generate("gpipe", 2, 2)])  # type: ignore[list-item]


# -- in notebooks -----------------------------------------------------------------------------------------------------


def test_a_notebook_shows_the_picture() -> None:
    schedule, timeline = generate("zb-v", 2, 4), simulate(generate("gpipe", 2, 2), StageCost(0.002, 0.002, 0.002))
    assert schedule._repr_html_() == svg([make_panel(schedule)], "slots")
    assert timeline._repr_html_() == svg([make_panel(timeline)])
    assert "2 ranks, 18 ms; bubble 33.3%" in svg([make_panel(timeline)])
    stuck = Schedule("stuck", Placement.loop(1), 1, [[Action.parse("0B0"), Action.parse("0F0")]])
    assert stuck._repr_html_() is None, "what cannot run is shown as text"
    how = "penstock.report.svg([penstock.report.make_panel(schedule)], 'slots')"
    long = Schedule("long", Placement.loop(1), 100_001, [Row.of(Op.F, 0, range(100_001))])
    assert long._repr_html_() == f"<pre>100,001 actions; {how} draws them, in a while</pre>"


def test_schedules_load_what_draws_them_only_when_asked() -> None:
    code = (
        "import sys; from penstock.schedule import generate; s = generate('gpipe', 2, 2); "
        "assert not [m for m in sys.modules if m.startswith(('penstock.report', 'torch', 'numpy'))]; "
        "assert s._repr_html_().startswith('<svg'); "
        "assert not [m for m in sys.modules if m.startswith(('torch', 'numpy'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
