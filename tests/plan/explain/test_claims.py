"""A claim is an interval: it covers what is assumed, and is ordered by what is certain."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import even, recorded, timeline, twice

from penstock._base.errors import ArgumentError
from penstock.costs import Profile, UnitCost
from penstock.plan.explain import Explanation, Prediction, explain, load_trace, steps_of_trace
from penstock.plan.explain.changes import WhatIfContext, suggestions
from penstock.plan.explain.replay import Change
from penstock.plan.explain.schedules import change_schedule
from penstock.report import write_perfetto
from penstock.schedule import Op, generate
from penstock.schedule.timeline import Timeline
from penstock.simulate import LinkCost, StageCost, simulate
from penstock.simulate.computations import COMPUTE
from scaffolding.nanoseconds import merged


def trial_of(measured: Timeline, *, shared: bool = False, predicted: Prediction | None = None) -> WhatIfContext:
    trial = WhatIfContext.from_step(steps_of_trace(recorded(measured)).typical, predicted)
    return replace(trial, shared=shared)


def profile(splits: float = 1.0, spread: float = 0.0, ranks: int = 4) -> Prediction:
    """Units as even stages have them, of which a backward that is split takes so many times as long."""
    units = tuple(
        UnitCost(
            f"layers.{n}", 1.0, 1.0, 1.0, spread=spread, split_forward_seconds=1.0,
            split_input_gradient_seconds=splits, split_weight_gradient_seconds=splits,
        )
        for n in range(ranks)
    )  # fmt: skip
    cuts = [unit.name for unit in units[1:]]
    return Prediction.of_profile(Profile(units, "cpu", "float32", {"layers.0.weight": (1, 1)}), ranks, cuts)


def test_a_cut_at_a_module_that_was_profiled_in_parts_is_at_its_first() -> None:
    units = tuple(UnitCost(f"layers.{n}.{part}", 1.0, 1.0, 1.0) for n in (1, 10) for part in "ab")
    made = Profile(units, "cpu", "float32", {"layers.1.a.weight": (1, 1)})
    assert Prediction.of_profile(made, 2, ["layers.10"]).starts == (0, 2)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
def test_another_schedule_removes_no_host_overhead(name: str) -> None:
    """Both parts of a backward take what the host does after a whole one: no more is saved than ranks wait besides."""
    trial = trial_of(timeline(even, twice, ranks=2, microbatches=4))
    host = np.zeros_like(trial.replay.host)
    host[COMPUTE.index(Op.B)] = 1.0
    trial = replace(trial, replay=replace(trial.replay, host=host))
    change = change_schedule(trial.replay, name, trial.factors.rank)
    assert (change.cases[0].host[COMPUTE.index(Op.I)] == 1.0).all()
    busy = trial.replay.busiest_seconds + 4 - 1  # the host of all backwards but the last
    most = (trial.replay.step_seconds - busy) / trial.step.seconds
    assert trial.evaluate(change, 0.0).gain <= most + 1e-9


stage_times = st.lists(st.floats(0.2, 3.0), min_size=3, max_size=3)


@settings(max_examples=40, deadline=None)
@given(
    stage_times,
    stage_times,
    st.sampled_from(["1f1b", "gpipe", "zb-h1", "naive"]),
    st.integers(1, 6),
    st.floats(0.0, 0.3),
)
def test_changes_are_ordered_by_what_is_certain(
    forward: list[float], backward: list[float], schedule: str, microbatches: int, latency: float
) -> None:
    """What nobody measured comes after what is certain, and has no ±; nothing is measured that may be nothing."""
    measured = timeline(
        lambda s, k: forward[s] * (1 + 0.1 * (k % 2)),
        lambda s, k: backward[s],
        3,
        microbatches,
        schedule,
        LinkCost(latency),
    )
    found = explain(recorded(measured))
    assert [not one.measured for one in found.changes] == sorted(not one.measured for one in found.changes)
    certain = [one.certain for one in found.changes if one.measured]
    assert certain == sorted(certain, reverse=True)
    assert all(one > 0 for one in certain)
    for one in found.changes:
        assert ("±" in one.claim) == one.measured
        assert one.claim.startswith("at most -") != one.measured
    assert bool(found.advice) != bool(found.to_dict()["nothing"])


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["1f1b", "gpipe"]), st.integers(2, 4), st.integers(2, 8), st.floats(1e-5, 4e-4))
def test_no_gain_is_claimed_that_the_fixed_cost_exceeds(
    schedule: str, ranks: int, microbatches: int, seconds: float
) -> None:
    """Of actions as short as the runtime's own work, splitting backwards and cutting batches brings a loss."""
    measured = timeline(
        lambda s, k: seconds, lambda s, k: seconds, ranks, microbatches, schedule, LinkCost(0.1 * seconds)
    )
    now, changes = generate(schedule, ranks, microbatches), explain(recorded(measured)).changes
    split = [one for one in changes if one.kind == "schedule" and "zb-" in one.text]
    added = 15e-5 * 2 * microbatches  # by each rank, for a bubble of (ranks - 1) of two ops at most
    if added > 2 * (ranks - 1) * seconds * 1.5 + 0.01 * microbatches * seconds:
        assert not split, now
    assert not any(one.kind == "pieces" for one in changes)


def advice(found: Explanation | Sequence[Change], text: str) -> list[Change]:
    changes = found.changes if isinstance(found, Explanation) else found
    return [one for one in changes if text in one.text]


def test_what_splitting_costs_is_measured_or_said_to_be_assumed() -> None:
    measured = recorded(timeline(even, twice))
    (assumed,) = advice(explain(measured), "schedule zb-h1")
    assert assumed.claim.startswith("at most -")
    assert "if splitting a backward costs nothing" in assumed.note
    assert "pass a --profile" in assumed.note
    (known,) = advice(explain(measured, predicted=profile(1.05)), "schedule zb-h1")
    costs = [StageCost(1.0, 1.05, 1.05)] * 4
    repaired = simulate(generate("zb-h1", 4, 8), costs, LinkCost(0.02)).makespan_seconds
    assert known.step_seconds == pytest.approx(repaired)
    assert known.error < 0.01
    assert not advice(explain(measured, predicted=profile(1.5)), "zb-")
    slow = recorded(timeline(lambda s, k: 2.0, lambda s, k: 4.0))  # so the profile is of something else
    (unsure,) = advice(explain(slow, predicted=profile(1.5)), "schedule zb-h1")
    assert unsure.claim.startswith("at most -")
    assert "the profile is not used, since its times are off by a factor of 2.00" in unsure.note
    assert "pass a --profile" not in unsure.note
    (wider,) = advice(explain(measured, predicted=profile(1.05, spread=0.1)), "schedule zb-h1")
    assert wider.error > known.error + 0.02
    (widest,) = advice(explain(measured, predicted=profile(1.05, spread=0.5)), "schedule zb-h1")
    assert widest.claim.startswith("at most -")
    assert widest.note.endswith("little of it is certain")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("link=-1", "what-if link=-1: expected a factor for transfer times, 0 or more; this step has 4 stages"),
        ("cut=9:0.1", "a stage of 1 to 3 and a share of -1 to 1; this step"),
        ("rank=9", "what-if rank=9: expected a rank of 0 to 3; this step has 4 stages on 4 ranks"),
        ("rank", "what-if rank: expected schedule=NAME"),
        ("schedule=zb-h3", "did you mean 'zb-h2'?"),
        ("link=nan", "what-if link=nan: expected a factor"),
        ("", "expected schedule=NAME"),
        *((f"cut={cut}", "a stage of 1 to 3 and a share") for cut in ("0:0.5", "2:1.5", "2")),
        ("speed=2", "what-if speed=2: expected schedule=NAME"),
    ],
)
def test_a_what_if_that_cannot_be_says_what_is_wrong_with_it(text: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(said)):
        explain(recorded(timeline(even, twice)), what_ifs=[text])


def test_a_run_that_splits_tells_what_another_that_splits_costs_and_not_what_joining_brings() -> None:
    measured = recorded(timeline(even, twice, schedule="zb-h1"))
    joined, split = explain(measured, what_ifs=["schedule=1f1b", "schedule=zb-h2"]).what_ifs
    assert joined.claim.startswith("at most -")
    assert "if splitting a backward costs up to half of the work" in joined.note
    assert split.measured


def test_what_may_be_a_loss_comes_last() -> None:
    """Twice as many microbatches usually bring more than other cuts, and cost time if a half takes as long."""
    found = explain(recorded(timeline(lambda s, k: 1.8 if s == 1 else 1.0, twice, ranks=4, microbatches=4)))
    kinds = [one.kind for one in found.changes if not one.measured]
    assert kinds[0] == "cut"
    assert "pieces" in kinds


def test_an_order_that_hides_messages_may_not() -> None:
    """If they keep their ranks busy, GPipe hides none: the interval reaches from there to there."""
    measured = recorded(timeline(even, twice, link=LinkCost(0.5)))
    found = explain(measured, what_ifs=["schedule=gpipe"])
    (one,) = found.what_ifs
    hidden = simulate(generate("gpipe", 4, 8), [StageCost(1.0, 1.0, 1.0)] * 4, LinkCost(0.5)).makespan_seconds
    assert one.step_seconds == pytest.approx(hidden)
    busy = [
        simulate(generate(name, 4, 8), [StageCost(1.5, 1.25, 1.25)] * 4).makespan_seconds for name in ("1f1b", "gpipe")
    ]
    assert one.gain > 0.05
    assert one.gain - one.error <= (busy[0] - busy[1]) / found.step.seconds + 0.05
    assert not advice(found, "schedule gpipe")


def test_backwards_that_are_split_send_too() -> None:
    trial = trial_of(timeline(even, twice, schedule="zb-h1", link=LinkCost(0.5)))
    costs = [StageCost(1.0 + 0.5 * (stage < 3), 2.0 + 0.5 * (stage > 0), 0.0) for stage in range(4)]
    busy = simulate(generate("zb-h1", 4, 8), costs).makespan_seconds
    assert trial.replay.blocking_sends.step_seconds == pytest.approx(busy)


def test_a_gain_that_another_step_does_not_show_is_not_certain() -> None:
    slow, usual = timeline(lambda s, k: 2.0 if s == 2 else 1.0, twice), timeline(even, twice)
    both = recorded(usual, slow)
    step = steps_of_trace(both).typical
    trial = WhatIfContext.from_step(step)
    quiet = steps_of_trace(recorded(usual, usual)).typical
    shows = suggestions([trial, trial], 0.0)
    hides = suggestions([trial, WhatIfContext.from_step(quiet)], 0.0)
    assert shows[0].kind == "rank"
    assert not any(one.kind == "rank" for one in hides)


# -- what a trace is of -----------------------------------------------------------------------------------------------


def in_turns(made: Timeline) -> Timeline:
    """The same actions, one after the other in one process."""
    spans = sorted(made, key=lambda span: (span.start_seconds, span.rank))
    rows: list[list[Any]] = [[] for _ in range(made.ranks)]
    now = 0.0
    for span in spans:
        took = span.end_seconds - span.start_seconds
        rows[span.rank].append(replace(span, start_seconds=now, end_seconds=now + took, waited_seconds=0.0))
        now += 1.1 * took
    return merged(rows, in_turns=True)


def test_ranks_that_took_turns_are_refused_in_perfettos_trace_too(tmp_path: Path) -> None:
    write_perfetto(in_turns(timeline(even, twice)), tmp_path / "turns.json")
    with pytest.raises(ArgumentError, match="one process ran all ranks in turns"):
        load_trace([tmp_path / "turns.json"])


def columns(made: Timeline, file: Path) -> Path:
    rows = [f"{s.action.op.value},{s.action.microbatch},{s.rank},{s.start_seconds},{s.end_seconds}" for s in made]
    file.write_text("\n".join(["op,microbatch,pp_rank,start_s,end_s", *rows]))
    return file


def test_columns_in_which_ranks_took_turns_promise_nothing(tmp_path: Path) -> None:
    """They carry no mark; but at no time do two ranks compute, though their order would let them."""
    usual = timeline(even, twice, schedule="gpipe")
    found = explain(load_trace([columns(in_turns(usual), tmp_path / "turns.csv")]))
    assert "no two ranks compute at once" in found.run.notes[0]
    assert not any(one.measured for one in found.changes)
    assert not explain(load_trace([columns(usual, tmp_path / "usual.csv")])).run.notes
    naive = explain(load_trace([columns(timeline(even, twice, schedule="naive"), tmp_path / "naive.csv")]))
    assert not naive.run.notes, "its order lets no two ranks compute at once"


def test_ranks_that_shared_cores_are_marked_in_every_form(tmp_path: Path) -> None:
    crowded = replace(timeline(even, twice, schedule="naive"), crowded=True)
    write_perfetto(crowded, tmp_path / "trace.json")
    (tmp_path / "timeline.json").write_text(json.dumps(crowded.to_dict()))
    assert Timeline.from_dict(crowded.to_dict()).crowded
    for name in ("trace.json", "timeline.json"):
        found = explain(load_trace([tmp_path / name]))
        assert "fewer cores than they compute with" in found.run.notes[0]
        assert found.changes
        assert not any(one.measured for one in found.changes)


@pytest.mark.parametrize("shift", range(5))
def test_where_ranks_share_cores_even_stages_are_advised_but_nothing_that_adds_work(shift: int) -> None:
    """Followed on two cores, zb-h1 for 1f1b on four ranks took a fifth longer. The work of even stages is the same but
    for rounding, up or down."""
    free = recorded(timeline(even, twice))
    assert any("zb-h1" in one.text for one in explain(free).changes)
    assert not any("zb-" in one.text for one in explain(replace(free, crowded=True)).changes)
    uneven = timeline(lambda s, k: (1.0 + (s == 1)) * (1.0 + 0.003 * ((7 * s + 3 * k + shift) % 5)), twice)
    assert suggestions([trial_of(uneven, shared=True)], 0.0)[0].kind == "cut"


def test_what_was_simulated_is_not_called_measured() -> None:
    simulated = recorded(timeline(even, twice))
    jittered = timeline(lambda s, k: 1.0 + 0.01 * ((7 * s + 3 * k) % 5), twice, link=LinkCost(0.02))
    late = [
        replace(e, start_seconds=e.start_seconds + 0.001 * (n % 3)) for n, e in enumerate(recorded(jittered).events)
    ]
    assert explain(simulated).origin == "simulated"
    assert explain(replace(simulated, events=tuple(late))).origin == "measured"


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v"])
def test_a_trace_of_actions_that_overlap_has_the_schedules_name(name: str) -> None:
    """A trace has the two actions one after the other."""
    schedule = generate(name, 4, 8)
    ran = schedule.with_rows([*row] for row in schedule.rows)
    found = explain(recorded(simulate(ran, StageCost(1.0, 1.0, 1.0), LinkCost(0.02))))
    assert found.step.slowest.schedule.name == name


def test_a_profile_that_is_off_does_not_silence_a_heavy_stage() -> None:
    """It has one unit a stage, so no better cut."""

    def advised(times: float) -> list[Change]:
        heavy = timeline(lambda s, k: times if s == 2 else 1.0, lambda s, k: 2 * times if s == 2 else 2.0)
        return advice(explain(recorded(heavy), predicted=profile()), "stage 2 takes")

    assert not advised(1.3)
    (found,) = advised(2.0)
    assert found.claim.startswith("at most -")
    assert "no better cut, but stages took 1.00 to 2.00 times what it says" in found.note


@pytest.mark.parametrize(
    ("threads", "rows", "unchecked"),
    [(0, None, "threads, rows or devices"), (1, None, "rows or devices"), (1, 4, "devices")],
)
def test_a_prediction_that_is_far_off_may_be_of_what_was_not_compared(
    threads: int, rows: int | None, unchecked: str
) -> None:
    units = tuple(UnitCost(f"layers.{n}", 1.0, 1.0, 1.0) for n in range(4))
    made = Profile(units, "cpu", "float32", {"layers.0.weight": (1, 1)}, rows=4, threads=1)
    predicted = Prediction.of_profile(made, 4, ["layers.1", "layers.2", "layers.3"], rows, threads)
    note = explain(recorded(timeline(lambda s, k: 1.9, lambda s, k: 3.8)), predicted=predicted).run.notes[0]
    assert note.startswith("the pipeline took 1.91 times what was predicted")
    assert note.endswith(f"predicted: it may be of other {unchecked}, or other work may have run on the machine")
    near = recorded(timeline(lambda s, k: 1.1, lambda s, k: 2.2))
    assert not any("predicted" in note for note in explain(near, predicted=predicted).run.notes)


def test_of_several_sizes_that_of_the_run_counts() -> None:
    def units(scale: float) -> tuple[UnitCost, ...]:
        return tuple(UnitCost(f"layers.{n}", scale, scale, scale) for n in range(4))

    large = Profile(units(8.0), "cpu", "float32", {"layers.0.weight": (1, 1)}, rows=8)
    both = large.with_others([replace(large, units=units(2.0), rows=2)])
    cuts = ["layers.1", "layers.2", "layers.3"]
    assert Prediction.of_profile(both, 4, cuts, 2).stage_seconds == (6.0,) * 4
    assert not Prediction.of_profile(both, 4, cuts, 2).note
    assert "does not say how many rows" in Prediction.of_profile(both, 4, cuts).note
    assert "have 4 rows, and the profile is of 2, 8" in Prediction.of_profile(both, 4, cuts, 4).note
    assert "ranks had 3 threads, and the profile was made with 1" in Prediction.of_profile(both, 4, cuts, 2, 3).note
    found = explain(recorded(timeline(even, twice)), predicted=Prediction.of_profile(both, 4, cuts, 4))
    assert any("have 4 rows" in note for note in found.run.notes)


def test_a_gain_that_single_slow_actions_bring_is_not_certain() -> None:
    """Without them GPipe and 1F1B take equally long, even if every step has them."""

    def slow(stage: int, microbatch: int) -> float:
        return 4.0 if (stage, microbatch) in ((0, 1), (0, 2)) else 1.0

    one = recorded(timeline(slow, twice, 2, 4, "gpipe", LinkCost(0.0)))
    steps = replace(one, events=tuple(replace(event, step=n) for n in range(3) for event in one.events))
    found = explain(steps, what_ifs=["schedule=1f1b"])
    assert found.what_ifs[0].claim == "-9.5% ± <0.1%", "by the simulator alone"
    assert not any(one.kind == "schedule" and one.measured for one in found.changes)
