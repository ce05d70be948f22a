"""Numbers that a forward draws and then looks at: layer drop, stochastic depth, masks that numpy makes.

Their values are not known when a forward is recorded, and must not be, since a recording would freeze them. So an
object without a value stands in for each number; it supports comparison and arithmetic. The stand-in for an array can
only be turned into a tensor. When the forward asks for an outcome (`if torch.rand([]) < 0.1:`), it gets the answer that
this recording was given. `random_branches` records the other paths too, and merges them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, partialmethod
from types import FunctionType
from typing import Any, NoReturn

import numpy
import torch
from torch import fx
from torch.fx.node import map_aggregate

from penstock._base.compat import FakeTensor, unset_fake_temporarily
from penstock._base.errors import PartitionError
from penstock.partition.nested import NodeValue
from penstock.partition.record import python_draws
from penstock.partition.record.graph_writer import Writer
from penstock.partition.record.known_values import KnownValues, compare_drawn
from penstock.partition.recording import RandomBranch, walk
from penstock.partition.units import Lesson
from penstock.partition.user_code import current_line

REMEDY = (
    "Draw it with torch (torch.rand) and keep it a tensor, do it inside of a module that leaf_modules=[...] names, or "
    "switch it off"
)
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
UNARY = ("neg", "pos", "abs")
UNSUPPORTED = tuple(
    "bool int float complex index round floor ceil trunc array iter len getitem setitem contains format "  # noqa: SIM905
    "invert and or matmul array_ufunc array_function".split()
)


class Drawn(NodeValue):
    """Stands for a number or an array that is drawn for each microbatch, or calculated from such numbers."""

    subject, misuse = "a random number", "in another way than to compare or calculate with it"

    def __init__(self, chance: Chance, node: fx.Node) -> None:
        self.chance, self.node = chance, node

    def __repr__(self) -> str:
        return f"<{self.subject}, {self.node.name}>"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        self.chance.refuse(f"{self.subject}, {self.node.name!r}, {self.misuse}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = _drawn_in((args, kwargs))[0]
        number.chance.refuse(f"{number.subject}, {number.node.name!r}, inside of a module that runs as a whole")

    __hash__ = None  # type: ignore[assignment]


for _name in (*COMPARISONS, *ARITHMETIC, *(f"r{name}" for name in ARITHMETIC), *UNARY, *UNSUPPORTED):
    setattr(Drawn, f"__{_name}__", Drawn._refuse)


class DrawnNumber(Drawn):
    """`compare`: see `compare_drawn`, with its bounds; None if these are unknown."""

    def __init__(self, chance: Chance, node: fx.Node, compare: Callable[..., bool | None] | None = None) -> None:
        super().__init__(chance, node)
        self.compare = compare

    def __bool__(self) -> bool:
        return self.chance.decide(self.node)

    def _compare(self, function: Callable[..., Any], other: Any) -> Any:
        if self.compare is not None and isinstance(other, (bool, int, float)):
            outcome = self.compare(function.__name__, other)
            if outcome is not None:
                return outcome
        return self._calculate(function, other)

    def _calculate(self, function: Callable[..., Any], *operands: Any, reflected: bool = False) -> Any:
        if not all(isinstance(other, (bool, int, float, DrawnNumber)) for other in operands):
            return NotImplemented
        return self.chance.calculate(function, *((*operands, self) if reflected else (self, *operands)))


for _name in (*COMPARISONS, *ARITHMETIC, *UNARY):
    _function, _rule = getattr(operator, _name), "_compare" if _name in COMPARISONS else "_calculate"
    setattr(DrawnNumber, f"__{_name}__", partialmethod(getattr(DrawnNumber, _rule), _function))
    if _name in ARITHMETIC:
        setattr(DrawnNumber, f"__r{_name}__", partialmethod(DrawnNumber._calculate, _function, reflected=True))


class DrawnArray(Drawn):
    """Stands for an array of random numbers that the forward makes into a tensor."""

    subject, misuse = "an array of random numbers", "for more than to make a tensor of it"

    def __init__(self, chance: Chance, node: fx.Node, array: Any) -> None:
        super().__init__(chance, node)
        self.shape, self.dtype, self.ndim, self.size = array.shape, array.dtype, array.ndim, array.size

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()


class Chance:
    """What one recording knows about the numbers that are drawn outside its units.

    Args:
        writer: where they are recorded.
        values: runs functions that draw.
        call: makes a call and records it.
        choices: the answer to each question, by its number; questions that are not in it get False.
    """

    def __init__(
        self, writer: Writer, values: KnownValues, call: Callable[[Any, Any, Any], Any], choices: Mapping[int, bool]
    ) -> None:
        self._writer, self._known_values, self._call, self._choices = writer, values, call, choices
        self._generators = python_draws.generator_states()
        self._drew_in_unit = False
        self._answers: dict[fx.Node, bool] = {}
        self.asks: list[RandomBranch] = []
        self.has_drawn = False
        """Whether a `Drawn` was handed out and so may come back as an argument."""
        self.is_foreign = False
        """Whether any such number, or a unit, is drawn from Python's or numpy's generators."""

    def read(self, function: Any, args: Any) -> Any:
        """Return the answer to a call that asks for a value which chance alone decides; None for any other call."""
        name = getattr(function, "__name__", "")
        tensor = args[0] if args and name in ("__bool__", "item") else None
        if not isinstance(tensor, FakeTensor) or not self._writer.is_seen(tensor):
            return None
        node = self._writer.get_node(tensor)
        if not self._is_chance(node):
            return None
        return self.decide(node) if name == "__bool__" else self._number("call_method", name, (node,))

    def _is_chance(self, node: fx.Node) -> bool:
        """Whether a value depends on draws alone: not on inputs, parameters or what blocks compute."""
        facts = [self._writer.facts[n] for n in walk([node])]
        acting = (f.kind not in ("call", "constant") or f.writes or f.takes_gradient for f in facts)
        return any(fact.draws for fact in facts) and not any(acting)

    def decide(self, node: fx.Node) -> bool:
        """Return the outcome that this recording must follow."""
        writer = self._writer
        if writer.is_paused:
            self.refuse(f"a random number, {node.name!r}, inside of a module that runs as a whole")
        if node not in self._answers:
            self._answers[node] = self._choices.get(len(self.asks), False)
            self.asks.append(RandomBranch(node, writer.observer.position, current_line(), writer.scope))
        return self._answers[node]

    def calculate(self, function: Callable[..., Any], *args: Any) -> Drawn:
        if self._writer.is_paused:
            self.refuse("a random number inside of a module that runs as a whole")
        return self._number("call_function", function, tuple(a.node if isinstance(a, Drawn) else a for a in args))

    def _number(self, op: str, target: Any, args: tuple[Any, ...]) -> Drawn:
        self.has_drawn = True
        return DrawnNumber(self, self._writer.write_number(op, target, args))

    # -- Python's and numpy's random numbers ------------------------------------------------------------------------

    @contextmanager
    def redirect_draws(self, whole_functions: Collection[FunctionType]) -> Iterator[None]:
        """Wrap the forward. `whole_functions`: functions that are recorded as one call."""

        def from_numpy(array: Any) -> Any:
            return self._call(real, (array,), {}) if isinstance(array, DrawnArray) else real(array)

        real = torch.from_numpy
        functions = {function: partial(self._call_whole, function) for function in whole_functions}
        with python_draws.redirect_draws(self._writer.model, self._draw, functions, from_numpy):
            yield
        self.check_generators()

    def check_generators(self) -> None:
        """Refuse unrecorded draws outside the units: a recording would freeze them."""
        if self._generators != python_draws.generator_states():
            raise PartitionError(
                f"the forward seeds Python's or numpy's random numbers, or draws from them in a way that was not seen, "
                f"before {self._writer.current_position()} which a recording would freeze. Draw them as random.f or "
                "numpy.random.f, or with torch (torch.rand), inside of a block if they are seeded; or switch it off"
            )

    def after_unit(self) -> bool:
        """Whether the unit that just ran drew from Python's or numpy's generators; which part of it did is unknown."""
        before, self._generators = self._generators, python_draws.generator_states()
        moved, was_noted, self._drew_in_unit = before != self._generators, self._drew_in_unit, False
        self.is_foreign |= moved
        return moved and not was_noted

    def _draw(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._writer.observer.is_elsewhere:
            return function(*args, **kwargs)
        values = (*args, *kwargs.values())
        if self._writer.is_paused:
            self._writer.observer.draw()
            self._drew_in_unit = True
            return function(*args, **kwargs)
        self.check_generators()
        if not all(isinstance(a, (bool, int, float, str, tuple, type(None))) for a in values):
            self.refuse(f"{name} of objects")
        value = function(*args, **kwargs)
        return self._stand_in(value, python_draws.draw, (name, *args), kwargs, _comparison(name, values))

    def _call_whole(self, function: FunctionType, *args: Any, **kwargs: Any) -> Any:
        writer = self._writer
        if writer.observer.is_elsewhere or writer.is_paused:
            return function(*args, **kwargs)
        self.check_generators()
        if holds_drawn((args, kwargs)):
            self.refuse(f"a random number as an argument of {function.__name__}")
        node_args, node_kwargs = writer.arguments(args, kwargs)
        with writer.pause():
            if self._known_values.unknown(args, kwargs):
                raise PartitionError(
                    f"{writer.current_position()} calls {function.__name__}, which draws random numbers, with a "
                    "tensor whose values are unknown when the forward is recorded. Switch it off, or do it outside the "
                    "model"
                )
            with unset_fake_temporarily(), writer.observer.trial():
                value = function(*args, **kwargs)
        return self._stand_in(value, function, node_args, node_kwargs)

    def _stand_in(
        self, value: Any, target: Any, args: Any, kwargs: Any, compare: Callable[..., bool | None] | None = None
    ) -> Any:
        """Return a stand-in for a drawn number or array, of which only the kind is used."""
        self._generators = python_draws.generator_states()
        self.is_foreign = self.has_drawn = True
        is_array = isinstance(value, numpy.ndarray)
        if is_array and value.dtype.kind not in "biufc":
            self.refuse("a random choice among objects")
        if is_array and target is python_draws.draw and (function := python_draws.enclosing_function()) is not None:
            raise Lesson(f"{self._writer.current_position()} draws an array", functions=[function])
        if not is_array and not isinstance(value, (bool, int, float, numpy.generic)):
            self.refuse(f"{getattr(target, '__name__', target)}, which gives something else than random numbers")
        node = self._writer.write_number("call_function", target, args, kwargs, draws=True)
        return DrawnArray(self, node, value) if is_array else DrawnNumber(self, node, compare)

    def refuse(self, subject: str) -> NoReturn:
        refusal = f"{self._writer.current_position()} uses {subject}, which a recording cannot follow. {REMEDY}"
        if (function := python_draws.enclosing_function()) is not None and not self._writer.is_paused:
            raise Lesson(refusal, functions=[function])
        raise PartitionError(refusal)


def _comparison(name: str, values: Sequence[Any]) -> Callable[..., bool | None] | None:
    """Return what compares a number, drawn by this function with these arguments, with a bound; None if its own bounds
    are unknown."""
    if name.rpartition(".")[2] in ("random", "rand", "random_sample", "ranf", "sample"):
        return compare_drawn
    bounds = values or (0.0, 1.0)
    if name.endswith(".uniform") and len(bounds) == 2 and all(isinstance(b, (int, float)) for b in bounds):
        return partial(compare_drawn, low=min(bounds), high=max(bounds), closed=True)  # sums are rounded
    return None


def replace_drawn(tree: Any) -> Any:
    """Replace drawn numbers and arrays in a tree with values of the same type and shape, for calls on fake tensors."""

    def replace(leaf: Any) -> Any:
        if isinstance(leaf, DrawnArray):
            return numpy.zeros(leaf.shape, leaf.dtype)
        return 0.5 if isinstance(leaf, Drawn) else leaf

    return map_aggregate(tree, replace)


def holds_drawn(tree: Any) -> bool:
    """Whether a random number or array is among the leaves."""
    return bool(_drawn_in(tree))


def _drawn_in(tree: Any) -> list[Drawn]:
    leaves: list[Any] = []
    map_aggregate(tree, leaves.append)
    return [leaf for leaf in leaves if isinstance(leaf, Drawn)]
