"""The frames that `parallelize` is applied to: each stage as a module that holds the model's own modules by name.

A stage is recorded anew for each signature of its inputs and modes, but sharded only once. So its code runs inside a
permanent frame: hooks on the frame (such as those of `fully_shard`) run, and the code finds its parameters there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from penstock._base.compat import reduction_dtype
from penstock._base.errors import ArgumentError
from penstock._base.gradients import gradient_dtype
from penstock.runtime.features.feature import recorded_code
from penstock.runtime.front_end import Stage
from penstock.runtime.gradients.distribution import is_distributed, parallelized_by

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
        return [_not_a_view(output) for output in outputs] if isinstance(self, FSDPModule) else outputs

    def adopt(self, module: nn.Module) -> None:
        """Makes the code of another recording of this stage use the frame's parameters."""
        assert isinstance(module, fx.GraphModule)
        for node in module.graph.nodes:
            if node.op != "get_attr":
                continue
            path, _, name = str(node.target).rpartition(".")
            holder, own = module.get_submodule(path), _submodule(self, path)
            if own is not None and own is not holder and name in own._parameters:
                holder.__dict__["_parameters"] = own._parameters


def _not_a_view(output: Tensor) -> Tensor:
    """`fully_shard` puts a hook on each output, and an update in place, in a loss say, would take it off a view."""
    return output.clone() if output._base is not None and output.requires_grad else output


class Sharded:
    """The parts of one stage that `fully_shard` was applied to, controlled by a schedule.

    `unshard` starts to gather parameters, `wait` waits for them, and `reshard` frees them. Gradients stay whole until
    the stage's last backward, which runs within `reducing`, however often the parameters are freed in between. All of
    this uses FSDP's public API, as its documentation requires with microbatches.
    """

    def __init__(self, frame: nn.Module) -> None:
        self.frame = frame
        self._parts = [module for module in frame.modules() if isinstance(module, FSDPModule)]
        self._arriving: list[UnshardHandle] = []
        self._whole = {id(p) for p in frame.parameters() if not is_distributed(p)}
        self._widened = False
        for part in self._parts:
            part.set_reshard_after_forward(False, recurse=False)
        self._reduce(False)

    def unshard(self) -> None:
        """Starts to gather the parameters."""
        handles = [part.unshard(async_op=True) for part in self._parts]
        self._arriving = [handle for handle in handles if handle is not None]

    def wait(self) -> None:
        """Waits until the parameters are there, before the first computation that uses them."""
        for handle in self._arriving:
            handle.wait()
        self._arriving.clear()
        if not self._widened:
            self._widen()
            self._widened = True

    def _widen(self) -> None:
        """Lets gradients accumulate in the dtype in which they are reduced, if that is wider than the parameters' own.

        FSDP converts them after each backward. But what several Ws add in between would be summed in the narrow dtype.
        """
        dtypes = {p: reduction_dtype(part) for part in self._parts for p in part.parameters()}  # inner parts come last
        for parameter, dtype in dtypes.items():
            narrow = dtype is not None and gradient_dtype(parameter).itemsize < dtype.itemsize
            if narrow and parameter.is_floating_point() and id(parameter) not in self._whole:
                parameter.grad_dtype = dtype

    def reshard(self) -> None:
        """Frees the gathered parameters."""
        self.wait()  # a replica with fewer microbatches may have had no use for them
        for part in self._parts:
            part.reshard()

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters that a forward uses: the whole ones between `wait` and `reshard`."""
        return dict(self.frame.named_parameters())

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Wraps the last backward of a stage, which sums and scatters gradients."""
        self._reduce(True)
        try:
            yield
        finally:
            self._reduce(False)

    def _reduce(self, now: bool) -> None:
        for part in self._parts:
            part.set_requires_gradient_sync(now, recurse=False)
            part.set_is_last_backward(now)
            part.set_reshard_after_backward(False, recurse=False)


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
            index: Sharded(frame)
            for index, frame in self._by_stage.items()
            if any(isinstance(module, FSDPModule) for module in frame.modules())
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
                _dress(module, kind, hooks)
            yield
        finally:
            for module, kind, hooks in present:
                _dress(module, kind, hooks)

    def _apply(self, index: int, frame: Frame, parallelize: Parallelize) -> None:
        before = dict(frame.named_parameters(remove_duplicate=False))
        result = parallelize(frame)
        if by := parallelized_by(frame, "torch.distributed._composable"):  # torchtitan's stages that are not sharded
            raise ArgumentError(
                f"parallelize applied torch's replicate to stage {index} ({by}), which averages gradients in each "
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
    """Replaces parameters, by identity, even in containers that belong to no stage."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if id(parameter) in new:
                module._parameters[name] = new[id(parameter)]


def _dress(module: nn.Module, kind: type[nn.Module], hooks: Mapping[str, Any]) -> None:
    if type(module) is not kind:
        module.__class__ = kind
    module.__dict__.update(hooks)


def _submodule(root: nn.Module, path: str) -> nn.Module | None:
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None
