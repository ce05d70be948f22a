"""What a feature is made from: a program's binding, and the stage in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.runtime.exact.streams import Streams
from penstock.runtime.features.feature import Feature
from penstock.runtime.features.per_stage import Recompute
from penstock.runtime.front_end import Partition, Stage
from penstock.runtime.loss.loss import Loss, LossHead
from penstock.schedule import Action, Op, Schedule

if TYPE_CHECKING:
    from penstock.runtime.features.deferred_norm import DeferredNorms
    from penstock.runtime.features.frame import Sharded  # which imports torch's FSDP


@dataclass(frozen=True, slots=True)
class Binding:
    """What a bound schedule is bound from: partitions, a schedule, and what the user chose about how stages run.

    Attributes:
        partitions: of each microbatch; they differ in shapes only.
        schedule: communication included.
        training: backward runs as well.
        recompute: of each stage of one copy of the model, in training.
        offload: likewise: what backward needs goes to the host's memory meanwhile.
        norms: batch norms whose statistics are deferred, in training.
        sharded: the stages that `fully_shard` was applied to.
        compile: arguments of `torch.compile` for each stage; None: stages run as they are.
        check_finite: raise where a value, the loss or a gradient is NaN or Inf.
    """

    partitions: Sequence[Partition]
    schedule: Schedule
    loss: Loss | None
    training: bool
    recompute: Sequence[Recompute] = ("never",)
    offload: Sequence[bool] = (False,)
    norms: DeferredNorms | None = None
    sharded: Mapping[int, Sharded] = field(default_factory=dict)
    compile: Mapping[str, Any] | None = None
    check_finite: bool = False


@dataclass(frozen=True, slots=True)
class StageContext:
    """One stage of one rank's program.

    Attributes:
        rank: by the number that messages call it.
        stages: as each microbatch runs it, with the code that features before have given it.
        head: what follows the last stage; None on others.
        streams: random streams, if anything draws.
        made: the features that come before.
    """

    binding: Binding
    rank: int
    index: int
    stages: Sequence[Stage]
    row: Sequence[Action]
    device: torch.device
    head: LossHead | None
    streams: Streams | None
    made: tuple[Feature, ...] = ()

    @property
    def stage(self) -> Stage:
        """The stage of the first microbatch."""
        return self.stages[0]

    @property
    def partition(self) -> Partition:
        """The partition of the first microbatch."""
        return self.binding.partitions[0]

    @property
    def recorded(self) -> Stage:
        """The stage of the first microbatch with the code that was recorded."""
        return self.partition.stages[self.index]

    @property
    def training(self) -> bool:
        """Whether backward runs as well."""
        return self.binding.training

    @property
    def copies(self) -> bool:
        """Whether the schedule runs several copies of the stage."""
        return self.binding.schedule.placement.pipelines > 1

    @property
    def recompute(self) -> Recompute:
        """The user's choice for this stage; copies of it do alike."""
        return self.binding.recompute[self.index % len(self.binding.recompute)]

    @property
    def offload(self) -> bool:
        """Likewise."""
        return self.binding.offload[self.index % len(self.binding.offload)]

    @property
    def sharded(self) -> Sharded | None:
        """What `fully_shard` was applied to in this stage, if it was."""
        return self.binding.sharded.get(self.index)

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Those that the stage's forward uses, as they are now: sharded ones change with every gathering."""
        return self.recorded.parameters if self.sharded is None else self.sharded.parameters()

    def held(self) -> tuple[Tensor, ...]:
        """What lives on the stage now and stays there: parameters and buffers."""
        return (*self.parameters().values(), *self.recorded.buffers.values())

    def microbatches(self, *ops: Op) -> list[int]:
        """The microbatches of this stage's actions of some kinds, in the row's order."""
        own = (action for action in self.row if action.stage == self.index and action.op in ops)
        return [action.microbatch for action in own if action.microbatch is not None]

    def in_order(self, *ops: Op) -> bool:
        """Whether these actions come in ascending order of microbatch, as on one device."""
        numbers = self.microbatches(*ops)
        return numbers == sorted(numbers)
