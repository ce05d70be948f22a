"""The planner finds what trying everything finds, says what a plan takes, and says what is missing if nothing fits."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from penstock._base.errors import ArgumentError
from penstock.costs import Profile, Tied, UnitCost
from penstock.plan import (
    Cluster,
    DevicePool,
    FixedNumbers,
    ParallelConfig,
    Plan,
    Sizes,
    enumerate_configs,
    make_plans,
    read_plan,
)
from penstock.plan.layout import assign_pools
from penstock.plan.planner import EQUAL
from penstock.plan.predict import Cut, cut_model, cuts_within_memory, predict, schedule_for_config
from penstock.schedule import Schedule, check, generate
from penstock.simulate import LinkCost, StageCost, memory, simulate

MB = 10**6


def _profile(seconds: list[float], **bytes_: float) -> Profile:
    units = [
        UnitCost(f"layer.{number}", each, each, each, **{f"{name}_bytes": value for name, value in bytes_.items()})
        for number, each in enumerate(seconds)
    ]
    return Profile(tuple(units), "cpu", "float32", {"weight": (1,)})


ALIKE = Sizes({1: _profile([1.0] * 8, activation=MB, parameter=MB, gradient=MB, optimizer=2 * MB, boundary=MB // 10)})


def _cut(choice: ParallelConfig, cluster: Cluster, sizes: Sizes = ALIKE) -> Cut:
    (kinds,) = assign_pools(cluster, choice.replicas, choice.ranks)
    return cut_model(sizes.at(choice.rows), schedule_for_config(choice).placement, cluster, kinds)


def test_what_is_tied_counts_once_on_a_rank_with_both_its_uses() -> None:
    held = {"parameter_bytes": MB, "gradient_bytes": MB, "optimizer_bytes": 2 * MB}
    ties = {0: (Tied("weight", MB, MB),), 3: (Tied("weight", MB, MB),)}
    units = tuple(UnitCost(f"{n}", 1.0, 1.0, 1.0, **held, tied=ties.get(n, ())) for n in range(4))
    sizes = Sizes({1: Profile(units, "cpu", "float32", {"weight": (1,)})})

    def held_by(choice: ParallelConfig) -> tuple[float, ...]:
        cluster = Cluster(choice.devices)
        return predict(choice, _cut(choice, cluster, sizes)).held_bytes

    assert held_by(ParallelConfig(1, 1, 1, "1f1b", 4, 1)) == (12 * MB,)
    assert held_by(ParallelConfig(1, 2, 1, "1f1b", 4, 1)) == (8 * MB, 8 * MB)
    assert held_by(ParallelConfig(1, 2, 2, "zb-v", 4, 1)) == (4 * MB, 8 * MB)


def test_inputs_the_loss_and_the_largest_unit_count() -> None:
    """Inputs of all microbatches wait on the first rank, a loss is kept on the last, and one unit runs at a time."""
    units = (
        UnitCost("a", 1.0, 1.0, 1.0, activation_bytes=5 * MB, input_bytes=2 * MB, working_bytes=9 * MB),
        UnitCost("b", 1.0, 1.0, 1.0, activation_bytes=MB, working_bytes=2 * MB, loss_bytes=4 * MB),
    )
    sizes = Sizes({1: Profile(units, "cpu", "float32", {"weight": (1,)})})
    choice, cluster = ParallelConfig(1, 2, 1, "1f1b", 4, 1), Cluster(2)
    plan = predict(choice, _cut(choice, cluster, sizes))
    assert plan.memory_bytes == (2 * 3 * MB + 4 * 2 * MB + 9 * MB, 5 * MB + 2 * MB)
    alone = predict(one := ParallelConfig(1, 1, 1, "1f1b", 4, 1), _cut(one, Cluster(1), sizes))
    assert alone.memory_bytes == ((3 + 5) * MB + 4 * 2 * MB + (9 - 5) * MB,)  # while "a" runs, "b" has kept nothing


def _needed(schedule: str, ranks: int, *units: UnitCost, chunks: int = 1) -> tuple[float, ...]:
    """What a plan of four microbatches says of each rank."""
    sizes = Sizes({1: Profile(units, "cpu", "float32", {"weight": (1,)})})
    choice, cluster = ParallelConfig(1, ranks, chunks, schedule, 4, 1), Cluster(ranks)
    return predict(choice, _cut(choice, cluster, sizes)).memory_bytes


def test_gradients_come_with_the_first_backward() -> None:
    """When GPipe holds most there are none yet; they come as what is kept goes. In 1F1B they are there meanwhile."""
    a, b = (UnitCost(name, 1.0, 1.0, 1.0, activation_bytes=10 * MB, gradient_bytes=6 * MB) for name in "ab")
    assert _needed("gpipe", 2, a, b) == (4 * 10 * MB + 6 * MB,) * 2
    assert _needed("gpipe", 1, a, b) == (4 * 20 * MB + 6 * MB,)  # b's gradient, then b's 10 MB go and a's comes
    assert _needed("1f1b", 1, a, b) == (20 * MB + 12 * MB,)
    assert _needed("1f1b", 2, a, b) == (2 * 10 * MB + 6 * MB, 10 * MB + 6 * MB)
    a, b = (replace(unit, weight_gradient_bytes=4 * MB) for unit in (a, b))  # known: W needs less than F has kept
    assert _needed("zb-h1", 2, a, b) == (2 * 10 * MB + 6 * MB, 10 * MB + 4 * MB + 6 * MB)


def test_each_stage_of_a_rank_takes_its_own_working_memory() -> None:
    """Rank 1 holds most when its light stage 3 runs; what heavy stage 1 takes while it runs comes at other times."""
    light = [UnitCost(name, 1.0, 1.0, 1.0, activation_bytes=9 * MB, working_bytes=MB) for name in "0123"]
    units = [replace(unit, activation_bytes=MB, working_bytes=5 * MB) if unit.name == "1" else unit for unit in light]
    row = str(generate("interleaved-1f1b", 2, 4, 2).rows[1])
    assert row == "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"
    assert _needed("interleaved-1f1b", 2, *units, chunks=2)[1] == 2 * MB + 9 * MB + MB


CLUSTERS = {
    "no limit": Cluster(4, link=LinkCost(0.01, 10 * MB)),
    "roomy": Cluster(4, 16 * MB, LinkCost(0.01, 10 * MB)),
    "tight": Cluster(4, 11 * MB, LinkCost(0.01, 10 * MB)),
    "offload": Cluster(4, 11 * MB, LinkCost(0.01, 10 * MB), offload_link=LinkCost(0.01, 4 * MB)),
    "two hosts": Cluster(4, 14 * MB, LinkCost(0, 50 * MB), 2, LinkCost(0.1, MB)),
    "updates": Cluster(4, 16 * MB, optimizer_byte_seconds=1 / MB),
    "two kinds": Cluster(
        kinds=(DevicePool("old", 2, 9 * MB, 0.5), DevicePool("new", 2, 30 * MB)), link=LinkCost(0.01, 10 * MB)
    ),
}


def _all_plans(cluster: Cluster, sizes: Sizes, global_batch: int) -> list[Plan]:
    """Every choice, for every order of the kinds; with other cuts, too, if the fastest leave too little memory."""
    tried = []
    for choice in enumerate_configs(sizes, cluster, global_batch):
        units, schedule = sizes.at(choice.rows), schedule_for_config(choice)
        for kinds in assign_pools(cluster, choice.replicas, choice.ranks):
            where = cut_model(units, schedule.placement, cluster, kinds)
            tried.append(predict(choice, where))
            if tried[-1].recompute or tried[-1].offload or tried[-1].lacking_bytes:
                for other in cuts_within_memory(where, schedule):
                    tried.append(predict(choice, other))
                    if not tried[-1].lacking_bytes:
                        break
    return tried


@pytest.mark.parametrize("name", CLUSTERS)
def test_no_choice_is_better_than_the_best(name: str) -> None:
    cluster = CLUSTERS[name]
    held = {"activation": MB, "parameter": MB, "gradient": MB, "optimizer": MB // 8}
    sizes = Sizes({2: _profile([1, 1, 1, 2, 1, 3], **held, boundary=MB // 10)})
    tried = _all_plans(cluster, sizes, 8)
    fitting: dict[tuple[ParallelConfig, tuple[int, ...]], float] = {}
    for plan in (plan for plan in tried if not plan.lacking_bytes):
        key = plan.choice, plan.limit_bytes if len(cluster.kinds) > 1 else ()
        fitting[key] = min(plan.step_seconds, fitting.get(key, math.inf))
    found = make_plans(sizes, cluster, 8, best=3)
    for plan, least in zip(found.best, sorted(fitting.values()), strict=False):
        assert plan.step_seconds <= (1 + EQUAL) * least
    assert len(found.best) == min(3, len(fitting))
    assert min(plan.step_seconds for plan in found.best) <= (1 + EQUAL) * min(fitting.values())
    assert {each.choice for each in (*found.rejected, *found.best)} == {p.choice for p in tried}
    for lost in found.rejected:
        assert lost.step_seconds <= max(plan.step_seconds for plan in tried if plan.choice == lost.choice)
        if lost.bubble is None:
            assert lost.step_seconds <= min(plan.step_seconds for plan in tried if plan.choice == lost.choice)


def test_a_cut_within_memory_spares_recomputing() -> None:
    """The fastest cut leaves the first rank short of memory; another, a little less even, does not."""
    units = [UnitCost(f"layer.{i}", 1, 1, 1, 4 * MB if i == 3 else MB // 4) for i in range(8)]
    sizes = Sizes({1: Profile(tuple(units), "cpu", "float32", {})})
    cluster = Cluster(2, 9 * MB)
    choice = ParallelConfig(1, 2, 1, "1f1b", 16, 1)
    fastest = predict(choice, _cut(choice, cluster, sizes))
    found = make_plans(sizes, cluster, 16, FixedNumbers(["1f1b"])).best[0]
    assert fastest.recompute
    assert not found.recompute
    assert found.step_seconds < fastest.step_seconds


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_cut_that_fits_is_found_if_every_stage_runs_forwards_again(name: str) -> None:
    """By time alone the first rank gets two layers besides the input, and by memory alone the last one gets three."""
    layers = (UnitCost(f"{i}", 1, 1, 1, 5 * MB // 2, 6 * MB, boundary_bytes=MB // 10) for i in range(7))
    units = (UnitCost("input", 0, 0, 0, parameter_bytes=4 * MB), *layers)
    sizes = Sizes({1: Profile(units, "cpu", "float32", {})})
    assert make_plans(sizes, Cluster(4, 18 * MB), 8, FixedNumbers([name], pipeline=4)).best[0].cuts == ("1", "3", "5")


def test_times_that_vary_make_more_plans_equal() -> None:
    """What a busy machine measured does not tell a schedule that splits backwards from one that does not."""
    quiet = ALIKE.profiles[1]
    busy = replace(quiet, units=tuple(replace(unit, spread=0.8) for unit in quiet.units))
    wanted = FixedNumbers(["1f1b", "zb-h1"], replicas=1, microbatches=32)
    found = [make_plans(Sizes({1: one}), Cluster(4), 32, wanted) for one in (quiet, busy)]
    assert [one.best[0].choice.schedule for one in found] == ["zb-h1", "1f1b"]
    assert [one.equal for one in found] == pytest.approx([EQUAL, 0.1])


def test_a_better_order_is_searched_for_and_goes_through_a_file(tmp_path: Path) -> None:
    """On a slow link, uneven stages do better in an order that was found for them than in any that has a name."""
    sizes = Sizes({1: _profile([3.0, 1.0, 2.0], gradient=1000 * MB, boundary=MB, boundary_gradient=MB)})
    cluster = Cluster(3, link=LinkCost(1.0, MB))
    named = make_plans(sizes, cluster, 6, best=1)
    found = make_plans(sizes, cluster, 6, best=1, search_seconds=0.3).best[0]
    assert found.choice.schedule == "search"
    assert found.step_seconds < named.best[0].step_seconds / (1 + EQUAL)
    found.save(tmp_path / "plan.json")
    read = read_plan(tmp_path / "plan.json")
    assert read == found
    schedule = read.schedule
    assert isinstance(schedule, Schedule)
    assert not check(schedule)
    assert (schedule.ranks, schedule.microbatches) == (3, found.choice.microbatches)


UNITS_2, UNIT_1 = Sizes({1: _profile([1.0, 1.0])}), Sizes({1: _profile([1.0])})


@pytest.mark.parametrize(
    ("devices", "sizes", "batch", "wanted", "said"),
    [
        (4, ALIKE, 16, FixedNumbers(replicas=3),
         r"replicas=3: 4 devices cannot be divided by 3; pass 3 or 6 devices, or one of \[1, 2, 4\]"),
        (4, ALIKE, 16, FixedNumbers(replicas=3, pipeline=2),
         "replicas=3: 4 devices cannot be divided by 3; pass 6 devices, or 2 in its place"),
        (4, ALIKE, 16, FixedNumbers(replicas=2, pipeline=4),
         "replicas=2, pipeline=4: .* the closest have 1 x 4 x .* or 2 x 2 x "),
        (4, ALIKE, 16, FixedNumbers(pipeline=4, microbatches=7),
         r"pipeline=4, microbatches=7: .* the closest have 1 x 4 x 8 or "),
        (2, UNITS_2, 3, FixedNumbers(["chimera"]), "^none of chimera works with 2 devices, 2 units and 3 rows"),
        (2, UNITS_2, 3, FixedNumbers(["chimera"], pipeline=2, microbatches=3),
         "^pipeline=2, microbatches=3: none of chimera works with 2 devices, 2 units and 3 rows"),
        (16, ALIKE, 7, FixedNumbers(), "at least 2 replicas; pass 6 or 8"),
        (2, UNIT_1, 3, FixedNumbers(), "at least 2 replicas; pass 2 or 4"),
        (2, ALIKE, 0, FixedNumbers(), "global_batch=0"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_names_what_can(
    devices: int, sizes: Sizes, batch: int, wanted: FixedNumbers, said: str
) -> None:
    with pytest.raises(ArgumentError, match=said):
        enumerate_configs(sizes, Cluster(devices), batch, wanted)


def test_what_is_no_cluster_is_refused() -> None:
    with pytest.raises(ArgumentError, match="devices=0"):
        Cluster(0)
    with pytest.raises(ArgumentError, match="one host has all of 4 devices"):
        Cluster(4, inter_host_link=LinkCost(1))
    with pytest.raises(ArgumentError, match="different units"):
        Sizes({1: _profile([1.0]), 2: _profile([1.0, 2.0])})
    for seconds in (-1.0, math.inf, math.nan):
        with pytest.raises(ArgumentError, match="action_seconds="):
            Cluster(2, action_seconds=seconds)


@pytest.mark.parametrize("name", ["replicas", "pipeline", "microbatches"])
def test_a_number_that_is_wanted_is_a_count(name: str) -> None:
    for value in (0, -1, True):
        with pytest.raises(ArgumentError, match=f"^{name}={value}: expected an integer >= 1"):
            FixedNumbers(**{name: value})


def test_the_optimizers_step_is_in_a_plans() -> None:
    """It takes as long as on the rank with most to update, on a device of half the speed twice as long."""
    sizes = Sizes({1: _profile([1.0] * 3 + [3.0], activation=MB, optimizer=2 * MB)})
    choice = ParallelConfig(1, 2, 1, "1f1b", 4, 1)
    for kinds, seconds in (((DevicePool("", 2),), 0.6), ((DevicePool("old", 1, speed=0.5), DevicePool("new", 1)), 0.8)):
        cluster = Cluster(kinds=kinds, optimizer_byte_seconds=1e-7)
        order = next(iter(assign_pools(cluster, 1, 2)))
        where = cut_model(sizes.at(1), schedule_for_config(choice).placement, cluster, order).with_starts(
            [0, 2] if len(kinds) > 1 else [0, 3]
        )
        plan, without = predict(choice, where), predict(choice, replace(where, cluster=Cluster(kinds=kinds)))
        assert plan.optimizer_seconds == pytest.approx(seconds)
        assert plan.step_seconds == pytest.approx(without.step_seconds + seconds)


def test_a_plan_says_what_the_simulator_says() -> None:
    choice, cluster = ParallelConfig(2, 4, 1, "1f1b", 8, 1), Cluster(8, link=LinkCost(0.5, MB))
    plan = predict(choice, _cut(choice, cluster))
    assert plan.cuts == ("layer.2", "layer.4", "layer.6")
    cost = StageCost(2, 2, 2, MB // 10, 2 * MB, 2 * MB, 2 * MB, 2 * MB, 4 * MB)
    schedule = generate("1f1b", 4, 8)
    timeline = simulate(schedule, [cost, cost, cost, replace(cost, output_bytes=0)], cluster.link)
    assert plan.pipeline_seconds == timeline.makespan_seconds
    assert plan.reduce_seconds == 2 * (0.5 + 1.0)  # two messages of half of 2 MB
    apart = Cluster(8, link=cluster.link, devices_per_host=1, inter_host_link=LinkCost(1.5, MB))
    assert predict(choice, _cut(choice, apart)).reduce_seconds == 2 * (1.5 + 1.0)
    assert plan.memory_bytes == tuple(one.peak for one in memory(schedule, cost, timeline))
    assert plan.bubble == pytest.approx(1 - 8 * 6 / timeline.makespan_seconds)
    assert plan.rows_per_second == 16 / plan.step_seconds


def test_stages_are_recomputed_only_where_memory_lacks() -> None:
    choice = ParallelConfig(1, 4, 1, "1f1b", 8, 1)

    def planned(megabytes: float) -> Plan:
        cluster = Cluster(4, megabytes * MB)
        return predict(choice, _cut(choice, cluster))

    assert planned(16).recompute == ()  # the first rank holds 8 MB of state and 4 microbatches of 2 MB
    assert planned(14.5).recompute == (0,)
    assert planned(12.5).recompute == (0, 1)
    assert planned(14.5).pipeline_seconds > planned(16).pipeline_seconds
    assert not planned(12.5).lacking_bytes
    assert planned(9).lacking_bytes > 0
    # The forward again is shorter than the first: what only the output needs is left out.
    again = tuple(replace(unit, recompute_seconds=0.25) for unit in ALIKE.at(1))
    cluster, shorter = Cluster(4, 12.5 * MB), Sizes({1: replace(ALIKE.profiles[1], units=again)})
    short = predict(choice, _cut(choice, cluster, shorter))
    assert short.recompute == (0, 1)
    assert short.pipeline_seconds < planned(12.5).pipeline_seconds


@pytest.mark.parametrize(
    ("boundary", "parameter", "grid"), [(50 * MB, MB, [[0, 1], [2, 3]]), (MB, 500 * MB, [[0, 2], [1, 3]])]
)
def test_the_slow_link_carries_least(boundary: int, parameter: int, grid: list[list[int]]) -> None:
    sizes = Sizes({1: _profile([1.0] * 4, gradient=parameter, boundary=boundary, boundary_gradient=boundary)})
    cluster = Cluster(4, math.inf, LinkCost(0, 1000 * MB), devices_per_host=2, inter_host_link=LinkCost(0, 10 * MB))
    plans = [p for p in make_plans(sizes, cluster, 8, FixedNumbers(["1f1b"]), best=99).best if p.choice.replicas == 2]
    assert plans[0].grid == grid


def test_costs_lie_on_the_line_through_two_sizes() -> None:
    one, four = _profile([1.0], activation=10, parameter=7), _profile([2.5], activation=40, parameter=7)
    both, single = Sizes({1: one, 4: four}), Sizes({4: four})
    assert [both.at(rows)[0].forward_seconds for rows in (1, 2, 4, 8)] == [1, 1.5, 2.5, 4.5]
    assert [both.at(rows)[0].activation_bytes for rows in (2, 8)] == [20, 80]
    assert single.at(2)[0].forward_seconds == 1.25
    assert {unit.parameter_bytes for rows in (1, 2, 8) for unit in both.at(rows)} == {7}
    assert both.largest == 8
    # Where time grows faster than rows, or falls, a line beyond the measured sizes would reach zero.
    steep = Sizes({4: _profile([1.0]), 8: _profile([3.0])})
    assert [steep.at(rows)[0].forward_seconds for rows in (1, 2, 6, 16)] == [0.25, 0.5, 2, 7]
    falling = Sizes({4: _profile([3.0]), 8: _profile([1.0])})
    assert falling.at(16)[0].forward_seconds == 1


def _split(profile: Profile, slower: float) -> Profile:
    """The same profile, whose units are so much slower where the backward is split."""
    units = [
        replace(
            unit,
            split_forward_seconds=slower * unit.forward_seconds,
            split_input_gradient_seconds=slower * unit.input_gradient_seconds,
            split_weight_gradient_seconds=slower * unit.weight_gradient_seconds,
        )
        for unit in profile.units
    ]
    return replace(profile, units=tuple(units))


def test_plans_with_split_backwards_take_what_those_take() -> None:
    """In whichever size: between two that were measured, too."""

    def steps(slower: float, name: str) -> dict[ParallelConfig, float]:
        sizes = Sizes({rows: _split(_profile([float(rows)] * 8), slower) for rows in (1, 4)})
        found = make_plans(sizes, Cluster(4), 16, FixedNumbers([name]), best=99).best
        return {plan.choice: plan.step_seconds for plan in found if plan.choice.ranks > 1}

    plain, slow = steps(1.0, "zb-h1"), steps(3.0, "zb-h1")
    assert {choice.rows for choice in plain} >= {1, 2, 4}
    assert slow == {choice: pytest.approx(3 * took) for choice, took in plain.items()}
    assert steps(3.0, "1f1b") == steps(1.0, "1f1b")
    some = Sizes({1: _profile([1.0, 2.0]), 4: _split(_profile([4.0, 8.0]), 10.0)})  # not all sizes have them
    assert [[unit.split.seconds / unit.seconds for unit in some.at(rows)] for rows in (1, 2, 4)] == [[1.0, 1.0]] * 3


def test_a_searched_order_is_judged_by_the_costs_of_split_backwards() -> None:
    uneven = _profile([3.0, 1.0, 2.0], gradient=1000 * MB, boundary=MB, boundary_gradient=MB)
    cluster = Cluster(3, link=LinkCost(1.0, MB))
    found = {
        slower: make_plans(
            Sizes({1: _split(uneven, slower)}), cluster, 6, FixedNumbers(["1f1b"]), best=1, search_seconds=0.3
        ).best[0]
        for slower in (1.0, 10.0)
    }
    assert {slower: plan.choice.schedule for slower, plan in found.items()} == {1.0: "search", 10.0: "1f1b"}


def test_every_device_is_used_and_the_batch_is_whole() -> None:
    open_ = enumerate_configs(ALIKE, Cluster(4), 12)
    assert {(c.replicas, c.ranks) for c in open_} == {(1, 4), (2, 2), (4, 1)}
    assert all(c.replicas * c.microbatches * c.rows == 12 and c.stages <= 8 for c in open_)
    assert {c.schedule for c in open_ if c.ranks == 2} >= {"gpipe", "1f1b", "zb-h1", "zb-v", "interleaved-1f1b"}
    assert {c.schedule for c in open_ if c.ranks == 1} == {"1f1b"}


@pytest.mark.parametrize("megabytes", [12, math.inf])
def test_a_plan_goes_through_a_file(tmp_path: Path, megabytes: float) -> None:
    plan = make_plans(ALIKE, Cluster(4, megabytes * MB, LinkCost(0.1, MB)), 8).best[0]
    plan.save(tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    assert "Infinity" not in (tmp_path / "plan.json").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", r"expected a plan of version 2, not \[\]"),
        ('{"version": 1}', "expected a plan of version 2, not 1"),
        ('{"version": 2, "choice": {}}', "is missing"),
        ('{"version": 1, "units": []}', "is a profile; `penstock plan --profile FILE"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ArgumentError, match=message):
        read_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("choice", {"ranks": 2}, "choice.replicas is missing"),
        ("cuts", "layer.1", "cuts='layer.1': expected a valid array"),
        ("cuts", [], r"cuts=\[\]: expected the names of 3 units"),
        ("recompute", [4], "recompute: there is no stage 4; the stages are 0 to 3"),
        ("stage_seconds", [1, 1, 1, -1], r"stage_seconds=.*expected 4 numbers of 0 or more"),
        ("memory_bytes", [1], r"memory_bytes=\[1.0\]: expected 4 numbers"),
        ("devices", [0, 1, 2, 2], "devices='0', '1', '2', '2': expected each of 0 to 3 once"),
        ("order", "1f1b", "expected a first line as in"),
        (
            "order",
            str(generate("1f1b", 2, 8)),
            "order is for 2 ranks, 2 stages, .*, but choice has 4 ranks",
        ),
        ("made_for", {"device": "cpu"}, "parameters"),
    ],
)
def test_a_plan_that_was_spoilt_is_refused(tmp_path: Path, name: str, value: object, message: str) -> None:
    file, cluster = tmp_path / "plan.json", Cluster(4)
    choice = ParallelConfig(1, 4, 1, "1f1b", 8, 1)
    predict(choice, _cut(choice, cluster)).save(file)
    read_plan(file)
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    with pytest.raises(ArgumentError, match=rf"plan '.*plan.json': .*{message}.*make a new one with `penstock plan`"):
        read_plan(file)


@pytest.mark.parametrize("name", ["replicas", "ranks", "chunks", "microbatches", "rows"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
def test_a_choice_of_nothing_is_refused(name: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=f"{name}={value!r}: expected an integer >= 1"):
        replace(ParallelConfig(1, 2, 1, "1f1b", 4, 1), **{name: value})  # type: ignore[arg-type]


def test_slow_devices_get_less_and_small_ones_are_not_overfilled() -> None:
    """The best order of kinds is found, and each rank is judged by its own device's speed and memory."""
    kinds = (DevicePool("old", 2, 9 * MB, 0.5), DevicePool("new", 2, 40 * MB))
    cluster = Cluster(kinds=kinds)
    sizes = Sizes({1: _profile([1.0] * 12, activation=MB, parameter=MB // 4, gradient=MB // 4, optimizer=MB // 2)})
    best = next(p for p in make_plans(sizes, cluster, 8, FixedNumbers(["1f1b"]), best=99).best if p.choice.ranks == 4)
    assert best.devices == (2, 3, 0, 1)  # new ones first: there 1F1B holds more microbatches
    assert best.limit_bytes == (40 * MB, 40 * MB, 9 * MB, 9 * MB)
    assert all(need <= limit for need, limit in zip(best.memory_bytes, best.limit_bytes, strict=True))
    assert best.stage_seconds == (12.0, 12.0, 12.0, 12.0)  # 4 units of 3 seconds, or 2 at half the speed
