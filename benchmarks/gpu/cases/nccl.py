"""NCCL by itself between ranks that share a GPU: what comes before anything that Penstock does with it.

On the CPU gloo takes its place, under `penstock.testing.nccl_rules`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import nccl_library
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from cases.case import Case, Found, Setting
from cases.ranks import RanksFailedError, on_ranks
from penstock.testing import nccl_rules

PART = 5

GATE = "ranks/nccl by itself"
"""The case that all others with NCCL come after: it finds the variables with which ranks can share the GPU."""

SHARED = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "4",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_DEBUG": "WARN",
}

WAYS: tuple[dict[str, str], ...] = (
    {},
    {"NCCL_CUMEM_ENABLE": "0"},
    {"NCCL_P2P_DISABLE": "1"},
    {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "0"},
    {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
)
"""In which ranks exchange memory, the fastest first; the first that works is taken."""

SECONDS = 30.0
"""For each of them."""


def cases() -> Iterator[Case]:
    yield Case(GATE, PART, by_itself, seconds=SECONDS * len(WAYS) + 10.0)


def by_itself(setting: Setting) -> Found:
    """Two ranks exchange messages and add, in each way until one works."""
    os.environ |= variables(setting)
    failed: list[str] = []
    for way in WAYS if setting.is_real else WAYS[:1]:
        os.environ |= way
        try:
            found = on_ranks(setting, 2, _exchanges, backend=backend(setting), seconds=SECONDS)
            wrong = "; ".join(f"rank {rank}: {each['says']}" for rank, each in enumerate(found) if not each["ok"])
        except RanksFailedError as error:
            wrong = str(error)
        if not wrong:
            return {**found[0], "environment": variables(setting) | way, "failed": failed}
        failed.append(f"{way or 'without more'}: {wrong}")
        print(failed[-1], flush=True)
        for name in way:
            del os.environ[name]
    return {"ok": False, "says": "; ".join(failed), "failed": failed}


def variables(setting: Setting) -> dict[str, str]:
    """Those with which ranks share the first GPU."""
    if not setting.is_real:
        return {}
    return SHARED | {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


def backend(setting: Setting) -> str:
    return "cpu:gloo,cuda:nccl" if setting.is_real else "gloo"


def rules(setting: Setting, *, eager: bool = False) -> AbstractContextManager[Any]:
    """NCCL's, where gloo stands in for it, and CUDA's lazy loading of kernels, which made ranks hang on an H100."""
    return nullcontext() if setting.is_real else nccl_rules(eager=eager, lazy_loading=True)


def _exchanges(setting: Setting, rank: int) -> Found:
    with rules(setting):
        return exchanges(setting, rank)


def exchanges(setting: Setting, rank: int) -> Found:
    """Sends and receives by themselves and in one call, sums, and two communicators whose messages cross.

    Whatever is wrong, each rank goes on to the end: the others wait for it.
    """
    ranks, device = dist.get_world_size(), setting.device
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks
    mine, got = torch.full((1 << 18,), rank + 1.0, device=device), torch.zeros(1 << 18, device=device)

    def in_turn() -> None:
        for call, tensor, peer in ((dist.send, mine, following), (dist.recv, got, previous))[:: 1 - rank % 2 * 2]:
            call(tensor, peer)

    def batched() -> None:
        isend, irecv = distributed_c10d.isend, distributed_c10d.irecv  # torch takes no stand-in for them
        operations = [dist.P2POp(isend, mine, following), dist.P2POp(irecv, got, previous)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    up, down = dist.new_group(), dist.new_group()

    def meet() -> None:
        """The first message of a group meets its receive, so that later ones may cross."""
        for group, sender in ((up, 0), (down, 1)):
            work = (dist.isend if rank == sender else dist.irecv)(got, following, group=group)
            assert work is not None
            work.wait()

    def crossing() -> None:
        """Each of two ranks posts a receive before it sends what the other waits for, in a group for each direction."""
        there, back = (up, down) if rank == 0 else (down, up)
        for work in (dist.irecv(got, following, group=back), dist.isend(mine, following, group=there)):
            assert work is not None
            work.wait()

    seconds: dict[str, float] = {}
    wrong: list[str] = []
    for name, exchange in {"in turn": in_turn, "batched": batched, "crossing": crossing}.items():
        if name == "crossing":
            if ranks > 2:
                continue
            meet()
        seconds[name] = _timed(setting, exchange, got)
        if not bool((got == previous + 1.0).all()):
            wrong.append(f"{name}: {got[:3].tolist()} arrived, not {previous + 1.0}")
    total = mine.clone()
    dist.all_reduce(total)
    if not bool((total == ranks * (ranks + 1) / 2).all()):
        wrong.append(f"all_reduce gives {total[:3].tolist()}")
    seconds["all_reduce"] = _timed(setting, lambda: dist.all_reduce(mine.clone()), got)
    version = ".".join(map(str, nccl_library.version_in_use())) if setting.is_real else "none: gloo"
    milliseconds = ", ".join(f"{name} {1e3 * each:.1f}" for name, each in seconds.items())
    says = "; ".join(wrong) or f"NCCL {version}; milliseconds: {milliseconds}"
    return {"ok": not wrong, "says": says, "nccl": version, "seconds": seconds}


def _timed(setting: Setting, exchange: Callable[[], object], got: torch.Tensor) -> float:
    """Seconds of one exchange of 1 MiB, after a first one."""
    for count in (1, 5):
        got.zero_()
        setting.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            exchange()
        setting.synchronize()
    return (time.perf_counter() - began) / count


@contextmanager
def messages(setting: Setting) -> Iterator[list[int]]:
    """Collects the sizes of what this process sends of the device's memory over NCCL; over gloo on the CPU."""
    found: list[int] = []
    isend, expected = dist.isend, "nccl" if setting.is_real else "gloo"

    def noted(tensor: torch.Tensor, dst: int | None = None, group: Any = None, *args: Any, **kwargs: Any) -> Any:
        if tensor.device.type == setting.device and dist.get_backend(group) == expected:
            found.append(tensor.nbytes)
        return isend(tensor, dst, group, *args, **kwargs)

    with mock.patch.object(dist, "isend", noted):
        yield found
