"""A plan: how a model is trained on given devices, and what that is predicted to take."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from penstock._base.errors import ArgumentError, ScheduleError
from penstock._base.files import STRICT, quoted, read_json, validate, write_json
from penstock._base.formatting import list_names
from penstock.costs import ModelFingerprint
from penstock.plan.parallel_configs import ParallelConfig
from penstock.schedule import Schedule

VERSION = 2
"""Of the file. Others are refused."""

VARIABLE = "PENSTOCK_PLAN"
"""Of the environment: the file of the plan that `penstock run` was told to follow."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `penstock.pipeline` needs to know, and what was predicted of it.

    Attributes:
        choice: replicas, ranks, chunks, schedule, microbatches.
        cuts: the unit with which each stage but the first begins.
        recompute: the stages whose forward runs again in backward.
        stage_seconds: F + I + W of each stage, for one microbatch, on its device.
        pipeline_seconds: from the first forward to the last backward.
        reduce_seconds: how much longer the sums of gradients take, which begin as stages end.
        optimizer_seconds: the optimizer's step after that, on the rank where it takes the longest.
        idle: the share of all ranks' time that is lost, by cause.
        memory_bytes: the most that each rank needs.
        limit_bytes: what each has; infinite: no limit.
        held_bytes: what each needs all the time: parameters, gradients and the optimizer's state.
        offload: the stages whose activations go to the host between forward and backward.
        devices: the device of each rank, replica after replica; empty: in order.
        order: the actions of each rank, as `str(schedule)` writes them; empty: the schedule is known by its name.
        made_for: the model and the device; None: not known.

    Raises:
        ArgumentError: they do not go together.
    """

    __pydantic_config__ = STRICT
    choice: ParallelConfig
    cuts: tuple[str, ...]
    recompute: tuple[int, ...]
    stage_seconds: tuple[float, ...]
    pipeline_seconds: float
    reduce_seconds: float
    idle: Mapping[str, float]
    memory_bytes: tuple[float, ...]
    limit_bytes: tuple[float, ...]
    held_bytes: tuple[float, ...] = ()
    offload: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    order: str = ""
    optimizer_seconds: float = 0.0
    made_for: ModelFingerprint | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        choice, stages = self.choice, range(self.choice.stages)
        if len(self.cuts) != choice.stages - 1 or not all(isinstance(cut, str) for cut in self.cuts):
            raise ArgumentError(f"cuts={list(self.cuts)!r}: expected the names of {choice.stages - 1} units")
        for name in ("recompute", "offload"):
            if absent := [stage for stage in getattr(self, name) if stage not in stages]:
                raise ArgumentError(f"{name}: there is no stage {absent[0]!r}; the stages are 0 to {choice.stages - 1}")
        _check_numbers("stage_seconds", self.stage_seconds, choice.stages)
        _check_numbers("memory_bytes", self.memory_bytes, choice.ranks)
        _check_numbers("limit_bytes", self.limit_bytes, choice.ranks)
        seconds = self.pipeline_seconds, self.reduce_seconds, self.optimizer_seconds
        _check_numbers("pipeline_seconds, reduce_seconds, optimizer_seconds", seconds, 3)
        if self.devices and sorted(self.devices) != [*range(choice.devices)]:
            text = list_names([*map(str, self.devices)])
            raise ArgumentError(f"devices={text}: expected each of 0 to {choice.devices - 1} once")

    @property
    def mesh(self) -> str:
        """The mesh that arranges processes as planned, in Python; `type` stands for an unknown type of devices."""
        names, kind = 'mesh_dim_names=("dp", "pp"))', "type" if self.made_for is None else repr(self.made_for.device)
        if self.devices:
            return f"DeviceMesh({kind}, {self.grid}, {names}"
        return f"init_device_mesh({kind}, {self.choice.replicas, self.choice.ranks}, {names}"

    @property
    def schedule(self) -> Schedule | str:
        """The order of work: a schedule's name, or the actions."""
        return Schedule.parse(self.order) if self.order else self.choice.schedule

    @property
    def grid(self) -> list[list[int]]:
        """The device of each rank of each replica: `DeviceMesh(type, plan.grid, mesh_dim_names=("dp", "pp"))`."""
        devices, ranks = self.devices or range(self.choice.devices), self.choice.ranks
        return [[*devices[start : start + ranks]] for start in range(0, self.choice.devices, ranks)]

    @property
    def step_seconds(self) -> float:
        """One step of training, with the optimizer's."""
        return self.pipeline_seconds + self.reduce_seconds + self.optimizer_seconds

    @property
    def rows_per_second(self) -> float:
        """Throughput, in rows of the batch."""
        choice = self.choice
        return choice.replicas * choice.microbatches * choice.rows / self.step_seconds if self.step_seconds else 0.0

    @property
    def bubble(self) -> float:
        """The share of the pipeline's time in which ranks do not compute."""
        return sum(self.idle.values())

    @property
    def fullest(self) -> int:
        """The rank that lacks most memory, or else has least to spare."""
        spare = [limit - peak for limit, peak in zip(self.limit_bytes, self.memory_bytes, strict=True)]
        if all(math.isinf(size) for size in spare):
            return max(range(len(spare)), key=self.memory_bytes.__getitem__)
        return min(range(len(spare)), key=spare.__getitem__)

    @property
    def lacking_bytes(self) -> float:
        """What the fullest rank needs beyond its memory; 0 if the plan fits."""
        return max(0.0, self.memory_bytes[self.fullest] - self.limit_bytes[self.fullest])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; null for no limit."""
        limits = [None if math.isinf(limit) else limit for limit in self.limit_bytes]
        return {"version": VERSION, **asdict(self), "limit_bytes": limits, "step_seconds": self.step_seconds}

    @classmethod
    def from_dict(cls, given: Any, what: str = "the plan") -> Plan:
        """Read the plan that `to_dict` wrote.

        Raises:
            ArgumentError: it is of another version, misses something, or has something odd.
        """
        version = given.get("version") if isinstance(given, dict) else given
        if isinstance(given, dict) and "choice" not in given and "units" in given:
            raise ArgumentError(f"{what} is a profile; `penstock plan --profile FILE --out PLAN` makes a plan of it")
        if version != VERSION:
            raise ArgumentError(f"{what}: expected a plan of version {VERSION}, not {quoted(version)}; make a new one")
        values = {key: value for key, value in given.items() if key not in ("version", "step_seconds")}
        try:
            limits = validate(tuple[float | None, ...], values.get("limit_bytes", ()), f"{what}: limit_bytes")
            plan = validate(cls, {**values, "limit_bytes": [limit or 0.0 for limit in limits]}, what)
        except ArgumentError as error:
            raise ArgumentError(f"{error}; make a new one with `penstock plan`") from None
        plan = replace(plan, limit_bytes=tuple(math.inf if limit is None else limit for limit in limits))
        try:
            _check_order(plan)
        except (ArgumentError, ScheduleError) as error:
            raise ArgumentError(f"{what}: {error}; make a new one with `penstock plan`") from None
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON. Raise ArgumentError if the file cannot be written."""
        write_json(path, self.to_dict())


def _check_numbers(name: str, values: Sequence[Any], count: int) -> None:
    valid = (isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 for value in values)
    if len(values) != count or not all(valid):
        raise ArgumentError(f"{name}={quoted([*values])}: expected {count} numbers of 0 or more")


def _check_order(plan: Plan) -> None:
    schedule, choice = plan.schedule, plan.choice
    if isinstance(schedule, str):
        return
    actual, expected = (
        f"{ranks} ranks, {stages} stages, {microbatches} microbatches"
        for ranks, stages, microbatches in (
            (schedule.ranks, schedule.placement.depth, schedule.microbatches),
            (choice.ranks, choice.stages, choice.microbatches),
        )
    )
    if actual != expected:
        raise ArgumentError(f"order is for {actual}, but choice has {expected}")


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan from a JSON file. Raise ArgumentError if there is none."""
    label = f"plan {os.fspath(path)!r}"
    return Plan.from_dict(read_json(path, label), label)
