"""Finds the stages and microbatches of `torch.distributed.pipelining`, whose schedules call stages by number."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from penstock.blame.watch import Watch

_WORK = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
_FIRST = "_penstock_stages"
"""An attribute of a schedule: its stages, if it trains."""


class Schedules:
    """What their stages do, for a `Watch`."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._microbatch: int | None = None
        self._offset = 0

    def find(self) -> None:
        """Watches all schedules that are made from now on."""
        for kind in (PipelineScheduleSingle, PipelineScheduleMulti):
            self._wrap(kind)

    def _wrap(self, kind: Any) -> None:
        init, step, evaluate = kind.__init__, kind.step, kind.eval
        signature = inspect.signature(init)

        @wraps(init)
        def made(schedule: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(schedule, *args, **kwargs)
            stages, loss = given.arguments.get("stages") or [given.arguments["stage"]], given.arguments.get("loss_fn")
            if loss is not None:
                vars(schedule)[_FIRST] = stages
                self._watch.finds_roots, self._watch.is_scheduled = False, True
                self._watch.microbatch = lambda: self._microbatch
                for stage in stages:
                    self._number(stage)
            init(*given.args, **given.kwargs)

        @wraps(step)
        def stepped(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            stages = vars(schedule).get(_FIRST)
            if stages is None or self._watch.paused or not torch.is_grad_enabled():
                with self._paused():
                    return step(schedule, *args, **kwargs)
            self._begin(stages)
            found = step(schedule, *args, **kwargs)
            for root in self._watch.roots.values():
                root.keep_gradients()
            return found

        @wraps(evaluate)
        def evaluated(*args: Any, **kwargs: Any) -> Any:
            with self._paused():
                return evaluate(*args, **kwargs)

        kind.__init__, kind.step, kind.eval = made, stepped, evaluated

    def _begin(self, stages: Sequence[Any]) -> None:
        """A batch begins. What stages run before they are given a microbatch is to find out shapes."""
        for stage in stages:
            self._watch.root(stage.submod, stage.stage_index)
        self._watch.enter_step()
        self._offset = max((root.count for root in self._watch.roots.values()), default=0)

    def _number(self, stage: Any) -> None:
        for name in _WORK:
            work = getattr(stage, name)

            @wraps(work)
            def numbered(microbatch: int, *args: Any, work: Any = work, name: str = name, **kwargs: Any) -> Any:
                if self._watch.paused:
                    return work(microbatch, *args, **kwargs)
                if name == _WORK[0]:
                    self._microbatch = self._offset + microbatch
                elif root := self._watch.roots.get(id(stage.submod)):
                    root.trail.begin(self._offset + microbatch, stage.stage_index, backward=True)
                try:
                    return work(microbatch, *args, **kwargs)
                finally:
                    self._microbatch = None

            setattr(stage, name, numbered)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        before, self._watch.paused = self._watch.paused, True
        try:
            yield
        finally:
            self._watch.paused = before
