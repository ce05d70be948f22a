"""What stands in the way of a recording, in words. `remedies` finds out what helps."""

from __future__ import annotations

from penstock._base.errors import PartitionError

OUTSIDE = "Do it outside of the model"


ELSEWHERE = f"{OUTSIDE}, or in a module of its own that leaf_modules=[...] names, so that it runs as a whole"


class Obstacle(PartitionError):  # noqa: N818  (it becomes a PartitionError with what was found to help)
    """Raised when the forward does something that cannot be recorded; `remedies` finds out what helps.

    Args:
        reason: what the forward did, and where.
        scope: the name of the module whose forward did it; empty for the model's own.
        alternative: what else may help, where more is known than that it can be done elsewhere.
    """

    def __init__(self, reason: str, scope: str, alternative: str = "") -> None:
        remedy = f"Pass leaf_modules=[{scope!r}], so that it runs as a whole" if scope else alternative or ELSEWHERE
        super().__init__(f"{reason}. {remedy}")
        self.reason, self.scope, self.alternative = reason, scope, alternative
