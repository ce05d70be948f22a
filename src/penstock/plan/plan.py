"""A plan: how a model is trained on given devices, and what that is predicted to take."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from penstock.errors import ArgumentError
from penstock.plan.choice import Choice
from penstock.words import shortened

VERSION = 1
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
        stage_seconds: F + I + W of each stage, for one microbatch.
        pipeline_seconds: from the first forward to the last backward.
        reduce_seconds: the sums over replicas that come after it.
        idle: the share of all ranks' time that is lost, by cause.
        memory_bytes: the most that each rank needs.
        limit_bytes: what each has; infinite: no limit.
    """

    choice: Choice
    cuts: tuple[str, ...]
    recompute: tuple[int, ...]
    stage_seconds: tuple[float, ...]
    pipeline_seconds: float
    reduce_seconds: float
    idle: Mapping[str, float]
    memory_bytes: tuple[float, ...]
    limit_bytes: float

    @property
    def step_seconds(self) -> float:
        """One step of training, without the optimizer."""
        return self.pipeline_seconds + self.reduce_seconds

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
    def lacking_bytes(self) -> float:
        """What the fullest rank needs beyond its memory; 0 if the plan fits."""
        return max(0.0, max(self.memory_bytes) - self.limit_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; null for no limit."""
        limit = None if math.isinf(self.limit_bytes) else self.limit_bytes
        return {"version": VERSION, **asdict(self), "limit_bytes": limit, "step_seconds": self.step_seconds}

    @classmethod
    def from_dict(cls, given: Any, what: str = "the plan") -> Plan:
        """The plan that `to_dict` wrote.

        Raises:
            ArgumentError: it is of another version, or misses something.
        """
        version = given.get("version") if isinstance(given, dict) else given
        if version != VERSION:
            raise ArgumentError(f"{what}: expected a plan of version {VERSION}, not {version!r}; make a new one")
        if missing := [field.name for field in fields(cls) if field.name not in given]:
            raise ArgumentError(f"{what}: misses {shortened(missing)}; make a new one with `penstock plan`")
        if not isinstance(given["choice"], dict) or given["choice"].keys() != {field.name for field in fields(Choice)}:
            raise ArgumentError(f"{what}: choice={given['choice']!r} is not one; make a new plan with `penstock plan`")
        values = {field.name: given[field.name] for field in fields(cls)}
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        limit = math.inf if values["limit_bytes"] is None else values["limit_bytes"]
        return cls(**{**values, **lists, "limit_bytes": limit, "choice": Choice(**given["choice"])})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it as JSON. Raises ArgumentError if the file cannot be written."""
        try:
            Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ArgumentError(f"{os.fspath(path)!r} cannot be written: {error.strerror}") from error


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in a file of JSON. Raises ArgumentError if there is none."""
    name = os.fspath(path)
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"plan {name!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ArgumentError(f"plan {name!r} is not JSON: {error}") from error
    return Plan.from_dict(given, f"plan {name!r}")
