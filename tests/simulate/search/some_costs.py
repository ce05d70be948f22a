"""Costs of stages, drawn for tests of searches."""

from __future__ import annotations

from hypothesis import strategies as st

from penstock.simulate.costs import StageCost


@st.composite
def some_costs(draw: st.DrawFn, stages: int, most: int) -> list[StageCost]:
    """One for each stage: F, I and W of 0 to `most`, and activations of 1 to 3, part of which is held until W."""
    costs = []
    for _ in range(stages):
        held = draw(st.integers(1, 3))
        seconds = (draw(st.integers(0, most)) for _ in range(3))
        costs.append(StageCost(*seconds, activation_bytes=held, weight_gradient_bytes=draw(st.integers(0, held))))
    return costs
