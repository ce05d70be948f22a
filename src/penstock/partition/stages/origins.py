"""Where the values of a recording were made, and where its tensors are once it is cut into stages."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import Tensor, fx, nn

from penstock.partition.recording.recording import Recording
from penstock.partition.stages.partition import Origin
from penstock.partition.stages.stage import Stage


def not_on_the_last(recording: Recording, stages: Sequence[Stage]) -> dict[str, Tensor]:
    """The parameters and updated buffers that are not on the last of several stages."""
    last = {id(t) for t in (*stages[-1].parameters.values(), *stages[-1].buffers.values())}
    updated = {id(stage.buffers[name]) for stage in stages for name in stage.meta.updated if name in stage.buffers}
    every = recording.held.items() if len(stages) > 1 else ()
    return {
        name: tensor
        for name, tensor in every
        if id(tensor) not in last and (isinstance(tensor, nn.Parameter) or id(tensor) in updated)
    }


def origins(recording: Recording, stages: Sequence[Stage]) -> dict[str, Origin]:
    """Where the values that cross between stages, or enter or leave the model, were made."""
    metas = [stage.meta for stage in stages]
    names = {value.name for meta in metas for value in meta.inputs} | {v.name for meta in metas for v in meta.outputs}
    return {node.name: _origin(recording, node) for node in recording.facts if node.name in names}


def _origin(recording: Recording, node: fx.Node) -> Origin:
    fact = recording.facts[node]
    if node.target is operator.getitem:  # a part of a result was made by the call that returned it
        made = node.args[0]
        if isinstance(made, fx.Node) and recording.facts[made].kind == "unit":
            fact = recording.facts[made]
    return Origin(fact.scope, "" if fact.kind in ("unit", "input") else fact.source_line)
