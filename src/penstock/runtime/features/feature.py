"""Defines features: what a stage does besides its forward and backward, in hooks that determine when.

A feature overrides the hooks that it needs and leaves the others alone. If several features have the same hook, the
first in the order of `registry.py` is the outermost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import reduce
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from torch import Tensor, fx

from penstock._base.errors import ArgumentError
from penstock.runtime.front_end import Stage
from penstock.schedule import Action

Forward = Callable[..., Sequence[Tensor]]
"""A stage's forward: takes its inputs, and returns the values that leave it."""

Context = AbstractContextManager[Any]

T = TypeVar("T")


class _Nothing:
    """`nullcontext` without calls of Python: it enters and leaves by functions in C, which do nothing here."""

    __enter__ = [].clear
    __exit__ = "".format  # takes any arguments, and returns an empty text, so that exceptions pass


NOTHING: Context = cast(Context, _Nothing())
"""For a feature that has nothing to do; may be entered any number of times."""


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


HOOKS = tuple(name for name in vars(Feature) if not name.startswith("_"))


def overrides_a_hook(feature: Feature) -> bool:
    """Whether a feature does anything."""
    return any(_has(feature, hook) for hook in HOOKS)


class Features:
    """The features of one stage. Each hook calls the features that have it."""

    def __init__(self, features: Sequence[Feature] = ()) -> None:
        self._features = tuple(features)
        self.around = self._hook("around")
        self.forward = self._hook("forward")
        self.code = self._hook("code")
        self.backward = self._hook("backward")
        self.again = self._hook("again")
        self.autograd = self._hook("autograd")
        self.weights = self._hook("weights")
        self.upcoming = [feature.upcoming for feature in self._features if _has(feature, "upcoming")]
        self.past = [feature.past for feature in self._features if _has(feature, "past")]
        self._keeping = [feature.keep for feature in self._features if _has(feature, "keep")]
        self.keeps = bool(self._keeping)
        """Whether any feature may have a forward run again."""

    def __iter__(self) -> Iterator[Feature]:
        """The features, the outermost first."""
        return iter(self._features)

    def begin_step(self, start: Start) -> None:
        """Called before a step's first action."""
        for feature in self._features:
            feature.begin_step(start)

    def keep(self, microbatch: int, args: Sequence[Any]) -> Rerun | None:
        """How to run a forward again in backward, if any feature asks for it."""
        for keep in self._keeping:
            rerun = keep(microbatch, args)
            if rerun is not None:
                return rerun
        return None

    def _hook(self, name: str) -> Callable[..., Context]:
        hooks = [getattr(feature, name) for feature in self._features if _has(feature, name)]
        if not hooks:
            return _nothing
        return hooks[0] if len(hooks) == 1 else _nested(hooks)


class _Both:
    """Two contexts, the second within the first. (An `ExitStack` takes longer than most features do.)"""

    __slots__ = ("_inner", "_outer")

    def __init__(self, inner: Context, outer: Context) -> None:
        self._inner, self._outer = inner, outer

    def __enter__(self) -> None:
        self._outer.__enter__()
        try:
            self._inner.__enter__()
        except BaseException:
            if not self._outer.__exit__(*sys.exc_info()):
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        try:
            if self._inner.__exit__(kind, error, trace):
                kind = error = trace = None
        except BaseException:
            if self._outer.__exit__(*sys.exc_info()):
                return True
            raise
        return self._outer.__exit__(kind, error, trace) or error is None  # the inner one has dealt with it


def _nested(hooks: Sequence[Callable[..., Context]]) -> Callable[..., Context]:
    def nested(*args: Any, **kwargs: Any) -> Context:
        contexts = [context for hook in hooks if (context := hook(*args, **kwargs)) is not NOTHING]
        return reduce(_Both, reversed(contexts)) if contexts else NOTHING

    return nested


def within(hook: Callable[..., Context], work: Callable[..., T]) -> Callable[..., T]:
    """`work`, run in what a hook of `Features` returns for its first argument; `work` itself if no feature has it."""
    if hook is _nothing:
        return work

    def wrapped(first: Any, *rest: Any) -> T:
        with hook(first):
            return work(first, *rest)

    return wrapped


def _has(feature: Feature, hook: str) -> bool:
    return getattr(type(feature), hook) is not getattr(Feature, hook)


def _nothing(*_args: Any, **_kwargs: Any) -> Context:
    return NOTHING
