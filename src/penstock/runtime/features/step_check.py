"""Refuses what a backward does besides its gradients, and what would follow the schedule, by two looks per step.

- Optimizer steps in hooks on parameters, as torchtune and GaLore take them: plain training would run the next forward
  with the new values.
- Updates of buffers that forwards take or update, as an average does in a checkpoint: in plain training each backward
  directly follows its forward.
- Random numbers, as hooks that add noise to gradients draw them (arXiv:1511.06807): in backward the drawing module is
  unknown.

A sum over microbatches in a buffer that no forward takes is fine, since backwards run in order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from itertools import groupby
from types import TracebackType

import torch
from torch import Tensor, nn

from penstock._base.compat import device_generator
from penstock._base.errors import PartitionError
from penstock.runtime.features.feature import NOTHING, Context, Feature, StageContext, Start
from penstock.runtime.gradients.dtensors import is_distributed
from penstock.schedule import Action, Op


class StepCheck(Feature):
    """Looks around the first and the last backward of a step, at what changes only in them. (A context of its own.)"""

    @classmethod
    def of(cls, stage: StageContext) -> StepCheck | None:
        """Build the feature in training."""
        return cls(stage) if stage.training else None

    def __init__(self, stage: StageContext) -> None:
        merged, deferred = stage.stage, stage.binding.deferred
        updated = {*merged.meta.updated, *merged.may_update}
        checked: dict[str, Tensor] = {name: p for name, p in merged.parameters.items() if not is_distributed(p)}
        checked |= {
            name: buffer
            for name, buffer in merged.buffers.items()
            if (stage.copies or name in merged.reads or name in updated) and id(buffer) not in deferred
        }
        if not stage.copies and _alternates(stage):
            checked = {}
        self._index, self._copies, self._checked = stage.index, stage.copies, checked
        self._steady = {name: tensor for name, tensor in checked.items() if name not in updated}
        self._generators = tuple(dict.fromkeys([torch.default_generator, device_generator(stage.device)]))
        backwards = [
            (a.op is Op.W, a.microbatch) for a in stage.row if a.stage == stage.index and a.op in (Op.B, Op.I, Op.W)
        ]
        reached = any(i.meta.requires_grad for microbatch_stage in stage.stages for i in microbatch_stage.meta.inputs)
        # Where no input takes a gradient, layer drop may leave a microbatch without a backward: the first may be any.
        self._checked_backwards = {*backwards[:1], *backwards[-1:]} if reached else {*backwards}
        self._last = len(self._checked_backwards)
        self._done = 0
        self._before: dict[str, int] = {}
        self._states: list[tuple[int, bytes]] = []

    def begin_step(self, start: Start) -> None:
        """Note the versions of what nothing may update until the last backward has ended."""
        self._done, self._before = 0, _versions(self._steady)

    def applies(self, hook: str, at: int | Action) -> bool:
        """Whether the hook applies: to the first and the last of the stage's backwards, or to all, if those may not
        come."""
        return (hook == "weights", at) in self._checked_backwards

    def autograd(self, microbatch: int) -> Context:
        """Wrap autograd's backward."""
        self._done += 1
        return self if self._done in (1, self._last) else NOTHING

    def weights(self, microbatch: int) -> Context:
        """Wrap the work that a split backward put off."""
        return self.autograd(microbatch)

    def __enter__(self) -> None:
        if self._done == 1:
            self._before |= _versions(self._checked)
        self._states = [_rng_state(generator) for generator in self._generators]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raise PartitionError also where autograd finds by itself that its tensors have changed."""
        if kind is not None and not (isinstance(error, RuntimeError) and "inplace operation" in str(error)):
            return
        for name, tensor in (self._checked if self._done == 1 else self._steady).items():
            if tensor._version != self._before[name]:
                raise self._refusal(name, tensor) from error
        for (seed, state), (seed_now, state_now) in zip(self._states, map(_rng_state, self._generators), strict=True):
            if seed_now == seed and state_now != state:  # what runs again restores or seeds the generators
                raise PartitionError(
                    f"the backward of stage {self._index} draws random numbers (in a hook on a gradient, or in the "
                    "backward of an autograd function): they would depend on the order of the schedule, and differ "
                    "from those of one device. Draw them in the forward, and keep them for backward "
                    "(ctx.save_for_backward). If another thread draws meanwhile, give it a torch.Generator of its own"
                )

    def _refusal(self, name: str, tensor: Tensor) -> PartitionError:
        if isinstance(tensor, nn.Parameter):
            return PartitionError(
                f"the backward of stage {self._index} updates parameter {name!r} by a hook "
                "(register_post_accumulate_grad_hook) while other microbatches are in flight, which plain training "
                "would run with the new value. Step the optimizer after pipe.step, or choose microbatches=1"
            )
        if self._copies:
            return PartitionError(
                f"the backward of stage {self._index} updates buffer {name!r}, but this schedule runs several copies "
                "of the stage, each of which would see only part of the batch; use a schedule with one copy "
                "(dualpipe-v for dualpipe)"
            )
        return PartitionError(
            f"the backward of stage {self._index} updates buffer {name!r}, which its forward takes or updates, too (a "
            "checkpoint in the model runs it again, or a hook writes to it), and forwards of other microbatches come "
            "between. Switch gradient checkpointing off in the model, and choose recompute='always' instead; update "
            "the buffer after the step; or choose schedule='naive' or microbatches=1"
        )


def _alternates(stage: StageContext) -> bool:
    """Whether each backward directly follows its forward, as in plain training."""
    microbatches = [a.microbatch for a in stage.row if a.stage == stage.index and a.op in (Op.F, Op.B, Op.I, Op.W)]
    return sum(1 for _ in groupby(microbatches)) == len({*microbatches})


def _versions(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor._version for name, tensor in tensors.items()}


def _rng_state(generator: torch.Generator) -> tuple[int, bytes]:
    state = generator.get_state()
    return generator.initial_seed(), ctypes.string_at(state.data_ptr(), state.numel())
