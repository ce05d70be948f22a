"""`penstock draw`: the picture says what the schedule and its timeline say, with colors and without."""

from __future__ import annotations

import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from command_line import as_json, output, refusal
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from penstock.cli._cost_options import CostOptions
from penstock.costs import Outcome, with_one_model
from penstock.report import make_panel
from penstock.report import svg as draw
from penstock.report.terminal import Palette, legend, proportional, slots, style
from penstock.schedule import Op, Schedule, check, generate, grid, names
from penstock.schedule.grid import slot_timeline
from scaffolding.some_schedules import generated

palettes = st.sampled_from(Palette)
NUMBERS = ("--ranks", "4", "--microbatches", "8")
needs_browser = pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium")


def picture(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("rank ")]


def timed(schedule: Schedule, forward: float = 2.0, comm: float = 0.5) -> Outcome:
    return Outcome.simulated(schedule, CostOptions(forward=forward, backward_weight=1.5, link_latency=comm).read())


@pytest.mark.parametrize("name", names())
def test_without_costs_it_is_the_grid(name: str) -> None:
    text = output("draw", "--schedule", name, *NUMBERS)
    assert picture(text) == picture(grid(generate(name, 4, 8), 80))
    assert max(map(len, text.splitlines())) <= 80


@given(generated(max_ranks=4, max_microbatches=6), st.integers(30, 140), palettes)
def test_colors_change_no_character(schedule: Schedule, width: int, palette: Palette) -> None:
    assert slots(schedule, width, palette).plain == grid(schedule, width)


def test_cells_have_the_color_of_op_and_chunk() -> None:
    made = slots(generate("zb-v", 2, 4), 80, Palette.MANY)
    plain = made.plain
    for cell in re.finditer(r"(\d)(F|I|W)(\d)", plain):
        (found,) = {span.style for span in made.spans if span.start <= cell.start() < span.end}
        assert found == style(Palette.MANY, Op(cell[2]), int(cell[1]) // 2, int(cell[3]))
    cells = product((Op.F, Op.B, Op.I, Op.W), (0, 1), (0, 1))
    assert len({style(Palette.MANY, *cell) for cell in cells}) == 16


@given(generated(max_ranks=4, max_microbatches=6), st.integers(60, 300), palettes)
def test_lengths_are_in_proportion_to_time(schedule: Schedule, width: int, palette: Palette) -> None:
    outcome = timed(schedule)
    made = proportional(schedule, outcome.timeline, width, palette)
    columns = width - len(f"rank {schedule.ranks - 1}") - 3
    unit = outcome.timeline.makespan_seconds / columns
    lines = picture(made.plain)
    assert len(lines) == schedule.ranks
    assert max(map(len, lines)) <= width
    for rank in range(schedule.ranks):
        cells = lines[rank].partition("| ")[2]
        assert len(cells) == columns
        idle = sum(cause for cause in outcome.idle[rank].values()) / unit
        gaps = len(outcome.timeline.tracks[rank]) + 1  # each gap's ends fall between the middles of columns
        assert abs(cells.count(".") - idle) <= gaps


def test_legend_explains_small_letters_where_there_are_some() -> None:
    options = ("draw", "--schedule", "1f1b", *NUMBERS)
    assert ". idle; small letters: the action continues" in output(*options, "--forward", "2")
    assert "small letters" not in output(*options)
    assert "small" not in legend([generate("1f1b", 2, 4)], Palette.MANY, fills=True).plain


@pytest.mark.parametrize(
    ("color_system", "palette"), [(None, Palette.NONE), ("standard", Palette.FEW), ("256", Palette.MANY)]
)
def test_palette_of_a_terminal(color_system: Any, palette: Palette) -> None:
    assert Palette.of(Console(color_system=color_system)) is palette
    colors = {style(palette, op, chunk, 0) for op in (Op.F, Op.B, Op.I, Op.W) for chunk in (0, 1)}
    assert len(colors) == (1 if palette is Palette.NONE else 8)


@pytest.mark.parametrize("name", ["zb-v", "dualpipe"])
def test_text_is_the_schedule_and_comms_add_its_messages(name: str) -> None:
    schedule = generate(name, 4, 8)
    assert Schedule.parse(output("draw", "--schedule", name, *NUMBERS, "--text")) == schedule
    with_messages = Schedule.parse(output("draw", "--schedule", name, *NUMBERS, "--with-messages"))
    assert any(action.op.is_send for row in with_messages.rows for action in row)
    assert not [violation for violation in check(with_messages) if violation.fatal]


def test_json_has_when_each_action_runs() -> None:
    made = as_json("draw", "--schedule", "zb-v", *NUMBERS, "--forward", "3", "--link-latency", "2")
    outcome = Outcome.simulated(generate("zb-v", 4, 8), CostOptions(forward=3, link_latency=2).read())
    assert made["makespan"] == outcome.timeline.makespan_seconds
    for row, track in zip(made["rows"], outcome.timeline.tracks, strict=True):
        assert row["actions"] == [str(action) for action in track.actions]
        assert (row["start"], row["end"]) == (list(track.start), list(track.end))
    assert Schedule.parse(made["text"]) == outcome.schedule


@needs_browser
def test_a_file_shows_slots_or_times(tmp_path: Path) -> None:
    svg, png = tmp_path / "a.svg", tmp_path / "a.png"
    assert output("draw", "--schedule", "zb-v", *NUMBERS, "--svg", str(svg)) == f"wrote {svg}\n"
    assert svg.read_text() == draw([make_panel(generate("zb-v", 4, 8))], "slots")
    options = ("--forward", "3", "--svg", str(svg), "--png", str(png), "--background", "dark", "--width", "600")
    assert output("draw", "--schedule", "zb-v", *NUMBERS, *options) == f"wrote {svg}\nwrote {png}\n"
    outcome = Outcome.simulated(generate("zb-v", 4, 8), CostOptions(forward=3).read())
    drawn = draw([make_panel(outcome.schedule, outcome.timeline)], "time", background="dark", width=600)
    assert svg.read_text() == drawn
    assert int.from_bytes(png.read_bytes()[16:20]) == 1200, "two dots a pixel"


def test_several_schedules_lie_on_one_axis(tmp_path: Path) -> None:
    svg = tmp_path / "a.svg"
    assert output("draw", "--schedule", "gpipe,zb-v", *NUMBERS, "--forward", "2", "--svg", str(svg)) == f"wrote {svg}\n"
    known = CostOptions(forward=2).read()
    found, _ = with_one_model(known, {name: generate(name, 4, 8) for name in ("gpipe", "zb-v")}, {})
    assert svg.read_text() == draw([make_panel(one.schedule, one.timeline) for one in found.values()], "time")


def test_several_schedules_have_columns_of_one_length_in_the_terminal() -> None:
    said = output("draw", "--schedule", "gpipe,naive", *NUMBERS, columns=130)
    lengths = {len(line) for line in said.splitlines() if line.startswith("rank 0 |")}
    slots = [round(slot_timeline(generate(name, 4, 8)).makespan_seconds) for name in ("gpipe", "naive")]
    assert lengths == {len("rank 0 | ") + slot for slot in slots}
    assert "zb-v" not in said
    left = output("draw", "--schedule", "gpipe,chimera", "--ranks", "4", "--microbatches", "7")
    assert "omitted: chimera works with an even number of microbatches" in " ".join(left.split())


@pytest.mark.parametrize(("option", "name"), [("--svg", "a.png"), ("--png", "a.svg")])
def test_a_picture_is_what_its_name_says(tmp_path: Path, option: str, name: str) -> None:
    said = refusal("draw", "--schedule", "1f1b", *NUMBERS, option, str(tmp_path / name))
    assert said.endswith(f"expected a name that ends in {option.replace('--', '.')}, such as {tmp_path}/a.{option[2:]}")
    assert not [*tmp_path.iterdir()]


def test_png_needs_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    files = ("--svg", str(tmp_path / "x.svg"), "--png", str(tmp_path / "x.png"))
    assert "install chromium" in refusal("draw", "--schedule", "1f1b", *NUMBERS, *files)
    assert not [*tmp_path.iterdir()]


def test_name_of_a_file_is_not_taken_for_markup(tmp_path: Path) -> None:
    path = tmp_path / "[red]mine[-].csv"
    path.write_text("0F0,0B0\n")
    assert "[red]mine[-]: 1 rank, 1 microbatch, 1 stage per rank" in output("draw", "--csv", str(path))
