"""Records the stages and microbatches of schedules of `torch.distributed.pipelining`."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from penstock.verification.blame.watch import Watch, get_watch

_STAGES = "_penstock_stages"
"""An attribute of a schedule that trains."""
_WORK = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


class Schedules:
    """Makes schedules that are created from now on report their stages and microbatches to a `Watch`."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._microbatch: int | None = None
        self._offset = 0
        for kind in (PipelineScheduleSingle, PipelineScheduleMulti):
            self._wrap_schedule(kind)

    def _wrap_schedule(self, kind: Any) -> None:
        init, step, evaluate, watch = kind.__init__, kind.step, kind.eval, self._watch
        signature = inspect.signature(init)

        @wraps(init)
        def init_schedule(schedule: Any, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(schedule, *args, **kwargs)
            stages = bound.arguments.get("stages") or [bound.arguments["stage"]]
            if bound.arguments.get("loss_fn") is not None:
                vars(schedule)[_STAGES] = stages
                watch.finds_roots, watch.is_scheduled = False, True
                watch.microbatch = lambda: self._microbatch
                for stage in stages:
                    self._wrap_stage(stage)
            init(*bound.args, **bound.kwargs)

        @wraps(step)
        def step_schedule(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            stages = vars(schedule).get(_STAGES)
            if stages is None or watch.paused or not torch.is_grad_enabled():
                return watch.without_recording(step, schedule, *args, **kwargs)
            for stage in stages:  # runs before the first microbatch only find shapes
                watch.track(stage.submod, stage.stage_index)
            watch.enter_step()
            self._offset = max((root.record.count for root in watch.roots.values()), default=0)
            result = step(schedule, *args, **kwargs)
            for root in watch.roots.values():
                root.record.grads |= root.gradients()
            return result

        kind.__init__, kind.step = init_schedule, step_schedule
        kind.eval = wraps(evaluate)(lambda *args, **kwargs: watch.without_recording(evaluate, *args, **kwargs))

    def _wrap_stage(self, stage: Any) -> None:
        for name in _WORK:
            work = getattr(stage, name)

            @wraps(work)
            def call_work(microbatch: int, *args: Any, work: Any = work, name: str = name, **kwargs: Any) -> Any:
                if self._watch.paused:
                    return work(microbatch, *args, **kwargs)
                if name == _WORK[0]:
                    self._microbatch = self._offset + microbatch
                elif root := self._watch.roots.get(id(stage.submod)):
                    root.trace.begin(self._offset + microbatch, stage.stage_index, backward=True)
                try:
                    return work(microbatch, *args, **kwargs)
                finally:
                    self._microbatch = None

            setattr(stage, name, call_work)


def begin() -> None:
    """Begin to record. Each Python process of a job that `penstock blame` starts calls this first."""
    if (watch := get_watch()) is not None:
        Schedules(watch)
