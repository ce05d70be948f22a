"""Pieces are measured without a trace on the model, and cuts follow what they take."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from penstock._base.errors import ArgumentError
from penstock.costs import Profile, UnitCost
from penstock.costs.stage_costs import price_stages
from penstock.partition import Balance, BalanceChoice, NoStreams, Partitioner, StageBudget, choose_cuts
from penstock.partition.cut.candidates import candidates
from penstock.partition.measure import clock
from penstock.partition.measure.measuring import measure
from penstock.partition.measure.pieces import UnmeasurableError
from penstock.partition.record.attempts import record
from scaffolding.models import SkipsTwice


class Waits(nn.Module):
    """A layer that takes a while, which its work does not show. The tests' clock goes on only here."""

    now_ns = 0

    def __init__(self, milliseconds: int) -> None:
        super().__init__()
        self.layer, self.milliseconds = nn.Linear(8, 8), milliseconds

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:  # not while it is recorded
            Waits.now_ns += self.milliseconds * 1_000_000
        return torch.tanh(self.layer(x))


@pytest.fixture(autouse=True)
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the clock was read as."""
    found: list[int] = []

    def read() -> int:
        found.append(Waits.now_ns)
        return Waits.now_ns

    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter_ns=read))
    monkeypatch.setattr(clock, "read_wait_ns", lambda *_: 0)
    return found


def waiting(slow: Sequence[int], layers: int = 6) -> nn.Module:
    return nn.Sequential(*(Waits(40 if i in slow else 1) for i in range(layers)))


X = torch.randn(4, 8)


def profile_of(model: nn.Module, *args: Tensor, budget_seconds: float = 0.0) -> Profile:
    recording = record(model, args, {})
    return measure(recording, model, candidates(recording, model, "flops"), args, {}, budget_seconds)


def weighed(model: nn.Module, stages: int, balance: Balance | BalanceChoice = "time") -> Partitioner:
    partitioner = Partitioner(model, stages, streams=NoStreams(), balance=balance)
    partitioner.weigh((X,))
    return partitioner


@pytest.fixture
def measures_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_cuts, "MIN_MEASURED_WORK", 0)


# -- what is measured -------------------------------------------------------------------------------------------------


def test_blocks_of_one_kind_are_measured_once(reads: list[int]) -> None:
    found = profile_of(waiting([5]), X)
    assert [unit.like for unit in found.units] == ["", "", "1", "1", "1", ""]  # the first passes no gradient on
    assert len(reads) == 3 * 4  # before and after forward and backward of one run
    assert [unit.forward_seconds for unit in found.units] == [0.001] * 5 + [0.04]


def test_layers_that_differ_in_a_setting_are_not_of_one_kind() -> None:
    layers = [nn.Conv1d(4, 4, 3, padding=d, dilation=d) for d in (1, 1, 2)]
    found = profile_of(nn.Sequential(nn.Conv1d(4, 4, 1), *layers), torch.randn(2, 4, 16))
    assert [unit.like for unit in found.units] == ["", "", "1", ""]


def test_what_is_held_kept_and_sent() -> None:
    width, rows = 7, 4
    model = SkipsTwice(width)
    model.layers[2].weight.requires_grad_(False)
    model.layers[5].register_buffer("table", torch.zeros(1000))
    found = profile_of(model, torch.randn(rows, width))
    tensor, parameters = 4 * rows * width, 4 * (width * width + width)
    assert [unit.parameter_bytes for unit in found.units] == [parameters] * 5 + [parameters + 4000]
    assert [unit.gradient_bytes for unit in found.units] == [parameters] * 2 + [4 * width] + [parameters] * 3
    assert found.units[0].optimizer_bytes == 2 * parameters
    # the first skip, then the second as well, and what goes to the next layer
    assert [unit.boundary_bytes for unit in found.units] == [tensor * count for count in (0, 1, 2, 3, 2, 2)]
    assert [unit.boundary_gradient_bytes for unit in found.units] == [unit.boundary_bytes for unit in found.units]
    assert min(unit.activation_bytes for unit in found.units) >= tensor


def test_measuring_leaves_no_trace() -> None:
    class Counts(nn.Module):
        """Keeps a number and a buffer."""

        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen += 1
            return x

    model = nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), Counts(), nn.ReLU(inplace=True), nn.LSTM(8, 8)
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    grads = [parameter.grad for parameter in model.parameters()]
    recording = record(model, (X,), {})
    tensors = [*model.parameters(), *model.buffers(), *grads]
    before = [tensor.clone() for tensor in tensors if tensor is not None]
    versions = [tensor._version for tensor in tensors if tensor is not None]
    drawn = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    measure(recording, model, candidates(recording, model, "flops"), (X,), {}, 0.02)
    now = [*model.parameters(), *model.buffers(), *(parameter.grad for parameter in model.parameters())]
    assert all(one is other for one, other in zip(now, tensors, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(now, before, strict=True))
    assert [tensor._version for tensor in tensors if tensor is not None] == versions
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert (numpy.random.get_state()[1] == drawn[2]).all()
    assert model[3].calls == 0


def test_weights_on_the_meta_device_cannot_be_measured() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(UnmeasurableError, match="meta device"):
        profile_of(model, X)


# -- where it is cut --------------------------------------------------------------------------------------------------


def test_cuts_follow_time(measures_all: None) -> None:
    assert weighed(waiting([0, 1]), 2, "flops").cuts == ("3",)
    partitioner = weighed(waiting([0, 1]), 2)
    assert partitioner.cuts == ("1",)
    made = partitioner((X,))
    assert made.cuts == ("1",)
    assert made.notes == ()


def test_what_others_took_of_a_core_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of each layer's time a thread waits for its core."""
    quiet = [unit.forward_seconds for unit in profile_of(waiting([1]), X).units]
    monkeypatch.setattr(clock, "read_wait_ns", lambda *_: Waits.now_ns // 2)
    assert [unit.forward_seconds for unit in profile_of(waiting([1]), X).units] == [each / 2 for each in quiet]


def test_on_a_busy_machine_one_thread_is_measured(measures_all: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that compute together wait for the one that waits for its core."""
    used: list[int] = []

    def measured(*args: Any) -> Profile:
        used.append(torch.get_num_threads())
        return profile_of(waiting([0, 1]), X)

    before = torch.get_num_threads()
    monkeypatch.setattr(choose_cuts, "measure", measured)
    try:
        torch.set_num_threads(2)
        monkeypatch.setattr(clock, "total_wait_ns", lambda: 0)
        assert weighed(waiting([0, 1]), 2)((X,)).notes == ()
        hours = iter(3_600_000_000_000 * number for number in range(2))
        monkeypatch.setattr(clock, "total_wait_ns", lambda: next(hours))
        (note,) = weighed(waiting([0, 1]), 2)((X,)).notes
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert used == [2, 2, 1]
    assert "threads waited for cores" in note


def test_small_models_are_cut_by_work_and_not_run(reads: list[int]) -> None:
    assert weighed(waiting([0, 1]), 2).cuts == ("3",)
    assert not reads


def test_cuts_by_work_stay_where_others_bring_little(measures_all: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def cuts(first: float) -> tuple[str, ...]:
        seconds = [first, 1.0, 1.0, 1.0, 1.0, 1.0]
        units = tuple(UnitCost(str(i), each, 0.0, 0.0) for i, each in enumerate(seconds))
        monkeypatch.setattr(choose_cuts, "measure", lambda *_: replace(profile_of(waiting([]), X), units=units))
        return weighed(waiting([]), 2).cuts or ()

    assert cuts(1.03) == ("3",)
    assert cuts(3.0) == ("2",)


def test_what_cannot_run_is_cut_by_work_with_a_note(measures_all: None) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if type(x) is Tensor:
                raise RuntimeError("no such kernel")
            return x + 1

    partitioner = weighed(
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), Fails(), *(nn.Linear(8, 8) for _ in range(4))), 2
    )
    note = "stages are cut by work, not by time: running its units fails (RuntimeError: no such kernel)"
    assert partitioner((X,)).notes == (note,)


def test_an_uneven_split_is_reported_with_a_remedy(measures_all: None) -> None:
    (note,) = weighed(waiting([4], 5), 3)((X,)).notes
    assert note.startswith("stage 2 takes ")
    assert "'4' alone takes" in note
    assert "take fewer stages" in note


class Group(nn.Module):
    """Layers in one module, as a stage of a hierarchical model has them."""

    def __init__(self, milliseconds: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Waits(milliseconds) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Grouped(nn.Module):
    def __init__(self, groups: nn.ModuleList) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        for group in self.groups:
            x = group(x)
        return x


def test_a_module_that_is_slower_than_its_work_is_opened(measures_all: None) -> None:
    groups = nn.ModuleList([*(Group(0) for _ in range(3)), Group(40)])
    by_work, by_time = (weighed(Grouped(groups), 4, balance) for balance in ("flops", "time"))
    assert by_work.cuts == ("groups.1", "groups.2", "groups.3")
    assert by_time.cuts == ("groups.3.blocks.1", "groups.3.blocks.2", "groups.3.blocks.3")
    assert not any("limits throughput" in note for note in by_time((X,)).notes)
    other = Partitioner(Grouped(groups), 4, streams=NoStreams(), balance="time")
    other((X,))
    other.divide(by_time.division)
    assert other((X,)).cuts == by_time.cuts


def test_parts_that_are_no_faster_stay_together(measures_all: None, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, attempts = nn.ModuleList([*(Group(0) for _ in range(3)), Group(40)]), []

    def fails_the_second_time(*args: Any, **options: Any) -> Profile:
        attempts.append(args)
        if len(attempts) > 1:
            raise UnmeasurableError("no memory is left")
        return measure(*args, **options)

    monkeypatch.setattr(choose_cuts, "measure", fails_the_second_time)
    partitioner = weighed(Grouped(groups), 4)
    assert len(attempts) == 2
    assert partitioner.cuts == ("groups.1", "groups.2", "groups.3")
    (note,) = partitioner((X,)).notes
    assert "'groups.3' alone takes" in note


# -- profiles, functions, classes -------------------------------------------------------------------------------------


def test_a_profile_says_where_to_cut(tmp_path: Any) -> None:
    found = profile_of(waiting([0, 1]), X)
    assert weighed(waiting([]), 2, found).cuts == ("1",)
    found.save(tmp_path / "profile.json")
    assert weighed(waiting([]), 2, tmp_path / "profile.json").cuts == ("1",)
    assert weighed(waiting([]), 2, str(tmp_path / "profile.json")).cuts == ("1",)


class Reversed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self):
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (waiting([], 5), "the model has no parameter '5.layer.weight'"),
        (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "it has no parameter '0.weight'"),
        (waiting([]).bfloat16(), "it was made for dtype 'float32', and this is 'bfloat16'"),
        (Reversed(*waiting([])), r"not of this model: there .* runs before .*, and here after"),
    ],
)
def test_a_profile_of_something_else_is_refused(model: nn.Module, words: str) -> None:
    found = profile_of(waiting([]), X)
    with pytest.raises(ArgumentError, match=words):
        Partitioner(model, 2, streams=NoStreams(), balance=found)((X.to(next(model.parameters()).dtype),))
    elsewhere = replace(found, device="cuda")
    with pytest.raises(ArgumentError, match="made for device 'cuda', and this is 'cpu'"):
        Partitioner(waiting([]), 2, streams=NoStreams(), balance=elsewhere)((X,))


def test_a_function_says_what_modules_cost() -> None:
    assert weighed(waiting([]), 2, lambda name, _: 5.0 if name in "01" else 1.0).cuts == ("1",)
    with pytest.raises(ArgumentError, match=r"<lambda> returned -1 for '0'; expected a number of 0 or more"):
        weighed(waiting([]), 2, lambda *_: -1)


def test_stages_cost_what_plans_say(measures_all: None) -> None:
    """What the runtime adds to an action included."""
    model = waiting([0])
    found = replace(profile_of(model, X), action_seconds=0.5)
    partition = weighed(model, 3, found)((X,))
    units = {unit.name: place for place, unit in enumerate(found.units)}
    starts = [0, *(units[cut] for cut in partition.cuts)]
    assert partition.costs == price_stages(found.units, starts, 0.5)
    assert min(cost.forward_seconds for cost in partition.costs) > 0.5


def test_stages_begin_before_modules_of_a_class() -> None:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8))))
    assert weighed(model, 2, "type:LayerNorm|Tanh").cuts == ("7",)
    assert weighed(model, 4, "type:^Linear$").cuts == ("3", "6", "9")
    with pytest.raises(ArgumentError, match=r"'type:Conv'.* there are LayerNorm, Linear, Tanh"):
        weighed(model, 2, "type:Conv")


def test_a_memory_limit_holds_for_measured_times_and_profiles(measures_all: None) -> None:
    found = profile_of(waiting([0]), X)
    held = found.units[0].held_bytes  # all units hold alike
    for balance in ("time", found):
        room = StageBudget(limit_bytes=5 * held + 500, in_flight=(2, 1))
        partitioner = Partitioner(waiting([0]), 2, streams=NoStreams(), balance=balance, budget=room)
        partitioner.weigh((X,))
        assert partitioner.cuts == ("2",)  # where time is least (at "1"), the last stage would hold five


def test_a_memory_limit_is_held_to_this_batch_whatever_the_profile_was_made_with() -> None:
    many = torch.randn(64 * len(X), *X.shape[1:])
    found = profile_of(waiting([0]), X)
    room = StageBudget(limit_bytes=sum(unit.held_bytes + 10 * unit.activation_bytes for unit in found.units))

    def notes(x: Tensor, balance: Profile, **options: StageBudget) -> tuple[str, ...]:
        made = Partitioner(waiting([0]), 2, streams=NoStreams(), balance=balance, **options)((x,))
        return tuple(note for note in made.notes if "other microbatches" in note)

    assert notes(X, found, budget=room) == ()
    with pytest.raises(ArgumentError, match="no cut into 2 stages fits"):
        notes(many, found, budget=room)
    (note,) = notes(many, found)
    assert str(list(many.shape)) in note
    sizes = replace(found, rows=1).with_others([replace(profile_of(waiting([0]), many), rows=2)])
    assert notes(many, sizes) == ()


# -- whatever chose the cuts ------------------------------------------------------------------------------------------


class Works(nn.Module):
    """A layer that may do much work, which neither its parameters nor its memory show."""

    def __init__(self, much: bool) -> None:
        super().__init__()
        self.layer, self.much = nn.Linear(8, 8), much

    def forward(self, x: Tensor) -> Tensor:
        if self.much:
            x = x + (torch.ones(256, 256) @ torch.ones(256, 256))[0, 0] * 0
        return torch.tanh(self.layer(x))


def working(much: Sequence[int]) -> nn.Module:
    return nn.Sequential(*(Works(i in much) for i in range(6)))


def of_one_unit(model: nn.Module) -> Profile:
    """A profile in which the last unit takes nearly all the time."""
    found = profile_of(model, X)
    units = (replace(unit, forward_seconds=10.0 if unit.name == "5" else 0.1) for unit in found.units)
    return replace(found, units=tuple(units))


@pytest.mark.parametrize(
    ("balance", "cuts", "much"),
    [
        ("time", None, [5]),
        ("flops", None, [5]),
        ("memory", None, [0, 1]),
        ("parameters", None, [0, 1]),
        ("layers", None, [0, 1]),
        ("type:Works", None, [0, 1]),
        (lambda name, module: 1.0, None, [0, 1]),
        (of_one_unit, None, []),
        ("time", ["5"], [0, 1]),
    ],
)
def test_a_slow_stage_is_reported_whatever_chose_the_cuts(
    measures_all: None, monkeypatch: pytest.MonkeyPatch, balance: Any, cuts: list[str] | None, much: list[int]
) -> None:
    model = working(much)
    measured = of_one_unit(model)
    monkeypatch.setattr(choose_cuts, "measure", lambda *_: measured)
    balance = measured if balance is of_one_unit else balance
    partitioner = Partitioner(
        model, 2, cuts, streams=NoStreams(), balance=balance, budget=StageBudget(in_flight=(2, 1))
    )
    partitioner.weigh((X,))
    (note,) = partitioner((X,)).notes
    slow = 1 if much in ([5], []) else 0
    assert note.startswith((f"stage {slow} takes 1.", f"stage {slow} does 1.", f"stage {slow} does 2.00"))
    assert "x the mean work per stage (estimated)" in note or "times the mean stage time" in note
    assert any(remedy in note for remedy in ("fewer stages", "change the cuts (cuts= or balance="))


def test_even_stages_are_not_reported(measures_all: None) -> None:
    for balance in ("flops", "layers", "memory", "type:Works"):
        assert weighed(working([]), 2, balance)((X,)).notes == ()
