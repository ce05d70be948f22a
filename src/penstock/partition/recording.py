"""What a recording holds: the model's forward as one graph, what was observed of each node when it ran, and what the
forward read from its inputs' values, since it holds only for inputs that give the same readings.

`record/` writes it, `cut/` finds positions in it, `stages/` turns it into stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, fx, nn

from penstock._base.compat import autocast_state
from penstock._base.stages import TensorMeta
from penstock.partition.nested import Constant
from penstock.partition.state.block_state import Remembered
from penstock.partition.state.loss_values import Left
from penstock.partition.units import NO_SPEC, UnitSpec

Kind = Literal["input", "parameter", "buffer", "constant", "object", "call", "unit"]

PatternLeaf = tuple[str, str, Any]
Pattern = tuple[PatternLeaf, ...]
"""Of each leaf of a result: its path, and `"tensor", shape or None`, `"value", v`, `"text", text of a value` or
`"any", name of its class`."""


@dataclass(frozen=True, slots=True)
class Modes:
    """The modes that a call ran in. None means the same as at the forward's entry."""

    grad_enabled: bool | None = None
    autocast: tuple[bool, torch.dtype, bool] | None = None

    @classmethod
    def now(cls, device: torch.device, entry: Modes | None = None) -> Modes:
        """Return the present modes; with those at entry, as far as they differ."""
        grad, autocast = torch.is_grad_enabled(), autocast_state(device)
        if entry is None or entry.autocast is None:
            return cls(grad, autocast)
        differs = autocast != entry.autocast and (autocast[0] or entry.autocast[0])
        return cls(None if grad == entry.grad_enabled else grad, autocast if differs else None)


@dataclass(slots=True)
class NodeInfo:
    """What was observed of one node.

    Attributes:
        index: its position in program order.
        kind: an input of the model, something that the model holds, an object built for a call, a torch call, or a
            module that ran as a unit.
        scope: the qualified name of the innermost module that it ran in; for a unit, the unit's own name.
        meta: the result's, if that is one tensor.
        storages: the memory behind its result's tensors. Equal numbers mean shared memory.
        writes: the memory that it updated in place.
        takes_gradient: whether any tensor of its result requires a gradient.
        draws: whether it is a torch call outside the units that draws random numbers.
        stream: the name of the stream that it draws from.
        modes: see `Modes`.
        source_line: `file:line` of the call in the user's code, for messages.
        on_every_stage: whether it is a random number, or leads to a decision: every stage that needs it computes it.
        branch: what runs only if a decision says so; see `Branch`.
        work: how much work it is, including its backward; see `count_work`.
        runs_again: whether it is a unit that a checkpoint around it would rerun in backward, which a stage does not.
        updates: the index of each node that updated the result in place, and the result's meta from then on.
        depends_on_values: whether it is a unit that ran for real: what it writes and draws may differ in other calls.
        pattern: for a unit, what its results must look like; None if there is nothing to check.
        read_at: for such a unit, the line that depends on a shape of its results, and that line's module.
    """

    index: int
    kind: Kind
    scope: str
    meta: TensorMeta | None = None
    storages: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    takes_gradient: bool = False
    draws: bool = False
    stream: str = ""
    modes: Modes = Modes()
    source_line: str = ""
    on_every_stage: bool = False
    branch: Branch | None = None
    work: int = 0
    runs_again: bool = False
    updates: list[tuple[int, TensorMeta]] = field(default_factory=list)
    depends_on_values: bool = False
    pattern: Pattern | None = None
    read_at: tuple[str, str] = ("", "")

    @property
    def units(self) -> tuple[str, ...]:
        """The modules in it that run as a whole."""
        if self.branch is not None:
            return self.branch.units
        return (self.scope,) if self.kind == "unit" else ()


@dataclass(frozen=True, slots=True)
class Branch:
    """Part of a recording that is run or skipped at random, such as a layer with drop. One node stands for all of it.

    The node's arguments: the decision, then for each output the value to pass on if the branch does not run, then what
    the branch needs. Its result is the tuple of the outputs.

    Attributes:
        nodes: what runs, in program order.
        facts: what was observed of each of these nodes.
        inputs, outputs: values that it needs, and values that are used after it.
        runs_if: the decision for which it runs.
        units: names of the units among the nodes.
        calls: how often it calls each module that draws.
        source_line: the line at which the forward asks for the decision.
    """

    nodes: tuple[fx.Node, ...]
    facts: Mapping[fx.Node, NodeInfo]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    runs_if: bool
    units: tuple[str, ...]
    calls: Mapping[str, int]
    source_line: str


def tensor_meta(tensor: Tensor) -> TensorMeta:
    """Return the meta of a tensor, fake or real."""
    return TensorMeta(
        tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad
    )


@dataclass(frozen=True)
class Guard:
    """`module`, given the leaves of (args, kwargs) at `inputs` and their device, returned `expected` when the forward
    asked for it."""

    module: fx.GraphModule
    inputs: tuple[int, ...]
    expected: object
    source_line: str
    device: torch.device
    """Where the forward was recorded."""
    is_unread_shape: bool = False
    """Whether it is a shape that no code reads: it matters only for values that enter or leave a stage."""

    def holds(self, leaves: Sequence[Any]) -> bool:
        """Whether these leaves, on any device, give the same reading. Does not write to them.

        They are read where they are, which does not wait for a device. If that fails, since they are on several devices
        or the forward names one, they are read where the forward was recorded.
        """
        if self.expected is None:  # anything will do
            return True
        tensors = [leaves[i] for i in self.inputs]
        device = tensors[0].device if tensors else self.device
        try:
            result = self._evaluate(tensors, device)
        except (RuntimeError, IndexError):
            if device == self.device and all(leaf.device == device for leaf in tensors):
                if isinstance(self.expected, torch.Size):  # a mask for other rows, say
                    return False
                raise
            result = self._evaluate([leaf.to(self.device) for leaf in tensors], self.device)
        return type(result) is type(self.expected) and result == self.expected

    def _evaluate(self, leaves: Sequence[Tensor], device: torch.device) -> object:
        with torch.no_grad():
            return self.module.forward(device, *(leaf.clone() for leaf in leaves))


def walk(
    starts: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]] = attrgetter("all_input_nodes")
) -> set[fx.Node]:
    """Return the nodes that can be reached from some, themselves included. `following`: the next ones of a node."""
    visited, stack = set[fx.Node](), [*starts]
    while stack:
        if (node := stack.pop()) not in visited:
            visited.add(node)
            stack += following(node)
    return visited


def is_readable(leaf: object) -> bool:
    """Whether an input's values count as known: integers, and masks of booleans or of 0 and -inf, that are here."""
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or leaf.is_meta or leaf.is_complex():
        return False
    if not leaf.is_floating_point():
        return True
    blocked = leaf.detach() == -torch.inf
    return not leaf.requires_grad and bool(blocked.any() and (blocked | (leaf == 0)).all())


class RandomSource(Protocol):
    """Where the random numbers of recorded calls come from."""

    def enter(self, name: str) -> None:
        """Set the generator for the recorded call `name`, which runs next."""

    def pass_by(self, calls: Mapping[str, int]) -> None:
        """Count skipped calls of modules that draw, by name."""


@dataclass(frozen=True, slots=True)
class RandomBranch:
    """The forward asked for the outcome of `node` before the node `index` was recorded.

    `source_line` is where it asked, `scope` the module whose code that is.
    """

    node: fx.Node
    index: int
    source_line: str
    scope: str = ""


@dataclass(frozen=True)
class Recording:
    """A forward, recorded.

    Attributes:
        graph: every call in program order; modules that ran as a unit are `call_module` nodes.
        facts: for each node of the graph.
        inputs: for each placeholder, its position among the leaves of (args, kwargs).
        outputs: the distinct tensors of the model's result, in order of first appearance.
        result_leaves: the leaves of the model's result; an int indexes `outputs`, `Constant` wraps anything else.
        result_structure: the pytree structure of the result.
        constants: objects and stray tensors, by the paths under which the graph refers to them.
        blocks: names of the units that are repeated blocks.
        held: qualified name of a parameter or buffer -> the tensor; canonical names only.
        memory: the storage number of each parameter and buffer -> its canonical name.
        drawing: qualified name -> module, for the modules in units that draw random numbers, or may.
        may_draw: the names of those that did not when they were recorded, on made-up inputs.
        entered: for each module that ran, the index of the first node of each of its calls.
        device: the device that the forward was recorded as if on.
        guards: what the forward read from its integer inputs' values; it holds for inputs that give the same readings.
        notes: what the user should know.
        unit_spec: which modules run as a whole, and what was learned about that.
        left: what the forward leaves in attributes and shared objects.
        needed: canonical names of the parameters that the result depends on, by the autograd graph of the unsplit
            forward.
        touched: canonical names of the parameters and buffers that any operator took.
        asks: where the forward asked for the outcome of something random.
        is_foreign: whether it draws from Python's or numpy's generators.
        remembered: what units carry over from call to call; see `Remembered`.
    """

    graph: fx.Graph
    facts: Mapping[fx.Node, NodeInfo]
    inputs: Mapping[fx.Node, int]
    outputs: tuple[fx.Node, ...]
    result_leaves: tuple[int | Constant, ...]
    result_structure: Any
    constants: Mapping[str, object]
    blocks: frozenset[str]
    held: Mapping[str, Tensor]
    memory: Mapping[int, str]
    drawing: Mapping[str, nn.Module]
    may_draw: frozenset[str]
    entered: Mapping[str, tuple[int, ...]]
    device: torch.device
    guards: tuple[Guard, ...]
    notes: tuple[str, ...]
    unit_spec: UnitSpec = NO_SPEC
    left: tuple[Left, ...] = ()
    needed: frozenset[str] = frozenset()
    touched: frozenset[str] = frozenset()
    asks: tuple[RandomBranch, ...] = ()
    is_foreign: bool = False
    remembered: tuple[Remembered, ...] = ()

    @property
    def calls(self) -> dict[str, tuple[int, ...]]:
        """For each drawing module, the index of the unit's node at each of its calls."""
        return {name: self.entered.get(name, ()) for name in self.drawing}

    @property
    def overwritten(self) -> list[int]:
        """The positions, among the leaves of (args, kwargs), of tensors that the forward updates in place."""
        written = frozenset[int]().union(*(fact.writes for fact in self.facts.values()))
        return [position for node, position in self.inputs.items() if self.facts[node].storages & written]
