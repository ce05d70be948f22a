"""Activations on the host: everything that backward needs goes there and comes back, with the same bits and strides, at
the right time, and however slow the copies are (the stand-in device makes them as late as can be).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock import Pipeline, pipeline, verify
from penstock._base.errors import ArgumentError
from penstock.runtime.execute import executor
from penstock.runtime.features.offload import HostCopy, Offload
from penstock.schedule import Op, generate, split_backward
from scaffolding.everything import WIDTH, everything, everything_goes, inputs_alive
from scaffolding.models import ConvNet, squared_error
from scaffolding.proofs import proven
from scaffolding.ranks import Ranks
from scaffolding.small import batch, mlp, training_stages
from scaffolding.stand_in import DEVICE, on_the_device


class Copies:
    """What goes to the host and comes back, and during which actions.

    Attributes:
        gone: what went.
        back: how often anything was taken back.
        log: for each copy, what it was, the action whose forward made the tensor, and the action that ran.
        running: the action that runs.
        on_end: called when an action ends.
    """

    def __init__(self) -> None:
        self.gone: list[Tensor] = []
        self.back = 0
        self.log: list[tuple[str, str, str]] = []
        self.running = ""
        self.on_end: Callable[[str], None] = lambda _: None
        self._made: list[tuple[str, weakref.ref[HostCopy]]] = []

    def on_device(self) -> set[str]:
        """The actions of which anything that they sent has memory on the device."""
        made = ((action, ref()) for action, ref in self._made)
        return {action for action, copy in made if copy and not (copy._source is copy._buffer is None)}


@contextmanager
def copies() -> Iterator[Copies]:
    """Follow the copies of pipelines that are made here."""
    seen, leave, fetch, get = Copies(), HostCopy.__init__, HostCopy.start_fetch, HostCopy.get
    bind, sent_in = executor.with_neighbors, weakref.WeakKeyDictionary[HostCopy, str]()

    def leaving(copy: HostCopy, tensor: Tensor, *args: Any) -> None:
        seen.gone.append(tensor)
        seen.log.append(("send", seen.running, seen.running))
        seen._made.append((seen.running, weakref.ref(copy)))
        sent_in[copy] = seen.running
        leave(copy, tensor, *args)

    def fetching(copy: HostCopy) -> None:
        if copy._buffer is None:
            seen.log.append(("fetch", sent_in[copy], seen.running))
        fetch(copy)

    def getting(copy: HostCopy) -> Tensor:
        seen.back += 1
        return get(copy)

    def noted(each: executor.BoundAction) -> executor.BoundAction:
        def work(*ready: Any) -> None:
            seen.running = str(each.action)
            each.work(*ready)
            seen.on_end(seen.running)

        return replace(each, work=work)

    with (
        mock.patch.multiple(HostCopy, __init__=leaving, start_fetch=fetching, get=getting),
        mock.patch.object(executor, "with_neighbors", lambda *given: [noted(each) for each in bind(*given)]),
    ):
        yield seen


# -- what goes, and that it is the same when it comes back -------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks", "recompute"),
    [("gpipe", 4, 1, "never"), ("interleaved-1f1b", 2, 2, 2), ("zb-v", 2, 2, "except_last")],
)
@everything_goes
def test_the_result_is_that_of_one_device(schedule: str, ranks: int, chunks: int, recompute: Any) -> None:
    model, x, y = everything(ranks * chunks)
    options: dict[str, Any] = {"microbatches": 5, "offload": True, "recompute": recompute, "exact": True}
    proven(model, x, y, schedule=schedule, ranks=ranks, stages_per_rank=chunks, **options)


def saved_by_hand(model: nn.Module, x: Tensor, y: Tensor) -> tuple[int, int]:
    """How many tensors autograd saves in a forward and its loss, besides parameters, and how many of them differ."""
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        squared_error(model(x), y)
    held = {p.untyped_storage().data_ptr() for p in model.parameters()}
    places = [t.data_ptr() for t in saved if t.untyped_storage().data_ptr() not in held]
    return len(places), len(set(places))


@everything_goes
def test_everything_but_parameters_goes_and_comes_back() -> None:
    model, (x, y) = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))), batch()
    expected, different = saved_by_hand(model, x, y)
    assert expected > 6 > different
    options: dict[str, Any] = {"schedule": "gpipe", "ranks": 1, "microbatches": 4, "offload": True}
    with copies() as seen, pipeline(model, (x,), loss=squared_error, **options) as pipe:
        pipe.step(x, target=y)
    assert len(seen.gone) == 4 * different, "what several calls save goes once"
    assert seen.back == 4 * expected
    held = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert not held & {t.untyped_storage().data_ptr() for t in seen.gone}


@pytest.mark.parametrize(("choice", "stages"), [(True, {0, 1}), ([False, True], {1}), ({0: True}, {0}), (False, set())])
@everything_goes
def test_a_choice_a_stage(choice: Any, stages: set[int]) -> None:
    model, (x, y) = mlp(4), batch()
    options: dict[str, Any] = {"schedule": "gpipe", "ranks": 2, "microbatches": 4, "offload": choice}
    with copies() as seen, pipeline(model, (x,), loss=squared_error, **options) as pipe:
        pipe.step(x, target=y)
        assert seen.back >= len(seen.gone)
        assert bool(seen.gone) == bool(stages)
        offloaded = [s.index for s in training_stages(pipe) if any(isinstance(one, Offload) for one in s.features)]
        assert set(offloaded) == stages
        seen.gone.clear()
        pipe.evaluate(x, target=y)
        assert not seen.gone


@everything_goes
def test_batch_norm_and_channels_last() -> None:
    torch.manual_seed(0)
    net = ConvNet().to(memory_format=torch.channels_last)
    x, y = torch.randn(8, 3, 6, 6).to(memory_format=torch.channels_last), torch.randn(8, 3)
    proven(net, x, y, ranks=2, microbatches=4, offload=True, exact=True)


class Tagged(Tensor):
    """A tensor of another class."""


class Scales(torch.autograd.Function):
    """Saves a view, an output and an integer tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x * 2
        ctx.save_for_backward(x[:, ::2], result, torch.arange(3))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        view, result, numbers = ctx.saved_tensors
        assert not view.is_contiguous()
        return grads[0] * 2 + result * 0.5 * numbers.sum() + view.sum()


class Odd(nn.Module):
    """Saves tensors of many kinds; a sparse one stays."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(1))
        self.register_buffer("sparse", torch.eye(WIDTH).to_sparse())
        self.table = torch.linspace(0.5, 1, WIDTH)  # neither parameter nor buffer: all microbatches share it

    def forward(self, x: Tensor) -> Tensor:
        a = self.linear(torch.sparse.mm(self.sparse, x.T).T)
        a = a * a[:, :1].expand_as(a) * self.scale.expand_as(a)
        a = a * a.mean() + (a[:, 1:8:3] * a[:, 0:7:3]).sum()
        low = a.bfloat16()
        a = a + (low * low.sin()).float() + a.gather(1, a.argmax(1, keepdim=True))
        number = torch.complex(a, a * 2)
        a = a + (number * number.conj()).real + (a.t() @ a).sum() * self.table
        tagged = a.as_subclass(Tagged)
        a = (tagged * tagged).as_subclass(Tensor)
        return torch.tanh(Scales.apply(a))  # type: ignore[no-untyped-call]


class Sloped(nn.Module):
    """Takes a gradient in its own forward, through what the forward has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(self.first(x)).square().sum(), x, create_graph=True)
        return torch.tanh(self.second(slope + x))


class UpdatesInput(nn.Module):
    """Updates what it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5).add_(1)
        return self.last(torch.tanh(self.layer(x)))


@pytest.mark.parametrize(
    ("kind", "schedule", "recompute"),
    [(Odd, "gpipe", "never"), (Sloped, "split", "never"), (Odd, "split", "never"), (UpdatesInput, "gpipe", "always")],
)
@everything_goes
def test_tensors_of_all_kinds_come_back(kind: Callable[[], nn.Module], schedule: str, recompute: str) -> None:
    torch.manual_seed(0)
    order: Any = split_backward(generate("gpipe", 2, 6)) if schedule == "split" else schedule
    model, (x, y) = [nn.Linear(WIDTH, WIDTH), kind(), kind()], batch(12)
    options: dict[str, Any] = {"microbatches": 6, "offload": True, "recompute": recompute, "cuts": ["1"]}
    with copies() as seen:
        proven(model, x, y, schedule=order, ranks=2, exact=True, **options)
    assert seen.gone


# -- when it goes and comes back ---------------------------------------------------------------------------------------


def late_copies(schedule: str, ranks: int, chunks: int, recompute: Any) -> None:
    """Copies that are made as late as can be, or into memory that is freed too early, would change bits or raise."""
    found = []
    for offload in (True, False):
        model, (x, y) = everything(4, norm=schedule != "dualpipe-v")[0], batch(16)
        options: dict[str, Any] = {"microbatches": 8, "schedule": schedule, "ranks": ranks, "stages_per_rank": chunks}
        options |= {"offload": offload, "recompute": recompute, "devices": DEVICE, "seed": 0}
        with copies() as seen, pipeline(model, (x,), loss=squared_error, **options) as pipe:
            losses = [float(pipe.step(x, target=y).loss) for _ in range(2)]
        assert {kind for kind, _, _ in seen.log} == ({"send", "fetch"} if offload else set())
        found.append((losses, [parameter.grad.cpu().tolist() for parameter in model.parameters()]))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "run", [("zb-h1", 4, 1, "never"), ("interleaved-1f1b", 2, 2, "always"), ("dualpipe-v", 2, 2, 2)], ids=str
)
def test_the_slowest_copies_are_waited_for(device_rank: Ranks, run: tuple[str, int, int, Any]) -> None:
    device_rank.run(on_the_device, late_copies, *run)


def of_eight(schedule: str, ranks: int, layers: int, **options: Any) -> tuple[Pipeline, Tensor, Tensor]:
    """A pipeline with eight microbatches that offloads, and its batch."""
    x, y = batch(16)
    given: dict[str, Any] = {"schedule": schedule, "ranks": ranks, "microbatches": 8, "offload": True, **options}
    return pipeline(mlp(layers), (x,), loss=squared_error, **given), x, y


def test_what_a_backward_needs_is_fetched_during_the_computation_before_it() -> None:
    with copies() as seen:
        pipe, x, y = of_eight("zb-h1", 4, 8)
        with pipe:
            for _ in range(2):
                seen.log.clear()
                pipe.step(x, target=y)
            rows = pipe.schedule.rows
    before = {}
    for row in rows:
        work = [action for action in row if action.op.is_compute]
        before.update({str(after): str(action) for action, after in pairwise(work)})
    assert seen.log
    for kind, sent_in, during in seen.log:
        if kind == "send":
            assert during == sent_in
        else:
            backward, weights = sent_in.replace("F", "I"), sent_in.replace("F", "W")
            assert during in (before[backward], before[weights])


def held_after_each_action() -> None:
    """On the second of five ranks, where four microbatches are in flight. (The first holds the batch.)"""
    found: dict[str, set[str]] = {}
    with copies() as seen:
        pipe, x, y = of_eight("1f1b", 5, 10, devices=DEVICE)
        with pipe:
            pipe.step(x, target=y)
            seen.on_end = lambda action: found.update({action: {a for a in seen.on_device() if a.startswith("1F")}})
            pipe.step(x, target=y)
            work = [action for action in pipe.schedule.rows[1] if action.op.is_compute]
    for action, following in pairwise(work):
        expected = {f"1F{action.microbatch}"} if action.op is Op.F else set()
        expected |= set() if following.op is Op.F else {f"1F{following.microbatch}"}
        assert found[str(action)] == expected, action
    assert not found[str(work[-1])]


def test_the_device_holds_what_was_just_saved_and_what_comes_next(device_rank: Ranks) -> None:
    device_rank.run(on_the_device, held_after_each_action)


@everything_goes
def test_what_is_away_is_not_on_the_device() -> None:
    """On two stages of two layers, when the last of four microbatches is in the last layer."""
    assert inputs_alive(4, ranks=2) == [4, 4, 4, 4]
    assert inputs_alive(4, ranks=2, offload=True) == [4, 0, 1, 1]  # the batch itself is there until the step ends
    # The last microbatch is still in the last stage's forward.
    assert inputs_alive(4, ranks=2, recompute="always") == [4, 0, 4, 1]
    assert inputs_alive(4, ranks=2, offload=True, recompute="always") == [4, 0, 1, 1]


def test_what_would_come_back_too_soon_stays_and_is_noted() -> None:
    with copies() as seen:
        pipe, x, y = of_eight("1f1b", 4, 8)
        with pipe:
            pipe.step(x, target=y)
            idle, there = [note for note in pipe.notes if note.startswith("offload: ")]
    assert {sent_in[0] for _, sent_in, _ in seen.log} == {"0", "1"}
    assert "nothing goes to the host on stages 2-3, where each backward comes within 3 computations" in idle
    assert there == "offload: stages 0-1 on the CPU: the copies are made, and save no memory"


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offload", [False, True])
def test_a_parameter_updated_before_its_backward_is_refused(offload: bool) -> None:
    pipe, x, y = of_eight("gpipe", 2, 4, offload=offload)
    with pipe:
        pipe.step(x, target=y)

        def update(*_: Any) -> None:
            with torch.no_grad():
                pipe.model[1].weight.mul_(1.5)

        pipe.model[1].register_forward_hook(update)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            pipe.step(x, target=y)


@everything_goes
def test_what_draws_after_it_was_saved_is_refused() -> None:
    x, y = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(1))
    model = [nn.Linear(WIDTH, WIDTH), nn.RReLU(), nn.Linear(WIDTH, WIDTH)]
    with pytest.raises(ArgumentError, match=r"nn.RReLU .* offload=\{0: False\}"):
        verify(model, (x,), target=y, loss_fn=squared_error, ranks=2, cuts=["2"], microbatches=4, offload=True)
    proven(model, x, y, ranks=2, cuts=["2"], microbatches=4, offload={0: False, 1: True})
