"""Data parallelism: several pipelines hold the same model, and each trains on its own part of the batch.

A stage's gradients are averaged over the replicas, in buckets, as soon as its last backward is done, while other stages
still run. Losses are weighted over the whole batch, so replicas may have batches of different sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock._base.errors import ArgumentError
from penstock._base.gradients import BUCKET_BYTES
from penstock.distributed.failure import OUTSIDE, Position, Watched
from penstock.distributed.groups import Groups
from penstock.distributed.world import World
from penstock.runtime.front_end import Stage
from penstock.runtime.gradients.dtensors import mesh_dimensions
from penstock.runtime.gradients.sums import GradientSum
from penstock.runtime.transport.distributed import all_reduce, broadcast_from
from penstock.runtime.transport.protocol import Pending
from penstock.runtime.transport.staging import Staging

SHARED = -1
"""Used instead of a stage index: the parameters that several stages hold, averaged once their own sum is complete."""


class Replicas:
    """One process's view of the processes that hold the same stages and train on other data.

    Attributes:
        active: whether steps average; if not, `.grad` is this replica's own until the next step that does.
        behind: whether the last step did not average.
    """

    def __init__(self, world: World, groups: Groups, staging: Staging | None = None) -> None:
        self.active = True
        self._groups = groups
        self._staging = staging
        self._count = len(world.replicas)
        self._divided = world.divided
        numbers = (world.everyone.index(rank) for rank in world.replicas)
        self.others = tuple(number for number in numbers if number != world.number)
        self.behind = False
        self._unaveraged: dict[int, nn.Parameter] = {}

    def averages(self, stages: Iterable[Stage], tied: Iterable[nn.Parameter]) -> dict[int, GradientSum]:
        """Return the averages of the gradients of this process's stages, by stage.

        Args:
            tied: parameters that other ranks of the pipeline hold too.
        """
        local_stages = list(stages)
        holders = Counter(id(p) for stage in local_stages for p in stage.parameters.values())
        shared = {id(p) for p in tied} | {key for key, count in holders.items() if count > 1}
        trained = {
            stage.meta.index: [p for p in stage.parameters.values() if p.requires_grad and not self._is_sharded(p)]
            for stage in local_stages
        }
        by_stage = {stage: [p for p in group if id(p) not in shared] for stage, group in trained.items()}
        by_stage[SHARED] = list({id(p): p for group in trained.values() for p in group if id(p) in shared}.values())
        return {stage: self._average(group, stage) for stage, group in by_stage.items()}

    def _average(self, parameters: Sequence[nn.Parameter], stage: int) -> GradientSum:
        position = Position(f"{'' if stage == SHARED else stage}REDUCE_GRAD", self.others)

        def reduce(tensors: Sequence[Tensor]) -> Pending:
            return all_reduce(tensors, self._groups["replicas"])  # a group that is kept would outlive the pipeline

        start = reduce if self._staging is None else self._staging.around(reduce)
        return GradientSum(parameters, start, position, divisor=self._count, bucket_bytes=BUCKET_BYTES)

    def _is_sharded(self, parameter: Tensor) -> bool:
        """Whether `fully_shard` itself averages the parameter's gradient."""
        return bool(set(self._divided) & set(mesh_dimensions(parameter)))

    def begin_step(self, averages: Mapping[int, GradientSum]) -> None:
        """Called before a step. Gradients not yet averaged stay in `.grad`, to be averaged with the step's own."""
        for average in averages.values() if self.active else ():
            average.begin_step(set_aside=not self.behind)

    def end_step(self, averages: Mapping[int, GradientSum], buffers: Sequence[Tensor], watched: Watched) -> None:
        """Called after a step: waits for the averages, and gives every replica the first one's `buffers`, like DDP."""
        self.behind = not self.active
        trained = {id(parameter): parameter for average in averages.values() for parameter in average.parameters}
        if self.active:
            averages[SHARED].start()
            for average in averages.values():
                watched.position = average.position
                average.end_step()
            if unaveraged := [parameter for key, parameter in self._unaveraged.items() if key not in trained]:
                self._average_late(unaveraged, watched)
            self._unaveraged.clear()
        else:
            self._unaveraged.update(trained)
        watched.position = Position("buffers", self.others)
        copy_from_first(buffers, self._groups["replicas"], self._staging)

    def _average_late(self, parameters: Sequence[nn.Parameter], watched: Watched) -> None:
        """Average gradients left by steps that did not average, for parameters that this step does not train.

        They were frozen since then, as layers are in turn, or this kind of batch does not use them.
        """
        average = self._average(parameters, SHARED)
        watched.position = average.position
        average.begin_step(set_aside=False)
        average.start()
        average.end_step()

    def mean(self, weight: float, *, training: bool, settings: int, watched: Watched) -> float:
        """Return the mean of a weight over the replicas. Every replica calls it before every step.

        Args:
            settings: a number that stands for everything else that must be the same, small enough for exact sums.

        Raises:
            ArgumentError: another replica does something else, so they would wait for each other in vain.
        """
        local_values = [float(training), float(training and self.active), float(settings)]
        values = torch.tensor([weight, *local_values], dtype=torch.float64)
        watched.position = Position("the weights of the batch", self.others)
        dist.all_reduce(values, group=self._groups["weights"])
        watched.position = OUTSIDE
        total, *sums = values.tolist()
        for value, sum_of_all, problem in zip(local_values, sums, _MISMATCHES, strict=True):
            if value * self._count != sum_of_all:
                raise ArgumentError(
                    f"the replicas do not take the same step: {problem}; all replicas must make the same calls, as "
                    "often as each other, and set train(), eval(), requires_grad_() and autocast alike"
                )
        return float(total) / self._count


_MISMATCHES = (
    "some train, others evaluate",
    "some are within no_sync(), others are not",
    "they differ in modes, requires_grad flags or autocast",
)


def copy_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup, staging: Staging | None) -> None:
    """Give every process of the group the first one's values, in place."""
    broadcast = partial(broadcast_from, (0,), group=group)
    copy = broadcast if staging is None else staging.around(broadcast)
    with torch.no_grad():
        for tensor in tensors:
            values = tensor.detach().contiguous()
            copy([values]).wait()
            if not tensor.is_contiguous():
                tensor.copy_(values)
