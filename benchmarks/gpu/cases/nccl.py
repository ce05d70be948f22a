"""NCCL by itself between ranks that share a GPU: what comes before anything that Penstock does with it.

On the CPU gloo takes its place, under `penstock.testing.nccl_rules`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import nccl_library
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from cases.case import Case, Found, NotHereError, Setting
from cases.ranks import RanksFailedError, on_ranks
from penstock.testing import nccl_rules

PART = 5

GATE = "ranks/nccl by itself"
"""The case that all others with NCCL come after: it finds the variables with which ranks can share the GPU."""

SHARES_A_GPU = (2, 30)
"""From this version on NCCL allows several ranks on one GPU, if it is asked to."""

SHARED = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "4",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_DEBUG": "WARN",
    "GLOO_SOCKET_IFNAME": "lo",
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
    yield Case(GATE, PART, by_itself, seconds=SECONDS * len(WAYS))


def by_itself(setting: Setting) -> Found:
    """Two ranks exchange messages and add, in each way until one works."""
    if setting.is_real:
        version = nccl_library.version_in_use()
        if version < SHARES_A_GPU:
            said = ".".join(map(str, version)) or "none"
            raise NotHereError(
                f"NCCL {said} refuses two ranks on one GPU; put 2.30 or later into {nccl_library.FOLDER}: see README.md"
            )
    os.environ |= variables(setting)
    failed: list[str] = []
    for way in WAYS if setting.is_real else WAYS[:1]:
        os.environ |= way
        try:
            first, *_ = on_ranks(setting, 2, _exchanges, backend=backend(setting), seconds=SECONDS)
        except RanksFailedError as error:
            failed.append(f"{way or 'without more'}: {error}")
            print(failed[-1], flush=True)
            for name in way:
                del os.environ[name]
            continue
        return {**first, "environment": variables(setting) | way, "failed": failed}
    return {"ok": False, "says": "; ".join(failed), "failed": failed}


def variables(setting: Setting) -> dict[str, str]:
    """Those with which ranks share the first GPU."""
    if not setting.is_real:
        return {"GLOO_SOCKET_IFNAME": "lo"}
    return SHARED | {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


def backend(setting: Setting) -> str:
    return "cpu:gloo,cuda:nccl" if setting.is_real else "gloo"


def rules(setting: Setting, *, eager: bool = False) -> AbstractContextManager[Any]:
    """NCCL's, where gloo stands in for it."""
    return nullcontext() if setting.is_real else nccl_rules(eager=eager)


def _exchanges(setting: Setting, rank: int) -> Found:
    with rules(setting):
        return exchanges(setting, rank)


def exchanges(setting: Setting, rank: int) -> Found:
    """Sends and receives by themselves and in one call, sums, and two communicators whose messages cross."""
    ranks, device = dist.get_world_size(), setting.device
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks
    mine, got = torch.full((1 << 18,), float(rank), device=device), torch.zeros(1 << 18, device=device)

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

    found: dict[str, Any] = {}
    for name, exchange in {"in turn": in_turn, "batched": batched, "crossing": crossing}.items():
        if name == "crossing":
            if ranks > 2:
                continue
            meet()
        found[name] = _timed(setting, exchange, got)
        if not bool((got == previous).all()):
            return {"ok": False, "says": f"{name}: {got[:3].tolist()} arrived, not {previous}"}
    total = mine.clone()
    dist.all_reduce(total)
    if not bool((total == ranks * (ranks - 1) / 2).all()):
        return {"ok": False, "says": f"all_reduce gives {total[:3].tolist()}"}
    found["all_reduce"] = _timed(setting, lambda: dist.all_reduce(mine.clone()), got)
    found["new groups"] = _timed(setting, partial(_in_a_new_group, got), got, times=3)
    version = ".".join(map(str, nccl_library.version_in_use())) if setting.is_real else "none: gloo"
    milliseconds = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in found.items())
    return {"ok": True, "says": f"NCCL {version}; milliseconds: {milliseconds}", "nccl": version, "seconds": found}


def _in_a_new_group(tensor: torch.Tensor) -> None:
    group = dist.new_group()
    dist.all_reduce(tensor[:1].clone(), group=group)
    dist.destroy_process_group(group)


def _timed(setting: Setting, exchange: Callable[[], object], got: torch.Tensor, times: int = 5) -> float:
    """Seconds of one exchange of 1 MiB, after a first one."""
    for count in (1, times):
        got.zero_()
        setting.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            exchange()
        setting.synchronize()
    return (time.perf_counter() - began) / times


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
