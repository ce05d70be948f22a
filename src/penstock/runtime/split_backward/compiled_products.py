"""Lets the weight gradients of products in compiled code wait for W.

A compiler makes one backward of all that it compiles. So before it does, each product whose weight gradient can wait
gets its weight without the weight's graph and, as further inputs of the compiled code, two *taps*: values that nobody
reads, but whose gradients are what W needs, the gradient of the product's result and the product's input (which the
compiler saves or computes anew, as for a whole backward). Autograd carries both from the compiled backward to a
function around the code, which keeps them for W or, in a whole backward, computes the weight gradients at once. So
both kinds of backward run the same compiled code, whatever the backend.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn

from penstock._base.compat_compiler import add_input, copy_of_recorded, size_in
from penstock._base.errors import PartitionError
from penstock.runtime.exact import rules as exact
from penstock.runtime.exact.rules import SavedTensor
from penstock.runtime.split_backward.weight_gradients import (
    PLANNERS,
    DeferredCall,
    Term,
    cast_back,
    evaluate,
    sum_terms,
)
from penstock.runtime.split_backward.weight_uses import RUNNING, DeferredGrads, WeightUses, parameter_ids

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
        """Compile a graph."""
        if not torch.is_grad_enabled() or not _products(module.graph, examples):
            return self.compiler(module, examples)
        module = copy_of_recorded(module)
        candidates = _products(module.graph, examples)
        tapping = _Tapping(module.graph, examples)
        products = tuple(tapping.tap(node, product) for node, product in candidates.items())
        weights, results = tapping.end(products)
        module.recompile()
        compiled = self.compiler(module, tapping.examples)
        return TappedCode(compiled, products, weights, tuple(tapping.taps), results)


# -- compiled code that runs ------------------------------------------------------------------------------------------


class Tap(NamedTuple):
    """An input that exists for its gradient; a size may depend on the code's other inputs."""

    sizes: tuple[int | Callable[[Sequence[Any]], int], ...]
    dtype: torch.dtype
    device: torch.device

    def make(self, inputs: Sequence[Any]) -> Tensor:
        """Make the tap: a tensor with the memory of one element."""
        sizes = [size if isinstance(size, int) else size(inputs) for size in self.sizes]
        return torch.empty_strided(sizes, [0] * len(sizes), dtype=self.dtype, device=self.device)


class Source(NamedTuple):
    """Something that W needs: a weight, the gradient of a tap, or a further result of the code, and its number."""

    kind: Literal["weight", "tap", "result"]
    number: int


class TappedCall(NamedTuple):
    """A tapped product.

    Attributes:
        gradients: see `DeferredCall`.
        weights: its weights, by their places among the code's inputs.
        tap: the number of the tap whose gradient is that of its result.
        sources: where what W needs of the forward comes from: its input, and more.
        contiguous: whether the input is contiguous; compiled code may hand it out in another order.
    """

    gradients: Callable[..., Sequence[Term]]
    weights: tuple[int, ...]
    tap: int
    sources: tuple[Source, ...]
    contiguous: bool

    def terms(self, weights: Sequence[Tensor], grad: Tensor, input: Tensor, *extra: Tensor) -> Sequence[Term]:
        """Return the gradients of the weights."""
        saved = (input.contiguous() if self.contiguous else input, *extra)
        cast = [x.to(grad.dtype) if x.is_floating_point() else x for x in saved]  # autocast casts kernels
        return cast_back(self.gradients(grad, *cast), weights, grad.dtype)


@dataclass(frozen=True)
class TappedCode:
    """Compiled code with taps.

    Attributes:
        compiled: takes the inputs, with weights without their graph, and taps; gives the results and further ones.
        weights: the places of the weights among the inputs.
        results: the number of results, without further ones.
    """

    compiled: Callable[..., Any]
    products: tuple[TappedCall, ...]
    weights: tuple[int, ...]
    taps: tuple[Tap, ...]
    results: int

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Run the code."""
        weights, uses, waiting = {index: inputs[index] for index in self.weights}, RUNNING.get(), set[int]()
        put_off = None
        if uses is not None:  # weights that share a call wait together or not at all
            groups = dict.fromkeys(product.weights for product in self.products)
            put_off = uses.begin_compiled(tuple(map(weights.__getitem__, group)) for group in groups)
            waiting = {p for p, weight in weights.items() if uses.waits(weight)} if put_off is not None else waiting
        run = _Run(self, weights, uses, put_off, waiting)
        immediate = [weight for index, weight in weights.items() if index not in waiting]
        taps: tuple[Tensor, ...] = _Taps.apply(run, inputs, _ANCHOR, *immediate)  # type: ignore[no-untyped-call]
        arguments = [weights[index].detach() if index in weights else value for index, value in enumerate(inputs)]
        results: Sequence[Any] = self.compiled(*arguments, *taps)
        run.extras = results[self.results :]
        return results[: self.results]


@dataclass
class _Run:
    """One run of the code: what its backward needs beside what autograd keeps.

    Attributes:
        weights: by their places.
        put_off: takes the weight gradients that wait.
        waiting: the places of their weights.
        extras: the further results.
    """

    code: TappedCode
    weights: Mapping[int, Tensor]
    uses: WeightUses | None
    put_off: list[DeferredGrads] | None
    waiting: Collection[int]
    extras: Sequence[Tensor] = ()

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Put off the weight gradients that can wait, and return the others."""
        _check_no_double_backward()
        if self.uses is not None:
            self.uses.note_backward()
        terms: defaultdict[int, list[Tensor]] = defaultdict(list)
        sources: Mapping[str, Any] = {"weight": self.weights, "tap": grads, "result": self.extras}
        with torch.no_grad():
            for product in reversed(self.code.products):  # in autograd's order
                if (grad := grads[product.tap]) is None:
                    continue
                weights = tuple(self.weights[index] for index in product.weights)
                saved = [SavedTensor.of(sources[kind][index]) for kind, index in product.sources]
                call = DeferredGrads(weights, parameter_ids(weights), partial(product.terms, weights), saved, grad)
                if self.put_off is not None and product.weights[0] in self.waiting:
                    self.put_off.append(call)
                    continue
                with exact.outside_autocast(grad.device.type):
                    for index, term in zip(product.weights, call.terms(), strict=True):
                        terms[index].append(evaluate(term))
            sums = {index: sum_terms(self.weights[index], values) for index, values in terms.items()}
        return [sums.get(index) for index in self.code.weights if index not in self.waiting]


_ANCHOR = torch.empty(0, requires_grad=True)
"""Makes taps take a gradient where all weights wait. (A weight must not be among the inputs then: autograd would call
its hooks without a gradient.)"""


class _Taps(torch.autograd.Function):
    """Makes the taps of a run, and passes their gradients to it."""

    @staticmethod
    def forward(ctx: Any, run: _Run, inputs: Sequence[Any], anchor: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.run = run
        return tuple(tap.make(inputs) for tap in run.code.taps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, None, *ctx.run.backward(grads)


class Tapped(torch.autograd.Function):
    """Within the code: a product's result, as it is. In backward, the taps get the result's gradient and the input."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, tap: Tensor, input: Tensor | None, input_tap: Tensor | None) -> Tensor:
        ctx.save_for_backward(*(() if input is None else (input,)))
        return result.clone()  # not a view, which could not be updated in place

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _check_no_double_backward()
        grad = grads[0]
        saved = ctx.saved_tensors
        return grad, grad, None, saved[0] if saved else None


def tapped(result: Tensor, tap: Tensor, input: Tensor | None = None, input_tap: Tensor | None = None) -> Tensor:
    """Call `Tapped`, as compiled graphs do."""
    value: Tensor = Tapped.apply(result, tap, input, input_tap)  # type: ignore[no-untyped-call]
    return value


def _check_no_double_backward() -> None:
    """Raise PartitionError in a backward that is itself recorded: weights without their graph would be constants in it,
    and what they owe to it would be lost."""
    if torch.is_grad_enabled():
        raise PartitionError(
            "the forward of a compiled stage takes a gradient with create_graph=True, which leads to its weights, and "
            "the schedule splits its backward; leave compile= out, or pass a schedule that does not split it: "
            "penstock.schedule.merge_backward makes one"
        )


# -- taps in a graph before it is compiled ----------------------------------------------------------------------------


class _Candidate(NamedTuple):
    """A product whose weights are parameters.

    Attributes:
        plan: the call, on fake tensors.
        weights: the weights, among the graph's inputs.
        nodes: the tensors among its arguments, by the id of the fake ones.
    """

    plan: DeferredCall
    weights: tuple[fx.Node, ...]
    nodes: Mapping[int, fx.Node]


def _products(graph: fx.Graph, examples: Sequence[Any]) -> dict[fx.Node, _Candidate]:
    """Return the products of a graph whose weight gradients can wait: their weights are used in such products only."""
    inputs = graph.find_nodes(op="placeholder")
    trained = {n for n, e in zip(inputs, examples, strict=True) if isinstance(e, nn.Parameter) and e.requires_grad}
    symbols = _symbols(inputs)
    products = ((node, _product(node, trained)) for node in _outside_transforms(graph))
    candidates = {node: product for node, product in products if product and _can_be_tapped(node, product, symbols)}

    def only_in_products(weight: fx.Node) -> bool:
        return all(user in candidates and weight in candidates[user].weights for user in weight.users)

    while rejected := [node for node, product in candidates.items() if not all(map(only_in_products, product.weights))]:
        for node in rejected:
            del candidates[node]
    return candidates


def _outside_transforms(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the nodes outside of `torch.func`'s transforms (`vmap`, `grad`, `jvp`), in which no autograd function can
    tap."""
    levels = 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        levels += name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")
        if not levels:
            yield node


def _product(node: fx.Node, trained: set[fx.Node]) -> _Candidate | None:
    """Return a product with trained weights, if that is what a node is."""
    if node.op not in ("call_function", "call_method"):
        return None
    function: Any = getattr(Tensor, str(node.target), None) if node.op == "call_method" else node.target
    planner = PLANNERS.get(_OPERATORS.get(function, function))
    if planner is None:
        return None
    arguments = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, fx.Node)]
    values = {arg: arg.meta.get("example_value") for arg in node.all_input_nodes}
    if len(arguments) != len(values) or any(isinstance(value, (type(None), torch.SymInt)) for value in values.values()):
        return None  # an argument that is given twice, or within another, or is a size
    args: Any = fx.node.map_arg(node.args, values.__getitem__)
    kwargs: Any = fx.node.map_arg(node.kwargs, values.__getitem__)
    plan = planner(*args, **kwargs)
    if plan is None:
        return None
    nodes = {id(value): arg for arg, value in values.items()}
    weights = tuple(nodes[id(weight)] for weight in plan.weights)
    return _Candidate(plan, weights, nodes) if trained.issuperset(weights) else None


def _can_be_tapped(node: fx.Node, product: _Candidate, symbols: Mapping[Any, int]) -> bool:
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
    """Return which inputs hold the sizes that change, by their symbols."""
    values = [node.meta.get("example_value") for node in inputs]
    return {value.node.expr: index for index, value in enumerate(values) if isinstance(value, torch.SymInt)}


class _Tapping:
    """Gives a graph its taps."""

    def __init__(self, graph: fx.Graph, examples: Sequence[Any]) -> None:
        self.examples = list(examples)
        self.taps: list[Tap] = []
        self._graph = graph
        self._inputs: list[fx.Node] = graph.find_nodes(op="placeholder")
        self._indices = {node: index for index, node in enumerate(self._inputs)}
        self._symbols = _symbols(self._inputs)
        self._extras: list[fx.Node] = []
        self._tapped: dict[fx.Node, fx.Node] = {}

    def tap(self, node: fx.Node, product: _Candidate) -> TappedCall:
        """Tap a product."""
        result: Tensor = node.meta["example_value"]
        result_source, result_tap = self._new(result.shape, result)
        taps, sources = [result_tap], list[Source]()
        for value in product.plan.saved:
            input = product.nodes[id(value)]
            if input in product.weights:
                sources.append(Source("weight", self._indices[input]))
            elif value.is_floating_point():
                input_source, input_tap = self._new(value.shape, result)
                taps += [self._cast(node, input, result.dtype), input_tap]
                sources.append(input_source)
            else:
                sources.append(self._returned(node, input))
        with self._graph.inserting_after(node):
            self._tapped[node] = self._graph.call_function(tapped, (node, *taps))
        weights = tuple(self._indices[weight] for weight in product.weights)
        return TappedCall(
            product.plan.gradients, weights, result_source.number, tuple(sources), product.plan.input.is_contiguous()
        )

    def end(self, products: Sequence[TappedCall]) -> tuple[tuple[int, ...], int]:
        """Put what is tapped in place, take the weights' graph from the examples, and let the graph return integers.

        Returns the places of the weights, and the number of results that the graph had before.
        """
        for node, tapped_node in self._tapped.items():
            node.replace_all_uses_with(tapped_node, lambda user, tapped_node=tapped_node: user is not tapped_node)  # type: ignore[misc]
        weights = tuple(sorted({index for product in products for index in product.weights}))
        for index in weights:
            self.examples[index] = self._inputs[index].meta["example_value"].detach()
        (output,) = self._graph.find_nodes(op="output")
        results: Any = output.args[0]
        output.args = ((*results, *self._extras),)
        return weights, len(results)

    def _new(self, sizes: Sequence[int], template: Tensor) -> tuple[Source, fx.Node]:
        """Make a new tap, like a fake tensor but for its sizes."""
        example = template.detach().new_empty(()).expand(tuple(sizes)).requires_grad_()
        node = add_input(self._graph, f"tap_{len(self.taps)}")
        resolved = [size_in(size, self._symbols) for size in sizes]
        self.taps.append(Tap(tuple(size for size in resolved if size is not None), template.dtype, template.device))
        self.examples.append(example)
        return Source("tap", len(self.taps) - 1), node

    def _cast(self, node: fx.Node, input: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Return a product's input in the precision in which autocast runs the product."""
        if input.meta["example_value"].dtype == dtype:
            return input
        with self._graph.inserting_before(node):
            low = self._graph.call_method("to", (input, dtype))
        node.replace_input_with(input, low)
        return low

    def _returned(self, node: fx.Node, input: fx.Node) -> Source:
        """Let the graph return a copy of integers."""
        with self._graph.inserting_before(node):
            self._extras.append(self._graph.call_function(torch.clone, (input,)))
        return Source("result", len(self._extras) - 1)
