"""The frames that `parallelize` is applied to: each stage as a module that holds the model's own modules by name.

A stage is recorded anew for each signature of its inputs and modes, but sharded only once. So its code runs inside a
permanent frame: hooks on the frame (such as those of `fully_shard`) run, and the code finds its parameters there. A
stage that is sharded reduces its gradients in its last backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock._base.errors import ArgumentError
from penstock.runtime.features.feature import NOTHING, Context, Feature, Forward, StageContext, Start, recorded_code
from penstock.runtime.front_end import Stage
from penstock.runtime.gradients.sharding import ShardedStage, is_sharded, parallelized_by
from penstock.schedule import Op

Parallelize = Callable[[nn.Module], nn.Module | None]
"""Called with each stage of this process, to shard it in place."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Frame(nn.Module):
    """A stage: the modules and parameters that its code uses, by their names in the model."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        code = recorded_code(stage, "parallelize=")
        self.__dict__.update(_modules=code._modules, _parameters=code._parameters, _buffers=code._buffers)

    def forward(self, run: Callable[..., Sequence[Tensor]], *args: Any) -> Sequence[Tensor]:
        outputs = run(*args)
        return [_not_a_view(output) for output in outputs] if is_sharded(self) else outputs

    def adopt(self, module: nn.Module) -> None:
        """Make the code of another recording of this stage use the frame's parameters."""
        assert isinstance(module, fx.GraphModule)
        for node in module.graph.nodes:
            if node.op != "get_attr":
                continue
            path, _, name = str(node.target).rpartition(".")
            holder, counterpart = module.get_submodule(path), _submodule(self, path)
            if counterpart is not None and counterpart is not holder and name in counterpart._parameters:
                holder.__dict__["_parameters"] = counterpart._parameters


def _not_a_view(output: Tensor) -> Tensor:
    """`fully_shard` puts a hook on each output, and an update in place, in a loss say, would take it off a view."""
    return output.clone() if output._base is not None and output.requires_grad else output


class Frames:
    """The frames of this process's stages.

    Args:
        model: the model whose modules they hold.
        stages: the stages, recorded before anything is sharded.
        parallelize: the user's function.
    """

    def __init__(self, model: nn.Module, stages: Sequence[Stage], parallelize: Parallelize) -> None:
        self._model = model
        self._by_stage = {stage.meta.index: Frame(stage) for stage in stages}
        self._plain = {
            id(module): (module, type(module), {name: getattr(module, name).copy() for name in _HOOKS})
            for frame in self._by_stage.values()
            for module in frame.modules()
        }
        for index, frame in self._by_stage.items():
            self._apply(index, frame, parallelize)
        self.sharded = {
            index: ShardedStage(frame)
            for index, frame in self._by_stage.items()
            if any(is_sharded(module) for module in frame.modules())
        }

    def __getitem__(self, stage: int) -> Frame:
        return self._by_stage[stage]

    @contextmanager
    def off(self) -> Iterator[None]:
        """Temporarily removes what `parallelize` put around the modules: a recording runs the model's own code."""
        present = [
            (module, type(module), {name: getattr(module, name) for name in _HOOKS})
            for module, *_ in self._plain.values()
        ]
        try:
            for module, kind, hooks in self._plain.values():
                _set_class_and_hooks(module, kind, hooks)
            yield
        finally:
            for module, kind, hooks in present:
                _set_class_and_hooks(module, kind, hooks)

    def _apply(self, index: int, frame: Frame, parallelize: Parallelize) -> None:
        before = dict(frame.named_parameters(remove_duplicate=False))
        result = parallelize(frame)
        if module := parallelized_by(frame, "torch.distributed._composable"):  # torchtitan's stages without sharding
            raise ArgumentError(
                f"parallelize applied torch's replicate to stage {index} ({module}), which averages gradients in each "
                "backward; omit it: the pipeline averages them over its mesh's data-parallel dimensions, once per step"
            )
        if result is not None and result is not frame:
            raise ArgumentError(
                f"parallelize returned a {type(result).__name__} for stage {index}; it must change the module that it "
                "is given in place (fully_shard and parallelize_module do) and return it, or None"
            )
        changed: dict[int, nn.Parameter] = {}
        for name, parameter in frame.named_parameters(remove_duplicate=False):
            old = before.get(name)
            if old is None:
                raise ArgumentError(
                    f"parallelize added a parameter, {name!r}, to stage {index}, which the model does not have"
                )
            changed[id(old)] = parameter
        _replace(self._model, {key: new for key, new in changed.items() if key != id(new)})


def _replace(model: nn.Module, new: Mapping[int, nn.Parameter]) -> None:
    """Replace parameters, by identity, even in containers that belong to no stage."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if id(parameter) in new:
                module._parameters[name] = new[id(parameter)]


def _set_class_and_hooks(module: nn.Module, kind: type[nn.Module], hooks: Mapping[str, Any]) -> None:
    if type(module) is not kind:
        module.__class__ = kind
    module.__dict__.update(hooks)


def _submodule(root: nn.Module, path: str) -> nn.Module | None:
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


class FramedCode(Feature):
    """Runs the stage's code inside its frame, with the frame's hooks."""

    @classmethod
    def of(cls, stage: StageContext) -> FramedCode | None:
        """Build the feature if `parallelize=` was passed."""
        return cls() if any(microbatch_stage.frame is not None for microbatch_stage in stage.stages) else None

    def forward_of(self, run: Forward, stage: Stage) -> Forward:
        """Return the frame's forward."""
        return run if stage.frame is None else partial(stage.frame, run)


class ShardedReduction(Feature):
    """Reduces the gradients of a sharded stage in its last backward.

    Args:
        last: the microbatch of that backward; None: there is none.
    """

    @classmethod
    def of(cls, stage: StageContext) -> ShardedReduction | None:
        """Build the feature in training, if `fully_shard` was applied."""
        if not stage.training or stage.sharded is None:
            return None
        backwards = stage.microbatches(Op.B, Op.I)
        return cls(stage.sharded, backwards[-1] if backwards else None)

    def __init__(self, sharded: ShardedStage, last: int | None) -> None:
        self._sharded = sharded
        self._last = last
        self._reduces = True

    def begin_step(self, start: Start) -> None:
        """Note whether this step reduces. Not every step does; see `Pipeline.no_sync`."""
        self._reduces = start.reduces

    def code(self, microbatch: int) -> Context:
        """Clear autocast's cache: a weight that was cast for an earlier microbatch would get its gradient after the
        reduction, since in backward what was made first comes last."""
        torch.clear_autocast_cache()
        return NOTHING

    def autograd(self, microbatch: int) -> Context:
        """Reduce within the last backward."""
        return self._sharded.reducing() if self._reduces and microbatch == self._last else NOTHING
