"""Defines features: what a stage does besides its forward and backward, in hooks that determine when.

A feature overrides the hooks that it needs and leaves the others alone. If several features have the same hook, the
first in the order of `registry.py` is the outermost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor, fx

from penstock._base.errors import ArgumentError
from penstock.runtime.exact.rules import NOTHING as NOTHING
from penstock.runtime.front_end import Stage
from penstock.schedule import Action

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
    """The code of a recorded stage.

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
        """The forward's arguments as they were.

        Raises:
            RuntimeError: one was updated in place since.
        """

    def as_before(self) -> Context:
        """Wraps the second run: gives the stage the state that the first run found, and restores it afterwards."""


class Feature:
    """A feature's hooks. Contexts may raise before or after the work that they wrap. All hooks of one kind are called
    before the first of their contexts is entered.
    """

    def rewrite(self, stages: Sequence[Stage]) -> Sequence[Stage]:
        """Replaces a stage's code before anything else looks at it. Takes and returns one stage per microbatch; they
        differ in shapes, and those of different kinds in everything but what `any_use` joins.
        """
        return stages

    def forward_of(self, run: Forward, stage: Stage) -> Forward:
        """The function that runs the stage's code instead of `run`."""
        return run

    def applies(self, hook: str, at: int | Action) -> bool:
        """Whether a hook is called for a microbatch, or an action: asked once, when the stage's actions are bound."""
        return True

    def begin_step(self, start: Start) -> None:
        """Called before a step's first action. Drops anything left by a step that raised."""

    def around(self, action: Action) -> Context:
        """Wraps each computation: a forward, a backward, or a part of one."""
        return NOTHING

    def upcoming(self, action: Action) -> None:
        """Called as the rank's computation before one of this stage's begins, on whatever stage that is."""

    def past(self, action: Action) -> None:
        """Called when the rank's computation after one of this stage's has ended, on whatever stage that is."""

    def keep(self, microbatch: int, args: Sequence[Any]) -> Rerun | None:
        """Called before a forward. Returns how to run it again in backward if it should; its graph is then dropped."""
        return None

    def forward(self, microbatch: int, *, runs_again: bool) -> Context:
        """Wraps the first run of a forward. `runs_again`: whether backward starts from a later run of it."""
        return NOTHING

    def code(self, microbatch: int) -> Context:
        """Wraps every run of the stage's code."""
        return NOTHING

    def backward(self, microbatch: int) -> Context:
        """Wraps a full backward, or the part that gives input gradients, including a forward that runs again."""
        return NOTHING

    def again(self, microbatch: int) -> Context:
        """Wraps a forward that runs again."""
        return NOTHING

    def autograd(self, microbatch: int) -> Context:
        """Wraps autograd's own part of a backward."""
        return NOTHING

    def weights(self, microbatch: int) -> Context:
        """Wraps the weight gradients that a split backward put off."""
        return NOTHING


HOOKS = tuple(name for name in vars(Feature) if name != "applies" and not name.startswith("_"))


def overrides_a_hook(feature: Feature) -> bool:
    """Whether a feature does anything."""
    return any(_has(feature, hook) for hook in HOOKS)


def calls(features: Iterable[Feature], hook: str, at: int | Action, **options: bool) -> list[Callable[..., Any]]:
    """A hook of the features that have it, for one microbatch or action, the outermost first."""
    having = (feature for feature in features if _has(feature, hook) and feature.applies(hook, at))
    return [partial(getattr(feature, hook), at, **options) for feature in having]


def contexts(features: Iterable[Feature], hook: str, at: int | Action, **options: bool) -> Callable[[], Context] | None:
    """Makes what a hook wraps one action in, each time that it runs; None if no feature has the hook."""
    made = calls(features, hook, at, **options)
    if len(made) < 2:
        return made[0] if made else None

    def nested() -> Context:
        entered = [context for make in made if (context := make()) is not NOTHING]
        if len(entered) < 2:
            return entered[0] if entered else NOTHING
        return _all(entered)

    return nested


@contextmanager
def _all(entered: Sequence[Context]) -> Iterator[None]:
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
