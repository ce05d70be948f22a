"""What the benchmark of predictions rests on: the runtime's time is part of a step, and ranks may share cores."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks/prediction"))

from calibration import Host

from penstock.costs import Profile, UnitCost
from penstock.plan import Cluster, FixedNumbers, Plan, Sizes, make_plans
from penstock.simulate import LinkCost
from report import Ran, predicted

UNITS = tuple(UnitCost(f"layer.{n}", 1.0 + n % 3, 1.0, 0.5, boundary_bytes=8) for n in range(9))
SIZES = Sizes({1: Profile(UNITS, "cpu", "float32", {"weight": (1,)}, rows=1)})
SCHEDULES = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1"]


def _plans(ranks: int, schedules: list[str], action_seconds: float = 0.0, link: LinkCost | None = None) -> list[Plan]:
    cluster = Cluster(ranks, link=link or LinkCost(0.0), action_seconds=action_seconds)
    found = make_plans(SIZES, cluster, 8, FixedNumbers(schedules), best=1000).best
    return [plan for plan in found if plan.choice.replicas == 1 and plan.choice.rows == 1]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_plan_takes_what_its_own_schedule_takes_with_a_core_for_each_rank(schedule: str) -> None:
    host = Host(latency=0.25, bytes_per_second=16.0)
    for plan in _plans(4, [schedule], link=host.link):
        ran = Ran.of(plan.to_dict())
        assert predicted(ran, UNITS, host, cores=4) == pytest.approx(plan.step_seconds)
        assert predicted(ran, UNITS, host, cores=3) > plan.step_seconds


def test_the_runtime_adds_to_each_action_of_the_slowest_way_through() -> None:
    """Of 1F1B with equal stages, m + p - 1 forwards and as many backwards are one after the other."""
    even = tuple(UnitCost(f"layer.{n}", 1.0, 1.0, 1.0) for n in range(4))
    sizes = Sizes({1: Profile(even, "cpu", "float32", {"weight": (1,)}, rows=1)})
    plain, loaded = (
        next(p for p in make_plans(sizes, Cluster(4, action_seconds=each), 8, FixedNumbers(["1f1b"]), best=99).best
             if p.choice.ranks == 4 and p.choice.rows == 1)
        for each in (0.0, 0.125)
    )  # fmt: skip
    assert loaded.step_seconds - plain.step_seconds == pytest.approx(2 * (8 + 4 - 1) * 0.125)
    assert predicted(Ran.of(plain.to_dict()), even, Host(action=0.125, step=1.0), cores=4) == pytest.approx(
        loaded.step_seconds + 1.0
    )


def test_the_runtime_decides_between_few_stages_and_many() -> None:
    best = {each: _plans(2, ["1f1b", "interleaved-1f1b"], each)[0].choice for each in (0.0, 1.0)}
    assert best[0.0].chunks > best[1.0].chunks == 1
