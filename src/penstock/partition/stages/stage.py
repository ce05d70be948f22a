"""A stage: its meta, and a module with readable code made from the user's own modules and the recorded calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from penstock._base.stages import StageMeta
from penstock.partition.names import public_names
from penstock.partition.nested import free_name
from penstock.partition.recording import Modes, NodeInfo, RandomSource
from penstock.partition.result_checks import check_returned
from penstock.partition.stages.stage_plans import CutRecording, StagePlan
from penstock.partition.state.block_state import Remembered

INPUT_OVERWRITTEN = "input overwritten"
"""In the `meta` of a stage's node that calls a module: this call or a later one updates its input in place."""

RUNS_AGAIN = "runs again"
"""In the `meta` of such a node: plain torch would rerun the module in backward, since it is in a checkpoint."""

_STATISTICS: Mapping[Any, int] = {F.batch_norm: 1, torch.batch_norm: 3}
"""Batch norm functions, and the position of the first running statistic among their arguments."""


class Surroundings(Protocol):
    """The context that a stage's code runs in."""

    def __call__(self, run: Callable[..., Sequence[Tensor]], *args: Any) -> Sequence[Tensor]:
        """Call `run(*args)` in this context and return its result."""

    def adopt(self, module: nn.Module) -> None:
        """Make a stage's code use this context's parameters."""


@dataclass(frozen=True)
class Stage:
    """One stage of a model.

    Attributes:
        meta: what enters, leaves and lives here.
        module: `module(*inputs)` returns the tuple of outputs, both in the order of `meta`. Its blocks are the model's
            own modules, not copies.
        parameters, buffers: the model's own tensors that live here, by the names in `meta`.
        depends_on_values: whether a block here ran for real when it was recorded, and may do something else for others.
        may_update: the buffers that the forward may update for some values, besides those in `meta`.
        reads: the buffers that any operator of the forward takes.
        device: where it was recorded; calls that make tensors make them there. See `on`.
        remembered: what its forward carries over from one microbatch to the next; see `Remembered`.
        frame: called with the stage's forward and its arguments; None if nothing needs to happen around it.
    """

    meta: StageMeta
    module: fx.GraphModule
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    device: torch.device
    frame: Surroundings | None = None
    depends_on_values: bool = False
    may_update: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    remembered: tuple[Remembered, ...] = ()

    @property
    def draws_outside_modules(self) -> bool:
        """Whether its code draws random numbers outside the modules that it calls."""
        return any(node.op == "call_method" and node.target == "enter" for node in self.module.graph.nodes)

    @property
    def checkpointed(self) -> Sequence[nn.Module]:
        """The modules that a checkpoint around them would rerun, each as often as it is called there."""
        calls = [node for node in self.module.graph.nodes if node.op == "call_module" and node.meta.get(RUNS_AGAIN)]
        return [module for node in calls for module in self.module.get_submodule(str(node.target)).modules()]

    @property
    def norms_as_functions(self) -> Sequence[str]:
        """Its calls of batch norm as a function with running statistics."""
        names = []
        for node in self.module.graph.nodes:
            first = _STATISTICS.get(node.target) if node.op == "call_function" else None
            if first is not None and any((*node.args[first : first + 2], node.kwargs.get("running_mean"))):
                names.append(str(node.name))
        return names

    @property
    def forward(self) -> Callable[..., Sequence[Tensor]]:
        """`forward(*inputs)`, the tuple of outputs."""
        forward: Callable[..., Sequence[Tensor]] = self.module.forward
        return forward if self.frame is None else partial(self.frame, forward)

    @property
    def code(self) -> str:
        """The stage's forward as Python text."""
        return (
            f"class {self.module.__class__.__name__}:{self.module.code.replace(chr(10), chr(10) + '    ').rstrip()}\n"
        )

    def on(self, device: torch.device) -> Stage:
        """Return the same stage for another device: recorded device constants and stray tensors move there.

        Parameters and buffers are shared with this stage and stay where they are.
        """

        def convert(value: Any) -> Any:
            return device if value == self.device and isinstance(value, torch.device) else value

        module = _convert_constants(self.module, convert)
        ids = {id(t) for t in self.buffers.values()}
        for name, tensor in list(module.named_buffers()):
            if id(tensor) not in ids and any(n.op == "get_attr" and n.target == name for n in module.graph.nodes):
                owner, _, field = name.rpartition(".")
                module.get_submodule(owner)._buffers[field] = tensor.to(device)
        return replace(self, module=module, device=device)


class Gate(nn.Module):
    """A branch of a recorded forward.

    Args:
        inside: what runs; returns the tuple of the branch's outputs.
        outputs: how many there are.
        runs_if: the decision for which it runs.
        calls: how often it calls each drawing module, so that later calls draw the same whether it ran or not.

    Attributes:
        has_run: whether it ran when it was last called.
    """

    def __init__(
        self, inside: fx.GraphModule, outputs: int, runs_if: bool, streams: RandomSource, calls: Mapping[str, int]
    ) -> None:
        super().__init__()
        self.inside = inside
        self.outputs, self.runs_if = outputs, runs_if
        self.streams, self.calls = streams, dict(calls)
        self.has_run = True

    def forward(self, decision: Any, *values: Any) -> tuple[Tensor, ...]:
        """Run the branch or skip it. `values`: what to pass on for each output if skipped, then what it needs."""
        self.has_run = bool(decision) == self.runs_if
        if self.has_run:
            outputs: tuple[Tensor, ...] = self.inside(*values[self.outputs :])
            return outputs
        self.streams.pass_by(self.calls)
        return values[: self.outputs]


def gates_of(module: nn.Module) -> list[Gate]:
    """Return the gates in a stage's code."""
    return [part for part in module.modules() if isinstance(part, Gate)]


def _convert_constants(old: fx.GraphModule, convert: Callable[[Any], Any]) -> fx.GraphModule:
    """Return the same code with its constants changed, including those in gates."""
    module = with_arguments(old, [map_aggregate((node.args, node.kwargs), convert) for node in old.graph.nodes])
    for name, part in old.named_children():
        if isinstance(part, Gate):
            inside = _convert_constants(part.inside, convert)
            setattr(module, name, Gate(inside, part.outputs, part.runs_if, part.streams, part.calls))
    return module


def with_arguments(old: fx.GraphModule, arguments: Sequence[Any]) -> fx.GraphModule:
    """Return the same code with other arguments, for each node of the old graph."""
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(old.graph, new))
    for node, argument in zip(old.graph.nodes, arguments, strict=True):
        if node in new:
            new[node].args, new[node].kwargs = fx.map_arg(argument, new.__getitem__)
    module = fx.GraphModule(old, graph, old.__class__.__name__)
    _keep_persistence(old, module)
    return module


def build_stage(split: CutRecording, plan: StagePlan, index: int, streams: RandomSource) -> Stage:
    """Build a stage from its plan."""
    recording, model = split.recording, split.model
    names = sorted({name for node in plan.run for name in split.held_by(node)}, key=list(recording.held).index)
    public = public_names(model, list(recording.held))
    tensors = {name: recording.held[name] for name in names}
    parameters = {public[n]: t for n, t in tensors.items() if isinstance(t, nn.Parameter)}
    buffers = {public[n]: t for n, t in tensors.items() if not isinstance(t, nn.Parameter)}
    meta = StageMeta(
        index=index,
        inputs=plan.inputs,
        outputs=plan.outputs,
        parameters=tuple(parameters),
        buffers=tuple(buffers),
        trainable=any(p.requires_grad for p in parameters.values()),
        updated=tuple(public[name] for name in names if name in split.updated),
        branches=any(split.facts[node].branch for node in plan.run),
    )
    streams_name = free_name(model, "streams")
    extra = {**recording.constants, streams_name: streams}
    for node in plan.run:
        if (branch := split.facts[node].branch) is not None:
            values = branch.inputs, branch.nodes, branch.outputs, branch.facts
            inside = _module(model, extra, _write_code(*values, streams_name, recording.device)[0], "branch")
            extra[str(node.target)] = Gate(inside, len(branch.outputs), branch.runs_if, streams, branch.calls)
    graph, new = _write_code(plan.received, plan.run, plan.returned, split.facts, streams_name, recording.device)
    for node in plan.run:
        if split.facts[node].kind == "unit":
            new[node].meta[INPUT_OVERWRITTEN] = split.overwrites_input(node)
            new[node].meta[RUNS_AGAIN] = split.facts[node].runs_again
    module = _module(model, extra, graph, f"submod_{index}")
    _keep_persistence(model, module)
    uncertain = {name for node in plan.run if split.depends_on_values(node) for name in split.held_by(node)}
    may_update = tuple(public[n] for n in names if n in uncertain and n not in split.updated and public[n] in buffers)
    remembered = tuple(r for r in recording.remembered if any(r.unit in split.facts[n].units for n in plan.run))
    return Stage(
        meta,
        module,
        parameters,
        buffers,
        recording.device,
        depends_on_values=any(map(split.depends_on_values, plan.run)),
        may_update=may_update,
        reads=tuple(public[n] for n in names if n in recording.touched and public[n] in buffers),
        remembered=remembered,
    )


def _module(model: nn.Module, extra: Mapping[str, object], graph: fx.Graph, name: str) -> fx.GraphModule:
    """Build the code with what it refers to: the model's own modules and tensors, and what is in `extra`, by path."""
    paths = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
    attributes = {path: extra[path] if path in extra else attrgetter(path)(model) for path in paths}
    module = fx.GraphModule(attributes, graph, name)
    module.training = model.training
    return module


def _keep_persistence(source: nn.Module, module: fx.GraphModule) -> None:
    """Make non-persistent again what the model keeps out of its state: GraphModule registers every tensor as a
    persistent buffer."""
    for node in module.graph.nodes:
        if node.op != "get_attr" or not isinstance(node.target, str):
            continue
        path, _, field = node.target.rpartition(".")
        holder = module.get_submodule(path)
        try:
            owner = source.get_submodule(path)
        except AttributeError:
            owner = None
        saved = owner is not None and field in owner._buffers and field not in owner._non_persistent_buffers_set
        if owner is not holder and field in holder._buffers and not saved:
            holder._non_persistent_buffers_set.add(field)


def _write_code(
    inputs: Sequence[fx.Node],
    nodes: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    facts: Mapping[fx.Node, NodeInfo],
    streams_name: str,
    device: torch.device,
) -> tuple[fx.Graph, Mapping[fx.Node, fx.Node]]:
    """Write recorded calls in program order, in their recorded modes. Draws come from their own streams. Return the
    code, and its node for each of these."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in inputs}

    def copy(node: fx.Node) -> None:
        if facts[node].draws:
            streams = graph.create_node("get_attr", streams_name)
            graph.call_method("enter", (streams, facts[node].stream))
        args = fx.map_arg(node.args, new.__getitem__)
        kwargs = fx.map_arg(node.kwargs, new.__getitem__)
        new[node] = graph.create_node(node.op, node.target, args, kwargs, node.name)
        new[node].meta["where"] = facts[node].scope, facts[node].source_line
        if facts[node].pattern is not None:
            fact = facts[node]
            graph.call_function(check_returned, (new[node], fact.scope, fact.pattern, fact.read_at))

    for modes, group in groupby(nodes, lambda n: facts[n].modes):
        leave = list(_enter(graph, modes, device))
        for node in group:
            copy(node)
        for function, arguments in reversed(leave):
            graph.call_function(function, arguments)
    graph.output(tuple(new[node] for node in outputs))
    return graph, new


def _enter(graph: fx.Graph, modes: Modes, device: torch.device) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Write the calls that enter the modes, and yield those that leave them again."""
    if modes.grad_enabled is not None:
        before = graph.call_function(torch.is_grad_enabled)
        graph.call_function(torch.set_grad_enabled, (modes.grad_enabled,))
        yield torch.set_grad_enabled, (before,)
    if modes.autocast is not None:
        enabled, dtype, caches = modes.autocast
        arguments = (device, dtype, enabled) if caches else (device, dtype, enabled, caches)
        context = graph.call_function(enter_autocast, arguments)
        yield leave_autocast, (context,)


def enter_autocast(device: torch.device, dtype: torch.dtype, enabled: bool, caches: bool = True) -> torch.autocast:
    """Turn autocast on or off for the device's type. Pass the result to `leave_autocast`."""
    context = torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=caches)
    context.__enter__()  # type: ignore[no-untyped-call]
    return context


def leave_autocast(context: torch.autocast) -> None:
    context.__exit__(None, None, None)
