"""The types of run.json: what ran (as in `Spec`), where, and how it ended. Entries of later versions are ignored."""
# ruff: noqa: UP013  (a class takes a line for each entry, and none can be called "from")

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic takes typing's only from Python 3.12 on

from penstock._base.files import STRICT
from penstock.network import MAX_HOSTS
from penstock.network.fabric.workload import MAX_SECONDS, Workload
from penstock.network.scenario import Happened

_MAX_HOSTS = 10_000
"""Of a run whose folder is read, of torchrun or of `--hosts`."""
_Count = Annotated[int, Field(ge=0, lt=1 << 40)]
_Whole = Annotated[int, Field(ge=1, lt=1 << 40)]
_Time = Annotated[int, Field(ge=-(1 << 62), le=1 << 62)]
_Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
_Lasting = Annotated[float, Field(ge=1e-9, le=MAX_SECONDS)]
_Rate = Annotated[float, Field(ge=1e-3, le=1e15)]
_Made = Annotated[int, Field(ge=2, le=MAX_HOSTS)]
_Number = Annotated[str, Field(pattern=r"^\d{1,5}$")]
# fmt: off
_Link = TypedDict("_Link", {
    "from": _Count, "to": _Count, "latency_seconds": _Seconds, "bytes_per_second": _Rate | None,
    "missing_seconds": NotRequired[_Seconds],
})
_Network = TypedDict("_Network", {
    "hosts": _Made, "shaper": str | None, "remarks": list[str], "link": str | None, "own": dict[_Number, str],
    "background": list[str], "slow": dict[_Number, float], "held_back_by": str | None, "mtu": NotRequired[int | None],
    "rates": NotRequired[dict[str, Any] | None],
})
_Stall = TypedDict("_Stall", {
    "since_ns": _Time, "length_ns": _Time, "every_ns": Annotated[_Time, Field(ge=1)], "until_ns": _Time | None,
})
_Late = TypedDict("_Late", {"p50": _Seconds | None, "p99": _Seconds | None, "worst": _Seconds | None})
_Counted = TypedDict("_Counted", {
    "frames": _Count, "bytes": _Count, "lost": _Count, "duplicated": _Count, "corrupted": _Count, "reordered": _Count,
    "queue_full": _Count, "host_gone": _Count, "no_such_host": _Count, "background_bytes": _Count,
})
_Port = TypedDict("_Port", {"up": _Counted, "down": _Counted})
_Switch = TypedDict("_Switch", {
    "late": _Late, "no_room": _Count, "busy_seconds": _Seconds, "stalls": list[_Stall], "links": list[_Port],
})
_Environment = TypedDict("_Environment", {
    "host": NotRequired[str], "cores": NotRequired[_Whole | None], "kernel": NotRequired[str | None],
    "torch": NotRequired[str | None], "congestion_control": NotRequired[str | None],
    "interface": NotRequired[str | None],
})
_Cpu = TypedDict("_Cpu", {
    "cpu_seconds": _Seconds, "wall_seconds": _Lasting, "involuntary_switches": NotRequired[_Count | None],
    "busy": NotRequired[_Seconds | None], "steal": NotRequired[_Seconds | None],
})
_Clock = TypedDict("_Clock", {"offset_ns": _Time, "uncertainty_ns": _Time})
# fmt: on


@dataclass(frozen=True, slots=True)
class RecordFile:
    """run.json."""

    __pydantic_config__: ClassVar = STRICT | {"extra": "ignore"}
    workload: Workload
    hosts: Annotated[int, Field(ge=2, le=_MAX_HOSTS)]
    algorithm: str = ""
    trials: _Count = 0
    backend: str = ""
    algorithms: tuple[str, ...] = ()
    warmup: _Count | None = None
    iterations: _Whole = 1
    overlap: bool = False
    meets: bool = False
    seed: int = 0
    link: str | None = None
    links: tuple[_Link, ...] = ()
    network: _Network | None = None
    switch: _Switch | None = None
    happened: tuple[Happened, ...] = ()
    environment: tuple[_Environment, ...] = ()
    machine_cores: _Whole | None = None
    shared_machine: bool = False
    cpu: tuple[_Cpu, ...] = ()
    clock: tuple[_Clock, ...] = ()
    steady: bool | None = None
    complete: bool = False
    missing: str = ""
