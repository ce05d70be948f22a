"""What a recording holds: the model's forward as one graph, and what was observed of each node when it ran.

`recorder/` writes it, `cut/` finds positions in it, `stages/` turns it into stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from penstock.partition.recording.facts import Fact
from penstock.partition.recording.guards import Guard
from penstock.partition.state.left_behind import Left
from penstock.partition.state.remembered import Remembered
from penstock.partition.units.units import NO_GRAIN, NOTHING, Grain, Opening


class RandomSource(Protocol):
    """Where the random numbers of recorded calls come from."""

    def enter(self, name: str) -> None:
        """Sets the generator for the recorded call `name`, which runs next."""

    def pass_by(self, calls: Mapping[str, int]) -> None:
        """Counts skipped calls of modules that draw, by name."""


@dataclass(frozen=True, slots=True)
class Ask:
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
        drawing: qualified name -> module, for the modules in units that draw random numbers.
        entered: for each module that ran, the index of the first node of each of its calls.
        device: the device that the forward was recorded as if on.
        guards: what the forward read from its integer inputs' values; it holds for inputs that give the same readings.
        notes: what the user should know.
        grain: what was learned about which modules run as a whole.
        left: what the forward leaves in attributes and shared objects.
        opening: which modules were opened for cuts.
        needed: canonical names of the parameters that the result depends on, by the autograd graph of the unsplit
            forward.
        touched: canonical names of the parameters and buffers that any operator took.
        asks: where the forward asked for the outcome of something random.
        is_foreign: whether it draws from Python's or numpy's generators.
        remembered: what units carry over from call to call; see `Remembered`.
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
    entered: Mapping[str, tuple[int, ...]]
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
    remembered: tuple[Remembered, ...] = ()

    @property
    def calls(self) -> dict[str, tuple[int, ...]]:
        """For each drawing module, the index of the unit's node at each of its calls."""
        return {name: self.entered.get(name, ()) for name in self.drawing}

    @property
    def overwritten(self) -> list[int]:
        """The positions, among the leaves of (args, kwargs), of tensors that the forward updates in place."""
        written = frozenset[int]().union(*(fact.writes for fact in self.facts.values()))
        return [place for node, place in self.inputs.items() if self.facts[node].storages & written]


@dataclass(frozen=True, slots=True)
class Constant:
    """A leaf of the model's result that is not a tensor."""

    value: object
