"""What a stage's runner is put together from: its forward for each microbatch, what its backward does beside, and what
is done around each of its computations. All choices of the user about how stages run meet here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.errors import ArgumentError
from penstock.partition import RUNS_AGAIN, Partition, Stage
from penstock.runtime.backward_counts import BackwardCounts
from penstock.runtime.backward_updates import BackwardUpdates
from penstock.runtime.compiled import OwnGradients, any_compiled, forward_of
from penstock.runtime.deferred_norm import DeferredNorms
from penstock.runtime.finite import FiniteStage
from penstock.runtime.forward_state import ForwardState
from penstock.runtime.in_flight import Overwritten, refuse_in_flight
from penstock.runtime.keeping import Keeping
from penstock.runtime.loss import LossHead
from penstock.runtime.offload import Offload
from penstock.runtime.recompute import Keeper, microbatches_to_recompute, overwritten
from penstock.runtime.recomputed_layers import with_recomputed_layers
from penstock.runtime.repeated_updates import RepeatedUpdates
from penstock.runtime.split_backward import SplitBackward
from penstock.runtime.stage import Extras
from penstock.schedule import Action, Op

if TYPE_CHECKING:
    from penstock.runtime.frame import Sharded  # which imports torch's FSDP

Around = Callable[[Action], AbstractContextManager[None]]
"""What is done around each computation of a stage."""

Forward = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Choices:
    """How the stages of a program run.

    Attributes:
        keepings: of each stage, in training; copies of a stage do as it does.
        norms: batch norms whose statistics are deferred.
        sharded: the stages that `fully_shard` was applied to.
        compile: arguments of `torch.compile` for each stage; None: stages run as they are.
        check_finite: raise where a value, the loss or a gradient is NaN or Inf.
    """

    keepings: Sequence[Keeping] = ()
    norms: DeferredNorms | None = None
    sharded: Mapping[int, Sharded] = field(default_factory=dict)
    compile: Mapping[str, Any] | None = None
    check_finite: bool = False

    def of_evaluation(self) -> Choices:
        """Those that are left where there is no backward."""
        return replace(self, keepings=(), norms=None, check_finite=False)


@dataclass(frozen=True, slots=True)
class Parts:
    """What one stage's runner is made of."""

    functions: Sequence[Forward]
    split: SplitBackward | None
    extras: Extras
    arounds: Sequence[Around]
    finite: FiniteStage | None


def assemble(
    rank: int,
    partitions: Sequence[Partition],
    index: int,
    row: Sequence[Action],
    device: torch.device,
    choices: Choices,
    head: LossHead | None,
    *,
    training: bool,
    copies: bool = False,
) -> Parts:
    """The parts of stage `index`, as the rank that messages call `rank` runs it by its row of actions.

    Args:
        partitions: of each microbatch.
        head: what follows the last stage; None on others.
        copies: whether the schedule runs several copies of the stage.

    Raises:
        ArgumentError: two choices cannot go together.
    """
    stages = [partition.stages[index] for partition in partitions]
    stage = stages[0]
    keeping = choices.keepings[index % len(choices.keepings)] if choices.keepings else Keeping()
    sharded = choices.sharded.get(index)
    _refuse(stage, keeping, choices)
    if training:
        refuse_in_flight(stage, row)
    if keeping.every is not None:
        stages = _with_layers_again(stages, keeping.every)
    arounds: list[Around] = []
    finite = None
    if training and stage.overwritten:
        again = microbatches_to_recompute(keeping.recompute, row, stage.meta.index)
        arounds.append(Overwritten(stage, row, again))
    if training and (choices.compile is not None or any_compiled(stage.module.modules())):
        arounds.append(OwnGradients(stage.parameters.values()))
    if training and choices.check_finite:
        finite = FiniteStage(rank, partitions[0], index, head)
        arounds.append(finite)
    runs: list[Forward] = []
    for each in stages:
        run = forward_of(each.module, choices.compile) if finite is None else finite.watching(each.module)
        runs.append(run if each.frame is None else partial(each.frame, run))
    return Parts(
        runs,
        _split(stage, row, device, sharded, can_wait=not keeping.offload),
        _extras(stages, partitions[0], row, device, keeping, choices, sharded, copies=copies) if training else Extras(),
        arounds,
        finite,
    )


def _refuse(stage: Stage, keeping: Keeping, choices: Choices) -> None:
    if keeping.offload and any(isinstance(part, nn.RReLU) and part.training for part in stage.module.modules()):
        raise ArgumentError(
            "offload: torch hands what nn.RReLU saves for backward over before it has drawn it, so that other numbers "
            f"would come back; choose offload={{{stage.meta.index}: False}}, or another activation"
        )
    if choices.compile is not None and keeping.every is not None:
        raise ArgumentError(
            f"recompute={keeping.every} runs layers again within the stage's code, whose surroundings torch's compiler "
            f"loses; with compile= choose recompute={{{stage.meta.index}: 'always'}}, or 'except_last'"
        )
    if choices.compile is not None and stage.frame is not None:
        raise ArgumentError(
            "compile= compiles each stage as a whole, hooks of parallelize= and all, which torch's compiler does not "
            "follow; compile the blocks within parallelize instead: block.compile() after fully_shard(block)"
        )


def _with_layers_again(stages: Sequence[Stage], every: int) -> list[Stage]:
    """The stages with layers that run again in backward; one for all that are recorded alike."""
    again = {id(stage): replace(stage, module=with_recomputed_layers(stage, every)) for stage in stages}
    for stage in again.values():
        if stage.frame is not None:
            stage.frame.adopt(stage)
    return [again[id(stage)] for stage in stages]


def _extras(
    stages: Sequence[Stage],
    partition: Partition,
    row: Sequence[Action],
    device: torch.device,
    keeping: Keeping,
    choices: Choices,
    sharded: Sharded | None,
    *,
    copies: bool,
) -> Extras:
    """What the stage does beside its forward and backward."""
    stage = stages[0]
    metas = [each.meta for each in partition.stages]

    def held() -> tuple[Tensor, ...]:
        parameters = stage.parameters if sharded is None else sharded.parameters()
        return (*parameters.values(), *stage.buffers.values())

    offload = Offload(device, held) if keeping.offload else None
    again = microbatches_to_recompute(keeping.recompute, row, stage.meta.index)
    keeper = Keeper(stages, overwritten(stage.meta, metas), offload) if again else None
    last = None if sharded is None else _last_backward(row, stage.meta.index)
    forward_state = repeated = None
    compiled = choices.compile is not None or any_compiled(stage.module.modules())
    if choices.compile is None:
        modules = [module for each in stages for module in each.module.modules()]
        forward_state = ForwardState(modules, stage.traces)
        if stage.meta.updated and choices.norms is None:  # which see to these updates too
            updated = {n: stage.buffers[n] for n in stage.meta.updated if n in stage.buffers}
            looks = not compiled and sharded is None
            repeated = RepeatedUpdates(modules, updated, _checkpointed(stage), looks=looks)
    updates = BackwardUpdates(stage, copies=copies, is_compiled=compiled) if choices.norms is None else None
    counts = BackwardCounts(stage.meta.index, stage.module.modules()) if copies else None
    return Extras(keeper, again, offload, choices.norms, sharded, last, forward_state, repeated, updates, counts)


def _checkpointed(stage: Stage) -> list[nn.Module]:
    """The modules that checkpointing around them would run again; as often as they are called there."""
    calls = [node for node in stage.module.graph.nodes if node.op == "call_module" and node.meta.get(RUNS_AGAIN)]
    return [module for node in calls for module in stage.module.get_submodule(str(node.target)).modules()]


def _last_backward(row: Sequence[Action], stage: int) -> int | None:
    """The microbatch of a stage's last backward; None if it has none."""
    found = [action.microbatch for action in row if action.stage == stage and action.op in (Op.B, Op.I)]
    return found[-1] if found else None


def _split(
    stage: Stage, row: Sequence[Action], device: torch.device, sharded: Sharded | None, *, can_wait: bool
) -> SplitBackward | None:
    """What runs the backwards that the row splits, if it splits any of this stage."""

    def microbatches(*ops: Op) -> list[int]:
        own = (action for action in row if action.stage == stage.meta.index and action.op in ops)
        return [action.microbatch for action in own if action.microbatch is not None]

    split = microbatches(Op.I)
    if not split:
        return None
    orders = (microbatches(Op.F), microbatches(Op.B, Op.I))
    in_order = all(order == sorted(order) for order in orders)
    parameters = (lambda: stage.parameters) if sharded is None else sharded.parameters
    return SplitBackward(parameters, stage.module, device, split, in_order=in_order, can_wait=can_wait)
