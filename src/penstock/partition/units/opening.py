"""Which modules are opened that would normally run as a whole, so that cuts can fall inside them.

A stage of a hierarchical model (ConvNeXt, Swin, MaxViT) is one element of a list, yet may do most of the work. A module
is opened if `opens=` names it, if a cut lies inside it, or if the stages would be less even with it whole.

Random streams are unaffected: draws inside a block come from the stream of its innermost module, wherever that is
called. Only what an opened module draws in its own forward would come from another stream if it ran as a whole. So such
a module is opened only for `opens=`, which does not depend on the number of stages.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from penstock.errors import PartitionError
from penstock.partition.units.units import Learned


@dataclass(frozen=True, slots=True)
class Opening:
    """Names of modules to open.

    Attributes:
        asked: opened because the user asked for it.
        for_cuts: opened because a cut lies inside.
        tried: opened for balance; they stay whole if they cannot be recorded call by call.
        whole: tried, but could not be recorded call by call.
    """

    asked: frozenset[str] = frozenset()
    for_cuts: frozenset[str] = frozenset()
    tried: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        return self.asked | self.for_cuts | self.tried

    def without(self, names: Collection[str]) -> Opening:
        """The same, but with these tried modules left whole."""
        return replace(self, tried=self.tried - set(names), whole=self.whole | (self.tried & set(names)))

    def around(self, scope: str) -> str:
        """The outermost module that was tried and is, or encloses, the one named `scope`; empty if there is none."""
        return min((name for name in self.tried if f"{scope}.".startswith(f"{name}.")), key=len, default="")

    def cut_inside(self, scope: str) -> str:
        """The same for modules that are opened because a cut lies inside."""
        return min((name for name in self.for_cuts if f"{scope}.".startswith(f"{name}.")), key=len, default="")

    def refusal(self, name: str, why: str) -> str:
        """The message for a module with a cut inside that cannot be opened."""
        return (
            f"cuts: one lies inside {name!r}, which then has to be recorded call by call, but {why}. Or cut at {name!r}"
        )

    def refuse_draw(self, scope: str, source_line: str) -> None:
        """Refuses, or leaves whole, a module that was opened unasked and draws random numbers in its own forward."""
        if name := self.around(scope):
            raise Learned(stays=name)
        if name := self.cut_inside(scope):
            raise PartitionError(
                f"cuts: one lies inside {name!r}, which draws random numbers in its own forward at {source_line}: "
                f"opened, it would draw others than as a whole. Cut at {name!r} instead, or pass opens=[{name!r}] for "
                "any number of stages"
            )


NOTHING = Opening()
