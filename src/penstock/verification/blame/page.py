"""What `penstock blame` found, as a page: the finding, and what ranks did in its step, the wrong action framed."""

from __future__ import annotations

from html import escape

from penstock.report.frame import frame
from penstock.report.svg import Panel, svg
from penstock.schedule import Action, Op
from penstock.schedule.timeline import Timeline
from penstock.verification.blame.finding import Blame

_MESSAGES = {Op.F: (Op.SEND_F, Op.RECV_F), Op.B: (Op.SEND_B, Op.RECV_B)}


def page(found: Blame) -> str:
    """A page that needs no other file."""
    finding, timeline, facts = found.finding, found.timeline or Timeline(()), ""
    title, text, where = "trains as the unsplit model does", found.summary(), "step 1"
    marked = None
    if finding is not None:
        title, text, marked = f"wrong: {finding.kind}", finding.text, _computation(timeline, finding.action)
        framed = "what is wrong comes after these actions" if marked is None else f"framed: {marked}"
        where = f"step {finding.step}; {framed}"
        rows = {
            "action": finding.action, "microbatch": finding.microbatch, "stage": finding.stage, "rank": finding.rank,
            "module": finding.module, "off by": finding.difference, "largest entry": finding.largest,
        }  # fmt: skip
        facts = "".join(_row(name, value) for name, value in rows.items() if value not in (None, ""))
    drawn = svg([Panel(where, timeline, marked=marked)]) if len(timeline) else ""
    notes = "".join(f"<p>note: {escape(note)}</p>" for note in found.notes)
    body = f"<main><h1>{escape(title)}</h1><p>{escape(text)}</p><table>{facts}</table>{drawn}{notes}</main>"
    return frame(f"penstock blame: {title}", body, generator="penstock blame")


def _row(name: str, value: object) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return f'<tr><th scope="row">{name}</th><td>{escape(text)}</td></tr>'


def _computation(timeline: Timeline, named: str) -> Action | None:
    """The computation that an action is, or whose message; None if it is neither: an update, say."""
    for span in timeline:
        action = span.action
        messages = (f"{action.stage}{op.value}{action.microbatch}" for op in _MESSAGES.get(action.op, ()))
        if named in (str(action), *messages):
            return action
    return None
