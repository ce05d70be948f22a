"""Lets the weight gradients of products in compiled code wait for W.

A compiler makes one backward of all that it compiles. So before it does, each product whose weight gradient can wait
gets its weight without the weight's graph and, as further inputs of the compiled code, two *taps*: values that nobody
reads, but whose gradients are what W needs, the gradient of the product's result and the product's input (which the
compiler saves or computes anew, as for a whole backward). Autograd carries both from the compiled backward to
`compiled_calls.py`, which keeps them for W or, in a whole backward, computes the weight gradients at once. So both
kinds of backward run the same compiled code, whatever the backend.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from penstock._base.compat_compiler import add_input, copy_of_recorded, size_in
from penstock.runtime.split_backward.compiled_calls import (
    Kept,
    Parameter,
    Product,
    ResultOf,
    Source,
    Tap,
    TapOf,
    TappedCode,
    tapped,
)
from penstock.runtime.split_backward.weight_gradients import FORMS, DeferredCall, Form

Compiler = Callable[..., Callable[..., Any]]
"""A backend of `torch.compile`: takes a graph and examples of its inputs."""

_LOWERED = (torch.bfloat16, torch.float16)
_OPERATORS = {operator.matmul: torch.matmul}


@dataclass(frozen=True)
class SplittingBackend:
    """A backend of `torch.compile` that lets weight gradients wait in whatever another backend compiles.

    Two that wrap equal backends are equal, so that torch compiles code that several stages share only once.
    """

    compiler: Compiler

    def __call__(self, module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """Compiles a graph."""
        if not torch.is_grad_enabled() or not _products(module.graph, examples):
            return self.compiler(module, examples)
        module = copy_of_recorded(module)
        found = _products(module.graph, examples)
        tapping = _Tapping(module.graph, examples)
        products = tuple(tapping.tap(node, product) for node, product in found.items())
        weights, results = tapping.end(products)
        module.recompile()
        compiled = self.compiler(module, tapping.examples)
        return TappedCode(compiled, products, weights, tuple(tapping.taps), results)


class _Found(NamedTuple):
    """A product whose weights are parameters.

    Attributes:
        plan: the call, on fake tensors.
        weights: the weights, among the graph's inputs.
        nodes: the tensors among its arguments, by the id of the fake ones.
    """

    form: Form
    plan: DeferredCall
    weights: tuple[fx.Node, ...]
    nodes: Mapping[int, fx.Node]


def _products(graph: fx.Graph, examples: Sequence[Any]) -> dict[fx.Node, _Found]:
    """The products of a graph whose weight gradients can wait: their weights are used in such products only."""
    inputs = graph.find_nodes(op="placeholder")
    trained = {n for n, e in zip(inputs, examples, strict=True) if isinstance(e, nn.Parameter) and e.requires_grad}
    symbols = _symbols(inputs)
    products = ((node, _product(node, trained)) for node in _outside_transforms(graph))
    found = {node: product for node, product in products if product and _can_be_tapped(node, product, symbols)}

    def only_in_products(weight: fx.Node) -> bool:
        return all(user in found and weight in found[user].weights for user in weight.users)

    while lost := [node for node, product in found.items() if not all(map(only_in_products, product.weights))]:
        for node in lost:
            del found[node]
    return found


def _outside_transforms(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes outside of `torch.func`'s transforms (`vmap`, `grad`, `jvp`), in which no autograd function can tap."""
    levels = 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        levels += name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")
        if not levels:
            yield node


def _product(node: fx.Node, trained: set[fx.Node]) -> _Found | None:
    """A product with trained weights, if that is what a node is."""
    if node.op not in ("call_function", "call_method"):
        return None
    function: Any = getattr(Tensor, str(node.target), None) if node.op == "call_method" else node.target
    form = FORMS.get(_OPERATORS.get(function, function))
    if form is None:
        return None
    given = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, fx.Node)]
    values = {arg: arg.meta.get("example_value") for arg in node.all_input_nodes}
    if len(given) != len(values) or any(isinstance(value, (type(None), torch.SymInt)) for value in values.values()):
        return None  # an argument that is given twice, or within another, or is a size
    args: Any = fx.node.map_arg(node.args, values.__getitem__)
    kwargs: Any = fx.node.map_arg(node.kwargs, values.__getitem__)
    plan = form(*args, **kwargs)
    if plan is None:
        return None
    nodes = {id(value): arg for arg, value in values.items()}
    weights = tuple(nodes[id(weight)] for weight in plan.weights)
    return _Found(form, plan, weights, nodes) if trained.issuperset(weights) else None


def _can_be_tapped(node: fx.Node, product: _Found, symbols: Mapping[Any, int]) -> bool:
    """Whether the sizes of a product's taps are known before it runs, and W knows its precision."""
    result = node.meta.get("example_value")
    if not isinstance(result, Tensor) or not result.is_floating_point():
        return False
    dtypes = {value.dtype for value in (product.plan.input, *product.plan.weights) if value.is_floating_point()}
    sizes = (*result.shape, *product.plan.input.shape)
    return (dtypes == {result.dtype} or result.dtype in _LOWERED) and all(
        size_in(size, symbols) is not None for size in sizes
    )


def _symbols(inputs: Sequence[fx.Node]) -> dict[Any, int]:
    """Which inputs tell the sizes that change, by their symbols."""
    values = [node.meta.get("example_value") for node in inputs]
    return {value.node.expr: place for place, value in enumerate(values) if isinstance(value, torch.SymInt)}


class _Tapping:
    """Gives a graph its taps."""

    def __init__(self, graph: fx.Graph, examples: Sequence[Any]) -> None:
        self.examples = list(examples)
        self.taps: list[Tap] = []
        self._graph = graph
        self._inputs: list[fx.Node] = graph.find_nodes(op="placeholder")
        self._places = {node: place for place, node in enumerate(self._inputs)}
        self._symbols = _symbols(self._inputs)
        self._further: list[fx.Node] = []
        self._tapped: dict[fx.Node, fx.Node] = {}

    def tap(self, node: fx.Node, found: _Found) -> Product:
        """Taps a product."""
        result: Tensor = node.meta["example_value"]
        given, named = node.args, node.kwargs
        of_result, own = self._new(result.shape, result)
        taps, kept, places = [own], list[Source](), dict[fx.Node, Parameter | Kept]()
        for value in found.plan.kept:
            input = found.nodes[id(value)]
            places[input] = Kept(len(kept))
            if input in found.weights:
                kept.append(Parameter(self._places[input]))
            elif value.is_floating_point():
                of_input, other = self._new(value.shape, result)
                taps += [self._cast(node, input, result.dtype), other]
                kept.append(of_input)
            else:
                kept.append(self._returned(node, input))
        places |= {arg: Parameter(self._places[arg]) for arg in node.all_input_nodes if self._is_parameter(arg)}
        args, kwargs = fx.node.map_arg(given, places.get), fx.node.map_arg(named, places.get)
        with self._graph.inserting_after(node):
            self._tapped[node] = self._graph.call_function(tapped, (node, *taps))
        weights = tuple(self._places[weight] for weight in found.weights)
        contiguous = found.plan.input.is_contiguous()
        return Product(found.form, args, kwargs, weights, of_result.place, tuple(kept), contiguous)

    def end(self, products: Sequence[Product]) -> tuple[tuple[int, ...], int]:
        """Puts what is tapped in place, takes the weights' graph from the examples, and lets the graph return integers.

        Returns the places of the weights, and the number of results that the graph had before.
        """
        for node, after in self._tapped.items():
            node.replace_all_uses_with(after, lambda user, after=after: user is not after)  # type: ignore[misc]
        weights = tuple(sorted({place for product in products for place in product.weights}))
        for place in weights:
            self.examples[place] = self._inputs[place].meta["example_value"].detach()
        (output,) = self._graph.find_nodes(op="output")
        results: Any = output.args[0]
        output.args = ((*results, *self._further),)
        return weights, len(results)

    def _is_parameter(self, node: fx.Node) -> bool:
        return node in self._places and isinstance(self.examples[self._places[node]], nn.Parameter)

    def _new(self, sizes: Sequence[int], like: Tensor) -> tuple[TapOf, fx.Node]:
        """A new tap, like a fake tensor but for its sizes."""
        example = like.detach().new_empty(()).expand(tuple(sizes)).requires_grad_()
        node = add_input(self._graph, f"tap_{len(self.taps)}")
        found = [size_in(size, self._symbols) for size in sizes]
        self.taps.append(Tap(tuple(size for size in found if size is not None), like.dtype, like.device))
        self.examples.append(example)
        return TapOf(len(self.taps) - 1), node

    def _cast(self, node: fx.Node, input: fx.Node, dtype: torch.dtype) -> fx.Node:
        """A product's input in the precision in which autocast runs the product."""
        if input.meta["example_value"].dtype == dtype:
            return input
        with self._graph.inserting_before(node):
            low = self._graph.call_method("to", (input, dtype))
        node.replace_input_with(input, low)
        return low

    def _returned(self, node: fx.Node, input: fx.Node) -> ResultOf:
        """Lets the graph return a copy of integers."""
        with self._graph.inserting_before(node):
            self._further.append(self._graph.call_function(torch.clone, (input,)))
        return ResultOf(len(self._further) - 1)
