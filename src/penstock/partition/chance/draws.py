"""Numbers that a forward draws and then looks at: layer drop, stochastic depth, masks that numpy makes.

Their values are not known when a forward is recorded, and must not be, since a recording would freeze them. So an
object without a value stands in for each number; it supports comparison and arithmetic. The stand-in for an array can
only be turned into a tensor. When the forward asks for an outcome (`if torch.rand([]) < 0.1:`), it gets the answer that
this recording was given. `branches` records the other paths too, and merges them.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, fx, nn

from penstock._base.compat import FakeTensor
from penstock._base.trees import Leaf
from penstock.errors import PartitionError
from penstock.partition import source
from penstock.partition.chance import foreign
from penstock.partition.chance.foreign import States
from penstock.partition.recording.facts import Fact
from penstock.partition.recording.recording import Ask
from penstock.partition.units.units import Learned
from penstock.partition.watch.observer import Observer

REMEDY = (
    "Draw it with torch (torch.rand) and keep it a tensor, do it inside of a module that leaves=[...] names, or switch "
    "it off"
)


class Drawn(Leaf):
    """Stands for a number that is drawn for each microbatch, or calculated from such numbers."""

    def __init__(self, chance: Chance, node: fx.Node, low: float | None = None, high: float | None = None) -> None:
        self.chance, self.node, self.low, self.high = chance, node, low, high

    def __repr__(self) -> str:
        return f"<a random number, {self.node.name}>"

    def __bool__(self) -> bool:
        return self.chance.decide(self.node)

    def _compare(self, function: Callable[..., Any], other: Any) -> Any:
        if not isinstance(other, (bool, int, float, Drawn)):
            return NotImplemented
        if not isinstance(other, Drawn) and self.low is not None and self.high is not None:
            if function(self.low, other) == function(self.high, other) and not self.low <= other <= self.high:
                return function(self.low, other)
            if (function, other) in ((operator.lt, self.low), (operator.gt, self.high)):
                return False
            if (function, other) in ((operator.ge, self.low), (operator.le, self.high)):
                return True
        return self.chance.calculate(function, self, other)

    def _calculate(self, function: Callable[..., Any], *args: Any) -> Any:
        if not all(isinstance(a, (bool, int, float, Drawn)) for a in args):
            return NotImplemented
        return self.chance.calculate(function, *args)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        self.chance.refuse(f"a random number, {self.node.name!r}, in another way than to compare or calculate with it")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held = next(_drawn((args, kwargs)))
        held.chance.refuse(f"a random number, {held.node.name!r}, inside of a module that runs as a whole")

    __hash__ = None  # type: ignore[assignment]
    __int__ = __float__ = __complex__ = __index__ = __round__ = __floor__ = __ceil__ = __trunc__ = _refuse
    __array__ = __iter__ = __len__ = __getitem__ = __format__ = _refuse


def _define_operators() -> None:
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        function = getattr(operator, name)
        setattr(Drawn, f"__{name}__", lambda self, other, f=function: self._compare(f, other))
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        function = getattr(operator, name)
        setattr(Drawn, f"__{name}__", lambda self, other, f=function: self._calculate(f, self, other))
        setattr(Drawn, f"__r{name}__", lambda self, other, f=function: self._calculate(f, other, self))
    for name in ("neg", "pos", "abs"):
        function = getattr(operator, name)
        setattr(Drawn, f"__{name}__", lambda self, f=function: self._calculate(f, self))


_define_operators()


class DrawnArray(Leaf):
    """Stands for an array of random numbers that the forward makes into a tensor."""

    def __init__(self, chance: Chance, node: fx.Node, array: Any) -> None:
        self.chance, self.node = chance, node
        self.shape, self.dtype, self.ndim, self.size = array.shape, array.dtype, array.ndim, array.size

    def __repr__(self) -> str:
        return f"<an array of random numbers, {self.node.name}>"

    def astype(self, dtype: Any) -> DrawnArray:
        return self.chance.astype(self, dtype)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        self.chance.refuse(f"an array of random numbers, {self.node.name!r}, for more than to make a tensor of it")

    __torch_function__ = Drawn.__torch_function__
    __hash__ = None  # type: ignore[assignment]
    __bool__ = __int__ = __float__ = __index__ = __array__ = __iter__ = __len__ = __getitem__ = __setitem__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __neg__ = __invert__ = __and__ = __or__ = __pow__ = __matmul__ = __mod__ = __floordiv__ = _refuse
    __array_ufunc__ = __array_function__ = _refuse


class Book(Protocol):
    """The parts of the recording in progress that `Chance` reads and writes; see `recorder.recorder`."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def observer(self) -> Observer: ...
    @property
    def facts(self) -> Mapping[fx.Node, Fact]: ...
    @property
    def is_paused(self) -> bool:
        """Whether a recorded call is running; what happens inside it is not recorded."""

    @property
    def scope(self) -> str:
        """The name of the module whose forward is running."""

    def here(self) -> str:
        """The running line, and its module."""

    def is_seen(self, tensor: Tensor) -> bool:
        """Whether a node stands for a tensor."""

    def node_of(self, tensor: Tensor) -> fx.Node:
        """That node."""

    def argument(self, value: Any) -> Any:
        """Converts a value to an argument of a node."""

    def arguments(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Converts a call's arguments to those of a node."""

    def write_number(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: Any = None, *, draws: bool = False
    ) -> fx.Node:
        """A call that returns a random number or array."""

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a call and records it."""

    def run_known(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of a drawing function, run for real."""


class Chance:
    """What one recording knows about the numbers that are drawn outside its units.

    Args:
        book: where they are recorded.
        choices: the answer to each question, by its number; questions that are not in it get False.
    """

    def __init__(self, book: Book, choices: Mapping[int, bool]) -> None:
        self._book, self._choices = book, choices
        self._thread = threading.get_ident()
        self._generators = States()
        self._noted = False
        self._answers: dict[fx.Node, bool] = {}
        self.asks: list[Ask] = []
        self.held = False
        """Whether a `Drawn` was handed out and so may come back as an argument."""
        self.is_foreign = False
        """Whether any such number, or a unit, is drawn from Python's or numpy's generators."""

    def read(self, function: Any, args: Any) -> tuple[bool, Any]:
        """Whether a call asks for a value that chance alone decides and, if so, the answer."""
        name = getattr(function, "__name__", "")
        if name not in ("__bool__", "item", "equal", "is_nonzero") or not any(isinstance(a, FakeTensor) for a in args):
            return False, None
        if not all(isinstance(a, Tensor) and self._book.is_seen(a) for a in args):
            return False, None
        nodes = [self._book.node_of(t) for t in args]
        if not self.is_chance(*nodes):
            return False, None
        if name == "__bool__":
            return True, self.decide(nodes[0])
        value = self._number(
            "call_function" if name == "equal" else "call_method",
            torch.equal if name == "equal" else name,
            tuple(nodes),
        )
        return True, value if name == "item" else bool(value)

    def is_chance(self, *nodes: fx.Node) -> bool:
        """Whether values depend on draws alone: not on inputs, parameters or what blocks compute."""
        facts, draws, stack, seen = self._book.facts, False, [*nodes], {*nodes}
        while stack:
            one = stack.pop()
            fact = facts[one]
            if fact.kind not in ("call", "constant") or fact.writes or fact.takes_gradient:
                return False
            draws |= fact.draws
            stack += [a for a in one.all_input_nodes if a not in seen]
            seen.update(one.all_input_nodes)
        return draws

    def decide(self, node: fx.Node) -> bool:
        """The outcome that this recording must follow."""
        if self._book.is_paused:
            self.refuse(f"a random number, {node.name!r}, inside of a module that runs as a whole")
        if node not in self._answers:
            self._answers[node] = self._choices.get(len(self.asks), False)
            book = self._book
            line = source.current_line()
            self.asks.append(Ask(node, book.observer.position, line, book.scope))
        return self._answers[node]

    def calculate(self, function: Callable[..., Any], *args: Any) -> Drawn:
        if self._book.is_paused:
            self.refuse("a random number inside of a module that runs as a whole")
        return self._number("call_function", function, tuple(a.node if isinstance(a, Drawn) else a for a in args))

    def astype(self, array: DrawnArray, dtype: Any) -> DrawnArray:
        """The stand-in for an array of another dtype."""
        node = self._book.write_number("call_method", "astype", (array.node, self._book.argument(dtype)))
        return DrawnArray(self, node, sys.modules["numpy"].empty(array.shape, dtype))

    def _number(self, op: str, target: Any, args: tuple[Any, ...]) -> Drawn:
        self.held = True
        return Drawn(self, self._book.write_number(op, target, args))

    # -- Python's and numpy's random numbers ------------------------------------------------------------------------

    @contextmanager
    def replaced(self, whole: Collection[FunctionType]) -> Iterator[None]:
        """Wraps the forward. `whole`: functions that are recorded as one call."""

        def from_numpy(array: Any) -> Any:
            if isinstance(array, DrawnArray):
                return self._book.call(real, (array,), {})
            return real(array)

        real = torch.from_numpy
        functions = {function: partial(self._call_whole, function) for function in whole}
        with foreign.replaced(self._book.model, self._draw, functions, from_numpy):
            yield
        self.check_generators()

    def check_generators(self) -> None:
        """Refuses unrecorded draws outside the units: a recording would freeze them."""
        if self._generators.moved():
            raise PartitionError(
                f"the forward seeds Python's or numpy's random numbers, or draws from them in a way that was not seen, "
                f"before {self._book.here()} which a recording would freeze. Draw them as random.f or "
                "numpy.random.f, or with torch (torch.rand), inside of a block if they are seeded; or switch it off"
            )

    def after_unit(self) -> bool:
        """Whether the unit that just ran drew from Python's or numpy's generators; which part of it did is unknown."""
        moved, noted, self._noted = self._generators.moved(), self._noted, False
        if moved:
            self._generators.accept()
        self.is_foreign |= moved
        return moved and not noted

    def _draw(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return function(*args, **kwargs)
        if name == foreign.FRESH and (args or kwargs) and (*args, *kwargs.values())[0] is not None:
            return function(*args, **kwargs)  # has its own seed
        if name == foreign.FRESH:
            self.refuse("a generator that has no seed (numpy.random.default_rng())")
        if self._book.is_paused:
            self._book.observer.draw()
            self._noted = True
            return function(*args, **kwargs)
        self.check_generators()
        if not all(isinstance(a, (bool, int, float, str, tuple, type(None))) for a in (*args, *kwargs.values())):
            self.refuse(f"{name} of objects")
        value = function(*args, **kwargs)
        self._generators.accept()
        return self._stand_in(value, foreign.draw, (name, *args), kwargs, *_range(name, args, kwargs))

    def _call_whole(self, function: FunctionType, *args: Any, **kwargs: Any) -> Any:
        book = self._book
        if threading.get_ident() != self._thread or book.is_paused:
            return function(*args, **kwargs)
        self.check_generators()
        if holds_drawn((args, kwargs)):
            self.refuse(f"a random number as an argument of {function.__name__}")
        given, named = book.arguments(args, kwargs)
        value = book.run_known(function, args, kwargs)
        self._generators.accept()
        return self._stand_in(value, function, given, named)

    def _stand_in(
        self,
        value: Any,
        target: Any,
        args: Any,
        kwargs: Any,
        low: float | None = None,
        high: float | None = None,
    ) -> Any:
        """A stand-in for a drawn number or array, of which only the kind is used."""
        numpy = sys.modules.get("numpy")
        self.is_foreign = self.held = True
        if numpy and isinstance(value, numpy.ndarray):
            if value.dtype.kind not in "biufc":
                self.refuse("a random choice among objects")
            if target is foreign.draw and (function := foreign.enclosing_function()) is not None:
                raise Learned(f"{self._book.here()} draws an array", function=function)
            return DrawnArray(self, self._book.write_number("call_function", target, args, kwargs, draws=True), value)
        if isinstance(value, (bool, int, float)) or (numpy and isinstance(value, numpy.generic)):
            return Drawn(self, self._book.write_number("call_function", target, args, kwargs, draws=True), low, high)
        return self.refuse(f"{getattr(target, '__name__', target)}, which gives something else than random numbers")

    def refuse(self, what: str) -> NoReturn:
        refusal = f"{self._book.here()} uses {what}, which a recording cannot follow. {REMEDY}"
        if (function := foreign.enclosing_function()) is not None and not self._book.is_paused:
            raise Learned(refusal, function=function)
        raise PartitionError(refusal)


def _range(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """The bounds of a drawn number, which may decide a comparison for certain (with a rate of 0, say)."""
    if name.rpartition(".")[2] in ("random", "rand", "random_sample", "ranf", "sample"):
        return 0.0, 1.0
    if name.endswith(".uniform"):
        bounds = [*args, *kwargs.values()] or [0.0, 1.0]
        if len(bounds) == 2 and all(isinstance(b, (int, float)) for b in bounds):
            return min(bounds), max(bounds)
    return None, None


def stand_ins(tree: Any) -> Any:
    """Replaces drawn numbers and arrays in a tree with values of the same type and shape, for calls on fake tensors."""
    if isinstance(tree, Drawn):
        return 0.5
    if isinstance(tree, DrawnArray):
        return sys.modules["numpy"].zeros(tree.shape, tree.dtype)
    if type(tree) in (tuple, list):
        return type(tree)(map(stand_ins, tree))
    return {key: stand_ins(value) for key, value in tree.items()} if type(tree) is dict else tree


def holds_drawn(tree: Any) -> bool:
    """Whether a random number or array is among the leaves."""
    return next(_drawn(tree), None) is not None


def _drawn(tree: Any) -> Iterator[Drawn | DrawnArray]:
    if isinstance(tree, (Drawn, DrawnArray)):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from _drawn(value)
    elif isinstance(tree, dict):
        yield from _drawn(tuple(tree.values()))
    elif isinstance(tree, slice):
        yield from _drawn((tree.start, tree.stop, tree.step))


def node_of_drawn(value: object) -> fx.Node | None:
    """The node of a drawn number or array; None for anything else."""
    return value.node if isinstance(value, (Drawn, DrawnArray)) else None
