"""Whole steps of several replicas, read from a trace's ops and timed again: durations, collectives, stragglers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock._base.errors import ArgumentError
from penstock.plan.explain import Event
from penstock.plan.explain.replay import replay_traced
from penstock.plan.explain.stragglers import compute_slowdowns, typical_seconds
from penstock.schedule import Action, Op, Schedule, generate
from penstock.simulate import StageCost, simulate
from penstock.trace.outside_pipeline import PIPELINE, Among, Joint, OutsidePipeline, measure_ops

JOINTS = {"gather": Among.REPLICAS, "ends": Among.PIPELINE, "norm": Among.ALL, "optimizer": Among.NOBODY}


def durations(rng: np.random.Generator, replicas: int, ranks: int, microbatches: int) -> dict[str, np.ndarray]:
    shape = (replicas, ranks, microbatches)
    found = {name: rng.integers(1, 9, shape).astype(float) for name in PIPELINE}
    found["forward-message"][:, -1] = found["backward-message"][:, 0] = np.nan
    for name in JOINTS:
        found[name] = rng.integers(1, 9, shape[:2]).astype(float)
    found["ends"][:, 1:-1] = np.nan
    return found


def step(rng: np.random.Generator, replicas: int, ranks: int, microbatches: int) -> OutsidePipeline:
    after = tuple(Joint(name, JOINTS[name]) for name in ("ends", "norm", "optimizer"))
    return OutsidePipeline((Joint("gather", Among.REPLICAS),), after, durations(rng, replicas, ranks, microbatches))


def seconds(schedule: Schedule, one: OutsidePipeline, **other: np.ndarray) -> float:
    """How long the step takes, with other durations of some ops."""
    return replay_traced(schedule, replace(one, durations={**one.durations, **other})).step_seconds


def event(replica: int, rank: int, done: str | Op, number: int | None, start: float, end: float) -> Event:
    action = None if isinstance(done, str) else Action(rank, done, number)
    return Event((replica, rank), str(action or done), start, end, action, 0, rank, replica)


def events_of(schedule: Schedule, took: Mapping[str, np.ndarray], rest: float) -> list[Event]:
    """What a trace of the step would show, one rank's collectives at a time; `rest` is idle before the optimizer."""
    replicas, ranks, _ = took["forward"].shape
    gathered = took["gather"]
    events = [event(d, r, "gather", None, 0.0, gathered[d, r]) for d in range(replicas) for r in range(ranks)]
    ended = np.zeros((replicas, ranks))
    for d in range(replicas):
        both = [np.nan_to_num(took[f"{way}-message"][d]) + took[way][d] for way in ("forward", "backward")]
        costs = [[StageCost(f, b, 0) for f, b in zip(*pair, strict=True)] for pair in zip(*both, strict=True)]
        begin = gathered[d].tolist()
        timeline = simulate(schedule, costs, begin=begin)
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
    schedule = generate("1f1b", ranks, microbatches)
    one = step(np.random.default_rng(seed), replicas, ranks, microbatches)
    events = events_of(schedule, one.durations, 0.0)
    found = measure_ops(schedule, events, JOINTS)
    assert (found.before, found.after) == (one.before, one.after)
    for name, expected in one.durations.items():
        np.testing.assert_allclose(found.durations[name], expected)
    whole = max(each.end_seconds for each in events) - min(each.start_seconds for each in events)
    assert seconds(schedule, found) == pytest.approx(whole)


def test_what_is_lost_in_between_is_left_out() -> None:
    schedule, one = generate("1f1b", 3, 2), step(np.random.default_rng(1), 2, 3, 2)
    found = measure_ops(schedule, events_of(schedule, one.durations, 4.0), JOINTS)
    whole = measure_ops(schedule, events_of(schedule, one.durations, 0.0), JOINTS)
    assert seconds(schedule, found) == pytest.approx(seconds(schedule, whole))


def test_what_ranks_do_together_waits_for_the_last_of_them() -> None:
    """Two replicas of one rank: forwards of 1 and 5 seconds, backwards of 2."""
    schedule = generate("1f1b", 1, 1)
    took = {"forward": np.array([[[1.0]], [[5.0]]]), "backward": np.full((2, 1, 1), 2.0)}
    took |= {name: np.full((2, 1, 1), np.nan) for name in PIPELINE[2:]}
    took |= {"sum": np.array([[10.0], [1.0]]), "optimizer": np.array([[0.5], [20.0]])}
    slow_first = np.array([[20.0], [0.5]])
    for among, expected in ((Among.REPLICAS, 7 + 21), (Among.NOBODY, 7 + 21), (Among.ALL, 28), (Among.PIPELINE, 28)):
        one = OutsidePipeline((), (Joint("sum", among), Joint("optimizer")), took)
        assert seconds(schedule, one) == expected
        assert seconds(schedule, one, optimizer=slow_first) == {Among.REPLICAS: 37, Among.ALL: 37}.get(among, 33)
    before = OutsidePipeline((Joint("sum", Among.REPLICAS),), (), took)
    assert seconds(schedule, before, sum=np.array([[10.0], [1.0]])) == 13


def test_whose_slowness_costs_what() -> None:
    """Rank 1 of replica 0 has forwards of 3 in place of 1; everything else is even."""
    schedule = generate("1f1b", 2, 4)
    even = {name: np.full((2, 2, 4), 1.0) for name in PIPELINE} | {"sum": np.full((2, 2), 1.0)}
    even |= {name: np.full((2, 2, 4), np.nan) for name in PIPELINE[2:]}
    real = even | {"forward": even["forward"].copy()}
    real["forward"][0, 1] = 3.0
    one = OutsidePipeline((), (Joint("sum", Among.REPLICAS),), real)
    found = compute_slowdowns(schedule, one, dict.fromkeys(real, 1.0))
    slow = seconds(schedule, one) / seconds(schedule, one, **even)
    assert slow > 1.5
    assert found.step == found.by_rank[1] == found.by_replica[0] == found.by_op["forward"] == slow
    assert found.by_rank[0] == found.by_replica[1] == found.by_op["sum"] == found.by_op["backward"] == 1
    known = typical_seconds([real], one)
    assert known["forward"] == 1.5
    assert known["sum"] == 1


def test_what_is_missing_is_named() -> None:
    schedule, one = generate("1f1b", 2, 2), step(np.random.default_rng(1), 2, 2, 2)
    events = events_of(schedule, one.durations, 0.0)
    with pytest.raises(ArgumentError, match="an op 'norm'; pass in `among`"):
        measure_ops(schedule, events, {name: among for name, among in JOINTS.items() if name != "norm"})
    few = [each for each in events if (each.replica, each.name) != (1, "0B1")]
    with pytest.raises(ArgumentError, match="no backward of replica 1, rank 0, microbatch 1"):
        measure_ops(schedule, few, JOINTS)
    with pytest.raises(ArgumentError, match="forward of rank 0, microbatch 7, is not in the schedule"):
        measure_ops(schedule, [*events, event(1, 0, Op.F, 7, 0, 0)], JOINTS)
