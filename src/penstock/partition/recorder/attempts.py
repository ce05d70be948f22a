"""Records a model's forward, in as many attempts as it takes.

An attempt may show that a module must be opened or stay whole, or that a function must be one call. The next attempt
starts from that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from penstock._base.errors import PartitionError
from penstock.partition.obstacle import Obstacle
from penstock.partition.recorder.attempt import record_path
from penstock.partition.recorder.branches import with_branches
from penstock.partition.recorder.recorder import Attempt
from penstock.partition.recording.recording import Recording
from penstock.partition.state.left_behind import EVERY
from penstock.partition.units.units import NO_GRAIN, NOTHING, Grain, Learned, Opening, find_units


def record(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    leaves: Sequence[str] = (),
    grain: Grain = NO_GRAIN,
    opening: Opening = NOTHING,
) -> Recording:
    """Records `model(*args, **kwargs)`. Parameters on `meta` are taken to be on the first input's device.

    `leaves`, `grain` and `opening`: see `find_units`. The recording's `grain` and `opening` add what the attempts
    showed.

    Raises PartitionError, with the line of the user's code, for anything that a stage could not replay.
    """
    reason, taught = "", False  # reason: why modules were opened, for messages
    without: Grain | None = None  # to go back to if opening more modules does not help
    while True:
        units = find_units(model, leaves, grain, opening.names)
        way = partial(record_path, Attempt(model, args, kwargs, units, opening, grain))
        try:
            found = way({})
            if found.asks and any(entry.is_carried for entry in found.left):
                grain, without, reason = replace(without or grain, shut=grain.shut | {EVERY}), None, ""
                continue  # a randomly skipped module leaves no value to carry
            return replace(with_branches(found, way) if found.asks else found, opening=opening)
        except Learned as learned:
            if learned.stays is not None:
                opening = opening.without(_alike(model, learned.stays, opening.tried))
            elif learned.more.functions:
                grain = _regrouped(grain, learned, leaves)
            elif opening.names == opening.asked:
                if not learned.needed:
                    without = replace(without or grain, shut=grain.shut | learned.more.opened)
                try:
                    reason, grain = learned.refusal, _regrouped(grain, learned, leaves)
                except PartitionError:
                    if without is None:
                        raise
                    grain, without, reason = without, None, ""
            elif not taught:  # the grain must not depend on where the model is cut
                grain, taught = record(model, args, kwargs, leaves, grain, Opening(opening.asked)).grain, True
            elif opening.tried:
                opening = opening.without(opening.tried)
            else:
                raise PartitionError(opening.refusal(sorted(opening.for_cuts)[0], learned.refusal)) from None
        except Exception as error:
            if without is not None:
                grain, without, reason = without, None, ""
            elif not reason or not isinstance(error, PartitionError):
                raise
            elif isinstance(error, Obstacle):
                raise error.because(reason) from error
            else:
                raise PartitionError(f"{reason}. Recording it call by call does not help: {error}") from error


def _regrouped(grain: Grain, learned: Learned, leaves: Sequence[str]) -> Grain:
    """The grain with what was learned. Raises PartitionError if that is nothing new, or the opposite of what is known
    or the user asked for."""
    found = grain | learned.more
    if kept := sorted(learned.more.opened & {*leaves}):
        raise PartitionError(
            f"{learned.refusal}; or leave {kept} out of leaves, so that it can be recorded call by call"
        )
    if found == grain or found.opened & found.whole:
        raise PartitionError(f"{learned.refusal}{_NOT_ENOUGH if learned.more.whole else ''}")
    return found


_NOT_ENOUGH = (
    ", which is not enough. Name the module whose forward this call is part of (one that calls torch.func, say) in "
    "leaves=[...], so that it runs as a whole; if it is the model itself, give this part a module of its own"
)


def _alike(model: nn.Module, name: str, tried: Collection[str]) -> Collection[str]:
    """The tried modules that will not work either: those of the named module's class, or all if none is named."""
    return [n for n in tried if not name or type(model.get_submodule(n)) is type(model.get_submodule(name))]
