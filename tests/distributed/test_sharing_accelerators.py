"""Several ranks on one accelerator are refused before any of them exchanges a tensor."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock
from penstock._base.errors import ArgumentError
from penstock.runtime.execute.transport_choice import accelerator_id, check_distinct_accelerators, check_queues
from scaffolding import stand_in
from scaffolding.ranks import Ranks
from scaffolding.refusals import refusal_of

pytestmark = pytest.mark.distributed


def refusal(rank: int) -> str:
    """What is said where two ranks would compute on the one device. The model stays where it is."""
    stand_in.install()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(4, 4)
    said = refusal_of(penstock.pipeline, model, (x,), microbatches=2, loss=F.mse_loss, devices=stand_in.DEVICE)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    return said


def devices_of_two_types(rank: int) -> str:
    """What each rank says where rank 0 computes on the device, and rank 1 on the CPU."""
    torch.manual_seed(0)
    stand_in.install()
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    device = "cpu" if rank else stand_in.DEVICE
    return refusal_of(penstock.pipeline, layers, (torch.randn(4, 6),), microbatches=2, loss=F.mse_loss, devices=device)


def test_more_ranks_than_accelerators_are_refused_on_each(own_pair: Ranks) -> None:
    for said in own_pair.run(refusal):
        assert "ranks [0, 1] would compute on the same accelerator (2 ranks have 1 in all)" in said
        assert "Start no more ranks on a machine than it has accelerators" in said


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


def test_ranks_on_devices_of_different_types_are_refused_on_each(own_pair: Ranks) -> None:
    for said in own_pair.run(devices_of_two_types):
        assert "rank 0 computes on 'standin', and rank 1 on 'cpu'" in said
        assert "pass the same devices= on every rank" in said
