"""Schedules too large to make are refused at once; what takes a while says so, on stderr."""

from __future__ import annotations

import json

import pytest
from command_line import penstock, refusal

from penstock.cli import _order
from penstock.schedule import ScheduleSpec, generate, schedule_specs
from penstock.schedule.generators import ScheduleParams


@pytest.mark.parametrize("entry", schedule_specs(), ids=lambda entry: entry.name)
def test_actions_are_counted_before_they_are_made(entry: ScheduleSpec) -> None:
    numbers = ScheduleParams(4, 6, entry.chunks)
    made = generate(entry.name, 4, 6)
    counted = sum(len(row) for row in made.rows)
    if entry.name.startswith("dualpipe"):  # some of its backwards are not split
        assert counted <= entry.actions(numbers) <= 1.5 * counted
    else:
        assert entry.actions(numbers) == counted


@pytest.mark.parametrize(
    "options",
    [
        ("simulate", "--schedule", "gpipe", "--ranks", "10000", "--microbatches", "10000"),
        ("simulate", "--schedule", "all", "--ranks", "10000", "--microbatches", "10000"),
        ("draw", "--schedule", "zb-v", "--ranks", "10000", "--microbatches", "10000"),
    ],
)
def test_too_much_is_refused(options: tuple[str, ...]) -> None:
    says = refusal(*options)
    assert says.startswith(f"--ranks {options[4]} --microbatches {options[6]}: that makes ")
    assert f"{_order.MAX_ACTIONS:,} can be timed; pass fewer ranks" in says


def test_too_many_stages_are_refused_however_few_their_actions() -> None:
    one = ("--ranks", "20000", "--microbatches", "1")
    for options in (("simulate", "--schedule", "gpipe", *one), ("draw", "--schedule", "1f1b", *one), ("search", *one)):
        assert "10,000; " in refusal(*options)
    options = ("simulate", "--schedule", "gpipe", "--ranks", "6000", "--microbatches", "1", "--stages-per-rank", "2")
    assert "12,000 stages; the limit is 10,000; use fewer" in refusal(*options)


def test_all_is_as_much_as_its_schedules_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_order, "MAX_ACTIONS", 500)
    numbers = ("--ranks", "4", "--microbatches", "8")
    assert penstock("simulate", "--schedule", "zb-v", *numbers).exit_code == 0
    assert "actions; at most 500 can be timed" in refusal("simulate", "--schedule", "all", *numbers)


def test_long_work_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("simulate", "--schedule", "gpipe", "--ranks", "4", "--microbatches", "8", "--json")
    assert penstock(*options).stderr == ""
    monkeypatch.setattr(_order, "ANNOUNCED", 60)
    done = penstock(*options)
    assert done.stderr == "penstock: timing 64 actions; this may take a while\n"
    assert json.loads(done.stdout)["makespan"] == 33


def test_without_numba_it_says_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_order, "ANNOUNCED", 60)
    monkeypatch.setattr(_order, "find_spec", lambda _: None)
    done = penstock("simulate", "--schedule", "gpipe", "--ranks", "4", "--microbatches", "8", "--json")
    assert done.stderr.startswith(
        "penstock: timing 64 actions; this may take a while; numba makes it several times faster"
    )
    assert json.loads(done.stdout)["makespan"] == 33
