"""What a recording holds: the model's forward as one graph, and for each of its nodes what was seen when it ran.

`record` writes it, `cut` reads positions from it, `split` makes stages of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, fx, nn

from penstock.partition.opening import NOTHING, Opening
from penstock.partition.state.left_behind import Left
from penstock.partition.state.reach import Trace
from penstock.partition.state.remembered import Remembered
from penstock.partition.units import NO_GRAIN, Grain
from penstock.stages import TensorMeta

if TYPE_CHECKING:
    from penstock.partition.chance.draws import Ask
    from penstock.partition.guards import Guard
    from penstock.partition.returned import Pattern


class RandomSource(Protocol):
    """Where the random numbers of recorded calls come from."""

    def enter(self, name: str) -> None:
        """Set the generator for the recorded call `name`, which runs next."""

    def pass_by(self, calls: Mapping[str, int]) -> None:
        """Count calls of modules that draw, by name, which were left out."""


Kind = Literal["input", "parameter", "buffer", "constant", "object", "call", "unit"]


@dataclass(frozen=True, slots=True)
class Modes:
    """The modes that a call ran in, where they differ from those at the forward's entry; None means the same."""

    grad_enabled: bool | None = None
    autocast: tuple[bool, torch.dtype] | None = None


@dataclass(slots=True)
class Fact:
    """What was seen of one node.

    Attributes:
        index: its place in program order.
        kind: an input of the model, something the model holds, an object that is put together for a call, a torch call,
            or a module that ran as a unit.
        scope: the qualified name of the innermost module that it ran in; for a unit, its own.
        meta: of the result, where that is one tensor.
        storages: the memory behind its result's tensors. Equal numbers mean shared memory.
        writes: the memory that it updated in place.
        unseen: of that, what autograd does not know to be updated: it was written through `.data`.
        saved: the memory that it saved for backward; empty if that was not looked at.
        saved_sizes: of that memory, the bytes; one number for each.
        takes_gradient: whether any tensor of its result requires a gradient.
        draws: a torch call outside the units that draws random numbers.
        stream: the name of the stream that it draws from.
        modes: see `Modes`.
        source_line: `file:line` of the call in the user's code, for messages.
        is_anywhere: a number by chance, or what a decision rests on: every stage that needs it makes it for itself.
        branch: what runs only if a decision says so; see `Branch`.
        work: how much work it is, its backward included; see `work_of`.
        runs_again: a unit that checkpointing around it would run again in backward, which a stage does not.
        updates: the index of each node that updated the result in place, and its meta from then on.
        depends_on_values: a unit that ran for real: what it writes and draws may be something else in other calls.
        returned: of a unit, what its results must look like; None where there is nothing to check.
        read_at: of such a unit, the line that rests on a shape of its results, and that line's module.
    """

    index: int
    kind: Kind
    scope: str
    meta: TensorMeta | None = None
    storages: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    unseen: frozenset[int] = frozenset()
    saved: frozenset[int] = frozenset()
    saved_sizes: Mapping[int, int] = field(default_factory=dict)
    takes_gradient: bool = False
    draws: bool = False
    stream: str = ""
    modes: Modes = Modes()
    source_line: str = ""
    is_anywhere: bool = False
    branch: Branch | None = None
    work: int = 0
    runs_again: bool = False
    updates: list[tuple[int, TensorMeta]] = field(default_factory=list)
    depends_on_values: bool = False
    returned: Pattern | None = None
    read_at: tuple[str, str] = ("", "")

    @property
    def units(self) -> tuple[str, ...]:
        """The modules that run as a whole in it."""
        if self.branch is not None:
            return self.branch.units
        return (self.scope,) if self.kind == "unit" else ()


@dataclass(frozen=True, slots=True)
class Branch:
    """Part of a recording that runs only if chance says so: layers that are dropped. One node stands for all of it.

    The node's arguments: the decision, then for each output what is passed on where the branch does not run, then
    what the branch needs. Its result is the tuple of the outputs.

    Attributes:
        nodes: what runs, in program order, and what was seen of each (`facts`).
        inputs, outputs: values that it needs, and values that are used behind it.
        runs_if: the decision with which it runs.
        units: names of the units among the nodes.
        calls: how often it calls each module that draws.
        source_line: where the forward asks.
    """

    nodes: tuple[fx.Node, ...]
    facts: Mapping[fx.Node, Fact]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    runs_if: bool
    units: tuple[str, ...]
    calls: Mapping[str, int]
    source_line: str


@dataclass(frozen=True)
class Recording:
    """A forward, recorded.

    Attributes:
        graph: every call in program order; modules that ran as a unit are `call_module` nodes.
        facts: for each node of the graph.
        inputs: for each placeholder, its place among the leaves of (args, kwargs).
        outputs: the distinct tensors of the model's result, in order of first appearance.
        result_leaves: the leaves of the model's result; an int indexes `outputs`, `Constant` wraps anything else.
        result_structure: the pytree structure of the result.
        constants: objects and stray tensors, by the paths under which the graph refers to them.
        blocks: names of the units that are repeated blocks.
        held: qualified name of a parameter or buffer -> the tensor; canonical names only.
        memory: the storage number of each parameter and buffer -> its canonical name.
        drawing: qualified name -> module, of the modules in units that draw random numbers.
        calls: for each drawing module, the index of the unit's node at each of its calls.
        device: where the forward was recorded "as if".
        guards: what the forward read from the values of its integer inputs; it holds where they read the same.
        notes: things to tell the user.
        grain: what the forward taught about which modules run as a whole.
        left: what the forward leaves in attributes and shared objects.
        opening: which modules were opened for the sake of cuts.
        needed: canonical names of the parameters on which the result depends, by the autograd graph of the unsplit
            forward.
        touched: canonical names of the parameters and buffers that any operator took.
        asks: where the forward asked for the outcome of something random.
        is_foreign: it draws from Python's or numpy's generators.
        borrowed: unit -> the memory of the model's own parameters and buffers that it takes in other tensors.
        remembered: what units carry over from call to call; see `Remembered`.
        traces: where it leaves something beside its result.
    """

    graph: fx.Graph
    facts: Mapping[fx.Node, Fact]
    inputs: Mapping[fx.Node, int]
    outputs: tuple[fx.Node, ...]
    result_leaves: tuple[int | Constant, ...]
    result_structure: Any
    constants: Mapping[str, object]
    blocks: frozenset[str]
    held: Mapping[str, Tensor]
    memory: Mapping[int, str]
    drawing: Mapping[str, nn.Module]
    calls: Mapping[str, tuple[int, ...]]
    device: torch.device
    guards: tuple[Guard, ...]
    notes: tuple[str, ...]
    grain: Grain = NO_GRAIN
    left: tuple[Left, ...] = ()
    opening: Opening = NOTHING
    needed: frozenset[str] = frozenset()
    touched: frozenset[str] = frozenset()
    asks: tuple[Ask, ...] = ()
    is_foreign: bool = False
    borrowed: Mapping[str, frozenset[int]] = field(default_factory=dict)
    remembered: tuple[Remembered, ...] = ()
    traces: tuple[Trace, ...] = ()

    @property
    def overwritten(self) -> list[int]:
        """The places, among the leaves of (args, kwargs), of tensors that the forward updates in place."""
        written = frozenset[int]().union(*(fact.writes for fact in self.facts.values()))
        return [place for node, place in self.inputs.items() if self.facts[node].storages & written]


@dataclass(frozen=True, slots=True)
class Constant:
    """A leaf of the model's result that is no tensor."""

    value: object


def tensor_meta(tensor: Tensor) -> TensorMeta:
    """The meta of a tensor, fake or real."""
    return TensorMeta(
        tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad
    )
