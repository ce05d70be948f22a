"""Which recorded forwards of a stage use its weights alike, so that what was learned from one holds for the others."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import fx, nn


def weight_uses(module: nn.Module) -> Hashable:
    """What tells apart forwards of one stage that may use its weights differently: the calls that get a weight, and
    their plain arguments, since a unit may branch on those. Leaves out all other calls, and names of values, which are
    numbered through the recording."""
    if not isinstance(module, fx.GraphModule):
        return type(module).__qualname__
    weights = dict(module.named_parameters(remove_duplicate=False))
    units = {name[:end] for name in weights for end, letter in enumerate(name) if letter == "."}
    held = {node: str(node.target) for node in module.graph.nodes if node.op == "get_attr" and node.target in weights}

    def plain(argument: fx.Node) -> Any:
        return held.get(argument, "")

    return tuple(
        (node.op, str(node.target), repr(fx.node.map_arg((node.args, node.kwargs), plain)))
        for node in module.graph.nodes
        if (node.op == "call_module" and node.target in units) or any(each in held for each in node.all_input_nodes)
    )
