"""The process groups of a pipeline: which groups of two are made at once, what torch is told of each, and what they ask
of devices."""

from __future__ import annotations

import copy
from datetime import timedelta
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from penstock._base.errors import ArgumentError
from penstock.distributed.failure_detector import Timeouts
from penstock.distributed.groups import GROUP_SECONDS, GroupOptions, Groups, RankPair, matchings
from penstock.distributed.world import World
from penstock.runtime.execute.transport_choice import accelerator_id, check_distinct_accelerators, check_queues


@given(st.sets(st.sampled_from(list(permutations(range(6), 2)))))
def test_no_rank_is_in_two_groups_at_once(ways: set[RankPair]) -> None:
    made = matchings(ways)
    assert sorted(way for matching in made for way in matching) == sorted(ways)
    for matching in made:
        ranks = [rank for way in matching for rank in way]
        assert len(ranks) == len(set(ranks))


def test_a_chain_takes_four_turns_however_long() -> None:
    for p in (3, 4, 9, 64):
        chain = {(a, b) for a, b in permutations(range(p), 2) if abs(a - b) == 1}
        assert len(matchings(chain)) == 4


class NcclOptions:
    """Like `torch.distributed.ProcessGroupNCCL.Options`, which builds for the CPU lack."""

    def __init__(self) -> None:
        self.is_high_priority_stream = True
        self._timeout = timedelta(minutes=10)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What torch is told of the groups that rank 1 of three makes."""
    calls: list[dict[str, Any]] = []

    def new_group(ranks: list[int], **options: Any) -> object:
        calls.append({"ranks": ranks, **options})
        return object()

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=NcclOptions), raising=False)
    return calls


def groups(backend: str, *options: Any) -> None:
    """Makes all kinds of them."""
    given = GroupOptions(*options)
    made = Groups(World(3, 1, (0, 1, 2)), backend, given)
    given.check(backend)
    made.open(late=True)
    made.make((0, 1))
    made.make((0, 2))
    made.pair([(0, 1), (1, 2), (0, 2)])


def test_every_group_has_the_limit_and_its_own_copy_of_the_options(told: list[dict[str, Any]]) -> None:
    assert 2 * Timeouts().timeout_seconds <= GROUP_SECONDS, "the watchdog ends a wait before a group does"
    mine = NcclOptions()
    before = copy.deepcopy(vars(mine))
    groups("nccl", 120.0, mine)
    assert len(told) == 9  # one of them for losses that leave late
    assert {call["timeout"] for call in told} == {timedelta(seconds=120)}
    given = [call.get("pg_options") for call in told if call["backend"] == "nccl"]
    assert len({id(options) for options in given} | {id(mine)}) == len(given) + 1 == 8
    for options in given:
        assert vars(options) == {"is_high_priority_stream": True, "_timeout": timedelta(seconds=120)}
    assert vars(mine) == before
    assert all("pg_options" not in call for call in told if call["backend"] == "gloo")


@pytest.mark.parametrize(
    ("backend", "options", "says"),
    [
        ("nccl", {"is_high_priority_stream": True}, "given dict, expected torch.distributed.ProcessGroupNCCL.Options"),
        ("gloo", NcclOptions(), "over gloo, for which torch uses none; leave it out where ranks compute on the CPU"),
    ],
)
def test_options_of_another_kind_are_refused(told: list[dict[str, Any]], backend: str, options: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=f"pg_options: .*{says}"):
        groups(backend, 120.0, options)
    assert [call["backend"] for call in told] == ["gloo"]  # over which the ranks agree on the refusal


# -- the devices that communicate -------------------------------------------------------------------------------------


def test_a_device_that_each_process_sees_as_number_0_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    seen = []
    for uuid in ("a", "b", "a"):
        properties = SimpleNamespace(uuid=uuid)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=properties: found)
        seen.append(accelerator_id(device))
    check_distinct_accelerators(seen[:2])
    with pytest.raises(ArgumentError, match=r"ranks \[0, 2\] would compute on the same accelerator \(3 ranks have 2"):
        check_distinct_accelerators(seen)


def test_cpus_are_shared_and_nccl_may_be_told_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    check_distinct_accelerators([accelerator_id(torch.device("cpu"))] * 2)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    check_distinct_accelerators(["one"] * 2)


def test_a_device_has_a_queue_for_each_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    check_queues(4)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    check_queues(1)
    with pytest.raises(
        ArgumentError, match=r"CUDA_DEVICE_MAX_CONNECTIONS=1: .* expected at least 3: unset the variable"
    ):
        check_queues(2)
    with pytest.raises(ArgumentError, match="expected at least 5"):
        check_queues(8)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    check_queues(8)
