"""Defines features: what a stage does besides its forward and backward, in hooks that determine when. And what a
feature is made from: the binding of a schedule, and the stage in it.

A feature overrides the hooks that it needs and leaves the others alone. If several features have the same hook, the
first in the order of `registry.py` is the outermost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, fx, nn

from penstock._base.compat_compiler import compiled
from penstock._base.errors import ArgumentError, PartitionError
from penstock.runtime.exact.rules import NOTHING as NOTHING
from penstock.runtime.exact.rules import Keeper
from penstock.runtime.exact.streams import Streams
from penstock.runtime.front_end import Partition, Stage
from penstock.runtime.gradients.sharding import ShardedStage
from penstock.runtime.loss.functions import Loss
from penstock.runtime.loss.loss import LossHead
from penstock.runtime.microbatch_kinds import MicrobatchKinds, distinct, merge_kinds
from penstock.schedule import Action, Op, Schedule

Forward = Callable[..., Sequence[Tensor]]
"""A stage's forward: takes its inputs, and returns the values that leave it."""

Context = AbstractContextManager[Any]

T = TypeVar("T")


class Start(NamedTuple):
    """What features learn about a step before it begins.

    Attributes:
        reduces: whether gradients are summed over the processes that share a stage in this step.
        loss_scale: what gradients are multiplied by.
    """

    reduces: bool = True
    loss_scale: float = 1.0


def recorded_code(stage: Stage, option: str) -> fx.GraphModule:
    """Return the code of a recorded stage.

    Raises:
        ArgumentError: the stage is ready-made, so what it calls is unknown.
    """
    if isinstance(stage.module, fx.GraphModule):
        return stage.module
    raise ArgumentError(
        f"{option} works on the recorded calls of a stage, and stage {stage.meta.index} is a ready-made "
        f"{type(stage.module).__name__}; leave it out, or let penstock.pipeline split the model"
    )


class Rerun(Protocol):
    """What it takes to run a forward again in backward, kept instead of its graph."""

    def args(self) -> list[Any]:
        """Return the forward's arguments as they were.

        Raises:
            RuntimeError: one was updated in place since.
        """

    def as_before(self) -> Context:
        """Wrap the second run: give the stage the state that the first run found, and restore it afterwards."""


class Feature:
    """A feature's hooks. Contexts may raise before or after the work that they wrap. All hooks of one kind are called
    before the first of their contexts is entered.
    """

    def rewrite(self, stages: Sequence[Stage]) -> Sequence[Stage]:
        """Replace a stage's code before anything else looks at it. It takes and returns one stage per microbatch; they
        differ in shapes, and those of different kinds in everything but what `merge_kinds` joins."""
        return stages

    def forward_of(self, run: Forward, stage: Stage) -> Forward:
        """Return the function that runs the stage's code instead of `run`."""
        return run

    def applies(self, hook: str, at: int | Action) -> bool:
        """Whether a hook is called for a microbatch, or an action: asked once, when the stage's actions are bound."""
        return True

    def begin_step(self, start: Start) -> None:
        """Called before a step's first action. Drops anything left by a step that raised."""

    def around(self, action: Action) -> Context:
        """Wrap each computation: a forward, a backward, or a part of one."""
        return NOTHING

    def upcoming(self, action: Action) -> None:
        """Called as the rank's computation before one of this stage's begins, on whatever stage that is."""

    def past(self, action: Action) -> None:
        """Called when the rank's computation after one of this stage's has ended, on whatever stage that is."""

    def keep(self, microbatch: int, args: Sequence[Any]) -> Rerun | None:
        """Called before a forward. Return how to run it again in backward if it should; its graph is then dropped."""
        return None

    def forward(self, microbatch: int, *, runs_again: bool) -> Context:
        """Wrap the first run of a forward. `runs_again`: whether backward starts from a later run of it."""
        return NOTHING

    def code(self, microbatch: int) -> Context:
        """Wrap every run of the stage's code."""
        return NOTHING

    def backward(self, microbatch: int) -> Context:
        """Wrap a full backward, or the part that gives input gradients, including a forward that runs again."""
        return NOTHING

    def again(self, microbatch: int) -> Context:
        """Wrap a forward that runs again."""
        return NOTHING

    def autograd(self, microbatch: int) -> Context:
        """Wrap autograd's own part of a backward."""
        return NOTHING

    def weights(self, microbatch: int) -> Context:
        """Wrap the weight gradients that a split backward put off."""
        return NOTHING


HOOKS = tuple(name for name in vars(Feature) if name != "applies" and not name.startswith("_"))


def overrides_a_hook(feature: Feature) -> bool:
    """Whether a feature does anything."""
    return any(_has(feature, hook) for hook in HOOKS)


def calls(features: Iterable[Feature], hook: str, at: int | Action, **options: bool) -> list[Callable[..., Any]]:
    """Return a hook of the features that have it, for one microbatch or action, the outermost first."""
    having = (feature for feature in features if _has(feature, hook) and feature.applies(hook, at))
    return [partial(getattr(feature, hook), at, **options) for feature in having]


def contexts(features: Iterable[Feature], hook: str, at: int | Action, **options: bool) -> Callable[[], Context] | None:
    """Make what a hook wraps one action in, each time that it runs; None if no feature has the hook."""
    makers = calls(features, hook, at, **options)
    if len(makers) < 2:
        return makers[0] if makers else None

    def nested() -> Context:
        entered = [context for make in makers if (context := make()) is not NOTHING]
        if len(entered) < 2:
            return entered[0] if entered else NOTHING
        return _enter_all(entered)

    return nested


@contextmanager
def _enter_all(entered: Sequence[Context]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in entered:
            stack.enter_context(context)
        yield


def within(enter: Callable[[], Context] | None, work: Callable[..., T]) -> Callable[..., T]:
    """`work`, run in a context that `enter` makes; `work` itself if there is none."""
    if enter is None:
        return work

    def wrapped(*args: Any) -> T:
        with enter():
            return work(*args)

    return wrapped


def _has(feature: Feature, hook: str) -> bool:
    return getattr(type(feature), hook) is not getattr(Feature, hook)


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
        deferred: the `id` of each buffer whose update so waits for the end of the step.
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
    norms: Feature | None = None
    deferred: Set[int] = frozenset()
    sharded: Mapping[int, ShardedStage] = field(default_factory=dict)
    compile: Mapping[str, Any] | None = None
    check_finite: bool = False
    features: Sequence[MakeFeature] = ()
    kinds: MicrobatchKinds = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", MicrobatchKinds.from_partitions(self.partitions))


@dataclass(frozen=True, slots=True)
class StageContext:
    """One stage of a schedule that is being bound, on its rank.

    Attributes:
        binding: what the bound schedule is made from: all stages, the schedule, and the user's choices.
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
        recorded = merge_kinds([partition.stages[self.index] for partition in self.binding.partitions])
        object.__setattr__(self, "recorded", recorded)

    @property
    def stage(self) -> Stage:
        """The same, with the code that earlier features gave it."""
        return merge_kinds(self.stages)

    @property
    def keeper(self) -> Keeper | None:
        """The feature made earlier that keeps what a forward saves, if one does."""
        return next((feature for feature in self.made if isinstance(feature, Keeper)), None)

    @property
    def is_compiled(self) -> bool:
        """Whether anything in the stage is compiled."""
        return self.binding.compile is not None or any(map(compiled, self.modules()))

    def modules(self) -> list[nn.Module]:
        """Return every module in the stage's code, for any microbatch."""
        return list(dict.fromkeys(module for stage in distinct(self.stages) for module in stage.module.modules()))

    def draw_offsets(self, microbatch: int) -> Mapping[str, int]:
        """Return how often each drawing module is called on earlier stages, for a microbatch."""
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
    def sharded(self) -> ShardedStage | None:
        """The parts of this stage that `fully_shard` was applied to, if any."""
        return self.binding.sharded.get(self.index)

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters that the stage's forward uses now. Sharded ones are new after each gathering."""
        return self.recorded.parameters if self.sharded is None else self.sharded.parameters()

    def held(self) -> tuple[Tensor, ...]:
        """Return the parameters and buffers that live on the stage now and stay there."""
        return (*self.parameters().values(), *self.recorded.buffers.values())

    def microbatches(self, *ops: Op) -> list[int]:
        """Return the microbatches of this stage's actions of some kinds, in the row's order."""
        actions = (action for action in self.row if action.stage == self.index and action.op in ops)
        return [action.microbatch for action in actions if action.microbatch is not None]

    def in_order(self, *ops: Op) -> bool:
        """Whether these actions come in ascending order of microbatch, as on one device."""
        numbers = self.microbatches(*ops)
        return numbers == sorted(numbers)


def check_forward_order(stage: StageContext) -> None:
    """Raise PartitionError if a user's own schedule runs forwards out of order on a stage that keeps something from one
    to the next, as batch norm does. `microbatch_kinds.py` checks schedules with two copies of a stage.

    The statistics of deferred batch norms are merged in order at the end of the step.
    """
    if stage.copies or stage.in_order(Op.F):
        return
    merged, deferred = stage.stage, stage.binding.deferred
    updated = [repr(name) for name in merged.meta.updated if id(merged.buffers.get(name)) not in deferred]
    for carried in (*updated, *(item.text for item in merged.remembered)):
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
