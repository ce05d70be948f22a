"""What the runtime itself takes on this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.simulate import LinkCost, StageCost


@dataclass(frozen=True)
class Host:
    """Seconds of the runtime.

    Attributes:
        action: for each action.
        step: besides, for each step.
        latency, bytes_per_second: of a message, from its send to the end of its receive.
    """

    action: float = 0.0
    step: float = 0.0
    latency: float = 0.0
    bytes_per_second: float = float("inf")

    @property
    def link(self) -> LinkCost:
        """Between two ranks."""
        return LinkCost(self.latency, self.bytes_per_second)

    def on(self, cost: StageCost, *, splits: bool) -> StageCost:
        """A stage's cost with the runtime's time for F, for B or I, and for W if that is an action of its own."""
        return replace(
            cost,
            forward_seconds=cost.forward_seconds + self.action,
            backward_input_seconds=cost.backward_input_seconds + self.action,
            backward_weight_seconds=cost.backward_weight_seconds + (self.action if splits else 0.0),
        )
