"""Spans of a step, as the SDK's exporter gets them: each receive links to the send on the other rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch.nn.functional import mse_loss

import penstock
from penstock._base.errors import ArgumentError
from penstock.integrations.opentelemetry import export_spans
from penstock.schedule import Op, generate
from penstock.schedule.timeline import Timeline
from penstock.simulate import LinkCost, StageCost, simulate
from scaffolding import small
from scaffolding.ranks import Ranks


def timed_step(rank: int) -> Timeline | None:
    """The second step: in the first, ranks agree on shapes."""
    x, y = small.batch()
    with penstock.pipeline(small.mlp(), (x,), microbatches=4, loss_fn=mse_loss) as pipe:
        pipe.step(x, target=y)
        return pipe.step(x, target=y, timeline=True).timeline


pytest.importorskip("opentelemetry.sdk", reason="pip install '.[test]'")


def exported(timeline: Timeline, **more: Any) -> list[Any]:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    export_spans(timeline, tracer=provider.get_tracer("test"), **more)
    return list(exporter.get_finished_spans())


def check_links(timeline: Timeline, spans: list[Any]) -> None:
    """One span for each action, below its rank's, and each receive's one link leads to its send."""
    (root,) = [one for one in spans if one.parent is None]
    ranks = {one.context.span_id: one for one in spans if one.parent and one.parent.span_id == root.context.span_id}
    assert [one.name for one in ranks.values()] == [f"rank {rank}" for rank in range(timeline.ranks)]
    actions = {one.context.span_id: one for one in spans if one is not root and one.context.span_id not in ranks}
    assert sorted(one.name for one in actions.values()) == sorted(str(span.action) for span in timeline)
    for one in actions.values():
        assert ranks[one.parent.span_id].attributes["penstock.rank"] == one.attributes["penstock.rank"]
        assert one.context.trace_id == root.context.trace_id
        assert root.start_time <= one.start_time <= one.end_time <= root.end_time
    links = {one.name: [actions[link.context.span_id] for link in one.links] for one in actions.values()}
    received = {span.action: span.rank for span in timeline if span.action.op.is_receive}
    assert {name for name, sent in links.items() if sent} == {str(action) for action in received}
    for action, rank in received.items():
        (sent,) = links[str(action)]
        assert sent.name == str(action.other_end)
        assert sent.attributes["penstock.rank"] != rank


def test_receives_of_a_step_of_processes_link_to_sends(ranks2: Ranks) -> None:
    timeline, *_ = ranks2.run(timed_step)
    assert any(span.action.op is Op.RECV_B for span in timeline)
    spans = exported(timeline, step=7, end_ns=10**18)
    check_links(timeline, spans)
    (root,) = [one for one in spans if one.parent is None]
    assert (root.name, root.attributes["penstock.step"], root.end_time) == ("step", 7, 10**18)
    assert root.end_time - root.start_time == round(timeline.makespan_seconds * 1e9)


def test_ranks_that_took_turns_are_refused() -> None:
    timeline = replace(simulate(generate("1f1b", 2, 2), StageCost(1.0, 1.0, 1.0), LinkCost(0.0)), serialized=True)
    with pytest.raises(ArgumentError, match="ranks took turns in one process"):
        exported(timeline)
