"""What a feature is made from: a program's binding, and the stage in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock._base.errors import PartitionError
from penstock.runtime.exact.streams import Streams
from penstock.runtime.features.feature import Feature
from penstock.runtime.front_end import Partition, Stage
from penstock.runtime.kinds import Kinds, any_use, distinct
from penstock.runtime.loss.loss import Loss, LossHead
from penstock.schedule import Action, Op, Schedule

if TYPE_CHECKING:
    from penstock.runtime.features.deferred_norm import DeferredNorms
    from penstock.runtime.features.frame import Sharded  # which imports torch's FSDP


@dataclass(frozen=True, slots=True)
class Binding:
    """What a bound schedule is made from: partitions, a schedule, and the user's choices about how stages run.

    Attributes:
        partitions: one per microbatch.
        schedule: includes communication.
        training: whether backward runs too.
        recompute: one choice per stage of one copy of the model, for training.
        offload: the same for offload: whether what backward needs waits in the host's memory.
        norms: batch norms whose statistics are deferred, in training.
        sharded: the stages that `fully_shard` was applied to.
        compile: arguments of `torch.compile` for each stage; None: stages run uncompiled.
        check_finite: in training, raise if a value, the loss or a gradient is NaN or Inf.
        features: makes the user's own features, for evaluation too.
        kinds: the kinds of microbatches among the partitions.
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
    features: Sequence[MakeFeature] = ()
    kinds: Kinds = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", Kinds.among(self.partitions))


@dataclass(frozen=True, slots=True)
class StageContext:
    """One stage of one rank's program.

    Attributes:
        binding: what the program is made from: all stages, the schedule, and the user's choices.
        number: the rank's, in messages.
        index: the stage's, over all ranks; a second copy of the model counts on.
        stages: the stage as each microbatch runs it, with any code that earlier features gave it.
        row: the actions of the stage's rank, in order.
        device: where the stage computes.
        head: what follows the last stage; None on other stages.
        streams: random streams, if anything draws.
        made: the features made earlier.
        recorded: the stage with everything that any microbatch uses there, and the first one's recorded code.
    """

    binding: Binding
    number: int
    index: int
    stages: Sequence[Stage]
    row: Sequence[Action]
    device: torch.device
    head: LossHead | None
    streams: Streams | None
    made: tuple[Feature, ...] = ()
    recorded: Stage = field(init=False)

    def __post_init__(self) -> None:
        recorded = any_use([partition.stages[self.index] for partition in self.binding.partitions])
        object.__setattr__(self, "recorded", recorded)

    @property
    def stage(self) -> Stage:
        """The same, with the code that earlier features gave it."""
        return any_use(self.stages)

    def modules(self) -> list[nn.Module]:
        """Every module in the stage's code, for any microbatch."""
        return list(dict.fromkeys(module for each in distinct(self.stages) for module in each.module.modules()))

    def draw_offsets(self, microbatch: int) -> Mapping[str, int]:
        """How often each drawing module is called on earlier stages, for a microbatch."""
        return self.binding.partitions[microbatch].draw_offsets[self.index]

    @property
    def training(self) -> bool:
        """Whether backward runs too."""
        return self.binding.training

    @property
    def copies(self) -> bool:
        """Whether the schedule runs several copies of the stage."""
        return self.binding.schedule.placement.pipelines > 1

    @property
    def recompute(self) -> Recompute:
        """The user's choice of recomputation for this stage, which its copies share."""
        return self.binding.recompute[self.index % len(self.binding.recompute)]

    @property
    def offload(self) -> bool:
        """The user's choice of offload for this stage, which its copies share."""
        return self.binding.offload[self.index % len(self.binding.offload)]

    @property
    def sharded(self) -> Sharded | None:
        """The parts of this stage that `fully_shard` was applied to, if any."""
        return self.binding.sharded.get(self.index)

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters that the stage's forward uses now. Sharded ones are new after each gathering."""
        return self.recorded.parameters if self.sharded is None else self.sharded.parameters()

    def held(self) -> tuple[Tensor, ...]:
        """The parameters and buffers that live on the stage now and stay there."""
        return (*self.parameters().values(), *self.recorded.buffers.values())

    def microbatches(self, *ops: Op) -> list[int]:
        """The microbatches of this stage's actions of some kinds, in the row's order."""
        own = (action for action in self.row if action.stage == self.index and action.op in ops)
        return [action.microbatch for action in own if action.microbatch is not None]

    def in_order(self, *ops: Op) -> bool:
        """Whether these actions come in ascending order of microbatch, as on one device."""
        numbers = self.microbatches(*ops)
        return numbers == sorted(numbers)


def check_forward_order(stage: StageContext) -> None:
    """Raises PartitionError if a user's own schedule runs forwards out of order on a stage that keeps something from
    one to the next, as batch norm does. `model/copies.py` checks schedules with two copies of a stage.

    The statistics of deferred batch norms are merged in order at the end of the step.
    """
    if stage.copies or stage.in_order(Op.F):
        return
    one, norms = stage.stage, stage.binding.norms
    deferred = {id(buffer) for buffer in norms.buffers()} if norms else set()
    updated = [repr(name) for name in one.meta.updated if id(one.buffers.get(name)) not in deferred]
    for carried in (*updated, *(each.text for each in one.remembered)):
        raise PartitionError(
            f"the forward of stage {stage.index} carries {carried} over from one microbatch to the next, but this "
            f"schedule runs its forwards in the order {', '.join(map(str, stage.microbatches(Op.F)))}; take one that "
            "runs them in order of microbatch (1f1b, gpipe), or defer batch norm (deferred_batch_norm=True)"
        )


MakeFeature = Callable[[StageContext], Feature | None]
"""Makes a feature for a stage; None if the stage does not use it."""

Recompute = str | int | MakeFeature
"""Which forwards of a stage run again in backward, so that their results need not be kept.

"always": the whole stage, for every microbatch; only the stage's inputs are kept. "except_last": the same, except for
the last microbatch that the stage runs. A number n: for every microbatch, the stage's layers 0, n, 2n, ..., each just
before its own backward; only those layers' inputs are kept, and everything that the other layers compute. A layer is a
module with parameters that the stage's code calls as a whole. A function: a kind of your own, which makes a
`RecomputedStage` (or another feature with `keep`) for a stage, or None; see docs/extending.md.
"""
