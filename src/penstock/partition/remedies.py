"""Tries what may help when a forward cannot be recorded, before a message suggests it, and says what is left to split.

The module around an obstacle is run as a whole and the model recorded again until nothing else is in the way, so that
one message lists all obstacles.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from torch import nn

from penstock._base.words import counted
from penstock.partition.cut.balance import candidates
from penstock.partition.recording.recording import Recording
from penstock.partition.source import ELSEWHERE, OUTSIDE, Obstacle
from penstock.partition.units.units import has_forward

TRIALS = 12
"""The most times that a model is re-recorded."""

SECONDS = 30.0
"""No new trial starts after this long."""

LISTED = 8
"""The most leaves that a message lists by name."""

Record = Callable[[Sequence[str], Mapping[str, Any]], Recording]
"""Records with these leaves and keyword arguments."""


def explained(
    error: Obstacle, record: Record, model: nn.Module, leaves: Sequence[str], kwargs: Any, stages: int
) -> str:
    """Explain an obstacle: everything that is in the way, and what was found to help."""
    trials, until = count(1), time.monotonic() + SECONDS
    found, whole, recording, failure, scope = [error], list(leaves), None, "", error.scope

    def may_try() -> bool:
        return next(trials) <= TRIALS and time.monotonic() < until

    while scope and recording is None and may_try():
        wanted = _with(model, whole, scope)
        try:
            recording, whole = record(wanted, kwargs), wanted
            continue
        except Obstacle as obstacle:
            if obstacle.scope not in wanted:  # a new obstacle
                found.append(obstacle)
                whole, scope = wanted, obstacle.scope
                continue
            failure = str(obstacle)
        except Exception as other:  # anything the model raises when it runs for real
            failure = f"leaf_modules={wanted!r} does not help: {other}"
        scope = scope.rpartition(".")[0]
        while scope and not has_forward(model.get_submodule(scope)):
            scope = scope.rpartition(".")[0]
    why = list(dict.fromkeys(obstacle.why for obstacle in found))
    text = why[0]
    if len(why) > 1:
        text = f"{len(why)} things are in the way: " + "; ".join(f"({n}) {one}" for n, one in enumerate(why, 1))
    remedies = []
    if recording is not None:
        it = "it runs as a whole" if len(found) == 1 else "they run as wholes"
        given = _listed(whole, model)
        left, helps = _left(recording, model, whole, stages)
        failure = f"leaf_modules={given}, which leaves nothing to split: {left}"
        if helps:
            remedies.append(f"Pass leaf_modules={given}, so that {it} (tried: {left})")
    if error.otherwise:
        remedies.append(error.otherwise)
    if len(found) == 1 and "labels" in kwargs and may_try():
        with suppress(Exception):  # including errors that the model raises without labels
            record(leaves, {name: value for name, value in kwargs.items() if name != "labels"})
            remedies.append("leave out labels and pass loss_fn=... (tried)")
    if not remedies:
        failed = f" Tried: {failure.rstrip('.')}." if failure else ""
        helped = (
            f" With leaf_modules={_listed(whole, model)} the last one remains." if len(found) > 1 and not scope else ""
        )
        return f"{text}.{failed}{helped} {OUTSIDE if found[-1].scope else ELSEWHERE}"
    first, *others = remedies
    return f"{text}. {', or '.join([first[:1].upper() + first[1:], *others])}"


def _with(model: nn.Module, leaves: Sequence[str], scope: str) -> list[str]:
    """Return the leaves plus this one; if it is the second of its class in the way, plus all modules of that class that
    hold none of the two, as containers do."""
    kind, new = type(model.get_submodule(scope)), [scope]
    if alike := [leaf for leaf in leaves if type(model.get_submodule(leaf)) is kind]:
        around = {"", *(leaf[:end] for leaf in (*alike, scope) for end in range(len(leaf)) if leaf[end] == ".")}
        new = [n for n, m in model.named_modules() if type(m) is kind and n not in around]
    every = dict.fromkeys((*leaves, *new))
    return [n for n in every if not any(n.startswith(f"{other}.") for other in every)]


def _left(recording: Recording, model: nn.Module, leaves: Sequence[str], stages: int) -> tuple[str, bool]:
    """Describe what is left to spread over stages, and return whether it is more than a tenth of the work."""
    pieces = candidates(recording, model, "flops")
    whole = sum(piece.weight for piece in pieces) or 1
    if len(pieces) < stages:
        are = "is" if len(pieces) == 1 else "are"
        return f"only {counted(len(pieces), 'module')} {are} left to share among {counted(stages, 'stage')}", True
    largest = max(pieces, key=lambda piece: piece.weight)
    share = f"{largest.weight / whole:.0%} of the work"
    if largest.name in leaves:
        return f"{largest.name!r} is {share}, all of it on one stage", largest.weight < 0.9 * whole
    return f"the largest piece is then {largest.name!r}, with {share}", True


def _listed(leaves: Sequence[str], model: nn.Module) -> str:
    kinds = {type(model.get_submodule(leaf)) for leaf in leaves}
    if len(leaves) <= LISTED or len(kinds) > 1:
        return repr(list(leaves))
    return f"[n for n, m in model.named_modules() if type(m).__name__ == {kinds.pop().__name__!r}]"
