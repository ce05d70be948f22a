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

from penstock._base.formatting import pluralize
from penstock.partition.cut.candidates import candidates
from penstock.partition.obstacles import ELSEWHERE, OUTSIDE, Obstacle
from penstock.partition.recording import Recording
from penstock.partition.units import has_forward

MAX_TRIALS = 12
"""The most times that a model is re-recorded."""

MAX_SECONDS = 30.0
"""No new trial starts after this long."""

MAX_LISTED = 8
"""The most leaves that a message lists by name."""

Record = Callable[[Sequence[str], Mapping[str, Any]], Recording]
"""Records with these leaves and keyword arguments."""


def explain_obstacle(
    error: Obstacle, record: Record, model: nn.Module, leaves: Sequence[str], kwargs: Any, stages: int
) -> str:
    """Explain an obstacle: everything that is in the way, and what was found to help."""
    trials, deadline = count(1), time.monotonic() + MAX_SECONDS
    obstacles, names, recording, failure, scope = [error], list(leaves), None, "", error.scope

    def may_try() -> bool:
        return next(trials) <= MAX_TRIALS and time.monotonic() < deadline

    while scope and recording is None and may_try():
        trial_leaves = _add_leaf(model, names, scope)
        try:
            recording, names = record(trial_leaves, kwargs), trial_leaves
            continue
        except Obstacle as obstacle:
            if obstacle.scope not in trial_leaves:  # a new obstacle
                obstacles.append(obstacle)
                names, scope = trial_leaves, obstacle.scope
                continue
            failure = str(obstacle)
        except Exception as failed_run:  # anything the model raises when it runs for real
            failure = f"leaf_modules={trial_leaves!r} does not help: {failed_run}"
        scope = scope.rpartition(".")[0]
        while scope and not has_forward(model.get_submodule(scope)):
            scope = scope.rpartition(".")[0]
    reasons = list(dict.fromkeys(obstacle.reason for obstacle in obstacles))
    text = reasons[0]
    if len(reasons) > 1:
        text = f"{len(reasons)} things are in the way: " + "; ".join(f"({n}) {r}" for n, r in enumerate(reasons, 1))
    remedies = []
    if recording is not None:
        subject = "it runs as a whole" if len(obstacles) == 1 else "they run as wholes"
        leaf_text = _listing(names, model)
        summary, helps = _describe_remaining(recording, model, names, stages)
        failure = f"leaf_modules={leaf_text}, which leaves nothing to split: {summary}"
        if helps:
            remedies.append(f"Pass leaf_modules={leaf_text}, so that {subject} (tried: {summary})")
    if error.alternative:
        remedies.append(error.alternative)
    if len(obstacles) == 1 and "labels" in kwargs and may_try():
        with suppress(Exception):  # including errors that the model raises without labels
            record(leaves, {name: value for name, value in kwargs.items() if name != "labels"})
            remedies.append("leave out labels and pass loss_fn=... (tried)")
    if not remedies:
        trial_note = f" Tried: {failure.rstrip('.')}." if failure else ""
        progress_note = (
            f" With leaf_modules={_listing(names, model)} the last one remains."
            if len(obstacles) > 1 and not scope
            else ""
        )
        return f"{text}.{trial_note}{progress_note} {OUTSIDE if obstacles[-1].scope else ELSEWHERE}"
    first, *remaining = remedies
    return f"{text}. {', or '.join([first[:1].upper() + first[1:], *remaining])}"


def _add_leaf(model: nn.Module, leaves: Sequence[str], scope: str) -> list[str]:
    """Return the leaves plus this one; if it is the second of its class in the way, plus all modules of that class that
    hold none of the two, as containers do."""
    kind, new = type(model.get_submodule(scope)), [scope]
    if peers := [leaf for leaf in leaves if type(model.get_submodule(leaf)) is kind]:
        parents = {"", *(leaf[:end] for leaf in (*peers, scope) for end in range(len(leaf)) if leaf[end] == ".")}
        new = [n for n, m in model.named_modules() if type(m) is kind and n not in parents]
    all_leaves = dict.fromkeys((*leaves, *new))
    return [n for n in all_leaves if not any(n.startswith(f"{outer}.") for outer in all_leaves)]


def _describe_remaining(recording: Recording, model: nn.Module, leaves: Sequence[str], stages: int) -> tuple[str, bool]:
    """Describe what is left to spread over stages, and return whether it is more than a tenth of the work."""
    pieces = candidates(recording, model, "flops")
    total = sum(piece.weight for piece in pieces) or 1
    if len(pieces) < stages:
        verb = "is" if len(pieces) == 1 else "are"
        return f"only {pluralize(len(pieces), 'module')} {verb} left to share among {pluralize(stages, 'stage')}", True
    largest = max(pieces, key=lambda piece: piece.weight)
    share = f"{largest.weight / total:.0%} of the work"
    if largest.name in leaves:
        return f"{largest.name!r} is {share}, all of it on one stage", largest.weight < 0.9 * total
    return f"the largest piece is then {largest.name!r}, with {share}", True


def _listing(leaves: Sequence[str], model: nn.Module) -> str:
    kinds = {type(model.get_submodule(leaf)) for leaf in leaves}
    if len(leaves) <= MAX_LISTED or len(kinds) > 1:
        return repr(list(leaves))
    return f"[n for n, m in model.named_modules() if type(m).__name__ == {kinds.pop().__name__!r}]"
