"""Whole steps of several replicas, read from a trace's ops and timed again: durations, collectives, stragglers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ArgumentError
from penstock.explain import Event
from penstock.explain.traced import traced
from penstock.schedule import Action, Op, generate
from penstock.simulate import StageCost, simulate
from penstock.simulate.job import PIPELINE, Among, Job, Joint, balanced, mixed, slowdowns, usual

JOINTS = {"gather": Among.REPLICAS, "ends": Among.PIPELINE, "norm": Among.ALL, "optimizer": Among.NOBODY}


def durations(rng: np.random.Generator, replicas: int, ranks: int, microbatches: int) -> dict[str, np.ndarray]:
    shape = (replicas, ranks, microbatches)
    found = {name: rng.integers(1, 9, shape).astype(float) for name in PIPELINE}
    found["forward-message"][:, -1] = found["backward-message"][:, 0] = np.nan
    for name in JOINTS:
        found[name] = rng.integers(1, 9, shape[:2]).astype(float)
    found["ends"][:, 1:-1] = np.nan
    return found


def job(ranks: int, microbatches: int) -> Job:
    after = tuple(Joint(name, JOINTS[name]) for name in ("ends", "norm", "optimizer"))
    return Job(generate("1f1b", ranks, microbatches), (Joint("gather", Among.REPLICAS),), after)


def event(replica: int, rank: int, done: str | Op, number: int | None, start: float, end: float) -> Event:
    action = None if isinstance(done, str) else Action(rank, done, number)
    return Event((replica, rank), str(action or done), start, end, action, 0, rank, replica)


def events_of(one: Job, took: dict[str, np.ndarray], rest: float) -> list[Event]:
    """What a trace of the step would show, one rank's collectives at a time; `rest` is idle before the optimizer."""
    replicas, ranks, _ = took["forward"].shape
    gathered = took["gather"]
    events = [event(d, r, "gather", None, 0.0, gathered[d, r]) for d in range(replicas) for r in range(ranks)]
    ended = np.zeros((replicas, ranks))
    for d in range(replicas):
        both = [np.nan_to_num(took[f"{way}-message"][d]) + took[way][d] for way in ("forward", "backward")]
        costs = [[StageCost(f, b, 0) for f, b in zip(*pair, strict=True)] for pair in zip(*both, strict=True)]
        begin = gathered[d].tolist()
        timeline = simulate(one.schedule, costs, begin=begin)
        for rank in range(ranks):
            before = begin[rank]
            for span in timeline.spans(rank):
                forward = span.action.op is Op.F
                way, send, receive = (
                    ("forward", Op.SEND_F, Op.RECV_F) if forward else ("backward", Op.SEND_B, Op.RECV_B)
                )
                number = span.action.microbatch
                assert number is not None
                other = rank + (1 if forward else -1)
                done = span.start_seconds + took[way][d, rank, number]
                events.append(event(d, rank, span.action.op, number, span.start_seconds, done))
                if 0 <= other < ranks:
                    events.append(event(d, rank, send, number, done, span.end_seconds))
                    events.append(event(d, other, receive, number, done, span.end_seconds))
                before = span.end_seconds
            ended[d, rank] = before
    for name, among in (("ends", Among.PIPELINE), ("norm", Among.ALL), ("optimizer", Among.NOBODY)):
        part = ~np.isnan(took[name])
        latest = {
            Among.PIPELINE: np.where(part, ended, 0).max(axis=1, keepdims=True) + 0 * ended,
            Among.ALL: np.full_like(ended, ended.max()),
            Among.NOBODY: ended + rest,
        }[among]
        start = ended + rest * (name == "optimizer")
        for d, r in np.argwhere(part).tolist():
            events.append(event(d, r, name, None, start[d, r], latest[d, r] + took[name][d, r]))
        ended = np.where(part, latest + took[name], ended)
    return events


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(2, 4), st.integers(1, 5))
def test_a_trace_gives_back_what_its_ops_took(seed: int, replicas: int, ranks: int, microbatches: int) -> None:
    one, took = job(ranks, microbatches), durations(np.random.default_rng(seed), replicas, ranks, microbatches)
    found = traced(one.schedule, events_of(one, took, 0.0), JOINTS)
    assert found.job == one
    for name, expected in took.items():
        np.testing.assert_allclose(found.durations[name], expected)
    assert found.job.seconds(found.durations) == pytest.approx(found.seconds)
    alone = one.spans(took)
    assert alone.shape == (replicas,)


def test_gaps_are_parts_of_the_step_if_asked_for() -> None:
    one, took = job(3, 2), durations(np.random.default_rng(1), 2, 3, 2)
    events = events_of(one, took, 4.0)
    without, with_gaps = (traced(one.schedule, events, JOINTS, gaps=gaps) for gaps in (False, True))
    assert without.job.seconds(without.durations) == pytest.approx(without.seconds - 4)
    assert (with_gaps.durations["before optimizer"] == 4).all()
    assert Joint("before optimizer") in with_gaps.job.after


def test_what_ranks_do_together_waits_for_the_last_of_them() -> None:
    """Two replicas of one rank: forwards of 1 and 5 seconds, backwards of 2."""
    took = {"forward": np.array([[[1.0]], [[5.0]]]), "backward": np.full((2, 1, 1), 2.0)}
    took |= {name: np.full((2, 1, 1), np.nan) for name in PIPELINE[2:]}
    took |= {"sum": np.array([[10.0], [1.0]]), "optimizer": np.array([[0.5], [20.0]])}
    for among, expected in ((Among.REPLICAS, 7 + 21), (Among.NOBODY, 7 + 21), (Among.ALL, 28), (Among.PIPELINE, 28)):
        one = Job(generate("1f1b", 1, 1), (), (Joint("sum", among), Joint("optimizer")))
        assert one.seconds(took) == expected
        slow_first = took | {"optimizer": np.array([[20.0], [0.5]])}
        assert one.seconds(slow_first) == {Among.REPLICAS: 37, Among.ALL: 37}.get(among, 33)
    before = Job(generate("1f1b", 1, 1), (Joint("sum", Among.REPLICAS),), ())
    assert before.seconds(took | {"sum": np.array([[10.0], [1.0]])}) == 13


def test_whose_slowness_costs_what() -> None:
    """Rank 1 of replica 0 has forwards of 3 in place of 1; everything else is even."""
    one = Job(generate("1f1b", 2, 4), (), (Joint("sum", Among.REPLICAS),))
    even = {name: np.full((2, 2, 4), 1.0) for name in PIPELINE} | {"sum": np.full((2, 2), 1.0)}
    even |= {name: np.full((2, 2, 4), np.nan) for name in PIPELINE[2:]}
    real = even | {"forward": even["forward"].copy()}
    real["forward"][0, 1] = 3.0
    found = slowdowns(one, real, even)
    slow = one.seconds(real) / one.seconds(even)
    assert slow > 1.5
    assert found.step == found.by_rank[1] == found.by_replica[0] == found.by_op["forward"] == slow
    assert found.by_rank[0] == found.by_replica[1] == found.by_op["sum"] == found.by_op["backward"] == 1
    where = mixed(real, even, np.array([[True, True], [False, True]]), ["forward"])
    assert (where["forward"] == real["forward"]).all()
    seconds = usual([real], one)
    assert seconds["forward"] == 1.5
    assert seconds["sum"] == 1
    assert (balanced(real, seconds)["forward"] == 1.5).all()


def test_ranks_that_begin_later() -> None:
    schedule, cost = generate("1f1b", 2, 2), StageCost(1, 1, 1)
    plain = simulate(schedule, cost)
    later = simulate(schedule, cost, begin=[5, 5])
    assert [span.start_seconds for span in later] == [5 + span.start_seconds for span in plain]
    assert simulate(schedule, cost, begin=[0, 1]) == plain
    assert next(simulate(schedule, cost, begin=[0, 10]).spans(1)).start_seconds == 10
    for wrong in ([1.0], [0.0, -1.0], [0.0, float("nan")]):
        with pytest.raises(ArgumentError, match="a time of 0 or more for each of 2 ranks"):
            simulate(schedule, cost, begin=wrong)


def test_what_is_missing_is_named() -> None:
    one, took = job(2, 2), durations(np.random.default_rng(1), 2, 2, 2)
    events = events_of(one, took, 0.0)
    with pytest.raises(ArgumentError, match="an op 'norm'; say in `among`"):
        traced(one.schedule, events, {name: among for name, among in JOINTS.items() if name != "norm"})
    few = [each for each in events if (each.replica, each.name) != (1, "0B1")]
    with pytest.raises(ArgumentError, match="no backward of replica 1, rank 0, microbatch 1"):
        traced(one.schedule, few, JOINTS)
    with pytest.raises(ArgumentError, match="forward of rank 0, microbatch 7, is not in the schedule"):
        traced(one.schedule, [*events, event(1, 0, Op.F, 7, 0, 0)], JOINTS)
    with pytest.raises(ArgumentError, match="durations have no 'norm'"):
        one.seconds({name: each for name, each in took.items() if name != "norm"})
    with pytest.raises(ArgumentError, match=r"'optimizer' have the shape \(2,\); expected \(2, 2\): replicas, ranks"):
        one.seconds(took | {"optimizer": np.zeros(2)})
