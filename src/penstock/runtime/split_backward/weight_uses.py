"""Observes the calls that use a stage's weights, learns which weight gradients can wait for W, and puts those off.

While a forward runs, weight matrices belong to a subclass of `nn.Parameter`, whose `__torch_function__` sees their
uses. Unlike a mode, this costs nothing in calls without weights, and nothing in backward. A compiler would compile anew
for another class; compiled code reports which weights it uses (`begin_compiled`).
"""

from __future__ import annotations

import types
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from penstock._base.compat import holders, saved_tensors_hooks
from penstock.runtime.exact import rules as exact
from penstock.runtime.exact.rules import Keeper, Saved, SavedTensor
from penstock.runtime.split_backward.weight_gradients import PLANNERS, UNLOWERED, DeferredCall, Term, lower_call


@dataclass(slots=True)
class DeferredGrads:
    """A call whose weight gradients wait. (A `DeferredCall` would hold the graph.)

    Attributes:
        keys: the `id` of each weight's parameter.
    """

    weights: tuple[Tensor, ...]
    keys: Sequence[int]
    gradients: Callable[..., Sequence[Term]]
    saved: Sequence[Saved]
    grad: Tensor

    def terms(self) -> Sequence[Term]:
        """Return the gradients of the weights."""
        return self.gradients(self.grad, *[saved.get() for saved in self.saved])


_OURS = (Tensor, nn.Parameter)
RUNNING: ContextVar[WeightUses | None] = ContextVar("RUNNING", default=None)
"""The uses of the stage whose forward runs, if its backward will be split: for compiled code."""


class WeightUses(AbstractContextManager[None]):
    """The uses of a stage's weights. As a context it wraps a forward: a class, which takes less time than a generator.

    Args:
        parameters: the weights.
        keeper: keeps what is needed later, for autograd and for W, if not they themselves.
        compiled: by id, those whose gradients only compiled code may put off.

    Attributes:
        decided: whether it is known which weights can wait.
        can_wait: by id, the parameters whose gradient can wait, and whether they are used through views.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], keeper: Keeper | None = None, *, compiled: Collection[int] = ()
    ) -> None:
        self.decided = False
        self._keeper = keeper
        self.can_wait: dict[int, bool] = {}
        strided = (p for p in parameters if type(p) is nn.Parameter and p.layout is torch.strided)
        self.candidates = {id(p): p for p in strided if p.is_floating_point()}
        self._watched = [p for p in self.candidates.values() if p.dim() > 1 and id(p) not in compiled]
        self._of_parameters = self._watched_class(nn.Parameter)
        self._of_views = self._watched_class(Tensor)
        self._noted: list[tuple[Tensor, ...]] | None = None
        self._learned: list[tuple[Tensor, ...]] = []
        self._token: Token[WeightUses | None] | None = None
        self._waiting: list[DeferredGrads] | None = None
        self._put_off_ids: set[int] = set()
        self._anchor: Tensor | None = None
        self._lowered: set[Any] = set()  # calls that autocast ran in its lower precision
        self._casts: set[Node] = set()  # the casts for these, in the noted forward
        self._cached: set[int] = set()  # ids of parameters whose cast in this forward may be cached
        self._ran_backward = False  # whether a backward ran inside the noted forward, through one of its calls

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Wrap an ordinary forward: note the calls whose weight gradient could wait."""
        self._noted, self._ran_backward = [], False
        self._casts.clear()
        self._cached.clear()
        with self:
            yield
        self._learned, self._noted = self._noted, None

    def putting_off(self, waiting: list[DeferredGrads], put: set[int], anchor: Tensor) -> AbstractContextManager[None]:
        """Wrap a forward: put off weight gradients. Fill `put` with the parameters that have one, by id; its backward
        fills `waiting`, in its own order."""
        self._waiting, self._put_off_ids, self._anchor = waiting, put, anchor
        self._cached.clear()
        return self

    def __enter__(self) -> None:
        self._set_classes(self._of_parameters)
        self._token = RUNNING.set(self)

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        RUNNING.reset(self._token)
        self._set_classes(nn.Parameter)
        self._waiting = self._anchor = None

    def begin_compiled(self, groups: Iterable[tuple[Tensor, ...]]) -> list[DeferredGrads] | None:
        """Called by compiled code before it runs. Return what takes the weight gradients that wait; None: none does.

        Args:
            groups: the weights whose gradients it can put off, each once; those in one group wait together or not.
        """
        if self._noted is not None:
            self._noted += groups
        return self._waiting

    def note_backward(self, _: object = None) -> None:
        """Called when a noted call's backward begins, maybe inside the noted forward."""
        self._ran_backward = self._ran_backward or self._noted is not None

    def decide(self, roots: Sequence[Node]) -> None:
        """Decide from the noted forward: a parameter can wait if all paths to it in the graph go through noted calls.

        None can wait if that forward ran a backward of its own: the graph of gradients leads to weights on other paths,
        through the same nodes.

        Args:
            roots: the nodes that backward starts from.
        """
        noted, self._learned, self.decided = [] if self._ran_backward else self._learned, [], True
        weights = [weight for call in noted for weight in call]
        uses = Counter(id(get_base(weight)) for weight in weights)
        views = {node for weight in weights for node in _view_nodes(weight)}
        path_counts = _count_paths(roots, views | self._casts)
        self._casts.clear()
        viewed = {key: {w._is_view() for w in weights if get_base(w) is self.candidates.get(key)} for key in uses}
        can_wait = {key for key, count in uses.items() if len(viewed[key]) == 1 and path_counts.get(key) == count}
        calls = [{id(get_base(weight)) for weight in call} for call in noted]
        while rejected := set[int]().union(*(call & can_wait for call in calls if not call <= can_wait)):
            can_wait -= rejected  # one kernel computes the gradients of a call's weights: both wait or neither
        self.can_wait = {key: viewed[key].pop() for key in can_wait}
        self._watched = [p for p in self._watched if id(p) in can_wait]

    def _watched_class(self, base: type[Tensor]) -> type[Tensor]:
        def torch_function(cls: type, func: Any, kinds: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
            if len(kinds) > 1 and not all(kind in _OURS or "is_watched" in vars(kind) for kind in kinds):
                return self._call_foreign(func, args, kwargs or {})
            with torch._C.DisableTorchFunctionSubclass():
                if torch.compiler.is_dynamo_compiling():  # compiled code is left alone
                    return func(*args, **(kwargs or {}))
                return self._call_watched(func, args, kwargs or {})

        body = {"__torch_function__": classmethod(torch_function), "is_watched": True}
        return types.new_class(f"Watched{base.__name__}", (base,), exec_body=lambda names: names.update(body))

    def _set_classes(self, kind: type[Tensor]) -> None:
        for parameter in self._watched:
            parameter.__class__ = kind  # type: ignore[assignment]

    def _call_foreign(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run a call with tensors of a foreign class, which must not be mixed with ours."""
        for arg in (*args, *kwargs.values()):
            if type(arg) is self._of_views:
                arg.__class__ = Tensor
        self._set_classes(nn.Parameter)
        try:
            return func(*args, **kwargs)
        finally:
            self._set_classes(self._of_parameters)

    def _call_watched(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        planner = PLANNERS.get(func)
        plan = planner(*args, **kwargs) if planner is not None else None
        if plan is None or not self._is_recorded():
            return self._watch_views(func(*args, **kwargs))
        if self._noted is not None:
            return self._note(func, plan, args, kwargs, self._noted)
        if self._waiting is not None and all(map(self.waits, plan.weights)):
            deferred = self._lowered_once(func, plan, args, kwargs) if _is_lowered(func, plan) else plan
            result = None if deferred is None else self._put_off(deferred, self._waiting)
            if result is not None:
                return result
        return func(*args, **kwargs)

    def _note(
        self, func: Any, plan: DeferredCall, args: Any, kwargs: Mapping[str, Any], noted: list[tuple[Tensor, ...]]
    ) -> Any:
        """Run a call of an ordinary forward, and note it if its weight gradients could wait: if autocast casts its
        weights, only as `lower_call` does, in casts that no other use can share."""
        result = func(*args, **kwargs)
        node = _find_node(result, plan)
        if node is None:
            return result
        if _is_lowered(func, plan):
            if result.dtype != torch.get_autocast_dtype(result.device.type):
                return result
            self._lowered.add(func)
            self._casts |= set(_casts_below(node))
            if self._lowered_once(func, plan, args, kwargs) is None:
                return result
        noted.append(plan.weights)
        node.register_prehook(self.note_backward)
        return result

    def _lowered_once(self, func: Any, plan: DeferredCall, args: Any, kwargs: Mapping[str, Any]) -> DeferredCall | None:
        """Return the call as autocast runs it, if it ran such calls that way in the noted forward.

        None for a parameter's second use in a forward if its cast may be cached: gradients of uses that share a cast
        are summed in the cast's precision.
        """
        dtype, caches = torch.get_autocast_dtype(plan.input.device.type), torch.is_autocast_cache_enabled()
        cached = {id(weight) for weight in plan.weights if caches and weight.is_leaf and weight.dtype != dtype}
        if func not in self._lowered or cached & self._cached:
            return None
        self._cached |= cached
        return lower_call(PLANNERS[func], plan, args, kwargs)

    def _is_recorded(self) -> bool:
        """Whether autograd records the call in its present run, so that it will not run again.

        It may, if hooks other than the keeper's take what autograd saves: a checkpoint's.
        """
        hooks = saved_tensors_hooks()
        is_ours = hooks is None or (self._keeper is not None and hooks[0] == self._keeper.pack)
        return torch.is_grad_enabled() and is_ours

    def waits(self, weight: Tensor) -> bool:
        """Whether a weight's gradient waits in a forward that puts off gradients."""
        return weight.requires_grad and self.can_wait.get(id(get_base(weight))) is weight._is_view()

    def _watch_views(self, result: Any) -> Any:
        for part in result if isinstance(result, (tuple, list)) else (result,):
            if type(part) is Tensor and part._is_view() and part.requires_grad and id(part._base) in self.candidates:
                part.__class__ = self._of_views
        return result

    def _put_off(self, plan: DeferredCall, waiting: list[DeferredGrads]) -> Tensor | None:
        """Defer a call's weight gradients; return its result, or None if autograd did not record what was expected."""
        save = SavedTensor.of if self._keeper is None else self._keeper.save
        saved = [save(tensor) for tensor in plan.saved]
        result = plan.run(*[weight.detach() for weight in plan.weights])
        keys = parameter_ids(plan.weights)
        keep = partial(self._keep, waiting, partial(DeferredGrads, plan.weights, keys, plan.gradients, saved))
        if not result.requires_grad:  # none of the inputs takes a gradient
            box = [exact.share_memory(result, int(result.storage_offset()), tuple(result.shape), result.stride())]
            result = _Tap.apply(self._anchor, box, keep)  # type: ignore[no-untyped-call]
        elif (node := _find_node(result, plan)) is not None:
            node.register_prehook(keep)
        else:
            return None
        self._put_off_ids.update(keys)
        return result

    def _keep(
        self, waiting: list[DeferredGrads], call: Callable[[Tensor], DeferredGrads], grads: Sequence[Tensor | None]
    ) -> None:
        if (grad := grads[0]) is not None:  # if written to, or shared, later backwards may use its memory, too
            shared = grad._version or holders(grad, None) > 1 + grad._is_view()  # a CUDA graph's replay is no write
            waiting.append(call(exact.copy_as(exact.Layout.of(grad), grad) if shared else grad))


def get_base(weight: Tensor) -> Tensor:
    """Return the parameter of which a weight is a view, or the weight itself."""
    return weight if weight._base is None else weight._base


def parameter_ids(weights: Iterable[Tensor]) -> list[int]:
    """The `id` of each weight's parameter."""
    return [id(get_base(weight)) for weight in weights]


class _Tap(torch.autograd.Function):
    """Makes autograd record a value that takes no gradient, and hands its gradient to `keep`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, box: list[Tensor], keep: Callable[[Sequence[Tensor | None]], None]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.keep = keep
        return box[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None, None]:
        ctx.keep(grads)
        return None, None, None


def _is_lowered(func: Any, call: DeferredCall) -> bool:
    """Whether autocast may run a call in its lower precision."""
    return (
        func not in UNLOWERED
        and torch.is_autocast_enabled(call.input.device.type)
        and not any(tensor.dtype is torch.float64 for tensor in (call.input, *call.weights))
    )


def _casts_below(node: Node) -> Iterator[Node]:
    """Yield the casts that produced a call's weights, some of them below a transpose."""
    for child, _ in node.next_functions:
        if child is not None and child.name() in ("TBackward0", "TransposeBackward0"):
            child = child.next_functions[0][0]
        if child is not None and child.name() == "ToCopyBackward0":
            yield child


def _find_node(result: Tensor, plan: DeferredCall) -> Node | None:
    """Autograd's node for a call, below the view that ends a product of more than two dimensions."""
    node = result.grad_fn
    while node is not None and node.name() in ("ViewBackward0", "UnsafeViewBackward0"):
        node = node.next_functions[0][0]
    return node if node is not None and node.name() in plan.nodes else None


def _view_nodes(weight: Tensor) -> Iterator[Node]:
    """Yield the nodes between a view and its parameter."""
    node = weight.grad_fn
    while node is not None and not _is_accumulator(node):
        yield node
        node = node.next_functions[0][0]


def _count_paths(roots: Sequence[Node], views: Collection[Node]) -> dict[int, int]:
    """Return, for each parameter in a graph, by id, the number of paths to it, counted up to the first node not in
    `views`."""
    parents: defaultdict[Node, list[Node]] = defaultdict(list)
    visited, stack = set(roots), list(dict.fromkeys(roots))
    while stack:
        node = stack.pop()
        if "Checkpoint" in node.name():
            return {}  # it runs its own backward, whose uses of parameters are not in this graph
        for child, _ in node.next_functions:
            if child is not None:
                parents[child].append(node)
                if child not in visited:
                    visited.add(child)
                    stack.append(child)

    def count_paths(node: Node) -> int:
        return roots.count(node) + sum(count_paths(parent) if parent in views else 1 for parent in parents[node])

    return {id(node.variable): count_paths(node) for node in visited if _is_accumulator(node)}  # type: ignore[attr-defined]


def _is_accumulator(node: Node) -> bool:
    return node.name() == "torch::autograd::AccumulateGrad"
