"""Merges data-parallel replicas of a pipeline into one pipeline, which has the microbatches of all.

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
from penstock.verification.blame.names import Part, RecordedJob, digest
from penstock.verification.blame.watch import Step
from penstock.verification.comparison import compare

_AFTER = "weights after the step differ, as if their optimizers had other options or states"


def merge_replicas(job: RecordedJob, model: nn.Module) -> tuple[RecordedJob, Finding | None]:
    """Merge all replicas of each part into one, if there are any; also return whether they begin with other weights.

    Stages that were all drawn from one seed look like replicas, but their parameters are not too many for one model.
    """
    count = sum(value.numel() for part in job.parts for value in part.parameters.values())
    replicas = count // max(1, sum(p.numel() for p in model.parameters() if p.requires_grad))
    if replicas < 2:
        return job, None
    ranks = {rank: [part for part in job.parts if part.rank == rank] for rank in sorted(job.files)}
    alike: dict[Any, list[list[Part]]] = defaultdict(list)
    for rank_parts in ranks.values():
        alike[tuple((p.steps[0].stage, *map(digest, p.parameters.values())) for p in rank_parts)].append(rank_parts)
    if {*map(len, alike.values())} == {replicas}:
        parts = [_merge_parts(group) for groups in alike.values() for group in zip(*groups, strict=True)]
        return RecordedJob(parts, job.steps, {part.rank: job.files[part.rank] for part in parts}), None
    shapes: dict[Any, list[int]] = defaultdict(list)
    for rank, rank_parts in ranks.items():
        shapes[tuple((name, value.shape) for p in rank_parts for name, value in p.parameters.items())].append(rank)
    if any(len(group) % replicas for group in shapes.values()):
        return job, None
    text = f"ranks hold {replicas} replicas of the model, but these begin with different weights"
    return job, Finding("replicas", text, "0F", rank=max(shapes.values(), key=len)[-1])


def compare_replicas(part: Part, step: int) -> Finding | None:
    """Find values that ranks of several replicas should have in common, but do not."""
    first = part.steps[step]
    for replica, second in ((replica, replica.steps[step]) for replica in part.replicas):
        for first_values, replica_values, text, action in (
            (first.grads, second.grads, "gradients differ, as if they were not averaged over replicas", "gradients"),
            (first.after, second.after, _AFTER, "update"),
        ):
            for name in (name for name in part.parameters if name in first_values and name in replica_values):
                row = compare("gradient", name, (), replica_values[name], first_values[name], exact=False)
                if not row.ok:
                    subject = f"ranks {part.rank} and {replica.rank} hold replicas of {part.tensors.get(name, name)!r}"
                    return part.make_finding("replicas", f"{subject}, but their {text}", action, row)
    return None


def _merge_parts(parts: Sequence[Part]) -> Part:
    first, *replicas = parts
    steps = [_merge_steps(records) for records in zip(*(part.steps for part in parts), strict=True)]
    return Part(first.rank, first.index, steps, replicas=replicas)


def _merge_steps(steps: Sequence[Step]) -> Step:
    """Merge one step of all replicas. Batch norm's statistics are each replica's own, so are left out."""
    first, offset = steps[0], 0
    merged = replace(first, values={}, random={}, overwritten=[])
    for record in steps:
        merged.values |= {p._replace(microbatch=p.microbatch + offset): value for p, value in record.values.items()}
        merged.random |= {(name, call, k + offset): state for (name, call, k), state in record.random.items()}
        merged.overwritten += [k + offset for k in record.overwritten]
        offset += record.count
    unchanged = {name for name, value in first.before.items() if value.equal(first.after[name])}
    after = {name: value for name, value in first.after.items() if name in first.trained or name in unchanged}
    return replace(merged, count=offset, after=after)
