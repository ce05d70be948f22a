"""Detects values of a recording that are one and the same tensor when a branch is skipped."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Iterator

from torch import fx

from penstock.partition.chance.gate import Gate
from penstock.partition.stages.stage import Stage


def crosses_twice(stages: Iterable[Stage]) -> bool:
    """Whether two values that are the same tensor when a branch is skipped cross the same cut.

    They arrive as two tensors, so the gradients of each one's uses are summed separately before they meet. The unsplit
    model adds all of them into one sum, in another order.
    """
    known: dict[str, Hashable] = {}
    for stage in stages:
        inputs = stage.meta.inputs
        arriving = [known.get(value.name, value.name) for value in inputs if value.meta.requires_grad]
        if len(set(arriving)) < len(arriving):
            return True
        *_, end = stage.module.graph.nodes
        origins = dict(_origins(stage, [known.get(value.name, value.name) for value in inputs]))
        for value, node in zip(stage.meta.outputs, end.args[0], strict=True):
            known[value.name] = origins.get(node, value.name)
    return False


def _origins(stage: Stage, arriving: list[Hashable]) -> Iterator[tuple[fx.Node, Hashable]]:
    """Each value of a stage, and the value that it equals if no branch runs."""
    found: dict[fx.Node, Hashable] = {}
    waiting = iter(arriving)
    for node in stage.module.graph.nodes:
        if node.op == "placeholder":
            found[node] = next(waiting)
        elif node.op == "call_function" and node.target is operator.getitem and (gate := _gate(stage, node.args[0])):
            passed = node.args[0].args[1 : gate.outputs + 1][node.args[1]]
            found[node] = found[passed]
        else:
            found[node] = (stage.meta.index, node)
        yield node, found[node]


def _gate(stage: Stage, node: object) -> Gate | None:
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    module = stage.module.get_submodule(str(node.target))
    return module if isinstance(module, Gate) else None
