"""Which action of a timeline made what another rank's action used: the messages, as arrows between spans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.schedule.action import Op
from penstock.schedule.timeline import Span, Timeline


@dataclass(frozen=True, slots=True)
class Message:
    """What went from one rank to another. `what`: activations or gradients."""

    what: str
    made: Span
    used: Span


def messages(timeline: Timeline) -> Iterator[Message]:
    """Each message from one rank to another, from the action that made it to the one that used it.

    If the timeline has sends, these say what went where; otherwise each stage passes on to the next, and back. What
    has not run, or took no time, has no message.
    """
    spans = {(span.action.stage, span.action.op, span.action.microbatch): span for span in timeline}
    if sends := [span.action for span in timeline if span.action.op.is_send]:
        for sent in sends:
            assert sent.peer is not None
            yield from _message(spans, sent.stage, sent.peer, sent.microbatch, forward=sent.op is Op.SEND_F)
        return
    for stage, op, microbatch in list(spans):
        if op is Op.F:
            yield from _message(spans, stage, stage + 1, microbatch, forward=True)
        elif op in (Op.B, Op.I) and stage:
            yield from _message(spans, stage, stage - 1, microbatch, forward=False)


def _message(
    spans: dict[tuple[int, Op, int | None], Span], source: int, target: int, microbatch: int | None, *, forward: bool
) -> Iterator[Message]:
    ops = (Op.F,) if forward else (Op.B, Op.I)
    made = next((spans[source, op, microbatch] for op in ops if (source, op, microbatch) in spans), None)
    used = next((spans[target, op, microbatch] for op in ops if (target, op, microbatch) in spans), None)
    if made is None or used is None or made.rank == used.rank:
        return
    if made.end_seconds > made.start_seconds and used.end_seconds > used.start_seconds:
        yield Message("activations" if forward else "gradients", made, used)
