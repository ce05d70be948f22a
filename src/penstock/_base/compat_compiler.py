"""The parts of torch's compiler that may move without notice: its settings, and the graphs that it recorded.

As for `compat`, `tests/test_compat.py` has what the tests of their users do not show.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import fx, nn


def backend_named(name: str) -> Callable[..., Any]:
    """Return a backend of `torch.compile`, by its name."""
    from torch._dynamo import lookup_backend  # takes long to import

    backend: Callable[..., Any] = lookup_backend(name)
    return backend


class Compiled(NamedTuple):
    """How a module was compiled by `torch.compile`, in whatever way.

    Attributes:
        name: of the module's attribute that holds the compiled function; empty if its class has that.
        function: that function before it was compiled.
        arguments: those of `torch.compile`, without `fullgraph`: Python sets random streams between graphs.
    """

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]


def compiled(module: nn.Module) -> Compiled | None:
    """Return how a module was compiled: `module.compile()`, `torch.compile(module)`, or its forward; None if it was
    not.

    No public name tells; torchtitan, accelerate and diffusers compile blocks in each of these ways.
    """
    for name in ("_compiled_call_impl", "forward"):
        function: Any = getattr(module, name, None)
        if not hasattr(function, "get_compiler_config"):
            continue
        from torch._dynamo.eval_frame import innermost_backend

        context = inspect.getclosurevars(function).nonlocals["self"]
        backend: Any = innermost_backend(context.callback)
        is_inductor = getattr(backend, "compiler_name", None) == "inductor"
        options = {"options": dict(backend.config)} if is_inductor else getattr(backend, "kwargs", {})
        backend = "inductor" if is_inductor else getattr(backend, "compiler_fn", backend)
        attribute = name if name in vars(module) else ""
        return Compiled(attribute, function.__wrapped__, {"backend": backend, "dynamic": context._dynamic, **options})
    return None


def noticing_hooks() -> AbstractContextManager[Any]:
    """Make code that torch compiles meanwhile look for module hooks that came or went since, whenever it runs.

    May be entered any number of times.
    """
    from torch._dynamo import config

    patch: AbstractContextManager[Any] = config.patch(skip_nnmodule_hook_guards=False)
    return patch


def inductor_options(mode: str, dynamic: bool | None) -> dict[str, Any]:
    """Return the options of inductor that a mode of `torch.compile` stands for."""
    from torch._inductor import list_mode_options

    options: dict[str, Any] = list_mode_options(mode, dynamic)
    return options


def copy_of_recorded(module: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph that torch's compiler recorded, to change it: the compiler goes on to use its own.

    It says the same about its inputs, such as which are parameters. (If this torch notes that elsewhere, the copy is
    compiled as a graph that is not the compiler's: correctly, but weights are not known to live through the step.)
    """
    graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    results = graph.graph_copy(module.graph, nodes)
    (output,) = module.graph.find_nodes(op="output")
    graph.output(results).meta = dict(output.meta)
    for node, copied in nodes.items():
        if hasattr(node, "_dynamo_source"):
            copied._dynamo_source = node._dynamo_source
    copy = fx.GraphModule(module, graph)
    copy.meta = dict(module.meta)
    if hasattr(module, "_param_name_to_source"):
        copy._param_name_to_source = module._param_name_to_source
    return copy


def add_input(graph: fx.Graph, name: str) -> fx.Node:
    """Add an input to a graph that torch's compiler recorded, behind the others."""
    inputs = graph.find_nodes(op="placeholder")
    with graph.inserting_after(inputs[-1]):
        node = graph.placeholder(name)
    if hasattr(inputs[0], "_dynamo_source"):  # then torch expects one of each input: where the program has it
        node._dynamo_source = None
    return node


def size_in(size: int | torch.SymInt, symbols: Mapping[Any, int]) -> int | Callable[[Sequence[Any]], int] | None:
    """Return a size in a graph that torch's compiler recorded: a number, or a function of the graph's inputs.

    None if the inputs do not tell.

    Args:
        symbols: the inputs that are sizes, by their symbols.
    """
    if isinstance(size, int):
        return size
    expression = size.node.expr
    if not expression.free_symbols <= symbols.keys():
        return None
    return lambda inputs: int(expression.xreplace({s: int(inputs[symbols[s]]) for s in expression.free_symbols}))
