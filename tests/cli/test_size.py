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


def test_all_is_as_much_as_its_schedules_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_order, "MAX_ACTIONS", 500)
    numbers = ("--ranks", "4", "--microbatches", "8")
    assert penstock("simulate", "--schedule", "zb-v", *numbers).exit_code == 0
    assert "actions; at most 500 can be timed" in refusal("simulate", "--schedule", "all", *numbers)


def test_long_work_is_announced_with_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("simulate", "--schedule", "gpipe", "--ranks", "4", "--microbatches", "8", "--json")
    assert penstock(*options).stderr == ""
    monkeypatch.setattr(_order, "ANNOUNCED", 60)
    for numba, hint in ((True, "\n"), (None, "; numba makes it several times faster (pip ")):
        monkeypatch.setattr(_order, "find_spec", lambda _, numba=numba: numba)
        done = penstock(*options)
        assert done.stderr.startswith(f"penstock: timing 64 actions; this may take a while{hint}")
        assert json.loads(done.stdout)["makespan"] == 33
