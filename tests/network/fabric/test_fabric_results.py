"""The figures of a run follow from its samples: known samples, known figures."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn_runs import EPOCH_NS, record_of, run_of
from hypothesis import given
from hypothesis import strategies as st
from made_runs import write_run

from penstock._base.errors import ArgumentError
from penstock.network.fabric.alpha_beta import HOSTS, forecast
from penstock.network.fabric.results import results
from penstock.network.fabric.samples import RUN, Run, RunRecord, computed_step, measured_step
from penstock.network.fabric.views.wording import warnings
from penstock.network.fabric.workload import Transfer, Workload

LINKS = [
    {"from": a, "to": (a + 1) % 4, "latency_seconds": 1e-4, "bytes_per_second": rate}
    for a, rate in enumerate((1.25e7, 1.25e7, 1e6, 1.25e7))
]
NETWORK = {
    "link": "100mbit",
    "own": {"2": "8mbit"},
    "rates": {way: [1.25e7, 1.25e7, 1e6, 1.25e7] for way in ("up", "down")},
    "shaper": "switch",
    "slow": {},
}
GOOD = 1448 / 1514
"""The share of a rate that is left for messages."""


def test_times_are_of_the_slowest_rank_and_apart_from_its_wait() -> None:
    start = np.array([[[0, 30, 10]]]) + EPOCH_NS
    end = np.array([[[100, 120, 90]]]) + EPOCH_NS
    workload = Workload("x", (Transfer("t", 4),))
    run = Run(RunRecord(workload, 3), start, end)
    (times,) = run.times
    assert times.completion == pytest.approx([100e-9])
    assert times.arrival_skew == pytest.approx([30e-9])
    assert times.transfer == pytest.approx([90e-9])
    assert times.durations[0] == pytest.approx([100e-9, 90e-9, 80e-9])
    assert measured_step(run) == pytest.approx([120e-9])
    (of_one,) = Run(RunRecord(workload, 3, iterations=5), start, end).times
    assert of_one.completion == pytest.approx([20e-9])
    assert of_one.transfer == pytest.approx([18e-9])
    assert of_one.arrival_skew == pytest.approx([30e-9]), "they begin once"
    assert of_one.late[0] == pytest.approx([0, 30e-9, 10e-9])


def test_who_is_slow_and_who_is_late() -> None:
    run = run_of(np.full((40, 1), 1e-3))
    run.start_ns[:30, 0, 2] += 500_000  # late: the others wait for it
    run.end_ns[:, 0, 1] += 100_000
    run.end_ns[:, 0, 3] -= 600_000  # done soon, and not late
    run.end_ns[:3, 0, 0] += 1_000_000
    (made,) = results(run)["transfers"]
    assert [one["trials_latest"] for one in made["per_rank"]] == [10, 0, 30, 0]
    assert [one["trials_slowest"] for one in made["per_rank"]] == [3, 37, 0, 0]
    assert made["per_rank"][1]["p50"] == pytest.approx(1.1e-3)
    assert made["per_rank"][1]["p99"] is None
    assert made["slowest_rank"]["rank"] == 1
    assert made["slowest_rank"]["trials_slowest"] == 37
    assert made["outliers"] == [0, 1, 2]
    assert made["arrival_skew_s"]["max"] == pytest.approx(5e-4)


def test_ideal_is_what_the_links_of_the_ranks_allow() -> None:
    transfers = (Transfer("all", 1_000_000), Transfer("pair", 1_000_000, "send", ranks=(1, 0)))
    made = results(run_of(np.full((10, 2), 2.0), transfers, links=LINKS, network=NETWORK))["transfers"]
    assert made[0]["ideal_percent"] == pytest.approx(100 * (1e-4 + 1.0 / GOOD) / 2), "once through the slowest port"
    assert made[1]["ideal_percent"] == pytest.approx(100 * (1e-4 + 0.08 / GOOD) / 2)
    assert results(run_of(np.full((10, 1), 1e-9), links=LINKS, network=NETWORK))["transfers"][0]["ideal_percent"] > 100
    assert results(run_of(np.full((10, 1), 2.0)))["transfers"][0]["ideal_percent"] is None


def test_a_rank_whose_trials_depend_on_each_other_bounds_nothing_of_any_rank() -> None:
    run = run_of(np.full((60, 1), 1e-3), hosts=2)
    draw = np.random.default_rng(0)
    run.end_ns[:, 0, 0] += draw.integers(0, 1000, 60)
    run.end_ns[:, 0, 1] += 1000 * np.arange(60)
    (made,) = results(run)["transfers"]
    assert [one["p50"] for one in made["per_rank"]] == [None, None]


def test_a_transfer_of_some_ranks_is_of_them_only() -> None:
    run = run_of(np.full((10, 1), 1e-3), (Transfer("t", 1000, ranks=(3, 1)),))
    (made,) = results(run)["transfers"]
    assert made["ranks"] == [3, 1]
    assert [one["rank"] for one in made["per_rank"]] == [3, 1]
    assert made["busbw_GBps"] == pytest.approx(made["algbw_GBps"])
    assert results(run)["step"]["time_s"]["max"] == pytest.approx(1e-3)
    both_ways = run_of(np.full((10, 1), 2e-3), (Transfer("t", 8_000_000, "sendrecv"),), trials=12, complete=True)
    made = results(both_ways)
    assert made["transfers"][0]["busbw_GBps"] == pytest.approx(4.0), "as nccl-tests has it"
    assert (made["complete"], made["missing"]) == (False, "2 of 12 trials"), "whatever it says itself"


def test_too_few_samples_are_null_throughout() -> None:
    made = results(run_of(np.full((5, 1), 1e-3), links=LINKS))
    (transfer,) = made["transfers"]
    assert transfer["time_s"] == {
        "min": 0.001, "p50": None, "p90": None, "p99": None, "p999": None, "max": 0.001, "mean": 0.001
    }  # fmt: skip
    assert {transfer[key] for key in ("mean_interval", "algbw_GBps", "busbw_GBps", "ideal_percent")} == {None}
    assert made["step"]["with_overlap_s"] is made["step"]["without_overlap_s"] is None


def test_the_algorithm_of_each_transfer() -> None:
    transfers = (Transfer("a", 8), Transfer("b", 8, "send", ranks=(0, 1)))
    for requested, of_each in (("ring", ["ring", "direct"]), ("engine", ["engine"] * 2), ("", ["", ""])):
        run = run_of(np.full((1, 2), 1e-3), transfers, algorithm=requested)
        assert [one["algorithm"] for one in results(run)["transfers"]] == of_each


# -- the model --------------------------------------------------------------------------------------------------------


def test_a_message_is_foretold_once_for_any_number_of_hosts() -> None:
    transfers = tuple(Transfer(f"{size}", size, "send", ranks=(0, 1)) for size in (4096, 65536, 1048576))
    run = run_of([[1e-3, 2e-3, 9e-3]] * 10, transfers)
    (model,) = (made := results(run))["model"]
    assert [row["hosts"] for row in model["predictions"]] == [2]
    assert model == forecast(run.record, made, "send", [1048576], HOSTS), "results and predictions are of one fit"


# -- messages of a pipeline -------------------------------------------------------------------------------------------


def there_and_back(**record: Any) -> Run:
    """Rank 0 computes 10 ms and sends for 1 ms, rank 1, which has waited, computes 10 ms and sends back for 1 ms."""
    there = Transfer("there", 1_000_000, "send", (0, 1), 10e-3, "activation", (10e-3, 0.0))
    back = Transfer("back", 1_000_000, "send", (1, 0), 10e-3, "activation gradient", (10e-3, 0.0))
    workload = Workload("pipeline", (there, back), hosts=2)
    start = np.array([[[10, 0], [11, 21]]] * 10) * 1_000_000 + EPOCH_NS
    end = np.array([[[11, 11], [22, 22]]] * 10) * 1_000_000 + EPOCH_NS
    made = {"workload": asdict(workload), "algorithm": "ring", "hosts": 2, "trials": 10, "complete": True}
    return Run(record_of(**{**made, **record}), start, end)


def test_what_a_stage_waits_for_another_is_not_counted_twice() -> None:
    run = there_and_back()
    step = results(run)["step"]
    assert step["without_overlap_s"] == step["time_s"]["p50"] == pytest.approx(22e-3)
    # Rank 1 computes as rank 0 does, and sends back what it has as soon as it has got what rank 0 sends.
    assert step["with_overlap_s"] == pytest.approx(12e-3)
    # What is computed without it is what was measured above.
    assert results(there_and_back(overlap=True))["step"]["without_overlap_s"] == pytest.approx(22e-3)
    assert step["compute_s"] == pytest.approx(20e-3)


def test_rates_of_a_message_leave_out_what_its_receiver_waited() -> None:
    links = [{"from": 0, "to": 1, "latency_seconds": 1e-4, "bytes_per_second": 2e9}]
    found = results(there_and_back(links=links))
    for one in found["transfers"]:
        assert one["time_s"]["p50"] == pytest.approx(11e-3)
        assert one["transfer_s"]["p50"] == pytest.approx(1e-3)
        assert one["algbw_GBps"] == one["busbw_GBps"] == pytest.approx(1.0)
        assert one["ideal_percent"] == pytest.approx(60)
    assert found["step"]["ideal_percent"] == pytest.approx(100 * 21.2 / 22), "of the computing and both messages"


def test_the_step_has_the_figures_of_a_transfer() -> None:
    transfers = (Transfer("a", 1_000_000), Transfer("b", 3_000_000))
    found = results(run_of(np.full((10, 2), 2e-3), transfers, links=LINKS, network=NETWORK))
    step, (a, b) = found["step"], found["transfers"]
    shared = {"name", "bytes", "collective", "algorithm", "trials", "time_s", "mean_interval", "intervals"}
    shared |= {"algbw_GBps", "busbw_GBps", "ideal_percent"}
    assert shared <= set(step) & set(a)
    assert (step["name"], step["bytes"], step["collective"], step["algorithm"]) == (
        "step",
        4_000_000,
        "all_reduce",
        "ring",
    )
    assert (step["algbw_GBps"], step["busbw_GBps"]) == (pytest.approx(1.0), pytest.approx(1.5))
    assert step["bound_s"] == pytest.approx(a["bound_s"] + b["bound_s"])
    assert step["ideal_percent"] == pytest.approx(100 * step["bound_s"] / 4e-3)
    few = results(run_of(np.full((5, 2), 2e-3), transfers, links=LINKS))["step"]
    assert {few[key] for key in ("algbw_GBps", "busbw_GBps", "ideal_percent")} == {None}
    mixed = (Transfer("a", 8), Transfer("b", 8, "broadcast"))
    assert results(run_of(np.full((10, 2), 2e-3), mixed))["step"]["collective"] is None


# -- the step ---------------------------------------------------------------------------------------------------------


def test_ranks_apart_do_not_wait_for_each_other() -> None:
    transfers = tuple(
        Transfer(f"t{a}{b}", 4, "send", ranks=(a, b), compute_seconds=1) for a, b in ((0, 1), (2, 3), (1, 2))
    )
    took = [np.array([seconds]) for seconds in (10.0, 20.0, 5.0)]
    assert computed_step(Workload("x", transfers), took, 4, overlap=False) == [1 + 20 + 1 + 5]
    assert computed_step(Workload("x", transfers), took, 4, overlap=True) == [1 + 20 + 5]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_step_that_was_not_measured_is_computed(overlap: bool) -> None:
    transfers = tuple(Transfer(f"t{i}", 8, compute_seconds=2e-3) for i in range(3))
    workload = Workload("x", transfers, compute_seconds=1e-3)
    run = run_of(np.full((20, 3), 3e-3), transfers, overlap=overlap, workload=workload)
    step = results(run)["step"]
    assert step["time_s"]["p50"] == pytest.approx(3 * 5e-3 + 1e-3)
    measured, other = ("with", "without") if overlap else ("without", "with")
    assert step[f"{measured}_overlap_s"] == step["time_s"]["p50"]
    assert step[f"{other}_overlap_s"] == pytest.approx(16e-3 if overlap else 2e-3 + 9e-3 + 1e-3)
    assert step["compute_s"] == pytest.approx(7e-3)


# -- runs that ended early, and large ones ----------------------------------------------------------------------------


def _swapped(line: str) -> str:
    *place, start, end = line.split(",")
    return ",".join([*place, end, start])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda lines: lines[:10] + lines[11:], r"damaged: line 11, 1,0,2,.*: expected .* rank 1,0,1 once"),
        (lambda lines: [*lines, lines[9]], r"damaged: line 66, 1,0,0,.*: expected .* rank 1,0,1 once"),
        (lambda lines: lines + lines[1:], r"damaged: line 66, 0,0,0,.*: expected .* rank 0,0,1 once"),
        (lambda lines: [*lines[:9], _swapped(lines[9]), *lines[10:]], r"damaged: line 10, 1,0,0,.*: .* an end after"),
        (lambda lines: [lines[0], *map(_swapped, lines[1:])], r"damaged: line 2, 0,0,0,.*: .* an end after"),
        (lambda lines: [_swapped(line) for line in lines], r"no run .*begins with 'trial,transfer,rank,end_ns"),
        (lambda lines: [*lines[:64], "7,2,3,1,2"], r"damaged: line 65, 7,2,3,1,2: expected .* rank 7,1,3"),
        (lambda lines: [*lines[:64], "-1,0,0,1,2"], r"damaged: line 65, -1,0,0,1,2: expected .* rank 0,0,0"),
        (lambda lines: [*lines[:64], "99999999999,0,0,1,2"], r"damaged: line 65, 99999999999,0,0,1,2: expected"),
        (lambda lines: [*lines, "99999999999999999999,0,0,1,2"], r"holds no run"),
        (lambda lines: [*lines, "8,0,0,1,x"], r"holds no run .*: could not convert string 'x'"),
        (lambda lines: [*lines, "8,0,1,1,2", "8,0,1,3,4"], r"damaged: line 67, 8,0,1,3,4: expected .* once"),
        (lambda lines: [*lines, "8,0,0,1,2", "8,9,0,1,2"], r"damaged: line 67, 8,9,0,1,2: expected .* rank 8,0,1 once"),
        (lambda lines: [*lines, "9,0,0,1,2"], r"damaged: line 66, 9,0,0,1,2: expected .* rank 8,0,0 once"),
        (lambda lines: [*lines, "8,0,3,2,1"], r"damaged: line 66, 8,0,3,2,1: .* an end after"),
    ],
)  # fmt: skip
def test_samples_that_no_run_writes_are_refused(tmp_path: Path, spoil: Any, says: str) -> None:
    samples = write_run(run_of(np.full((8, 2), 1e-3)), tmp_path) / "samples.csv"
    lines = samples.read_text().splitlines()
    assert len(lines) == 65
    samples.write_text("\n".join([lines[0], *lines[:0:-1]]) + "\n")
    assert len(Run.read(tmp_path).start_ns) == 8, "in any order"
    samples.write_text("\n".join(spoil(lines)) + "\n")
    with pytest.raises(ArgumentError, match=says):
        Run.read(tmp_path)


@given(st.integers(0, 2000))
def test_a_run_that_was_killed_anywhere_shows_its_whole_trials(tmp_path_factory: Any, cut: int) -> None:
    folder = tmp_path_factory.mktemp("run")
    run = run_of(np.full((8, 2), 1e-3), hosts=2, trials=100, complete=False)
    write_run(run, folder)
    text = (folder / "samples.csv").read_text()
    (folder / "samples.csv").write_text(text[: max(len(text) - cut, 40)])
    made = results(Run.read(folder))
    assert made["complete"] is False
    assert made["missing"] == f"{100 - made['trials']} of 100 trials"
    assert made["trials"] <= 8
    assert [one["trials"] for one in made["transfers"]] == [made["trials"]] * 2
    assert made["trials"] == 8 or cut


def test_processors_are_judged() -> None:
    cpu = [{"cpu_seconds": 5.0, "wall_seconds": 10.0, "involuntary_switches": 50}] * 4

    def judged(**record: Any) -> dict[str, Any]:
        usual = {"cpu": cpu, "shared_machine": True, "machine_cores": 2}
        return results(run_of(np.full((10, 1), 1e-3), **{**usual, **record}))["cpu"]

    busy = judged()
    assert (busy["saturated"], busy["scheduler_tails"]) == (True, True)
    assert busy["text"].startswith("4 hosts share 2 cores, 100% busy; the processors are the limit")
    assert "200 involuntary switches in 10 trials" in busy["text"]
    assert judged(machine_cores=16)["saturated"] is False
    apart = judged(machine_cores=16, shared_machine=False, environment=[{"cores": 1}] * 3 + [{"cores": None}])
    assert apart["utilization"] == pytest.approx(0.5 / 16)
    assert judged(cpu=[])["text"] == ""


@pytest.mark.parametrize(("seconds", "saturated"), [(1.65, False), (2.0, True)])
def test_busy_processors_are_no_limit_where_times_are_what_the_links_allow(seconds: float, saturated: bool) -> None:
    cpu = [{"cpu_seconds": 5.0, "wall_seconds": 10.0}] * 4
    run = run_of(
        np.full((10, 1), seconds), (Transfer("t", 1_000_000),), links=LINKS, network=NETWORK, cpu=cpu,
        shared_machine=True, machine_cores=2,
    )  # fmt: skip
    found = results(run)["cpu"]
    assert found["saturated"] is saturated
    assert ("the processors are the limit" in found["text"]) is saturated
    assert ("yet the network alone accounts for at least 91% of the times" in found["text"]) is not saturated


CRAMMED: dict[str, Any] = {"cpu": [{"cpu_seconds": 0.1, "wall_seconds": 10.0, "busy": 1.0}] * 4, "shared_machine": True}


def _of_two(rate: float, latency: float, **record: Any) -> dict[str, Any]:
    """Beside other work that fills the processors, over a shaped link between two hosts."""
    links = [{"from": a, "to": 1 - a, "latency_seconds": latency, "bytes_per_second": GOOD * rate} for a in (0, 1)]
    delay = f" delay {latency}s" if latency else ""
    network = {"link": f"{rate * 8:.0f}bit{delay}", "rates": {"up": [rate] * 2, "down": [rate] * 2}, "slow": {}}
    return {
        "hosts": 2,
        "links": links,
        "network": {**network, "shaper": "switch"},
        "machine_cores": 2,
        **CRAMMED,
        **record,
    }


def test_a_figure_above_ideal_is_an_error_and_no_argument() -> None:
    one = (Transfer("t", 2**17, "send", ranks=(0, 1)),)
    took = 2**17 / (GOOD * 125e3)
    for factor, wrong in ((0.98, False), (0.5, True)):
        run = run_of(np.full((10, 1), took * factor), one, **_of_two(125e3, 0.0))
        found = results(run)
        said = warnings(run, found)
        assert any("its times or its links were measured wrong" in line for line in said) is wrong
        assert ("the network alone accounts for" in found["cpu"]["text"]) is not wrong
        assert ("not known" in found["cpu"]["text"]) is wrong
        assert "the processors are the limit" not in found["cpu"]["text"]


def test_a_root_that_ran_ahead_is_named_as_the_cause() -> None:
    """In a run whose hosts did not meet between transfers; where they did, it is none."""
    took, members = 2**17 / (GOOD * 125e3), (0, 1)
    for kind, cause in (
        ("gradient", "because a rank can begin it while others are still in the previous transfer"),
        ("", "its times or its links were measured wrong"),
    ):
        pair = tuple(Transfer(name, 2**17, "scatter", ranks=members, kind=kind) for name in "ab")
        run = run_of(np.full((10, 2), (took, took / 4)), pair, **_of_two(125e3, 0.0))
        (said,) = (line for line in warnings(run, results(run)) if line.startswith("ideal"))
        assert said.startswith("ideal: b is at")
        assert cause in said


def test_the_step_of_sizes_by_hand_is_without_the_time_in_which_hosts_met() -> None:
    def run(kind: str, iterations: int = 1) -> Run:
        pair = tuple(Transfer(name, 1000, kind=kind) for name in "ab")
        made = run_of(np.full((10, 2), (0.25, 0.5)), pair, iterations=iterations)
        made.start_ns[:, 1] += 10**9
        made.end_ns[:, 1] += 10**9
        return made

    assert measured_step(run("gradient")) == pytest.approx(np.full(10, 1.75))
    assert measured_step(run("", iterations=5)) == pytest.approx(np.full(10, 0.15))


def test_a_workload_of_other_hosts_is_refused(tmp_path: Path) -> None:
    write_run(run_of(np.full((8, 1), 1e-3), (Transfer("t", 4, ranks=(0, 1)),), hosts=2), tmp_path)
    (tmp_path / RUN).write_text((tmp_path / RUN).read_text().replace('"ranks": [0, 1]', '"ranks": [0, 7]'))
    with pytest.raises(ArgumentError, match="ranks that are not among the 2 hosts"):
        Run.read(tmp_path)


def test_entries_of_later_versions_do_no_harm(tmp_path: Path) -> None:
    folder = write_run(run_of(np.full((8, 1), 1e-3), environment=[{"host": "a"}] * 4), tmp_path / "run")
    entries = json.loads((folder / RUN).read_text())
    entries |= {"topology": 1, "times": 2, "happened": [{"seconds": 0.5, "step": 1, "text": "x", "later": 3}]}
    entries["environment"][0]["python"] = "3.11"
    (folder / RUN).write_text(json.dumps(entries))
    run = Run.read(folder)
    assert run.record.topology is None
    made = results(run)["environment"]
    assert made["happened"] == ({"seconds": 0.5, "step": 1, "text": "x"},)
    assert made["hosts"][0] == {"host": "a", "python": "3.11"}, "a host says more than is read"
