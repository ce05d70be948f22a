"""What stands in the way of a recording, in words. `remedies` finds out what helps."""

from __future__ import annotations

from penstock._base.errors import PartitionError
from penstock.partition.user_code import raising_line

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


def depends_on_values(error: Exception, scope: str) -> Obstacle:
    """Return the obstacle of a forward that asks for the values of a tensor, and so raised this."""
    text = f"the forward depends on the values of a tensor at {raising_line(error)} in {describe_scope(scope)}"
    return Obstacle(f"{text}, which a recording cannot follow", scope)


def describe_scope(scope: str) -> str:
    return f"module {scope!r}" if scope else "the model's own forward"
