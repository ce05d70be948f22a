"""What does not change in a run: run.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any

from penstock.errors import ArgumentError
from penstock.schedule import Placement

FORMAT = "penstock run"
VERSION = 1


@dataclass(frozen=True, slots=True)
class About:
    """What a run is.

    Attributes:
        name: the folder's.
        id: tells this run from others that were in the folder.
        started: when it began, ISO 8601 in UTC.
        resumed: when it began again, each time.
        penstock, torch: versions.
        host: of the process that writes.
        device: such as "cpu", or "cuda: NVIDIA H200".
        model: the class of the model.
        ranks: of one pipeline.
        replicas: pipelines that train together, each on its part of the batch.
        processes: how many there are; 1 if one drives all ranks.
        chunks: stages per rank.
        schedule: its name.
        microbatches: into how many each replica's batch is cut.
        rows: of a whole batch like the example, over all replicas.
        placement: which rank owns which stage, as `str(Placement)` writes it.
        cuts: the module that each stage but the first begins with.
        units: for each stage, the modules that run on it.
        parameter_bytes, gradient_bytes: for each stage, tied ones on each of theirs.
        activation_bytes: for each stage, what one microbatch keeps there from forward to backward; empty if not known.
        memory_limit: the bytes that a rank may need, if the run was given that.
        total_steps: how many steps the run will have, if it was said.
    """

    name: str
    id: str
    started: str
    resumed: tuple[str, ...]
    penstock: str
    torch: str
    host: str
    device: str
    model: str
    ranks: int
    replicas: int
    processes: int
    chunks: int
    schedule: str
    microbatches: int
    rows: int
    placement: str
    cuts: tuple[str, ...]
    units: tuple[tuple[str, ...], ...]
    parameter_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    memory_limit: float | None
    total_steps: int | None

    @property
    def stages(self) -> Placement:
        """Which rank owns which stage."""
        return Placement.parse(self.placement)

    def seconds_since(self, other: About) -> float:
        """From the start of another run to the start of this one."""
        return (datetime.fromisoformat(self.started) - datetime.fromisoformat(other.started)).total_seconds()

    def same_layout(self, other: About) -> bool:
        """Whether stages, ranks and schedule are those of another run, so that timelines of both can be compared."""
        names = ("ranks", "replicas", "chunks", "schedule", "microbatches", "placement", "cuts")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, given: Any, what: str) -> About:
        """What `to_dict` wrote. Raises ArgumentError if it is something else, or of another version.

        Args:
            what: names the file in messages.
        """
        if not isinstance(given, Mapping) or given.get("format") != FORMAT:
            raise ArgumentError(
                f"{what} is not of a run of penstock; one is recorded by penstock.pipeline(..., run='runs/NAME')"
            )
        if given.get("version") != VERSION:
            raise ArgumentError(
                f"{what} is of version {given.get('version')!r}, and this penstock reads version {VERSION}: use the "
                f"penstock that wrote it ({given.get('penstock', 'not known')})"
            )
        if missing := [each.name for each in fields(cls) if each.name not in given]:
            raise ArgumentError(f"{what} is damaged: it misses {', '.join(missing)}")
        values = {each.name: _frozen(given[each.name]) for each in fields(cls)}
        if odd := next((name for name, is_fit in _FIT.items() if not is_fit(values[name])), None):
            raise ArgumentError(f"{what} is damaged: {odd} is {str(values[odd])[:80]!r}")
        return cls(**values)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_count(value: Any) -> bool:
    return _is_whole(value, 1)


def _is_limit(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and math.isfinite(value))


def _all(is_fit: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple) and all(map(is_fit, value))


def _parses(parse: Callable[[str], object]) -> Callable[[Any], bool]:
    def is_fit(value: Any) -> bool:
        try:
            return isinstance(value, str) and bool(parse(value))
        except ValueError:  # of which ArgumentError is one
            return False

    return is_fit


_FIT: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("name", "id", "penstock", "torch", "host", "device", "model", "schedule"), _is_text),
    **dict.fromkeys(("ranks", "replicas", "processes", "chunks", "microbatches"), _is_count),
    **dict.fromkeys(("resumed", "cuts"), _all(_is_text)),
    **dict.fromkeys(("parameter_bytes", "gradient_bytes", "activation_bytes"), _all(_is_whole)),
    "rows": _is_whole,
    "units": _all(_all(_is_text)),
    "started": _parses(lambda text: datetime.fromisoformat(text).tzinfo),
    "placement": _parses(Placement.parse),
    "memory_limit": _is_limit,
    "total_steps": lambda value: value is None or _is_count(value),
}


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
