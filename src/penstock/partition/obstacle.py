"""Things in a forward that a recording cannot follow, but that a module that runs as a whole may contain."""

from __future__ import annotations

from penstock._base.errors import PartitionError

OUTSIDE = "Do it outside of the model"
ELSEWHERE = f"{OUTSIDE}, or in a module of its own that leaves=[...] names, so that it runs as a whole"


class Obstacle(PartitionError):  # noqa: N818  (it becomes a PartitionError with what was found to help)
    """Raised when the forward does something that cannot be recorded; `remedies` finds out what helps.

    Args:
        why: what the forward did, and where.
        scope: the name of the module whose forward did it; empty for the model's own.
        otherwise: what else may help, where more is known than that it can be done elsewhere.
    """

    def __init__(self, why: str, scope: str, otherwise: str = "") -> None:
        helps = f"Pass leaves=[{scope!r}], so that it runs as a whole" if scope else otherwise or ELSEWHERE
        super().__init__(f"{why}. {helps}")
        self.why, self.scope, self.otherwise = why, scope, otherwise

    def because(self, reason: str) -> Obstacle:
        """The same obstacle, with the reason why the module around it was opened."""
        why = f"{reason}. Recording it call by call does not help: {self.why}"
        return Obstacle(why, self.scope, self.otherwise)
