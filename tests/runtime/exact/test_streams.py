"""Random streams: known values, the user's generators left as they were, and masks that follow their key alone."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

import penstock
from penstock.runtime.exact.streams import Streams, hash_name, mix
from scaffolding.models import squared_error

CPU = (torch.device("cpu"),)


def test_mix_has_the_values_that_it_always_had() -> None:
    """They decide every mask: another value would change all runs that are taken up from a checkpoint."""
    assert mix() == 0
    assert mix(0) == 16294208416658607535  # splitmix64's first value from seed 0
    assert mix(1, 2, 3) == 7702586659592502839
    assert mix(3, 2, 1) != mix(1, 2, 3)
    assert hash_name("h.0.drop") == 2774884591786673151


def draw(streams: Streams, name: str) -> float:
    streams.enter(name)
    return float(torch.rand(()))


def test_a_draw_depends_on_its_key_alone() -> None:
    streams = Streams(5)
    found: dict[tuple[int, int, str, int], float] = {}
    for order in ((0, 1), (1, 0)):
        for step in (0, 1):
            with streams.drawing(step, CPU):
                for microbatch in order:
                    streams.begin(microbatch, {})
                    for call in (0, 1):
                        for name in ("a", "b") if order[0] else ("b", "a"):
                            value = draw(streams, name)
                            assert found.setdefault((step, microbatch, name, call), value) == value
    assert len(set(found.values())) == len(found) == 16


def test_a_loss_draws_from_a_stream_of_its_own_for_each_microbatch() -> None:
    found: dict[tuple[int, int, int], float] = {}
    own: set[float] = set()
    for seed in (5, 6):
        for first in (0, 2):  # the second replica, whose microbatches are numbers 2 and 3 of the whole batch
            streams = Streams(seed)
            streams.first_microbatch = first
            for step in (0, 1):
                with streams.drawing(step, CPU):
                    for microbatch in (1, 0):
                        streams.begin(microbatch, {})
                        own.add(draw(streams, "a"))
                        streams.begin_loss(microbatch)
                        found[seed, step, first + microbatch] = float(torch.rand(()))
    assert len(set(found.values()) | own) == 2 * 2 * 2 * 4


def test_hooks_are_inert_outside_of_a_step_and_stay_behind_on_copies() -> None:
    streams, module = Streams(5), nn.Dropout(0.5)
    streams.watch({"drop": module})
    streams.watch({"drop": module})
    assert len(module._forward_pre_hooks) == 1
    x = torch.ones(64)
    torch.manual_seed(1)
    plain = nn.Dropout(0.5)(x)
    for other in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.manual_seed(1)
        assert torch.equal(other(x), plain)
    copied = copy.deepcopy(module)
    with streams.drawing(0, CPU):
        streams.begin(0, {})
        torch.manual_seed(1)
        assert torch.equal(copied(x), plain)
        assert not torch.equal(module(x), plain)
    streams.close()
    assert not module._forward_pre_hooks


def test_without_a_seed_torchs_initial_seed_is_taken() -> None:
    x = torch.randn(7, 5)
    for seed in (3, 4):
        torch.manual_seed(seed)
        with penstock.pipeline(nn.Linear(5, 5), (x,), loss=squared_error, microbatches=3) as pipe:
            assert pipe.seed == seed
