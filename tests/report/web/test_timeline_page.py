"""The timeline in a browser: what it shows is what Python found, and mouse, touch and keys reach all of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from penstock.report.colors import DARK, LIGHT, Theme, shade
from penstock.report.frame import frame
from penstock.report.web.page import STATIC, asset, bundle, embedded
from penstock.report.web.timeline_data import band, curve, timeline_data
from penstock.schedule import Action, Op, Schedule, add_communication, add_sharding, generate
from penstock.schedule.describe import WORDS, Kind, describe
from penstock.schedule.timeline import Span, Timeline
from penstock.simulate import LinkCost, StageCost, critical_path, memory, simulate
from scaffolding.nanoseconds import merged

ZB = generate("zb-h1", 3, 5)
INTERLEAVED = generate("interleaved-1f1b", 2, 4, 2)


def simulated(schedule: Schedule) -> Timeline:
    return simulate(schedule, StageCost(1.0, 1.5, 0.5), LinkCost(0.25))


def with_timeline(folder: Path, data: dict[str, Any]) -> Path:
    """A page whose `view` is a Timeline of the data, and whose `told` is what was selected."""
    start = (
        'window.view = new Timeline(document.getElementById("here"), '
        'JSON.parse(document.getElementById("data").textContent), {onselect: (one) => { window.told = one; }});\n'
    )
    body = f'<main><div id="here"></div></main>{embedded("data", data)}'
    path = folder / "page.html"
    path.write_text(frame("Timeline", body, style=asset("timeline.css"), script=bundle("timeline.js") + start))
    return path


def of_schedules(folder: Path, *schedules: Schedule) -> Path:
    return with_timeline(folder, timeline_data(band(one.name, simulated(one), one) for one in schedules))


def test_a_page_has_every_action_with_its_times_and_needs(tmp_path: Path, open_page: Any) -> None:
    page = open_page(of_schedules(tmp_path, ZB, INTERLEAVED))
    assert page.evaluate("view.bands.map((band) => band.name)") == ["zb-h1", "interleaved-1f1b"]
    for place, schedule in enumerate((ZB, INTERLEAVED)):
        timeline = simulated(schedule)
        spans = list(timeline)
        assert page.evaluate(f"view.bands[{place}].length") == len(spans)
        critical = {(span.rank, str(span.action)) for span in critical_path(schedule, timeline).spans}
        for number, span in enumerate(spans):
            found = page.evaluate(
                "([band, number]) => { view.select(band, number); const {lane, place} = view.bands[band].find(number);"
                " return {...told, start: lane.start[place], end: lane.end[place], critical: lane.critical[place]}; }",
                [place, number],
            )
            assert (found["rank"], found["label"]) == (span.rank, str(span.action))
            assert (found["start"], found["end"]) == (span.start_seconds, span.end_seconds)
            assert bool(found["critical"]) == ((span.rank, str(span.action)) in critical)
    number = next(number for number, span in enumerate(simulated(ZB)) if str(span.action) == "1I0")
    page.evaluate(f"view.select(0, {number})")
    text = page.inner_text(".tl-details")
    assert "input gradient of microbatch 0, stage 1, rank 1" in text
    assert re.search(r"needs\s+1F0 of rank 1, 2I0 of rank 2", text)
    assert re.search(r"is needed by\s+0I0 of rank 0, 1W0 of rank 1", text)


def test_a_page_says_of_each_action_what_pictures_and_traces_say(tmp_path: Path, open_page: Any) -> None:
    schedule = add_communication(add_sharding(generate("chimera", 2, 4), {0, 1}, 1))
    timeline = simulated(schedule)
    page = open_page(with_timeline(tmp_path, timeline_data([band("chimera", timeline, schedule)])))
    told = page.evaluate(
        "[...Array(view.bands[0].length).keys()].map((n) => { view.select(0, n); return told.title; })"
    )
    assert told == [f"{describe(span.action)}, rank {span.rank}" for span in timeline]
    assert page.inner_text(".tl-legend").startswith(f"F {WORDS[Kind.F]}")
    labels = page.evaluate(
        "(({lanes: [lane]}) => [...lane.op.keys()].map((n) => view.bands[0].label(lane, n)))(view.bands[0])"
    )
    assert not [label for label in labels if "_" in label], "raw names of ops"


def test_keys_go_everywhere(tmp_path: Path, open_page: Any) -> None:
    page = open_page(of_schedules(tmp_path, ZB))
    whole = page.evaluate("view.range")
    page.keyboard.press("Tab")
    while page.evaluate("document.activeElement !== view.canvas"):
        page.keyboard.press("Tab")
    page.keyboard.press("+")
    zoomed = page.evaluate("view.range")
    assert whole[0] < zoomed[0] < zoomed[1] < whole[1]
    page.keyboard.press("ArrowRight")
    assert page.evaluate("view.range")[0] > zoomed[0]
    page.keyboard.press("0")
    assert page.evaluate("view.range") == whole
    page.keyboard.press("Enter")
    assert page.evaluate("told.label") == "0F0"
    page.keyboard.press("Tab")
    assert page.evaluate("told.label") == "0F1"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("[told.rank, told.label]") == [1, "1F0"]
    page.keyboard.press("Escape")
    assert page.evaluate("told") is None
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement !== view.canvas"), "Tab leaves the timeline when nothing is selected"


def test_the_mouse_selects_pans_and_zooms(tmp_path: Path, open_page: Any) -> None:
    page = open_page(of_schedules(tmp_path, ZB))
    box = page.locator("canvas.tl-canvas").bounding_box()
    x, y = page.evaluate(
        "[view.left + 1.5 * view.width / view.extent / 1.01, view.places.get(view.bands[0].lanes[0]).y + 5]"
    )
    page.mouse.move(box["x"] + x, box["y"] + y)
    assert "0F1" in page.inner_text(".tl-tip")
    page.mouse.click(box["x"] + x, box["y"] + y)
    assert page.evaluate("told.label") == "0F1"
    page.mouse.wheel(0, -300)
    page.wait_for_function("!view.whole")
    low, high = page.evaluate("view.range")
    assert low < 1.5 < high, "zooming keeps what is under the pointer"
    page.mouse.down()
    page.mouse.move(box["x"] + x - 60, box["y"] + y, steps=3)
    page.mouse.up()
    assert page.evaluate("view.range")[0] > low


def test_two_fingers_zoom_and_one_pans(tmp_path: Path, open_page: Any) -> None:
    page = open_page(of_schedules(tmp_path, ZB), "phone", touch=True)
    box = page.locator("canvas.tl-canvas").bounding_box()
    middle, y = box["x"] + page.evaluate("view.left + view.width / 2"), box["y"] + page.evaluate("view.total / 2")
    devtools = page.context.new_cdp_session(page)

    def fingers(kind: str, *places: float) -> None:
        points = [{"x": x, "y": y, "id": number} for number, x in enumerate(places)]
        devtools.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    whole = page.evaluate("view.range")
    center = sum(whole) / 2
    fingers("touchStart", middle - 30, middle + 30)
    for apart in (45, 60, 75, 90):
        fingers("touchMove", middle - apart, middle + apart)
    fingers("touchEnd")
    page.wait_for_function("!view.whole")
    low, high = page.evaluate("view.range")
    assert (high - low) / (whole[1] - whole[0]) == pytest.approx(30 / 90, rel=0.1)
    assert (low + high) / 2 == pytest.approx(center, abs=0.05 * whole[1])
    fingers("touchStart", middle)
    for by in (20, 40, 60):
        fingers("touchMove", middle - by)
    fingers("touchEnd")
    page.wait_for_function(f"view.range[0] > {low}")
    after = page.evaluate("view.range")
    assert after[1] - after[0] == pytest.approx(high - low)
    page.touchscreen.tap(middle, box["y"] + page.evaluate("view.places.get(view.bands[0].lanes[1]).y + 5"))
    assert page.evaluate("told.rank") == 1


PIXEL = """(place) => {
    view._draw();
    const lane = view.bands[0].lanes[0];
    const x = view.left + ((lane.start[place] + 0.1) * view.width) / view.extent / 1.01;
    return [...view.canvas.getContext("2d").getImageData(x, view.places.get(lane).y + 3, 1, 1).data];
}"""


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_colors_are_those_of_every_picture(tmp_path: Path, open_page: Any, theme: Theme) -> None:
    page = open_page(of_schedules(tmp_path, ZB), dark=theme is DARK)
    for place in (0, 1):  # two forwards, of microbatches 0 and 1
        assert "#" + bytes(page.evaluate(PIXEL, place)[:3]).hex() == shade(theme, Kind.F, 0, place)


def test_memory_is_drawn_to_its_peak(tmp_path: Path, open_page: Any) -> None:
    costs = [StageCost(1.0, 1.0, 1.0, parameter_bytes=7.0, activation_bytes=100.0, weight_gradient_bytes=50.0)] * 3
    timeline = simulated(ZB)
    held = memory(ZB, costs, timeline)
    data = timeline_data([band("", timeline, ZB, memory=[curve(one, 1000.0) for one in held])])
    page = open_page(with_timeline(tmp_path, data))
    assert page.evaluate("view.bands[0].lanes.map((lane) => lane.memory.peak)") == [one.peak for one in held]


@pytest.mark.parametrize(
    "timeline",
    [
        Timeline(()),
        merged([[], []]),
        merged([[], [Span(1, Action(0, Op.F, 0), 0.0, 0.0)]]),
        merged([[Span(0, Action(0, Op.UNSHARD), 0.0, 1e-9), Span(0, Action(0, Op.F, 0), 5.0, 1e6)]]),
    ],
)
def test_odd_timelines_are_drawn(tmp_path: Path, open_page: Any, timeline: Timeline) -> None:
    page = open_page(with_timeline(tmp_path, timeline_data([band("odd", timeline)])))
    page.evaluate("view._draw(); view.zoom(0.1); view._draw(); view.walk(0);")
    assert page.evaluate("view.range.every(Number.isFinite)")


def test_names_cannot_become_markup(tmp_path: Path, open_page: Any) -> None:
    name = "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 1'>"
    page = open_page(with_timeline(tmp_path, timeline_data([band(name, simulated(ZB), ZB, note=name)])))
    assert page.evaluate("[view.bands[0].name, window.ran]") == [name, None]


def test_a_bundle_stands_alone() -> None:
    text = bundle("timeline.js")
    assert "import " not in text
    assert not re.search(r"^export", text, re.MULTILINE)
    names = re.findall(r"^(?:async )?(?:function|class|const|let) (\w+)", text, re.MULTILINE)
    assert len(names) == len({*names}), "the modules of a bundle share one scope"


def test_nothing_is_loaded_from_elsewhere() -> None:
    for file in STATIC.iterdir():
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")  # a name, not a place
        assert not re.search(r"https?:|//[a-z]+\.", text), file.name
