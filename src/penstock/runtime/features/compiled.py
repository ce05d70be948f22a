"""Stages compiled by `torch.compile`.

Python sets a module's random stream between two graphs: the compiler does not look into a `torch.Generator`. Inductor's
own random numbers would give other masks than the uncompiled model's, so it has to draw torch's, unless the caller's
arguments rule that out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock._base.compat_compiler import backend_named, compiled, inductor_options, noticing_hooks
from penstock._base.errors import ArgumentError
from penstock.partition.stages.stage import enter_autocast, leave_autocast
from penstock.runtime.features.feature import Feature, Forward, StageContext
from penstock.runtime.front_end import Stage
from penstock.runtime.split_backward.compiled_products import SplittingBackend
from penstock.schedule import Action, Op, Schedule

Compile = bool | Mapping[str, Any]
"""Whether stages are compiled: False, True, or arguments of `torch.compile`."""


def compile_arguments(compile: Compile) -> dict[str, Any] | None:
    """Return the arguments of `torch.compile` for a stage; None if stages are not compiled.

    Raises:
        ArgumentError: neither a bool nor a dict, or something that cannot work in a pipeline.
    """
    if not isinstance(compile, (bool, Mapping)):
        raise ArgumentError(
            f"compile={compile!r}: expected True, False, or a dict of torch.compile's arguments, such as "
            "{'backend': 'inductor'}"
        )
    if compile is False:
        return None
    arguments = {} if compile is True else dict(compile)
    known = inspect.signature(torch.compile).parameters.keys() - {"model"}
    if unknown := arguments.keys() - known:
        raise ArgumentError(
            f"compile={compile!r}: torch.compile has no argument {min(unknown, key=str)!r}, only "
            f"{', '.join(sorted(known))}"
        )
    if arguments.get("disable"):
        raise ArgumentError("compile={'disable': True}: leave compile= out")
    _check_no_cuda_graphs(arguments, f"compile={compile!r}")
    if draws_as_torch_does(arguments) and arguments.get("backend", "inductor") == "inductor":
        arguments["options"] = {"fallback_random": True, **(arguments.get("options") or {})}
    return arguments


def _check_no_cuda_graphs(arguments: Mapping[str, Any], source: str) -> None:
    backend, options = arguments.get("backend"), arguments.get("options") or {}
    by_backend = "cudagraphs" in (backend, getattr(backend, "compiler_name", None))
    if by_backend or arguments.get("mode") in ("reduce-overhead", "max-autotune") or options.get("triton.cudagraphs"):
        raise ArgumentError(
            f"{source} uses CUDA graphs, which keep one forward's results; a pipeline has several microbatches in "
            "flight; omit the mode or backend, or pass mode='max-autotune-no-cudagraphs'"
        )


def effective_compile(compile: Compile, model: nn.Module, stages: Sequence[Stage]) -> Compile:
    """Return the value of `compile=`; if that is off, how the model compiled itself, or a module that was opened."""
    if compile is not False:
        return compile
    staged_ids = {id(module) for stage in stages for module in stage.module.modules()}
    opened = (call for module in model.modules() if id(module) not in staged_ids and (call := compiled(module)))
    model_compile: Compile = next((call.arguments for call in opened), False)
    if not isinstance(model_compile, bool):
        _check_no_cuda_graphs(model_compile, "torch.compile(...) of the model")
    return model_compile


def schedule_arguments(compile: Compile, schedule: Schedule) -> dict[str, Any] | None:
    """Return the arguments of `torch.compile` for a stage of a schedule: if that splits backwards, the backend does,
    too."""
    arguments = compile_arguments(compile)
    return arguments if arguments is None or not schedule.splits else _configure(arguments, SplittingBackend)


def _configure(arguments: dict[str, Any], wrap: Callable[[_ConfiguredBackend], Any]) -> dict[str, Any]:
    """Return the same arguments of `torch.compile` with a backend of our own around theirs."""
    backend, mode = arguments.pop("backend", "inductor"), arguments.pop("mode", None)
    options = arguments.pop("options", None)
    compiler = _ConfiguredBackend(backend, _settings(backend, mode, options, arguments.get("dynamic")))
    return {**arguments, "backend": wrap(compiler)}


@dataclass(frozen=True)
class _ConfiguredBackend:
    """A backend, by name or itself, and its own arguments."""

    backend: Any
    arguments: Mapping[str, Any] = field(hash=False)

    def __call__(self, module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph."""
        compiler = backend_named(self.backend) if isinstance(self.backend, str) else self.backend
        compiled: Callable[..., Any] = compiler(module, examples, **self.arguments)
        return compiled


def _settings(
    backend: Any, mode: str | None, options: Mapping[str, Any] | None, dynamic: bool | None
) -> dict[str, Any]:
    """Return what `torch.compile` would pass to a backend besides the graph."""
    if backend != "inductor":
        arguments = {"mode": mode if mode != "default" else None, "options": options}
        return {key: value for key, value in arguments.items() if value}
    patches = {**(inductor_options(mode, dynamic) if mode else {}), **(options or {})}
    return {"config_patches": {key.replace("-", "_"): value for key, value in patches.items()}}


def draws_as_torch_does(arguments: Mapping[str, Any]) -> bool:
    """Whether masks in compiled code are those of the uncompiled model. (torch allows no options next to a mode.)"""
    if arguments.get("backend", "inductor") != "inductor":
        return True
    return arguments.get("mode") is None and (arguments.get("options") or {}).get("fallback_random", True)


def compile_notes(compile: Compile, *, draws: bool, blocks: bool = False) -> tuple[str, ...]:
    """Return the notes for users on a compiled pipeline.

    Args:
        draws: whether the model draws random numbers.
        blocks: whether the model compiled blocks of its stages itself.
    """
    arguments = compile_arguments(compile)
    if arguments is None:
        note = "blocks of the model are compiled: a compiler may add in another order than the model as it is"
        return (f"{note} (close, not equal)",) if blocks else ()
    notes = ["stages are compiled: a compiler may add in another order than the model as it is (close, not equal)"]
    if draws and not draws_as_torch_does(arguments):
        notes.append(
            "stages are compiled with random numbers of the compiler's own: the same for any number of ranks, but not "
            "those of the uncompiled model; leave out mode and fallback_random for those"
        )
    return tuple(notes)


def empty_w_notes(stages: Sequence[int]) -> tuple[str, ...]:
    """Return the notes for users on compiled stages in which W has nothing to do."""
    return tuple(
        f"stage {index}: W does nothing (deferred_weight_grad_fraction is 0), since no weight gradient can be taken "
        "out of its compiled code: weights are used other than in products, or a forward is compiled in its class"
        for index in stages
    )


class Compiled(Feature):
    """Runs the stage compiled.

    Args:
        arguments: of `torch.compile`; None if only blocks of the stage are compiled, by the model itself.
    """

    @classmethod
    def of(cls, stage: StageContext) -> Compiled | None:
        """Build the feature if `compile=` or the model asks for it. Raise ArgumentError if another choice excludes
        it."""
        arguments = stage.binding.compile
        if arguments is None:
            blocks = [module for module in stage.modules() if compiled(module)]
            for block in blocks if stage.recorded.frame is None else ():
                _recompile(block, stage.binding.schedule)
            return cls(None) if blocks else None
        if stage.binding.check_finite:
            raise ArgumentError(
                "check_finite=True looks at every call of a stage, which compiled stages do not show; leave compile= "
                "out, and pass the model as it is before torch.compile, while you look for a NaN"
            )
        if stage.recorded.frame is not None:
            raise ArgumentError(
                "compile= compiles each stage as a whole, hooks of parallelize= and all, which torch's compiler does "
                "not follow; compile the blocks within parallelize instead: block.compile() after fully_shard(block)"
            )
        return cls(arguments)

    def __init__(self, arguments: Mapping[str, Any] | None) -> None:
        self._arguments = arguments

    def forward_of(self, run: Forward, stage: Stage) -> Forward:
        """Return the stage's module, compiled once, and again for hooks that come or go."""
        if self._arguments is not None and not compiled(stage.module):
            if isinstance(stage.module, fx.GraphModule):
                _exclude_autocast(stage.module)
            stage.module.compile(**self._arguments)
        noticing = noticing_hooks()

        def run_compiled(*args: Any) -> Sequence[Tensor]:
            with noticing:
                values: Sequence[Tensor] = stage.module(*args)
                return values

        return run_compiled


def _recompile(block: nn.Module, schedule: Schedule) -> None:
    """Compile a block that the model compiled itself, as `compile=` compiles stages: if the schedule splits backwards,
    or if there are hooks in the block, which code that was compiled before would not call."""
    call, splits = compiled(block), schedule.splits
    assert call is not None
    _check_no_cuda_graphs(call.arguments, f"torch.compile(...) of a block, {type(block).__name__},")
    hooked = any(m._forward_pre_hooks or m._forward_hooks for m in block.modules())
    accepted: Any = SplittingBackend if splits else (SplittingBackend, _ConfiguredBackend)
    arguments = compile_arguments(call.arguments)
    if arguments is not None and call.name and (splits or hooked) and not isinstance(arguments["backend"], accepted):
        arguments = _configure(arguments, SplittingBackend if splits else lambda compiler: compiler)
        vars(block)[call.name] = torch.compile(call.function, **arguments)


def _exclude_autocast(module: fx.GraphModule) -> None:
    """Let Python enter and leave autocast, whose state the compiler loses in between."""
    nodes = [node for node in module.graph.nodes if node.target in (enter_autocast, leave_autocast)]
    for node in nodes:
        node.target = torch.compiler.disable(node.target)  # type: ignore[no-untyped-call]
    if nodes:
        module.recompile()


def any_compiled(modules: Iterable[nn.Module]) -> bool:
    """Whether any module is already compiled."""
    return any(map(compiled, modules))


class SeparateGradients(Feature):
    """Separates the gradients of a stage with compiled code, which may share memory with each other.

    Autograd takes a first gradient over as it is, and adds the next microbatch's to it in place, which would change the
    other gradient too. (With torch 2.13 this makes accumulated gradients wrong by as much as their size. It takes only
    two parameters, one of which is added to a slice of the other.)
    """

    @classmethod
    def of(cls, stage: StageContext) -> SeparateGradients | None:
        """Build the feature if anything in the stage is compiled."""
        return cls(stage.recorded.parameters.values()) if stage.training and stage.is_compiled else None

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        new = [] if action.op is Op.F else [p for p in self._parameters if p.grad is None]
        yield
        for parameter in new:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
