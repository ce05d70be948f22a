"""`penstock fabric predict`: what is found in a run's times is found back, and carried to other sizes and hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import as_json, output, refusal

from network.fabric.drawn_runs import run_of
from network.fabric.made_runs import write_run
from penstock.network.fabric.algorithms import algorithms, closed_form
from penstock.network.fabric.alpha_beta import LinkFit
from penstock.network.fabric.views import page
from penstock.network.fabric.workload import Transfer

ALPHA, BETA = 250e-6, 8e-8
SIZES = (4096, 65536, 1048576, 8388608)
MEASURED = (100e-6, 8e-8)
"""Of the links that were measured before the trials: seconds, and seconds a byte."""

LINKS = [{"from": 0, "to": 1, "latency_seconds": 100e-6, "bytes_per_second": 12.5e6}]
CPU = {"cpu_seconds": 1.5, "wall_seconds": 20.0, "steal": 0.0, "involuntary_switches": 0}


def sweep(
    folder: Path,
    *,
    hosts: int = 4,
    sizes: Sequence[int] = SIZES,
    collectives: Sequence[Any] = ("all_reduce",),
    algorithm: str = "ring",
    trials: int = 20,
    off: dict[int, float] | None = None,
    **record: Any,
) -> str:
    """A run whose every trial takes what the closed form says; `off`: some sizes take so many times as long."""
    transfers = tuple(Transfer(f"{kind} {size}", size, kind) for kind in collectives for size in sizes)
    took = []
    for transfer in transfers:
        form = algorithms(transfer.collective)[0] if algorithm == "engine" else algorithm
        seconds = LinkFit(ALPHA, BETA).seconds(closed_form(transfer.collective, form, hosts), transfer.bytes)
        took.append(seconds * (off or {}).get(transfer.bytes, 1.0))
    usual = {"links": LINKS, "cpu": [CPU] * hosts, "machine_cores": 2, "shared_machine": True, "missing": ""}
    run = run_of([took] * trials, transfers, hosts, algorithm=algorithm, **{**usual, **record})
    return str(write_run(run, folder))


def test_an_exact_sweep_is_found_back_and_predicts_the_closed_form(tmp_path: Path) -> None:
    made = as_json("fabric", "predict", sweep(tmp_path / "run"), "--hosts", "4,8,64,4096", "--sizes", "64KiB,3MB")
    (one,) = made["collectives"]
    fit = one["fit"]
    assert (fit["collective"], fit["algorithm"], fit["form"], fit["source"]) == ("all_reduce", "ring", "ring", "times")
    assert fit["alpha_seconds"] == pytest.approx(ALPHA, rel=1e-4)
    assert fit["beta_seconds_per_byte"] == pytest.approx(BETA, rel=1e-4)
    assert fit["largest_residual"] < 1e-4
    assert [size["bytes"] for size in fit["sizes"]] == list(SIZES)
    assert [(row["bytes"], row["hosts"]) for row in one["predictions"]] == [
        (size, hosts) for size in (65536, 3 * 1024**2) for hosts in (4, 8, 64, 4096)
    ]
    for row in one["predictions"]:
        for name in algorithms("all_reduce"):
            expected = LinkFit(ALPHA, BETA).seconds(closed_form("all_reduce", name, row["hosts"]), row["bytes"])
            assert row["seconds"][name] == pytest.approx(expected, rel=1e-3)
        assert row["seconds"][row["best"]] == min(row["seconds"].values())
        moved = 2 * (row["hosts"] - 1) / row["hosts"] * row["bytes"]
        assert row["busbw_GBps"] == pytest.approx(moved / row["seconds"][row["best"]] / 1e9)


def test_each_collective_has_a_fit_of_its_own_and_the_engines_is_a_rings(tmp_path: Path) -> None:
    run = sweep(tmp_path / "run", collectives=("all_gather", "all_reduce"), algorithm="engine")
    made = as_json("fabric", "predict", run)["collectives"]
    fits = [(one["fit"]["collective"], one["fit"]["algorithm"], one["fit"]["form"]) for one in made]
    assert fits == [("all_gather", "engine", "ring"), ("all_reduce", "engine", "ring")]
    assert made[1]["fit"]["alpha_seconds"] == pytest.approx(ALPHA, rel=1e-4)
    assert "torch.distributed's own as if it were ring" in output("fabric", "predict", run)
    assert as_json("fabric", "predict", run, "--collective", "all_gather")["collectives"] == made[:1]


def test_each_crossover_is_where_the_fastest_changes(tmp_path: Path) -> None:
    run = sweep(tmp_path / "run")
    (one,) = as_json("fabric", "predict", run, "--hosts", "16", "--sizes", "1KiB")["collectives"]
    (row,) = one["crossovers"]
    assert row["hosts"] == 16
    assert len(row["from"]) > 1
    for before, after in zip(row["from"], row["from"][1:], strict=False):
        for factor, name in ((0.9, before["algorithm"]), (1.1, after["algorithm"])):
            size = str(round(after["bytes"] * factor))
            (near,) = as_json("fabric", "predict", run, "--hosts", "16", "--sizes", size)["collectives"]
            times = near["predictions"][0]["seconds"]
            assert times[name] == pytest.approx(min(times.values()))


def test_without_options_it_is_the_runs_own_sizes_to_4096_hosts(tmp_path: Path) -> None:
    run = sweep(tmp_path / "run", sizes=(1048576, 4096, 65536))
    (one,) = as_json("fabric", "predict", run)["collectives"]
    hosts = [2**power for power in range(1, 13)]
    assert [(row["bytes"], row["hosts"]) for row in one["predictions"]] == [
        (size, n) for size in (4096, 65536, 1048576) for n in hosts
    ]
    assert [row["hosts"] for row in one["crossovers"]] == hosts
    text = output("fabric", "predict", run)
    assert "all_reduce: alpha 250us/step, 1/beta 100 Mbit/s" in text
    assert "4,096 hosts" in text
    assert "recursive-doubling to 7.32 KiB, then halving-doubling" in text, "in the unit of the tables"
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("options", "arguments", "shown"),
    [
        ({"sizes": SIZES[:2]}, (), 2),
        ({"trials": 3}, (), 0),
        ({}, ("--collective", "broadcast"), 0),
        ({"sizes": SIZES[:1], "links": [{**LINKS[0], "latency_seconds": 1e-5}, *LINKS]}, (), 1),
    ],
    ids=["two sizes", "three trials", "a collective that it has not", "the slowest of two links"],
)
def test_where_the_times_make_no_fit_the_measured_links_do(
    tmp_path: Path, options: dict[str, Any], arguments: tuple[str, ...], shown: int
) -> None:
    run = sweep(tmp_path / "run", **options)
    (one,) = as_json("fabric", "predict", run, *arguments)["collectives"]
    fit = one["fit"]
    assert (fit["source"], fit["alpha_seconds"], fit["beta_seconds_per_byte"]) == ("links", *MEASURED)
    assert len(fit["sizes"]) == shown
    for size in fit["sizes"]:  # still compared with what was measured, which has another alpha here
        assert size["fitted_s"] == pytest.approx(
            LinkFit(1e-4, 8e-8).seconds(closed_form("all_reduce", "ring", 4), size["bytes"])
        )
        assert size["residual"] > 0
    said = output("fabric", "predict", run, *arguments)
    assert "from the slowest measured link" in said
    assert ("the run has no broadcast to fit" in said) == ("broadcast" in arguments)


README = {2600: 4.17e-3, 33024: 5.90e-3, 131584: 19.4e-3, 803840: 110e-3}
"""The medians that the README shows, of links measured at 95.5 Mbit/s and more."""


def taken(medians: dict[int, float], algorithm: str = "ring") -> dict[int, float]:
    """For `sweep`: how many times as long as its closed form each size takes."""
    form = closed_form("all_reduce", algorithm, 4)
    return {size: seconds / LinkFit(ALPHA, BETA).seconds(form, size) for size, seconds in medians.items()}


def measured(*bits_per_second: float) -> list[dict[str, Any]]:
    """Links around the ring of four hosts."""
    return [
        {"from": a, "to": (a + 1) % 4, "latency_seconds": 1e-4, "bytes_per_second": rate / 8}
        for a, rate in enumerate(bits_per_second)
    ]


def test_no_fit_is_faster_than_the_links_were_measured(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(page, "write_page", lambda *given: None)
    links = measured(95.59e6, 95.57e6, 95.55e6, 95.5e6)
    run = sweep(tmp_path / "run", sizes=tuple(README), off=taken(README), links=links, backend="gloo")
    (one,) = as_json("fabric", "predict", run, "--hosts", "4", "--sizes", "8MiB")["collectives"]
    assert one["fit"]["bytes_per_second"] == pytest.approx(95.5e6 / 8)
    assert one["fit"]["held_to_links"]
    assert 0 < one["fit"]["alpha_seconds"] < 1e-3
    assert one["predictions"][0]["seconds"]["ring"] > 1.5 * 8 * 2**20 / (95.5e6 / 8), "what the wire takes"
    assert "1/beta is limited to the measured links" in output("fabric", "predict", run)
    assert "1/beta 95.5 Mbit/s (limited to the links); at most" in output("fabric", "show", run)
    free = sweep(tmp_path / "free", sizes=tuple(README), off=taken(README), links=measured(110e6))
    (one,) = as_json("fabric", "predict", free)["collectives"]
    assert one["fit"]["bytes_per_second"] == pytest.approx(102.7e6 / 8, rel=1e-3)
    assert not one["fit"]["held_to_links"]
    assert "held" not in output("fabric", "predict", free)


@pytest.mark.parametrize(("algorithm", "beta"), [("ring", 16e-8), ("tree", BETA)])
def test_a_slow_link_holds_a_fit_that_has_to_wait_for_it(tmp_path: Path, algorithm: str, beta: float) -> None:
    """All ports of a ring carry as much; a tree's leaves may be behind the slow one."""
    times = {size: LinkFit(ALPHA, BETA / 2).seconds(closed_form("all_reduce", algorithm, 4), size) for size in SIZES}
    links = measured(100e6, 100e6, 50e6)
    run = sweep(tmp_path / "run", algorithm=algorithm, off=taken(times, algorithm), links=links)
    fit = as_json("fabric", "predict", run)["collectives"][0]["fit"]
    assert fit["beta_seconds_per_byte"] == pytest.approx(beta)


def test_a_run_without_measured_links_gives_its_fit_to_a_simulation(tmp_path: Path, monkeypatch: Any) -> None:
    """As of NCCL and of a training, where no links are measured."""
    monkeypatch.setattr(page, "write_page", lambda *given: None)
    run = Path(sweep(tmp_path / "run", links=[], backend="gloo"))
    assert "links.json" in output("fabric", "show", str(run))
    costs = "simulate --schedule gpipe --ranks 2 --microbatches 1 --forward 1 --backward-input 1 --backward-weight 1"
    made = as_json(*costs.split(), "--output-bytes", "1e6", "--links", str(run / "links.json"))
    assert made["makespan"] == pytest.approx(6 + 2 * (ALPHA + 1e6 * BETA), rel=1e-3)
    few = Path(sweep(tmp_path / "few", links=[], sizes=SIZES[:2], backend="gloo"))
    assert "links.json" not in output("fabric", "show", str(few))


def test_a_run_whose_processors_were_the_limit_is_marked(tmp_path: Path) -> None:
    run = sweep(tmp_path / "busy", cpu=[{**CPU, "cpu_seconds": 9.9}] * 4)
    text = output("fabric", "predict", run)
    assert "the processors are the limit, not the network" in text
    killed = sweep(tmp_path / "killed", complete=False, missing="host 2 was lost")
    text = output("fabric", "predict", killed)
    assert "the run is not complete; missing: host 2 was lost" in text
    assert "processors" not in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--hosts", "4,x"), "--hosts 4,x: expected comma-separated integers, as in 1,2,4"),
        (("--hosts", "4,1"), "--hosts 4, 1: expected numbers from 2 to 65,536"),
        (("--sizes", "64KiB,big"), "'big' is not a size"),
    ],
)
def test_numbers_that_make_no_sense(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    assert says in refusal("fabric", "predict", sweep(tmp_path / "run"), *arguments)


def test_runs_that_say_nothing(tmp_path: Path) -> None:
    few = sweep(tmp_path / "few", sizes=SIZES[:2], links=[])
    says = "2 sizes of all_reduce cannot be fitted (a fit needs 3), and no links were measured: run a sweep"
    assert says in refusal("fabric", "predict", few)
    short = sweep(tmp_path / "short", trials=5, links=[])
    assert "5 trials are too few for a median (it needs 6)" in refusal("fabric", "predict", short)
