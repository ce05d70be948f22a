"""Numbers that a forward draws and then looks at: layer drop, stochastic depth, masks that numpy makes.

Their values are not known when a forward is recorded, and must not be: a recording would freeze them. So a number is
stood for by an object that has none, which can be compared and calculated with, and an array by one that only a tensor
can be made of. Where the forward asks for the outcome (`if torch.rand([]) < 0.1:`) it gets the answer that this
recording was told to give. `branches` records the other ways as well and puts them together.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor, fx

from penstock.errors import PartitionError
from penstock.partition import source
from penstock.partition._compat import FakeTensor

if TYPE_CHECKING:
    from penstock.partition.recorder import Recorder

REMEDY = (
    "Draw it with torch (torch.rand) and keep it a tensor, do it inside of a module that leaves=[...] names, or switch "
    "it off"
)


@dataclass(frozen=True, slots=True)
class Ask:
    """The forward asked for an outcome: that of `node`, before the node `index` was recorded, at a line of its code."""

    node: fx.Node
    index: int
    source_line: str


class Drawn:
    """Stands for a number that is drawn anew for each microbatch, or is calculated from such numbers."""

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


class DrawnArray:
    """Stands for an array of random numbers, of which the forward makes a tensor."""

    MADE_BY: ClassVar[tuple[Any, ...]] = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy)

    def __init__(self, chance: Chance, node: fx.Node, array: Any) -> None:
        self.chance, self.node = chance, node
        self.shape, self.dtype, self.ndim, self.size = array.shape, array.dtype, array.ndim, array.size

    def __repr__(self) -> str:
        return f"<an array of random numbers, {self.node.name}>"

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


class Chance:
    """What one recording knows of the numbers that are drawn outside of its units.

    Args:
        choices: by number of the question, the answer to give; False for those that are not in it.
    """

    def __init__(self, recorder: Recorder, choices: Mapping[int, bool]) -> None:
        self._recorder, self._choices = recorder, choices
        self._answers: dict[fx.Node, bool] = {}
        self.asks: list[Ask] = []
        self.held = False
        """Whether a `Drawn` was handed out, so that one may come back as an argument."""

    def read(self, function: Any, args: Any) -> tuple[bool, Any]:
        """Whether a call asks for the value of what chance alone decides, and then what it gets."""
        name = getattr(function, "__name__", "")
        if name not in ("__bool__", "item", "equal", "is_nonzero") or not any(isinstance(a, FakeTensor) for a in args):
            return False, None
        if not all(isinstance(a, Tensor) and self._recorder.is_seen(a) for a in args):
            return False, None
        nodes = [self._recorder.node_of(t) for t in args]
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
        """Whether values follow from draws alone: not from inputs, parameters or what blocks compute."""
        facts, draws, stack, seen = self._recorder.facts, False, [*nodes], {*nodes}
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
        """The outcome that this recording is to follow."""
        if self._recorder.is_paused:
            self.refuse(f"a random number, {node.name!r}, inside of a module that runs as a whole")
        if node not in self._answers:
            self._answers[node] = self._choices.get(len(self.asks), False)
            self.asks.append(Ask(node, self._recorder.observer.position, source.current_line()))
        return self._answers[node]

    def calculate(self, function: Callable[..., Any], *args: Any) -> Drawn:
        if self._recorder.is_paused:
            self.refuse("a random number inside of a module that runs as a whole")
        return self._number("call_function", function, tuple(a.node if isinstance(a, Drawn) else a for a in args))

    def _number(self, op: str, target: Any, args: tuple[Any, ...]) -> Drawn:
        self.held = True
        return Drawn(self, self._recorder.write_number(op, target, args))

    def refuse(self, what: str) -> NoReturn:
        raise PartitionError(f"{self._recorder.here()} uses {what}, which a recording cannot follow. {REMEDY}")


def stand_ins(tree: Any) -> Any:
    """The same with something in place of what is drawn, of the same type and shape, for calls on fake tensors."""
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
