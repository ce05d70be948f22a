"""Transfers that differ only in microbatch or replica are one row, of all their times."""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
import pytest
from drawn_runs import run_of
from rich.console import Console

from penstock.network.fabric.compare import compare
from penstock.network.fabric.results import results
from penstock.network.fabric.samples import Run
from penstock.network.fabric.statistics import Summary
from penstock.network.fabric.views.page import page
from penstock.network.fabric.views.text import show, show_comparison
from penstock.network.fabric.workload import Transfer, Workload, groups

RANKS, MICROBATCHES, REPLICAS, TRIALS = 4, 8, 2, 40
CUTS = ["stage 0->1", "stage 1->0", "stage 1->2", "stage 2->1", "stage 2->3", "stage 3->2"]


def pipeline() -> tuple[Transfer, ...]:
    """Every microbatch over every cut, there and back, in both replicas; then each stage's gradients."""
    made = []
    for microbatch in range(MICROBATCHES):
        for cut in range(RANKS - 1):
            for letter, ends, kind in (("F", (cut, cut + 1), "activation"), ("B", (cut + 1, cut), "gradient of one")):
                for replica in range(REPLICAS):
                    name = f"{letter}{microbatch} stage {ends[0]}->{ends[1]} of replica {replica}"
                    hosts = (replica * RANKS + ends[0], replica * RANKS + ends[1])
                    made.append(Transfer(name, 4096, "send", hosts, kind=kind))
    sums = [Transfer(f"gradients of stage {n}", 8000 + 4 * n, ranks=(n, n + RANKS)) for n in range(RANKS)]
    return (*made, *sums)


def drawn(slower: float = 1.0) -> tuple[Run, np.ndarray[Any, Any]]:
    """A run, and the seconds that each trial's transfers took: no two cuts are alike."""
    draw_ = np.random.default_rng(7)
    transfers = pipeline()
    by_cut = np.array([1 + len(groups(Workload("x", transfers[: n + 1]))) for n in range(len(transfers))])
    seconds = draw_.lognormal(-7, 0.4, (TRIALS, len(transfers))) * by_cut * slower
    return run_of(seconds, transfers, hosts=RANKS * REPLICAS, backend="gloo"), seconds


def places(name: str) -> list[int]:
    return [n for n, one in enumerate(pipeline()) if name in one.name]


def test_a_row_is_of_all_microbatches_and_replicas_of_a_cut_and_direction() -> None:
    run, seconds = drawn()
    made = results(run)
    assert len(made["transfers"]) == len(pipeline()), "each one keeps its own figures"
    assert [one["name"] for one in made["groups"]][0:2] == ["stage 0->1", "stage 1->0"], "in order of the first"
    assert sorted(one["name"] for one in made["groups"]) == sorted(
        [*CUTS, *(f"gradients of stage {n}" for n in range(4))]
    )
    for name in CUTS:
        found = next(one for one in made["groups"] if one["name"] == name)
        of_cut = seconds[:, places(name)].ravel()
        assert len(of_cut) == TRIALS * MICROBATCHES * REPLICAS
        assert (found["times"], found["bytes"], found["trials"]) == (16, 4096, TRIALS)
        for q, key in ((0.5, "p50"), (0.9, "p90")):
            assert found["time_s"][key] == pytest.approx(np.quantile(of_cut, q), rel=1e-6)
        assert found["time_s"]["min"] == pytest.approx(of_cut.min(), rel=1e-6)
        assert found["time_s"]["max"] == pytest.approx(of_cut.max(), rel=1e-6)
        assert found["time_s"]["mean"] == pytest.approx(of_cut.mean(), rel=1e-6)
        assert found["algbw_GBps"] == pytest.approx(4096 / np.median(of_cut) / 1e9, rel=1e-6)
        ends = [int(end) for end in re.findall(r"\d+", name)]
        assert found["ranks"] == [ends[0], ends[1], ends[0] + RANKS, ends[1] + RANKS]
        assert [one["rank"] for one in found["per_rank"]] == found["ranks"]
        assert sum(one["trials_slowest"] for one in found["per_rank"]) == len(of_cut)
    alone = made["groups"][-1]
    assert {**made["transfers"][-1], "times": 1} == alone, "one transfer is a group of its own"


def test_samples_of_one_trial_count_as_one() -> None:
    """Or sixty trials of sixteen messages would bound a p99 that one slow trial in fifty makes."""
    draw_ = np.random.default_rng(1)
    alone = draw_.lognormal(0, 0.5, 300)
    rows = np.repeat(alone[:, None], 16, axis=1)
    summary, of_one = Summary.from_samples(rows), Summary.from_samples(alone)
    assert (summary.count, summary.effective, summary.figures["p99"]) == (300, of_one.effective, None)
    assert summary.mean_interval == pytest.approx(of_one.mean_interval)
    assert summary.intervals["p50"] == pytest.approx(of_one.intervals["p50"], rel=0.02)
    covered = 0
    for _ in range(300):
        trial = draw_.normal(0, 1, (60, 1)) + 0.3 * draw_.normal(0, 1, (60, 8))
        low, high = Summary.from_samples(trial).intervals["p50"] or (1, -1)
        covered += low <= 0 <= high
    assert covered / 300 > 0.92, "60 x 8 independent samples would have an interval that covers 50%"


@pytest.fixture(scope="module")
def shown() -> tuple[Run, dict[str, Any]]:
    """A run and its results."""
    run, _ = drawn()
    return run, results(run)


@pytest.mark.parametrize("width", [80, 160])
def test_the_table_has_a_row_for_each_cut_and_direction(width: int, shown: tuple[Run, dict[str, Any]]) -> None:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    show(*shown, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    tables = text[: text.index("\nTimes are")]
    for name in CUTS:
        lines = [line for line in tables.splitlines() if line.startswith(name)]
        assert 1 <= len(lines) <= 2, "in two tables where one is too wide"
        assert all(re.match(rf"{name} +(send +)?4,096 +16 ", line) for line in lines), "bytes of one, and how many"
    assert not re.search(r"\b[FB]\d+ stage", text)
    assert "share a row" in text
    assert re.search(rf"^step +[\d,]+ +{len(pipeline())} ", text, re.MULTILINE)


def test_pictures_have_a_curve_and_a_name_for_each_cut_and_direction(shown: tuple[Run, dict[str, Any]]) -> None:
    run, found = shown
    whole = page(run, found).replace("&gt;", ">")
    pictures = re.findall(r"<svg.*?</svg>", whole, re.DOTALL)
    assert len(pictures) == 4
    assert not any(re.search(r"[FB]\d+ stage", text) for text in pictures)
    distribution = set(re.findall(r"stage \d->\d", pictures[0]))
    assert 3 <= len(distribution & set(CUTS)) == len(distribution), "evenly spread names of the ten groups"
    assert "Share of transfers" in pictures[0]
    table = whole[whole.index("<table>") : whole.index("</table>")]
    assert table.count("stage 0->1") == 1
    assert "<th>times</th>" in table


def test_two_runs_are_compared_by_cut_and_direction() -> None:
    (a, _), (b, _) = drawn(), drawn(slower=1.5)
    found = compare(a, b)
    assert sorted(one["name"] for one in found["transfers"] if "->" in one["name"]) == CUTS
    assert found["step"] is not None
    assert all(one["ratio"] == pytest.approx(1.5, rel=1e-3) for one in found["transfers"])
    assert all(one["verdict"] == "differs" for one in found["transfers"])
    assert [one["trials"] for one in found["transfers"]] == [[TRIALS, TRIALS]] * 10, "those of a trial are one sample"
    console = Console(width=160, file=io.StringIO(), highlight=False)
    show_comparison(found, console, ("a", "b"), ([], []))
    assert "F0 stage" not in console.file.getvalue()  # type: ignore[attr-defined]
