"""A step's timeline as OpenTelemetry spans, in which receives link to sends. Needs `penstock[opentelemetry]`."""

from __future__ import annotations

import time
from typing import Any

from penstock._base.errors import ArgumentError, require
from penstock.schedule.timeline import Timeline

_NANOSECONDS = 1e9


def export_spans(timeline: Timeline, *, step: int | None = None, end_ns: int | None = None, tracer: Any = None) -> None:
    """End a span for each action of a timeline, as a trace of its own.

    The root is the step; below it stands a span for each rank, and below that the rank's actions, named as in schedules
    (`2F3`), with `penstock.rank`, `.op`, `.stage`, `.microbatch` and `.waited_seconds` as attributes. The span of a
    receive links to that of its send on the other rank, so that a backend leads from one to the other.

    Call it on one rank only, with `result.timeline` of a step with `timeline=True`, which has all ranks.

    Args:
        timeline: real or simulated.
        step: its number, for the root's attributes.
        end_ns: when the step ended, in nanoseconds since 1970; now if it is not given.
        tracer: where spans go; that of the global tracer provider if it is not given.

    Raises:
        ArgumentError: the timeline's ranks took turns in one process, so its times say nothing about ranks.
        MissingExtraError: the package `opentelemetry-api` is not installed.
    """
    require("opentelemetry", "opentelemetry", for_what="export_spans")
    from opentelemetry import trace

    if timeline.serialized:
        raise ArgumentError("timeline: ranks took turns in one process; pass one of a run with a process for each rank")
    tracer = trace.get_tracer("penstock") if tracer is None else tracer
    start_ns = (time.time_ns() if end_ns is None else end_ns) - round(timeline.makespan_seconds * _NANOSECONDS)

    def to_ns(seconds: float) -> int:
        return start_ns + round(seconds * _NANOSECONDS)

    finish_ns = to_ns(timeline.makespan_seconds)
    root = tracer.start_span(
        "step", trace.set_span_in_context(trace.INVALID_SPAN), start_time=start_ns,
        attributes={} if step is None else {"penstock.step": step},
    )  # fmt: skip
    step_context = trace.set_span_in_context(root)
    ranks = [
        tracer.start_span(f"rank {rank}", step_context, start_time=start_ns, attributes={"penstock.rank": rank})
        for rank in range(timeline.ranks)
    ]
    sends: dict[Any, Any] = {}
    for span in sorted(timeline, key=lambda span: span.action.op.is_receive):  # a link leads to a span that has begun
        action = span.action
        send_context = sends.get(action.other_end) if action.op.is_receive else None
        attributes = {
            "penstock.rank": span.rank,
            "penstock.op": action.op.value,
            "penstock.stage": action.stage,
            "penstock.waited_seconds": span.waited_seconds,
        }
        if action.microbatch is not None:
            attributes["penstock.microbatch"] = action.microbatch
        otel_span = tracer.start_span(
            str(action), trace.set_span_in_context(ranks[span.rank]), start_time=to_ns(span.start_seconds),
            attributes=attributes, links=[] if send_context is None else [trace.Link(send_context)],
        )  # fmt: skip
        otel_span.end(to_ns(span.end_seconds))
        if action.op.is_send:
            sends[action] = otel_span.get_span_context()
    for parent in (*ranks, root):
        parent.end(finish_ns)
