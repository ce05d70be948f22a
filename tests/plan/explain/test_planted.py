"""What is planted in a simulated step is found, named, and its repair predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import LINK, even, recorded, timeline, twice, without

from penstock._base.errors import ArgumentError
from penstock.plan.explain import Event, Explanation, TraceData, explain, steps_of_trace
from penstock.plan.explain.breakdown import TimeCategory
from penstock.plan.explain.changes import WhatIfContext, suggestions
from penstock.schedule import generate
from penstock.schedule.timeline import Timeline
from penstock.simulate import LinkCost, StageCost, simulate


def first(found: Explanation, kind: str) -> str:
    change = found.changes[0]
    assert change.kind == kind, found.changes
    return change.text


def test_nothing_planted_nothing_found() -> None:
    found = explain(recorded(timeline(even, twice)))
    assert not {"cut", "rank", "microbatches", "actions"} & {change.kind for change in found.changes}
    assert found.step.slowest.schedule.name == "1f1b"
    assert found.error < 1e-9
    added = found.where.added_seconds
    assert added[TimeCategory.LINKS] == pytest.approx(found.step.seconds - found.where.even_seconds)


def test_a_heavy_stage() -> None:
    """Both its ops take longer, as more layers do."""

    def heavy(stage: int, microbatch: int) -> float:
        return 1.6 if stage == 2 else 1.0

    measured = timeline(heavy, lambda stage, k: 2 * heavy(stage, k))
    found = explain(recorded(measured))
    assert first(found, "cut").startswith("stage 2 takes 1.39 times the mean (rank 2)")
    even_one = timeline(lambda stage, k: 1.15, lambda stage, k: 2.3)
    assert found.changes[0].step_seconds == pytest.approx(even_one.makespan_seconds)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("backward", [1.0, 1.4, 4.4])
def test_without_a_replica_no_rank_is_blamed(ranks: int, backward: float) -> None:
    """A stage whose forwards are long beside its backwards may be of other layers, such as a CNN's first: cut it."""
    long = timeline(lambda s, k: 4.4 if s == 1 else 1.0, lambda s, k: 2 * backward if s == 1 else 2.0, ranks=ranks)
    found = explain(recorded(long))
    assert not any(change.kind == "rank" or "is slow" in change.text for change in found.changes)
    (cut,) = [change for change in found.changes if change.kind == "cut"]
    assert cut.text.startswith("stage 1 takes ")
    assert cut.claim.startswith("at most -")
    assert all(one.slowest is None for one in found.steps)


def test_a_replica_whose_ranks_are_all_slow_may_have_more_data() -> None:
    """Longer sequences make all of its ranks slow, and no device is to blame."""
    usual, longer = timeline(even, twice), timeline(lambda stage, k: 1.5, lambda stage, k: 3.0)
    found = explain(recorded(usual, longer))
    (rank,) = [change for change in found.changes if change.kind == "rank"]
    assert rank.text == (
        "replica 1 is slow (forwards 1.5x, backwards 1.5x its replicas'): give it less data, or check its host"
    )
    assert rank.step_seconds == pytest.approx(usual.makespan_seconds)
    assert found.to_dict()["each_step"][0]["slowest"] == {"replica": 1, "rank": None, "times": 1.5}


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_slow_rank_of_one_replica(replicas: int) -> None:
    """Though both ops are slow, as on a heavy stage: the other replicas tell."""
    usual = timeline(even, twice)
    slow = timeline(lambda stage, k: 1.5 if stage == 1 else 1.0, lambda stage, k: 3.0 if stage == 1 else 2.0)
    found = explain(recorded(*[usual] * (replicas - 1), slow))
    assert f"rank 1 of replica {replicas - 1} is slow (forwards 1.5x, backwards 1.5x" in first(found, "rank")
    assert found.changes[0].step_seconds == pytest.approx(usual.makespan_seconds)


def test_of_one_microbatch_advice_is_doubted() -> None:
    """The only forward of a replica's rank 1 was held up."""
    usual, held_up = (
        timeline(lambda s, k, f=f: f if s == 1 else 1.0, twice, microbatches=1)  # type: ignore[misc]
        for f in (1.0, 5.0)
    )
    found = explain(recorded(usual, held_up))
    assert "rank 1 of replica 1 is slow" in first(found, "rank")
    assert found.changes[0].note.endswith("of one microbatch, a single interruption looks the same")


def test_unequal_microbatches() -> None:
    """Long sequences are long on every stage."""
    length = [1.0, 1.0, 2.5, 1.0, 0.5, 1.0, 0.5, 0.5]
    found = explain(recorded(timeline(lambda stage, k: length[k], lambda stage, k: 2 * length[k])))
    (one,) = [change for change in found.changes if change.kind == "microbatches"]
    assert "microbatch 2 takes 2.50 times the mean): if their data are, give each as much work" in one.text
    assert one.claim.startswith("at most -"), "warming up or garbage collection would look the same"
    assert one.step_seconds == pytest.approx(timeline(even, twice).makespan_seconds)


@pytest.mark.parametrize(("slow", "microbatches", "blocked_by"), [((1, 5), 8, "1F5"), ((1, 0), 2, "None")])
def test_one_slow_action_is_no_slow_rank(slow: tuple[int, int], microbatches: int, blocked_by: str) -> None:
    found = explain(recorded(timeline(lambda s, k: 8.0 if (s, k) == slow else 1.0, twice, microbatches=microbatches)))
    assert not {"cut", "rank"} & {change.kind for change in found.changes}
    (actions,) = [change for change in found.changes if change.kind == "actions"]
    assert "1 action took" in actions.text
    assert f"1F{slow[1]}" in actions.text
    assert found.bubble is not None
    assert str(found.bubble.blocked_by) == blocked_by


def test_a_wait_is_for_an_action_only_if_most_of_it_is_and_that_is_long() -> None:
    """Rank 0 waits for three backwards in a row, one of them a trifle longer, and for messages."""
    bubble = explain(recorded(timeline(lambda s, k: 1.001 if (s, k) == (3, 0) else 1.0, twice))).bubble
    assert bubble is not None
    assert (bubble.rank, bubble.blocked_by) == (0, None)


def test_each_ranks_time_adds_up() -> None:
    length = [1.0, 1.0, 2.5, 1.0, 0.5, 1.0, 0.5, 0.5]
    measured = timeline(lambda stage, k: length[k] * (1 + stage / 4), twice)
    found = explain(recorded(measured))
    for one in found.where.ranks:
        assert min(one.idle_seconds.values()) >= 0
        assert one.compute_seconds + sum(one.idle_seconds.values()) == pytest.approx(measured.makespan_seconds)
    total = found.where.even_seconds + sum(found.where.added_seconds.values())
    assert total == pytest.approx(found.step.pipeline_seconds)


def test_a_cut_moves_in_both_copies_of_a_model() -> None:
    (found,) = explain(recorded(timeline(even, twice, schedule="dualpipe")), what_ifs=["cut=2:0.5"]).what_ifs
    moved = [1.0, 1.5, 0.5, 1.0]
    repaired = timeline(lambda s, k: moved[s % 4], lambda s, k: 2 * moved[s % 4], schedule="dualpipe")
    assert found.step_seconds == pytest.approx(repaired.makespan_seconds, rel=0.01)


WHAT_IFS = ["schedule=zb-h1", "schedule=gpipe", "link=0", "link=2", "cut=even"]


@pytest.mark.parametrize("change", WHAT_IFS)
def test_a_what_if_is_what_the_simulator_says_of_it(change: str) -> None:
    """The trace knows only B: half of it is taken as I, and that nothing is lost by it, so that is the best."""
    slow = [1.0, 1.0, 1.9, 1.0]
    (found,) = explain(recorded(timeline(lambda stage, k: slow[stage], twice)), what_ifs=[change]).what_ifs
    name, _, value = change.partition("=")
    link = LinkCost(float(value) * LINK.latency_seconds) if name == "link" else LINK
    costs = [StageCost(forward, 1.0, 1.0) for forward in slow]
    if name == "cut":
        even_one = sum(slow) / 4 + 2
        costs = [StageCost(even_one * f / (f + 2), even_one / (f + 2), even_one / (f + 2)) for f in slow]
    repaired = simulate(generate(value if name == "schedule" else "1f1b", 4, 8), costs, link)
    assert found.step_seconds == pytest.approx(repaired.makespan_seconds)


@pytest.mark.parametrize("change", ["stragglers=none", "rank=2"])
def test_without_the_straggler_a_step_is_what_the_simulator_says(change: str) -> None:
    slow, usual = timeline(lambda s, k: 1.9 if s == 2 else 1.0, twice), timeline(even, twice)
    (found,) = explain(recorded(usual, slow), what_ifs=[change]).what_ifs
    assert found.step_seconds == pytest.approx(usual.makespan_seconds)


@pytest.mark.parametrize(
    ("change", "after"), [("cut=2:0.25", (1.4, 1.2)), ("cut=2:-0.5", (0.5, 2.1)), ("cut=2:1", (2.6, 0))]
)
def test_a_moved_cut_is_what_the_simulator_says_of_it(change: str, after: tuple[float, float]) -> None:
    before = [1.0, 1.0, 1.6, 1.0]

    def taking(stages: list[float]) -> Timeline:
        return timeline(lambda stage, k: stages[stage], lambda stage, k: 2 * stages[stage])

    (found,) = explain(recorded(taking(before)), what_ifs=[change]).what_ifs
    assert found.step_seconds == pytest.approx(taking([1.0, *after, 1.0]).makespan_seconds)
    back = "cut=1:0.5,cut=1:" + str(-0.5 / 1.5)  # stage 0 takes a half of stage 1, and gives as much back
    (same,) = explain(recorded(taking(before)), what_ifs=[back]).what_ifs
    assert same.step_seconds == pytest.approx(taking(before).makespan_seconds)


@pytest.mark.parametrize("change", ["cut=even", "cut=1:0.25"])
def test_a_moved_cut_leaves_an_interruption_as_long_as_it_was(change: str) -> None:
    """A backward of the light stage was interrupted; that it gets more work does not make the interruption longer."""

    def with_interruption(seconds: Callable[[int], float]) -> Timeline:
        return timeline(
            lambda stage, k: seconds(stage),
            lambda stage, k: 2 * seconds(stage) + (20.0 if (stage, k) == (0, 2) else 0.0),
            ranks=2,
        )

    found = explain(
        recorded(with_interruption(lambda stage: 1.0 + stage)), what_ifs=[change, f"{change},actions=usual"]
    )
    level = with_interruption(lambda stage: 1.5).makespan_seconds
    assert found.what_ifs[0].step_seconds == pytest.approx(level)
    quiet = timeline(lambda stage, k: 1.5, lambda stage, k: 3.0, ranks=2).makespan_seconds
    assert found.what_ifs[1].step_seconds == pytest.approx(quiet)
    assert next(one for one in found.changes if one.kind == "cut").step_seconds == pytest.approx(level)


def test_nothing_is_accused_of_what_the_replay_may_have_wrong() -> None:
    """Ranks, too: only what brings more than the replay's error is told."""
    slow = timeline(lambda stage, k: 1.9 if stage == 2 else 1.0, twice)
    step = steps_of_trace(recorded(timeline(even, twice), slow)).typical
    trial = WhatIfContext.from_step(step)
    gain = next(one.gain for one in suggestions([trial], 0.0) if one.kind == "rank")
    assert "rank" in [one.kind for one in suggestions([trial], 0.95 * gain)]
    assert "rank" not in [one.kind for one in suggestions([trial], 1.01 * gain)]


def test_changes_are_made_together() -> None:
    measured = recorded(timeline(lambda stage, k: 1.6 if stage == 2 else 1.0, lambda s, k: 3.2 if s == 2 else 2.0))
    both, other_order = explain(measured, what_ifs=["cut=even,schedule=zb-h1", "schedule=zb-h1,cut=even"]).what_ifs
    (even_one,) = explain(recorded(timeline(lambda s, k: 1.15, lambda s, k: 2.3)), what_ifs=["schedule=zb-h1"]).what_ifs
    assert both.step_seconds == pytest.approx(even_one.step_seconds)
    assert both.step_seconds == other_order.step_seconds


# -- clocks -----------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    ahead=st.dictionaries(st.integers(0, 3), st.floats(1.0, 1e6) | st.floats(-1e6, -1.0), min_size=1, max_size=3),
    schedule=st.sampled_from(["1f1b", "gpipe", "zb-h1"]),
)
def test_a_clock_that_is_ahead_changes_nothing(ahead: dict[int, float], schedule: str) -> None:
    measured = timeline(lambda stage, k: 1.5 if stage == 2 else 1.0, twice, schedule=schedule)
    plain, shifted = (explain(recorded(measured, ahead=by)) for by in ({}, ahead))
    assert [change.text for change in shifted.changes] == [change.text for change in plain.changes]
    for one, other in zip(shifted.changes, plain.changes, strict=True):
        assert one.gain == pytest.approx(other.gain, abs=1e-6)
    assert shifted.step.seconds == pytest.approx(plain.step.seconds, rel=1e-6)
    by_rank = zip(shifted.where.ranks, plain.where.ranks, strict=True)
    assert all(a.idle_seconds == pytest.approx(b.idle_seconds, abs=1e-6 * 50) for a, b in by_rank)


@pytest.mark.parametrize("microbatches", [1, 8])
def test_one_message_that_seems_early_is_no_other_clock(microbatches: int) -> None:
    """A rank may be held up between its message and the end of the action that made it."""
    events = recorded(timeline(even, even, ranks=2, microbatches=microbatches)).events
    late = [replace(e, end_seconds=e.end_seconds + 0.3) if e.name == "0F0" else e for e in events]
    late = [replace(e, start_seconds=e.start_seconds + 0.3) if e.name == "0F1" else e for e in late]
    assert not explain(TraceData(tuple(late))).run.notes


def test_clocks_are_set_by_the_fastest_messages() -> None:
    """Most of rank 1's forwards begin late, whatever the messages take."""
    given_ = recorded(timeline(even, twice, ranks=2))
    late = {f"1F{k}" for k in range(1, 8)}
    events = [replace(e, start_seconds=e.start_seconds + 0.3 * (e.name in late)) for e in given_.events]
    ahead = [
        replace(e, start_seconds=e.start_seconds + 50 * e.rank, end_seconds=e.end_seconds + 50 * e.rank)
        for e in events
        if e.rank is not None
    ]
    (note,) = explain(replace(given_, events=tuple(ahead))).run.notes
    assert "rank 1's is 50 s ahead of rank 0's" in note


# -- what cannot be explained -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keeps", "said"),
    [
        (lambda event: event.rank != 0, "rank 0 has no actions"),
        (lambda event: event.rank != 2, "rank 2 has no actions"),
        (lambda event: event.name != "1B5", "rank 1 has no 1B5"),
    ],
)
def test_what_is_missing_or_before_what_it_needs_is_named(keeps: Callable[[Event], bool], said: str) -> None:
    whole = recorded(timeline(even, twice))
    assert explain(TraceData(whole.events[::-1])).to_dict() == explain(whole).to_dict(), "in whatever order"
    with pytest.raises(ArgumentError, match=said):
        explain(without(whole, keeps))
    early = [replace(e, start_seconds=-5.0, end_seconds=-4.0) if e.name == "1B5" else e for e in whole.events]
    with pytest.raises(ArgumentError, match="1B5"):
        explain(TraceData(tuple(early)))
    with pytest.raises(ArgumentError, match="step=7: the trace has complete steps 0"):
        explain(whole, step=7)


def test_a_replica_that_misses_a_rank_is_left_out() -> None:
    both = recorded(timeline(even, twice), timeline(even, twice))
    found = explain(without(both, lambda event: (event.replica, event.rank) != (0, 3)))
    assert [one.number for one in found.step.replicas] == [1]
    (note,) = found.run.notes
    assert "replica 0" in note
    assert "stage 3" in note


def test_a_microbatch_that_took_no_time_the_clock_can_tell() -> None:
    """As in a trace whose ranges begin with a wait that takes all of a small forward."""
    measured = timeline(lambda s, k: float(k > 0), lambda s, k: 2.0 * (k > 0), ranks=2)
    assert explain(recorded(measured)).step.seconds == pytest.approx(measured.makespan_seconds)
