"""Data-parallel replicas of a pipeline as one pipeline, whose microbatches are those of all.

Microbatches of the second replica are numbered on from the first's, and so on. What ranks of several replicas hold in
common, gradients and weights after a step, has to be alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from penstock.verification.blame.finding import Finding
from penstock.verification.blame.names import Noted, Part, digest
from penstock.verification.blame.watch import Step
from penstock.verification.comparison import compare

_AFTER = "weights after the step differ, as if their optimizers had other options or states"


def merged(noted: Noted, model: nn.Module) -> tuple[Noted, Finding | None]:
    """Merge all replicas of each part into one, if there are any; also return whether they begin with other weights.

    Stages that were all drawn from one seed look like replicas, but their parameters are not too many for one model.
    """
    count = sum(value.numel() for part in noted.parts for value in part.parameters.values())
    replicas = count // max(1, sum(p.numel() for p in model.parameters() if p.requires_grad))
    if replicas < 2:
        return noted, None
    ranks = {rank: [part for part in noted.parts if part.rank == rank] for rank in sorted(noted.files)}
    alike: dict[Any, list[list[Part]]] = defaultdict(list)
    for own in ranks.values():
        alike[tuple((p.steps[0].stage, *map(digest, p.parameters.values())) for p in own)].append(own)
    if {*map(len, alike.values())} == {replicas}:
        parts = [_joined(same) for groups in alike.values() for same in zip(*groups, strict=True)]
        return Noted(parts, noted.steps, {part.rank: noted.files[part.rank] for part in parts}), None
    shapes: dict[Any, list[int]] = defaultdict(list)
    for rank, own in ranks.items():
        shapes[tuple((name, value.shape) for p in own for name, value in p.parameters.items())].append(rank)
    if any(len(same) % replicas for same in shapes.values()):
        return noted, None
    text = f"ranks hold {replicas} replicas of the model, but these begin with different weights"
    return noted, Finding("replicas", text, "0F", rank=max(shapes.values(), key=len)[-1])


def apart(part: Part, step: int) -> Finding | None:
    """Find what ranks of several replicas should have in common, and have not."""
    first = part.steps[step]
    for other, own in ((other, other.steps[step]) for other in part.replicas):
        for mine, theirs, text, action in (
            (first.grads, own.grads, "gradients differ, as if they were not averaged over replicas", "gradients"),
            (first.after, own.after, _AFTER, "update"),
        ):
            for name in (name for name in part.parameters if name in mine and name in theirs):
                row = compare("gradient", name, (), theirs[name], mine[name], exact=False)
                if not row.ok:
                    who = f"ranks {part.rank} and {other.rank} hold replicas of {part.tensors.get(name, name)!r}"
                    return part.found("replicas", f"{who}, but their {text}", action, row)
    return None


def _joined(parts: Sequence[Part]) -> Part:
    first, *others = parts
    steps = [_step(own) for own in zip(*(part.steps for part in parts), strict=True)]
    return Part(first.rank, first.index, steps, replicas=others)


def _step(steps: Sequence[Step]) -> Step:
    """Merge one step of all replicas. Batch norm's statistics are each replica's own, so are left out."""
    first, count = steps[0], 0
    found = replace(first, values={}, random={}, overwritten=[])
    for own in steps:
        found.values |= {p._replace(microbatch=p.microbatch + count): value for p, value in own.values.items()}
        found.random |= {(name, call, k + count): state for (name, call, k), state in own.random.items()}
        found.overwritten += [k + count for k in own.overwritten]
        count += own.count
    fixed = {name for name, value in first.before.items() if value.equal(first.after[name])}
    after = {name: value for name, value in first.after.items() if name in first.trained or name in fixed}
    return replace(found, count=count, after=after)
