"""The kinds of microbatches in one batch: those of one kind differ in shapes only, and cross the cuts alike.

Real batches are uneven: of padded sequences, one microbatch may happen to need no mask, and the model's forward takes
another branch for it. Each kind has a partition of its own, with the same cuts, and its own routes. What lives on a
stage, and what the stage does besides its code, is the same for all kinds (`merge_kinds`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from penstock._base.errors import PartitionError
from penstock._base.stages import StageMeta, shift_stage, traffic_key
from penstock.partition.state.block_state import refuse_copies
from penstock.runtime.front_end import Partition, Stage

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MicrobatchKinds:
    """The kinds of a batch's microbatches.

    Attributes:
        metas: for each kind, all stages as its first microbatch goes through them.
        by_microbatch: each microbatch's kind.
    """

    metas: tuple[tuple[StageMeta, ...], ...]
    by_microbatch: tuple[int, ...]

    @classmethod
    def from_partitions(cls, partitions: Sequence[Partition]) -> MicrobatchKinds:
        """Find the kinds of some microbatches, from the partition of each."""
        numbers: dict[Hashable, int] = {}
        metas: list[tuple[StageMeta, ...]] = []
        by_partition: dict[int, int] = {}
        for partition in distinct(partitions):
            stages = tuple(stage.meta for stage in partition.stages)
            number = by_partition[id(partition)] = numbers.setdefault(traffic_key(stages), len(numbers))
            if number == len(metas):
                metas.append(stages)
        return cls(tuple(metas), tuple(by_partition[id(partition)] for partition in partitions))


def distinct(items: Iterable[T]) -> list[T]:
    """Return the objects without duplicates."""
    return list({id(item): item for item in items}.values())


def merge_stages(partitions: Sequence[Partition]) -> tuple[Stage, ...]:
    """Return all stages, each as `merge_kinds` merges it."""
    return tuple(map(merge_kinds, zip(*(partition.stages for partition in distinct(partitions)), strict=True)))


def merge_kinds(stages: Sequence[Stage]) -> Stage:
    """Merge a stage's kinds: return it with everything that any microbatch uses there. Its code, inputs and outputs are
    the first one's.

    Replaces only what differs: what is the same for all stages of another front end need not be a field of them.
    """
    variants = distinct(stages)
    first = variants[0]
    if len(variants) == 1:
        return first
    metas = [stage.meta for stage in variants]
    meta = replace(
        first.meta,
        parameters=_union(meta.parameters for meta in metas),
        buffers=_union(meta.buffers for meta in metas),
        updated=_union(meta.updated for meta in metas),
        trainable=any(meta.trainable for meta in metas),
        branches=any(meta.branches for meta in metas),
    )
    changes: dict[str, Any] = {}
    for name in ("parameters", "buffers"):
        changes[name] = {key: tensor for stage in variants for key, tensor in getattr(stage, name).items()}
    for name in ("may_update", "reads", "remembered"):
        changes[name] = _union(getattr(stage, name) for stage in variants)
    changes = {name: joined for name, joined in changes.items() if set(joined) != set(getattr(first, name))}
    if any(stage.depends_on_values for stage in variants) and not first.depends_on_values:
        changes["depends_on_values"] = True
    if meta != first.meta:
        changes["meta"] = meta
    return replace(first, **changes) if changes else first


def _union(groups: Iterable[Iterable[Any]]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(entry for group in groups for entry in group))


def with_copies(partition: Partition, pipelines: int) -> Partition:
    """The partition with its stages repeated for each pipeline of a bidirectional schedule, numbered consecutively.

    The stages of a copy run the same code on the same parameters. If one rank holds a stage's copy and another its
    original, the two are tied like any parameter that several stages hold.

    Raises:
        PartitionError: the forward updates a buffer, for which each copy would see only part of the batch.
    """
    if pipelines == 1:
        return partition
    stages = partition.stages
    for stage in stages:
        if stage.meta.updated:
            raise PartitionError(
                f"the forward updates {stage.meta.updated[0]!r} of stage {stage.meta.index}, but this schedule runs "
                f"{pipelines} copies of the stage, each of which would see only part of the batch; use a schedule "
                "with one copy (dualpipe-v for dualpipe), or keep the buffer fixed (a batch norm in eval mode)"
            )
        refuse_copies(stage.meta.index, stage.remembered, pipelines)
    copied = [
        replace(stage, meta=shift_stage(stage.meta, copy * len(stages)))
        for copy in range(pipelines)
        for stage in stages
    ]
    return replace(partition, stages=tuple(copied), draw_offsets=partition.draw_offsets * pipelines)
