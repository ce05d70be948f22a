"""One process that drives all ranks: its transport, its processes and devices, and the timeline of a real step."""

from __future__ import annotations

import contextlib
import gc
import math
import weakref
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import profiler

import penstock
from penstock._base.errors import ArgumentError
from penstock.distributed.world import World, join, resolve_device
from penstock.runtime.execute import executor
from penstock.runtime.transport.routes import LocalHub, LocalTransport
from penstock.schedule import forward_only, generate
from penstock.testing import check_transport
from penstock.testing.transport_scripts import scripts_for
from scaffolding.local_collectives import collective_transports
from scaffolding.models import GPT, squared_error, token_error
from scaffolding.representatives import representatives
from scaffolding.small import ONE_STAGE, batch, mlp

CPU = torch.device("cpu")


def test_the_local_transport_conforms() -> None:
    hub = LocalHub([CPU, CPU])
    transports = {rank: LocalTransport(rank, hub) for rank in (0, 1)}
    assert check_transport(transports) == [
        script.__name__ for script in scripts_for(collectives=False, one_process=True)
    ]


def test_the_conformance_checks_find_a_transport_that_does_not_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = LocalHub([CPU, CPU])
    transports = {rank: LocalTransport(rank, hub) for rank in (0, 1)}
    monkeypatch.setattr("penstock.runtime.exact.rules.copy_as", lambda layout, tensor, device: tensor)
    with pytest.raises(AssertionError, match="an update of what arrived changed what was sent"):
        check_transport(transports)


def test_the_conformance_checks_find_sums_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scaffolding.local_collectives.Sum.wait", lambda self: None)
    with pytest.raises(AssertionError, match="a sum is not that of both ranks' terms"):
        check_transport(collective_transports())


def test_a_process_alone_drives_all_ranks() -> None:
    assert join(None, None, "cpu") == World(1)
    assert join(4, None, "cpu") == World(4)
    assert World(4).is_local


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2)
    assert resolve_device(None, world, 1, CPU) == CPU
    assert resolve_device("cpu", world, 1, torch.device("meta")) == CPU
    assert resolve_device(["cpu", "meta"], world, 1, CPU) == torch.device("meta")
    with pytest.raises(ArgumentError, match="devices has 3 entries; expected one for each of 2 ranks"):
        resolve_device(["cpu"] * 3, world, 0, CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ArgumentError, match="CUDA is not available here"):
        resolve_device(torch.device("cuda", 3), world, 1, CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert resolve_device(torch.device("cuda", 3), world, 1, CPU) == torch.device("cuda", 3)
    assert resolve_device("cuda", world, 1, CPU) == torch.device("cuda", 1)
    assert resolve_device(None, world, 1, torch.device("cuda", 2)) == torch.device("cuda", 2)


@pytest.mark.parametrize(("schedule", "ranks"), representatives(2, ONE_STAGE, [3, 1]))
def test_the_timeline_of_a_step_is_its_schedule(schedule: str, ranks: int) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 19, (7, 6))
    with penstock.pipeline(GPT(), (ids,), ranks=ranks, schedule=schedule, microbatches=5, loss=token_error) as pipe:
        timeline = pipe.step(ids, target=ids, timeline=True).timeline
        assert timeline is not None
        assert [list(track.actions) for track in timeline.tracks] == [list(row) for row in pipe.schedule.rows]
        compute = sorted(str(span.action) for span in timeline if span.action.op.is_compute)
        expected = generate(schedule, ranks, 5)
        assert compute == sorted(str(action) for row in expected.rows for action in row)
        spans = sorted(timeline, key=lambda span: span.start_seconds)
        assert spans[0].start_seconds >= 0
        assert all(a.end_seconds <= b.start_seconds for a, b in pairwise(spans))  # one process: nothing overlaps
        assert 0 < sum(map(timeline.busy_seconds, range(ranks))) <= timeline.makespan_seconds
        assert timeline.serialized == (ranks > 1) == math.isnan(timeline.bubble_rate)
        assert ("took turns" in repr(timeline)) == (ranks > 1)
        assert pipe.step(ids, target=ids).timeline is None

        evaluated = pipe.evaluate(ids, target=ids, timeline=True).timeline
        assert evaluated is not None
        compute = sorted(str(span.action) for span in evaluated if span.action.op.is_compute)
        assert compute == sorted(str(action) for row in forward_only(expected).rows for action in row)


def test_nothing_of_a_batch_is_kept_after_a_step() -> None:
    """Neither activations nor gradients of values: only parameters, their gradients, and what was asked for."""
    x, made = torch.randn(8, 5), []

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            made.append(weakref.ref(out))
            return out

    model = nn.Sequential(*(Watched(5, 5) for _ in range(4)))
    with penstock.pipeline(model, (x,), ranks=2, microbatches=4, loss=squared_error) as pipe:
        made.clear()
        for _ in range(2):
            pipe.step(x, target=x)
        gc.collect()
        assert len(made) == 32
        assert not [ref for ref in made if ref() is not None]


class Marked(torch.autograd.Function):
    """Leaves something in the graph that is there for as long as the graph is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mark: object) -> torch.Tensor:
        ctx.mark = mark
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
        return grads[0], None


def test_nothing_of_a_step_that_raised_is_kept_in_the_next_one() -> None:
    """Its graphs would be in memory beside those of the next, until each microbatch's turn comes."""
    refs: list[weakref.ref[set[int]]] = []
    left = list[int]()
    fails = True

    class Fails(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gc.collect()
            left.append(sum(ref() is not None for ref in refs))
            if fails and len(left) == 3:
                raise ValueError("in the third microbatch")
            mark: set[int] = set()
            refs.append(weakref.ref(mark))
            marked: torch.Tensor = Marked.apply(super().forward(x), mark)  # type: ignore[no-untyped-call]
            return marked

    x = torch.randn(8, 5)
    model = nn.Sequential(Fails(5, 5), nn.Linear(5, 5))
    with penstock.pipeline(
        model, (x,), microbatches=4, schedule="gpipe", loss=squared_error, leaf_modules=["0"]
    ) as pipe:
        refs.clear()  # of the recording
        for fails, expected in ((True, [0, 1, 2]), (False, [0, 1, 2, 3])):
            left.clear()
            with pytest.raises(ValueError, match="third") if fails else contextlib.nullcontext():
                pipe.step(x, target=x)
            assert left == expected


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_refused_and_forwards_run(mode: Any) -> None:
    model, (x, y) = mlp(), batch()
    refused = pytest.raises(ArgumentError, match=rf"under torch.{mode.__name__}\(\), but .* use pipe.evaluate")
    with penstock.pipeline(model, (x,), ranks=2, microbatches=2, loss=squared_error) as pipe:
        expected = pipe.predict(x)
        with mode():
            with refused:
                pipe.step(x, target=y)
            with refused:
                penstock.verify(mlp(), (x,), target=y, ranks=2, microbatches=2, loss_fn=squared_error)
            assert torch.equal(pipe.predict(x), expected)
            assert pipe.evaluate(x, target=y).loss is not None
        assert pipe.step_count == 0
        assert all(p.grad is None for p in pipe.parameters())
        pipe.step(x, target=y)


# -- ranges for torch's profiler ---------------------------------------------------------------------------------------


CLEARS = pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11's


@CLEARS
def test_a_profile_names_each_action_once() -> None:
    x, y = batch(8)
    with penstock.pipeline(mlp(), (x,), ranks=2, microbatches=4, loss=F.mse_loss, schedule="zb-h1") as pipe:
        pipe.step(x, target=y)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            pipe.step(x, target=y)
        pipe.step(x, target=y)
    seen = Counter(event.name for event in profile.events() if event.name.startswith("penstock "))
    runs = Counter({name: count for name, count in seen.items() if not name.endswith(" waits")})
    assert runs == Counter(f"penstock {action}" for row in pipe.schedule.rows for action in row)
    assert seen["penstock 1F0 waits"] == 1
    inner = [event for event in profile.events() if event.name == "aten::linear"]
    assert all(event.cpu_parent.name.startswith("penstock ") for event in inner)


@CLEARS
def test_without_a_profiler_there_are_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch says whether it profiles; where it does not, every step has ranges."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert executor.is_profiling()
    with profiler.emit_nvtx(enabled=False):
        assert not executor.is_profiling()
    x, y = batch(8)
    monkeypatch.setattr(profiler, "record_function", pytest.fail)
    with penstock.pipeline(mlp(), (x,), ranks=2, microbatches=4, loss=F.mse_loss) as pipe:
        pipe.step(x, target=y)
    monkeypatch.delattr(profiler, "_is_profiler_enabled")
    assert executor.is_profiling()
