"""The report of `penstock blame`, as text and as a page: the first wrong action, if any."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any

from penstock._base.formatting import pluralize
from penstock.report.frame import frame
from penstock.report.svg import Panel, svg
from penstock.schedule import Action, Op
from penstock.schedule.timeline import Timeline

_MESSAGES = {Op.F: (Op.SEND_F, Op.RECV_F), Op.B: (Op.SEND_B, Op.RECV_B)}


@dataclass(frozen=True, slots=True)
class Finding:
    """The first wrong action.

    Attributes:
        kind: such as "labels", "message" or "gradient scale"; see the guide.
        text: what is wrong.
        action: in torch's grammar, such as 1F2 or 1RECV_F2, or a word: gradients, clipping, update.
        step: from 1.
        stage, rank, microbatch, module: its location; None or empty if everywhere, or unknown.
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
        location = [f"step {self.step}"]
        numbers = {"microbatch": self.microbatch, "stage": self.stage, "rank": self.rank}
        location += [f"{name} {number}" for name, number in numbers.items() if number is not None]
        location += [f"action {self.action}"] if self.action else []
        amount = "" if self.difference is None else f" (off by {self.difference:.3g}; largest entry {self.largest:.3g})"
        return f"{self.kind}: {self.text}{amount} [{', '.join(location)}]"


@dataclass(frozen=True, slots=True)
class Blame:
    """The result of `penstock blame`.

    Attributes:
        finding: the first wrong action; None: there is none.
        compared: the number of compared gradients, updates and buffers.
        notes: comparisons that were not possible.
        timeline: that of the finding's step, or of the first; None if unknown.
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
        """Summarize in words."""
        if self.finding is not None:
            return str(self.finding)
        steps = pluralize(self.steps, "step")
        return f"{self.compared} gradients, updates and buffers of {steps} are those of the unsplit model"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        values = asdict(replace(self, timeline=None))
        del values["timeline"]
        return {**values, "ok": self.ok, "summary": self.summary()}


def page(result: Blame) -> str:
    """Return a self-contained page: the finding, and the timeline of its step with the wrong action framed."""
    finding, timeline, table = result.finding, result.timeline or Timeline(()), ""
    title, text, step_text = "trains as the unsplit model does", result.summary(), "step 1"
    marked = None
    if finding is not None:
        title, text, marked = f"wrong: {finding.kind}", finding.text, _find_computation(timeline, finding.action)
        framed = "what is wrong comes after these actions" if marked is None else f"framed: {marked}"
        step_text = f"step {finding.step}; {framed}"
        rows = {
            "action": finding.action, "microbatch": finding.microbatch, "stage": finding.stage, "rank": finding.rank,
            "module": finding.module, "off by": finding.difference, "largest entry": finding.largest,
        }  # fmt: skip
        table = "".join(_html_row(name, value) for name, value in rows.items() if value not in (None, ""))
    figure = svg([Panel(step_text, timeline, marked=marked)]) if len(timeline) else ""
    notes = "".join(f"<p>note: {escape(note)}</p>" for note in result.notes)
    body = f"<main><h1>{escape(title)}</h1><p>{escape(text)}</p><table>{table}</table>{figure}{notes}</main>"
    return frame(f"penstock blame: {title}", body, generator="penstock blame")


def _html_row(name: str, value: object) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return f'<tr><th scope="row">{name}</th><td>{escape(text)}</td></tr>'


def _find_computation(timeline: Timeline, action_text: str) -> Action | None:
    """Return the computation that an action is, or whose message it is; None for others, such as an update."""
    for span in timeline:
        action = span.action
        messages = (f"{action.stage}{op.value}{action.microbatch}" for op in _MESSAGES.get(action.op, ()))
        if action_text in (str(action), *messages):
            return action
    return None
