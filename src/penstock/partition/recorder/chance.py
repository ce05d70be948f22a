"""Numbers that a forward draws and then looks at: layer drop, stochastic depth, masks that numpy makes.

Their values are not known when a forward is recorded, and must not be, since a recording would freeze them. So an
object without a value stands in for each number; it supports comparison and arithmetic. The stand-in for an array can
only be turned into a tensor. When the forward asks for an outcome (`if torch.rand([]) < 0.1:`), it gets the answer that
this recording was given. `branches` records the other paths too, and merges them.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, partialmethod
from types import FunctionType
from typing import Any, NoReturn

import numpy
import torch
from torch import fx

from penstock._base.compat import FakeTensor, unset_fake_temporarily
from penstock._base.errors import PartitionError
from penstock.partition import source
from penstock.partition.recorder import foreign
from penstock.partition.recorder.writer import Writer
from penstock.partition.recording.recording import Ask
from penstock.partition.run.known_values import KnownValues
from penstock.partition.units.units import Learned
from penstock.partition.values.objects import OfNode

REMEDY = (
    "Draw it with torch (torch.rand) and keep it a tensor, do it inside of a module that leaf_modules=[...] names, or "
    "switch it off"
)
COMPARING = ("lt", "le", "gt", "ge", "eq", "ne")
CALCULATING = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
ALONE = ("neg", "pos", "abs")
OTHERS = tuple(
    "bool int float complex index round floor ceil trunc array iter len getitem setitem contains format "  # noqa: SIM905
    "invert and or matmul array_ufunc array_function".split()
)


class Drawn(OfNode):
    """Stands for a number or an array that is drawn for each microbatch, or calculated from such numbers."""

    what, allowed = "a random number", "in another way than to compare or calculate with it"

    def __init__(self, chance: Chance, node: fx.Node) -> None:
        self.chance, self.node = chance, node

    def __repr__(self) -> str:
        return f"<{self.what}, {self.node.name}>"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        self.chance.refuse(f"{self.what}, {self.node.name!r}, {self.allowed}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held = next(_drawn((args, kwargs)))
        held.chance.refuse(f"{held.what}, {held.node.name!r}, inside of a module that runs as a whole")

    __hash__ = None  # type: ignore[assignment]


for _name in (*COMPARING, *CALCULATING, *(f"r{name}" for name in CALCULATING), *ALONE, *OTHERS):
    setattr(Drawn, f"__{_name}__", Drawn._refuse)


class DrawnNumber(Drawn):
    """`low`, `high`: its bounds, which may decide a comparison for certain (with a rate of 0, say)."""

    def __init__(self, chance: Chance, node: fx.Node, low: float | None = None, high: float | None = None) -> None:
        super().__init__(chance, node)
        self.low, self.high = low, high

    def __bool__(self) -> bool:
        return self.chance.decide(self.node)

    def _compare(self, function: Callable[..., Any], other: Any) -> Any:
        if (
            isinstance(other, (bool, int, float))
            and self.low is not None
            and function not in (operator.eq, operator.ne)
        ):
            always = function(self.low, other)
            if always == function(self.high, other):
                return always
        return self._calculate(function, other)

    def _calculate(self, function: Callable[..., Any], *others: Any, reflected: bool = False) -> Any:
        if not all(isinstance(other, (bool, int, float, DrawnNumber)) for other in others):
            return NotImplemented
        return self.chance.calculate(function, *((*others, self) if reflected else (self, *others)))


for _name in (*COMPARING, *CALCULATING, *ALONE):
    _function, _does = getattr(operator, _name), DrawnNumber._compare if _name in COMPARING else DrawnNumber._calculate
    setattr(DrawnNumber, f"__{_name}__", partialmethod(_does, _function))
    if _name in CALCULATING:
        setattr(DrawnNumber, f"__r{_name}__", partialmethod(DrawnNumber._calculate, _function, reflected=True))


class DrawnArray(Drawn):
    """Stands for an array of random numbers that the forward makes into a tensor."""

    what, allowed = "an array of random numbers", "for more than to make a tensor of it"

    def __init__(self, chance: Chance, node: fx.Node, array: Any) -> None:
        super().__init__(chance, node)
        self.shape, self.dtype, self.ndim, self.size = array.shape, array.dtype, array.ndim, array.size

    def astype(self, dtype: Any) -> DrawnArray:
        return self.chance.astype(self, dtype)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()


class Chance:
    """What one recording knows about the numbers that are drawn outside its units.

    Args:
        book: where they are recorded.
        known: runs functions that draw.
        call: makes a call and records it.
        choices: the answer to each question, by its number; questions that are not in it get False.
    """

    def __init__(
        self, book: Writer, known: KnownValues, call: Callable[[Any, Any, Any], Any], choices: Mapping[int, bool]
    ) -> None:
        self._book, self._known, self._call, self._choices = book, known, call, choices
        self._thread = threading.get_ident()
        self._generators = foreign.states()
        self._noted = False
        self._answers: dict[fx.Node, bool] = {}
        self.asks: list[Ask] = []
        self.held = False
        """Whether a `Drawn` was handed out and so may come back as an argument."""
        self.is_foreign = False
        """Whether any such number, or a unit, is drawn from Python's or numpy's generators."""

    def read(self, function: Any, args: Any) -> Any:
        """Return the answer to a call that asks for a value which chance alone decides; None for any other call."""
        name = getattr(function, "__name__", "")
        asked = args[0] if args and name in ("__bool__", "item") else None
        if not isinstance(asked, FakeTensor) or not self._book.is_seen(asked):
            return None
        node = self._book.node_of(asked)
        if not self._is_chance(node):
            return None
        return self.decide(node) if name == "__bool__" else self._number("call_method", name, (node,))

    def _is_chance(self, node: fx.Node) -> bool:
        """Whether a value depends on draws alone: not on inputs, parameters or what blocks compute."""
        facts, draws, stack, seen = self._book.facts, False, [node], {node}
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
        """Return the outcome that this recording must follow."""
        book = self._book
        if book.is_paused:
            self.refuse(f"a random number, {node.name!r}, inside of a module that runs as a whole")
        if node not in self._answers:
            self._answers[node] = self._choices.get(len(self.asks), False)
            self.asks.append(Ask(node, book.observer.position, source.current_line(), book.scope))
        return self._answers[node]

    def calculate(self, function: Callable[..., Any], *args: Any) -> Drawn:
        if self._book.is_paused:
            self.refuse("a random number inside of a module that runs as a whole")
        return self._number("call_function", function, tuple(a.node if isinstance(a, Drawn) else a for a in args))

    def astype(self, array: DrawnArray, dtype: Any) -> DrawnArray:
        """Return the stand-in for an array of another dtype."""
        node = self._book.write_number("call_method", "astype", (array.node, self._book.argument(dtype)))
        return DrawnArray(self, node, numpy.empty(array.shape, dtype))

    def _number(self, op: str, target: Any, args: tuple[Any, ...]) -> Drawn:
        self.held = True
        return DrawnNumber(self, self._book.write_number(op, target, args))

    # -- Python's and numpy's random numbers ------------------------------------------------------------------------

    @contextmanager
    def replaced(self, whole: Collection[FunctionType]) -> Iterator[None]:
        """Wrap the forward. `whole`: functions that are recorded as one call."""

        def from_numpy(array: Any) -> Any:
            return self._call(real, (array,), {}) if isinstance(array, DrawnArray) else real(array)

        real = torch.from_numpy
        functions = {function: partial(self._call_whole, function) for function in whole}
        with foreign.replaced(self._book.model, self._draw, functions, from_numpy):
            yield
        self.check_generators()

    def check_generators(self) -> None:
        """Refuse unrecorded draws outside the units: a recording would freeze them."""
        if self._generators != foreign.states():
            raise PartitionError(
                f"the forward seeds Python's or numpy's random numbers, or draws from them in a way that was not seen, "
                f"before {self._book.here()} which a recording would freeze. Draw them as random.f or "
                "numpy.random.f, or with torch (torch.rand), inside of a block if they are seeded; or switch it off"
            )

    def after_unit(self) -> bool:
        """Whether the unit that just ran drew from Python's or numpy's generators; which part of it did is unknown."""
        before, self._generators = self._generators, foreign.states()
        moved, noted, self._noted = before != self._generators, self._noted, False
        self.is_foreign |= moved
        return moved and not noted

    def _draw(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return function(*args, **kwargs)
        given = (*args, *kwargs.values())
        if name == foreign.FRESH:
            if given and given[0] is not None:
                return function(*args, **kwargs)  # has its own seed
            self.refuse("a generator that has no seed (numpy.random.default_rng())")
        if self._book.is_paused:
            self._book.observer.draw()
            self._noted = True
            return function(*args, **kwargs)
        self.check_generators()
        if not all(isinstance(a, (bool, int, float, str, tuple, type(None))) for a in given):
            self.refuse(f"{name} of objects")
        value = function(*args, **kwargs)
        return self._stand_in(value, foreign.draw, (name, *args), kwargs, *_range(name, given))

    def _call_whole(self, function: FunctionType, *args: Any, **kwargs: Any) -> Any:
        book = self._book
        if threading.get_ident() != self._thread or book.is_paused:
            return function(*args, **kwargs)
        self.check_generators()
        if holds_drawn((args, kwargs)):
            self.refuse(f"a random number as an argument of {function.__name__}")
        given, named = book.arguments(args, kwargs)
        with book.pause():
            if self._known.unknown(args, kwargs):
                raise PartitionError(
                    f"{book.here()} calls {function.__name__}, which draws random numbers, with a tensor whose values "
                    "are not known when the forward is recorded. Switch it off, or do it outside of the model"
                )
            with unset_fake_temporarily(), book.observer.trial():
                value = function(*args, **kwargs)
        return self._stand_in(value, function, given, named)

    def _stand_in(
        self, value: Any, target: Any, args: Any, kwargs: Any, low: float | None = None, high: float | None = None
    ) -> Any:
        """Return a stand-in for a drawn number or array, of which only the kind is used."""
        self._generators = foreign.states()
        self.is_foreign = self.held = True
        is_array = isinstance(value, numpy.ndarray)
        if is_array and value.dtype.kind not in "biufc":
            self.refuse("a random choice among objects")
        if is_array and target is foreign.draw and (function := foreign.enclosing_function()) is not None:
            raise Learned(f"{self._book.here()} draws an array", functions=[function])
        if not is_array and not isinstance(value, (bool, int, float, numpy.generic)):
            self.refuse(f"{getattr(target, '__name__', target)}, which gives something else than random numbers")
        node = self._book.write_number("call_function", target, args, kwargs, draws=True)
        return DrawnArray(self, node, value) if is_array else DrawnNumber(self, node, low, high)

    def refuse(self, what: str) -> NoReturn:
        refusal = f"{self._book.here()} uses {what}, which a recording cannot follow. {REMEDY}"
        if (function := foreign.enclosing_function()) is not None and not self._book.is_paused:
            raise Learned(refusal, functions=[function])
        raise PartitionError(refusal)


def _range(name: str, given: Sequence[Any]) -> tuple[float | None, float | None]:
    """Return the bounds of a drawn number."""
    if name.rpartition(".")[2] in ("random", "rand", "random_sample", "ranf", "sample"):
        return 0.0, 1.0
    bounds = given or (0.0, 1.0)
    if name.endswith(".uniform") and len(bounds) == 2 and all(isinstance(b, (int, float)) for b in bounds):
        return min(bounds), max(bounds)
    return None, None


def stand_ins(tree: Any) -> Any:
    """Replace drawn numbers and arrays in a tree with values of the same type and shape, for calls on fake tensors."""
    if isinstance(tree, DrawnArray):
        return numpy.zeros(tree.shape, tree.dtype)
    if isinstance(tree, Drawn):
        return 0.5
    if type(tree) in (tuple, list):
        return type(tree)(map(stand_ins, tree))
    return {key: stand_ins(value) for key, value in tree.items()} if type(tree) is dict else tree


def holds_drawn(tree: Any) -> bool:
    """Whether a random number or array is among the leaves."""
    return next(_drawn(tree), None) is not None


def _drawn(tree: Any) -> Iterator[Drawn]:
    if isinstance(tree, Drawn):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from _drawn(value)
    elif isinstance(tree, dict):
        yield from _drawn(tuple(tree.values()))
    elif isinstance(tree, slice):
        yield from _drawn((tree.start, tree.stop, tree.step))
