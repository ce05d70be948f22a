"""What `penstock blame` reports: the first wrong action, or that none is."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from penstock._base.words import counted
from penstock.schedule.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Finding:
    """The first wrong action.

    Attributes:
        kind: such as "labels", "message" or "gradient scale"; see the guide.
        text: what is wrong.
        action: in torch's grammar, such as 1F2 or 1RECV_F2, or a word: gradients, clipping, update.
        step: from 1.
        stage, rank, microbatch, module: where; None or empty if everywhere, or unknown.
        difference, largest: the largest absolute difference, and the right value's largest entry; None if unknown.
    """

    kind: str
    text: str
    action: str = ""
    step: int = 1
    stage: int | None = None
    rank: int | None = None
    microbatch: int | None = None
    module: str = ""
    difference: float | None = None
    largest: float | None = None

    def __str__(self) -> str:
        where = [f"step {self.step}"]
        named = {"microbatch": self.microbatch, "stage": self.stage, "rank": self.rank}
        where += [f"{name} {number}" for name, number in named.items() if number is not None]
        where += [f"action {self.action}"] if self.action else []
        by = "" if self.difference is None else f" (off by {self.difference:.3g}; largest entry {self.largest:.3g})"
        return f"{self.kind}: {self.text}{by} [{', '.join(where)}]"


@dataclass(frozen=True, slots=True)
class Blame:
    """What was compared.

    Attributes:
        finding: the first wrong action; None: there is none.
        compared: how many gradients, updates and buffers.
        notes: what could not be compared.
        timeline: what ranks did in the step of the finding, or in the first; None: not known.
    """

    finding: Finding | None
    steps: int
    ranks: int
    stages: int
    microbatches: int
    compared: int
    notes: tuple[str, ...] = ()
    timeline: Timeline | None = None

    @property
    def ok(self) -> bool:
        return self.finding is None

    def summary(self) -> str:
        """In words."""
        if self.finding is not None:
            return str(self.finding)
        steps = counted(self.steps, "step")
        return f"{self.compared} gradients, updates and buffers of {steps} are those of the unsplit model"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        told = asdict(replace(self, timeline=None))
        del told["timeline"]
        return {**told, "ok": self.ok, "summary": self.summary()}
