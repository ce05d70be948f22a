"""What is shown of a run is what its samples say, in a terminal, in nccl-tests' shape, as pictures and as a page."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import SIZES, SLOW_RANK, made_run, made_workload, write_run
from rich.console import Console

from cli.command_line import output
from penstock.network.fabric.compare import compare
from penstock.network.fabric.results import results
from penstock.network.fabric.samples import Run
from penstock.network.fabric.views import nccl
from penstock.network.fabric.views.numbers import seconds
from penstock.network.fabric.views.page import page, write_page
from penstock.network.fabric.views.plots import Scale, _timeline, draw
from penstock.network.fabric.views.text import show, show_comparison
from penstock.network.fabric.workload import Transfer, Workload
from scaffolding.browser import barriers


def shown(run: Run, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    show(run, results(run), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def row(text: str, name: str) -> list[str]:
    """The cells of the first line that begins with a name."""
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name])


# -- terminal ---------------------------------------------------------------------------------------------------------


def test_the_terminal_shows_the_percentiles_of_the_samples():
    run = made_run(400)
    times = (run.end_ns - run.start_ns).max(axis=2)[:, 3] / 1e6
    cells = row(shown(run, 140), "fc1")
    assert cells[1] == "803,840"
    for cell, q in zip(cells[2:6], (0, 0.5, 0.9, 0.99), strict=True):
        assert float(cell.removesuffix("ms")) == pytest.approx(np.quantile(times, q), rel=5e-3)
    assert cells[6] == "n/a"  # p99.9
    assert float(cells[7].removesuffix("ms")) == pytest.approx(times.max(), rel=5e-3)


def test_a_percentile_with_too_few_samples_says_how_many_it_takes():
    text = shown(made_run(50))
    assert row(text, "fc1")[5:7] == ["n/a", "n/a"]
    assert "p99 needs 368, p99.9 needs 3,688" in " ".join(text.split())
    assert "n/a:" not in shown(made_run(4500, steps=False))
    long = (Transfer("transformer.h.11.mlp.down_projection.weight", 40_000_000), Transfer("head", 4000, "all_gather"))
    lines = [line for line in shown(made_run(400, workload=Workload("gpt", long)), 70).splitlines() if "weight" in line]
    assert [len(line) <= 70 and "tion.weight" in line for line in lines] == [True, True], "however long the names"


def test_warnings_say_what_is_missing_and_that_processors_were_the_limit():
    busy = [{"cpu_seconds": 19.0, "wall_seconds": 20.0}] * 4
    text = shown(made_run(20, asked=200, cpu=busy, links=[]))
    assert "warning: the run is not complete; missing: rank 2 left in trial 20; 180 of 200 trials" in text
    assert "20 of 200 trials" in text.splitlines()[0]
    assert re.search(r"warning: processors: .*190% busy; the processors are the limit", text)
    calm = [{"cpu_seconds": 2.0, "wall_seconds": 20.0}] * 4
    assert "warning" not in shown(made_run(200, cpu=calm))


PAIRS = Workload(
    "pairs", tuple(Transfer(f"{a}", 4000, "send", ranks=(a, a + 1), compute_seconds=1e-3) for a in range(3))
)


def test_a_rank_that_the_others_wait_for_is_named():
    assert re.search(rf"rank {SLOW_RANK} came last to \d\d% of its transfers, up to \d+us after", shown(made_run(100)))
    slow = made_workload([1000 * size for size in SIZES])
    assert "came last" not in shown(made_run(100, workload=slow)), "by a trifle of what transfers take"
    assert "came last" not in shown(made_run(3)), "of three trials any rank may be the last in two"
    assert "came last" not in shown(made_run(100, workload=PAIRS)), "of two, one always is the last"


def test_overlap_of_a_pipelines_messages_is_said_not_to_wait_for_them():
    """Stages do wait for what they receive, and only gradients of replicas can travel while they compute."""
    said = "with overlap with compute (computed)"
    assert f"{said}, as if no stage waited to compute until it has received" in shown(made_run(20, workload=PAIRS), 400)
    assert said in shown(made_run(20), 400)
    assert "as if no stage" not in shown(made_run(20), 400)


def test_a_mean_that_its_trials_hardly_bound_has_no_margin():
    calm, wild = made_run(40), made_run(40)
    wild.end_ns[7, 3] += int(40 * (wild.end_ns - wild.start_ns)[7, 3].max())
    low, high = results(wild)["transfers"][3]["mean_interval"]
    assert high - low > 2 * results(wild)["transfers"][3]["time_s"]["mean"], "or it shows nothing"
    assert re.fullmatch(r"\u00b1\d\d?\.\d%", row(shown(calm), "fc1")[-1])
    assert row(shown(wild), "fc1")[-1] == "\u00b1n/a"
    assert row(shown(made_run(5)), "fc1")[-1] == "\u00b1n/a"
    assert "\u00b1n/a</td>" in page(wild, results(wild))


def test_a_run_without_a_whole_trial_is_shown():
    run = made_run(0, asked=100)
    text = shown(run)
    assert "0 of 100 trials" in text
    assert "n/a" not in text, "a table of nothing helps nobody"
    assert "validation: 0" in nccl.text(run, results(run)), "nothing was verified to the end"
    assert draw(run, results(run)) == {}
    assert "nothing to draw" in page(run, results(run))


@given(st.floats(1e-9, 1e4))
def test_times_have_three_digits_and_are_right(value: float):
    text = seconds(value)
    number, unit = re.fullmatch(r"([\d.,]+)(ns|us|ms|s)", text).groups()  # type: ignore[union-attr]
    scale = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
    assert float(number.replace(",", "")) * scale == pytest.approx(value, rel=5.1e-3)
    assert len(re.sub(r"[.,]", "", number).lstrip("0")) in (3, 4, 5)
    assert unit == "s" or float(number) < 1000


# -- two runs ---------------------------------------------------------------------------------------------------------


def compared(a: Run, b: Run, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    show_comparison(compare(a, b), console, ("runs/a", "runs/b"), ([], []))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 140])
def test_two_runs_are_shown_with_what_differs(width: int):
    a = made_run(100, seed=1)
    text = compared(a, made_run(100, seed=2, slower=1.3, link="50mbit"), width)
    assert text.splitlines()[:3] == ["A: runs/a", "B: runs/b", "link: 100mbit in A, 50mbit in B"]
    cells = row(text, "fc1")
    assert float(cells[cells.index("to") - 2]) == pytest.approx(1.3, rel=0.05)
    assert "differs: median" in next(line for line in text.splitlines() if line.startswith("fc1"))
    assert "The runs differ." in text
    assert all(len(line) <= width for line in text.splitlines())
    assert ("p99 A" in text) == (width > 80)
    assert "No difference shown" in compared(a, a, width)
    new = made_run(5, workload=Workload("b", (*made_workload().transfers, Transfer("new", 4000))))
    few = compared(made_run(5), new, width)
    assert "only in B: new" in few
    assert "too few samples" in few


# -- nccl-tests -------------------------------------------------------------------------------------------------------


def nccl_rows(run: Run, average: nccl.Average = "avg") -> list[list[str]]:
    """The cells of the rows: size, count, type, redop, root, and twice time, algbw, busbw and #wrong."""
    lines = nccl.text(run, results(run), average).splitlines()
    return [line.split() for line in lines if not line.startswith("#")]


def test_the_columns_of_nccl_tests_are_those_of_its_users_parsers():
    run = made_run(30, iterations=5, slower=0.01)
    lines = nccl.text(run, results(run)).splitlines()
    heads = next(line for line in lines if "busbw" in line).lstrip("# ").split()
    assert heads == ["size", "count", "type", "redop", "root", *["time", "algbw", "busbw", "#wrong"] * 2]
    cells = nccl_rows(run)
    assert [int(cell[0]) for cell in cells] == [2600, 33024, 131584, 803840]
    assert cells[3][1:5] == ["200960", "float", "sum", "-1"]
    assert cells[3][5:9] == ["N/A"] * 4  # an all_reduce of torch.distributed is in place
    assert cells[3][12] == "0"
    assert "iters: 30 agg iters: 5 validation: 1" in "\n".join(lines)
    (said,) = (line.split()[-1] for line in lines if line.startswith("# Avg bus bandwidth    : "))
    assert float(said) == pytest.approx(np.mean([float(cell[11]) for cell in cells]), abs=0.005)


def test_averages_over_ranks_are_those_of_nccl_tests():
    run = made_run(30, iterations=5)
    times = (run.end_ns - run.start_ns)[:, 3] / 1e3 / 5
    right = {"avg": times.mean(), "max": times.max(1).mean(), "min": times.min(1).mean(), "rank0": times[:, 0].mean()}
    assert len(set(right.values())) == 4
    for average, mean in right.items():
        assert float(nccl_rows(run, average)[3][9]) == pytest.approx(mean, rel=1e-4)


def test_types_ops_and_roots_are_in_the_words_of_nccl_tests():
    kinds = {"reduce": ("max", "0"), "scatter": ("none", "0"), "sendrecv": ("none", "-1"), "all_reduce": ("max", "-1")}
    kinds |= {"gather": ("none", "0"), "broadcast": ("none", "0"), "reduce_scatter": ("max", "-1")}
    parts = ("scatter", "gather", "reduce_scatter")
    transfers = tuple(Transfer(kind, 80_000, kind) for kind in kinds)
    run = made_run(30, workload=Workload("mixed", transfers, element_bytes=2, dtype="float16", op="max"))
    for kind, row in zip(kinds, nccl_rows(run), strict=True):
        assert row[1:5] == ["10000" if kind in parts else "40000", "half", *kinds[kind]]
    assert nccl.text(run, results(run)).count("Collective test starting: ") == len(kinds)


@pytest.mark.parametrize("average", ["avg", "max", "min", "rank0"])
def test_a_message_in_the_shape_of_nccl_tests_leaves_out_what_its_receiver_waited(average: nccl.Average):
    workload = Workload("pair", (Transfer("a", 80_000, "send", ranks=(SLOW_RANK, 0)),))
    run = made_run(30, workload=workload)
    both = run.start_ns[:, 0, [SLOW_RANK, 0]].max(1)
    assert float(nccl_rows(run, average)[0][5]) == pytest.approx((run.end_ns[:, 0].max(1) - both).mean() / 1e3, 1e-4)


# -- pictures ---------------------------------------------------------------------------------------------------------


def texts(drawn: str) -> list[str]:
    return ["".join(found.itertext()) for found in ElementTree.fromstring(drawn).iter() if found.tag.endswith("text")]


@pytest.fixture(scope="module")
def sixty() -> tuple[Run, dict[str, str]]:
    """A run of 60 trials and its pictures."""
    run = made_run(60)
    return run, draw(run, results(run))


def test_pictures_are_svg_whose_text_is_text_and_come_out_the_same(sixty: tuple[Run, dict[str, str]]):
    run, drawn = sixty
    assert list(drawn) == ["cdf", "trials", "busbw", "timeline"]
    for name, text in drawn.items():
        assert text.startswith("<svg"), name
        assert any("fc1" in label or "all_reduce" in label for label in texts(text)), name
    assert drawn == draw(run, results(run))


def test_the_slowest_trial_is_named_and_its_rounds_are_drawn(sixty: tuple[Run, dict[str, str]]):
    run, drawn = sixty
    took = run.end_ns.max(axis=(1, 2)) - run.start_ns.min(axis=(1, 2))
    assert any(f"number {took.argmax()}:" in text for text in texts(drawn["timeline"]))
    whole = _timeline(Run(run.record, run.start_ns, run.end_ns))
    # 6 rounds for each of 4 transfers, 4 ranks and 2 trials are bars of their own, over those of the transfers.
    assert drawn["timeline"].count("z") - whole.count("z") == 6 * 4 * 4 * 2


@given(st.floats(1e-7, 10), st.floats(1.01, 1e6), st.floats(60, 900), st.booleans())
def test_ticks_are_within_their_axis_and_leave_room_for_labels(low: float, ratio: float, pixels: float, is_log: bool):
    scale = Scale(low if is_log else 0.0, low * ratio, 10, 10 + pixels, is_log)
    ticks = scale.ticks(60)
    at = scale.at(ticks)
    assert all(10 - 1e-6 <= place <= 10 + pixels + 1e-6 for place in at)
    assert all(np.diff(at) >= 60 - 1e-6)
    assert ticks or ratio < 4, "an axis that is not short has ticks"
    assert len(Scale(12.5e-3, 18e-3, 66, 316, is_log=True).ticks(56)) > 2, "of times that hardly differ"


@pytest.mark.parametrize(("size", "dark"), [("wide", True), ("phone", False)])
def test_axe_finds_nothing(open_page: Any, tmp_path: Path, size: str, dark: bool):
    write_run(made_run(20), tmp_path)
    assert output("report", str(tmp_path)) == f"wrote {tmp_path / 'report.html'}\n"
    stored = Run.read(tmp_path)
    assert (tmp_path / "report.html").read_text() == page(stored, results(stored))
    assert barriers(open_page(tmp_path / "report.html", size=size, dark=dark)) == []


# -- page -------------------------------------------------------------------------------------------------------------


class Links(HTMLParser):
    """What a page would fetch, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.scripts = 0
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.fetched += [value or "" for key, value in attributes if key in ("src", "href", "xlink:href", "data")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_needs_no_network_and_has_everything(tmp_path: Path):
    run = Run.read(write_run(made_run(120, asked=200), tmp_path / "run"))
    write_page(run, results(run), tmp_path / "page.html")
    found = Links((tmp_path / "page.html").read_text())
    assert found.scripts == 0
    assert all(link.startswith(("#", "data:")) for link in found.fetched)
    words = " ".join(" ".join(found.words).split())
    for wanted in (
        "120 of 200 trials", "missing: rank 2 left in trial 120", "bbr", "qdisc tbf 8001", "tcp-segmentation-offload",
        "6.1.0", "2.40us ±900ns", "host3", "Slowest trial", "fc1", "% 8% 12 2.40us",
    ):  # fmt: skip
        assert wanted in words, wanted


def test_names_are_escaped():
    bad = "<script>alert(1)</script>&"
    workload = Workload(bad, (Transfer(bad, 4000), Transfer("$x_1$", 8000)))
    environment = [{"host": bad, "kernel": bad}] * 4
    text = page(run := made_run(40, workload=workload, environment=environment, link=bad), results(run))
    found = Links(text)
    assert found.scripts == 0
    assert bad in " ".join(found.words)
    assert "$x_1$" in texts(draw(run, results(run))["cdf"])  # no formula
