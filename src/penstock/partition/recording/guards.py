"""What a forward read from its inputs' values: its recording holds only for inputs that give the same readings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from penstock.partition.recording.calls import Target
from penstock.partition.recording.facts import Fact


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
    is_free: bool = False
    """Whether it is a shape that no code reads: it matters only for values that enter or leave a stage."""

    def holds(self, leaves: Sequence[Any]) -> bool:
        """Whether these leaves, on any device, give the same reading. Does not write to them.

        They are read where they are, which does not wait for a device. If that fails, since they are on several devices
        or the forward names one, they are read where the forward was recorded.
        """
        if self.expected is None:  # anything will do
            return True
        given = [leaves[i] for i in self.inputs]
        here = given[0].device if given else self.device
        try:
            found = self._found(given, here)
        except (RuntimeError, IndexError):
            if here == self.device and all(leaf.device == here for leaf in given):
                if isinstance(self.expected, torch.Size):  # a mask for other rows, say
                    return False
                raise
            found = self._found([leaf.to(self.device) for leaf in given], self.device)
        return type(found) is type(self.expected) and found == self.expected

    def _found(self, leaves: Sequence[Tensor], device: torch.device) -> object:
        with torch.no_grad():
            return self.module.forward(device, *(leaf.clone() for leaf in leaves))


def make_guard(
    target: Target,
    result: object,
    facts: Mapping[fx.Node, Fact],
    inputs: Mapping[fx.Node, int],
    source_line: str,
    device: torch.device,
    blanks: Mapping[fx.Node, Sequence[fx.Node]],
    held: Mapping[str, object] = MappingProxyType({}),
) -> Guard:
    """Makes a guard for a call that the graph will leave out because its result is not a tensor.

    `blanks`: nodes whose values do not matter, only their shapes; and an earlier value with as many rows, if any.
    `held`: the buffers and constants that it reads.
    `device`: where the forward was recorded. A guard makes its constants where its inputs are: values on the host can
    be read before they travel, without waiting for a device.
    """
    needed = ancestors(target, facts, blanks)
    graph = fx.Graph()
    used = [node for node in inputs if node in needed and node not in blanks]
    here = graph.placeholder("device")
    new = {node: graph.placeholder(node.name) for node in used}

    def of_inputs(value: Any) -> Any:
        return here if isinstance(value, torch.device) and value == device else value

    for node, fact in facts.items():
        if node in needed and node in blanks and fact.meta is not None:
            dtype, like = getattr(torch, fact.meta.dtype), [new[other] for other in blanks[node]]
            new[node] = graph.call_function(_blank, (fact.meta.shape[len(like) :], dtype, here, *like))
        elif node in needed and node not in new:
            new[node] = graph.node_copy(node, new.__getitem__)
            new[node].args, new[node].kwargs = map_aggregate((new[node].args, new[node].kwargs), of_inputs)
    args, kwargs = map_aggregate(fx.map_arg((target.args, target.kwargs), new.__getitem__), of_inputs)
    graph.output(graph.create_node(target.op, target.function, args, kwargs))
    module = fx.GraphModule(dict(held), graph, "guard")
    return Guard(module, tuple(inputs[node] for node in used), result, source_line, device)


def _blank(shape: Sequence[int], dtype: torch.dtype, device: torch.device, *like: Tensor) -> Tensor:
    """Zeros that take no memory, with as many rows as `like`."""
    return torch.zeros((), dtype=dtype, device=device).expand(*map(len, like), *shape)


def ancestors(
    target: Target, facts: Mapping[fx.Node, Fact], blanks: Mapping[fx.Node, Sequence[fx.Node]]
) -> set[fx.Node]:
    """The nodes that the call's arguments depend on, including those that update them in place."""
    needed: set[fx.Node] = set()
    stack: list[fx.Node] = []
    fx.map_arg((target.args, target.kwargs), stack.append)
    while stack:
        node = stack.pop()
        if node in needed:
            continue
        needed.add(node)
        if node in blanks:
            stack += blanks[node]
            continue
        stack += node.all_input_nodes
        stack += [writer for writer, fact in facts.items() if fact.writes & facts[node].storages]
    return needed


def is_readable(leaf: object) -> bool:
    """Whether an input's values count as known: integers, and masks of booleans or of 0 and -inf, that are here."""
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or leaf.is_meta or leaf.is_complex():
        return False
    if not leaf.is_floating_point():
        return True
    blocked = leaf.detach() == -torch.inf
    return not leaf.requires_grad and bool(blocked.any() and (blocked | (leaf == 0)).all())
