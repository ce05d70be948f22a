"""The constant facts of a run: run.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from penstock._base.errors import ArgumentError
from penstock._base.files import MAX_QUOTED, STRICT, quoted, validate
from penstock._base.formatting import strip_all_control_chars, strip_control_chars
from penstock.schedule import Placement

FORMAT = "penstock run"
VERSION = 1


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The constant facts of a run.

    Attributes:
        name: the folder's.
        id: distinguishes this run from others that were in the folder.
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
        memory_limit: the bytes that a rank may need, if it was set.
        total_steps: how many steps the run will have, if known.
        threads: that each rank computed with on a CPU; 0: not known.
        parameters: of the whole model, each tensor once, in numbers; 0: not known.
        verified: the fingerprint of model, schedule and options, if they had passed `verify` when it began; else empty.
    """

    __pydantic_config__ = STRICT
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
    verified: str = ""
    threads: int = 0
    parameters: int = 0

    @property
    def stages(self) -> Placement:
        """Which rank owns which stage."""
        return Placement.parse(self.placement)

    @property
    def microbatch_rows(self) -> int:
        """The rows of the largest microbatch."""
        return -(-self.rows // (self.replicas * self.microbatches))

    def seconds_since(self, other: RunInfo) -> float:
        """Return the seconds from the start of another run to the start of this one."""
        return (moment(self.started) - moment(other.started)).total_seconds()

    def same_layout(self, other: RunInfo) -> bool:
        """Whether stages, ranks and schedule are those of another run, so that timelines of both can be compared."""
        names = ("ranks", "replicas", "chunks", "schedule", "microbatches", "placement", "cuts")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Any, what: str) -> RunInfo:
        """Read what `to_dict` wrote. Raise ArgumentError if it is something else, or of another version.

        Args:
            what: names the file in messages.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise ArgumentError(
                f"{what} is not of a run of penstock; one is recorded by penstock.pipeline(..., run_dir='runs/NAME')"
            )
        if data.get("version") != VERSION:
            raise ArgumentError(
                f"{what} is of version {quoted(data.get('version'))}, and this penstock reads version {VERSION}: use "
                f"the penstock that wrote it "
                f"({strip_control_chars(str(data.get('penstock', 'not known')))[:MAX_QUOTED]})"
            )
        values = {key: value for key, value in data.items() if key not in ("format", "version")}
        info = validate(cls, strip_all_control_chars(values), f"{what} is damaged")
        for name in ("ranks", "replicas", "processes", "chunks", "microbatches", "rows"):
            if getattr(info, name) < 1:
                raise ArgumentError(f"{what} is damaged: {name}={getattr(info, name)}: expected 1 or more")
        times = [("resumed", moment, value) for value in info.resumed]
        for name, parse, value in (
            ("placement", Placement.parse, info.placement),
            ("started", moment, info.started),
            *times,
        ):
            try:
                parse(value)
            except (ValueError, OverflowError) as error:  # ArgumentError is a ValueError
                raise ArgumentError(f"{what} is damaged: {name}={quoted(value)}: {quoted(str(error))}") from None
        if info.stages.ranks != info.ranks:
            raise ArgumentError(f"{what} is damaged: ranks={info.ranks}, but placement={quoted(info.placement)}")
        return info


def moment(iso: str) -> datetime:
    """Parse a time in ISO 8601, in UTC. Raise ValueError or OverflowError if it is none."""
    time = datetime.fromisoformat(iso).astimezone(UTC)
    if not 1970 <= time.year < 9999:  # so that any time zone has a name for it
        raise ValueError(f"year {time.year}")
    return time
