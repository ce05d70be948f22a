"""What was observed of each node of a recording when it ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx

from penstock._base.stages import TensorMeta

Kind = Literal["input", "parameter", "buffer", "constant", "object", "call", "unit"]

Pattern = tuple[tuple[str, str, Any], ...]
"""Of each leaf of a result: its path, and `"tensor", shape or None`, `"value", v`, `"text", text of a value` or
`"any", None`."""


@dataclass(frozen=True, slots=True)
class Modes:
    """The modes that a call ran in. None means the same as at the forward's entry."""

    grad_enabled: bool | None = None
    autocast: tuple[bool, torch.dtype, bool] | None = None


@dataclass(slots=True)
class Fact:
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
        is_anywhere: whether it is a random number, or leads to a decision: every stage that needs it computes it.
        branch: what runs only if a decision says so; see `Branch`.
        work: how much work it is, including its backward; see `work_of`.
        runs_again: whether it is a unit that a checkpoint around it would rerun in backward, which a stage does not.
        updates: the index of each node that updated the result in place, and the result's meta from then on.
        depends_on_values: whether it is a unit that ran for real: what it writes and draws may differ in other calls.
        returned: for a unit, what its results must look like; None if there is nothing to check.
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
    facts: Mapping[fx.Node, Fact]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    runs_if: bool
    units: tuple[str, ...]
    calls: Mapping[str, int]
    source_line: str


def tensor_meta(tensor: Tensor) -> TensorMeta:
    """The meta of a tensor, fake or real."""
    return TensorMeta(
        tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad
    )
