"""`penstock simulate` with passes on every rank: a spread vocabulary, an optimizer, a last collective."""

from __future__ import annotations

import pytest
from command_line import as_json, output, refusal

NUMBERS = ("simulate", "--schedule", "1f1b", "--ranks", "4", "--microbatches", "64")


@pytest.mark.parametrize(("method", "in_flight"), [("vocab-1", 6), ("vocab-2", 5), ("interlaced", 6)])
def test_a_spread_vocabulary(method: str, in_flight: int) -> None:
    made = as_json(*NUMBERS, "--vocabulary", method, "--output-pass", "0.5", "--embedding-pass", "0.25")
    assert 192 + 64 < made["step"] == made["makespan"] < 192 + 64 + 16
    assert made["peak_activations"][0] == in_flight
    for rank in made["by_rank"]:
        assert rank["busy"] == 192
        assert rank["passes"] == 64
        assert sum(rank.values()) == pytest.approx(made["step"])


def test_what_comes_once_a_step() -> None:
    plain = as_json(*NUMBERS)["makespan"]
    made = as_json(*NUMBERS, "--optimizer", "3", "--last-collective", "1.5")
    assert (made["makespan"], made["step"]) == (plain, plain + 4.5)
    shown = output(*NUMBERS, "--optimizer", "3", "--last-collective", "1.5")
    assert "optimizer          3.0" in shown
    assert "step             205.5" in shown


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--output-pass", "1"), "--output-pass has no effect without --vocabulary"),
        (("--vocabulary", "vocab-2", "--collective", "-1"), "--collective -1: expected a time of 0 or more"),
        (("--vocabulary", "vocab-9"), "vocabulary method 'vocab-9': expected one of vocab-1, vocab-2, interlaced"),
        (("--optimizer", "1", "--schedule", "all"), "give one name"),
        (("--vocabulary", "vocab-1", "--schedule", "gpipe"), "give --schedule 1f1b"),
        (("--optimizer", "1", "--perfetto", "trace.json"), "--perfetto: a trace shows a schedule's own actions"),
    ],
)
def test_what_does_not_fit(options: tuple[str, ...], says: str) -> None:
    assert says in refusal(*NUMBERS, *options)
