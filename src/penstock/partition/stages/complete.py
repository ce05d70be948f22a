"""Checks that the stages hold every parameter of the model that the unsplit forward uses."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from penstock._base.errors import PartitionError
from penstock._base.words import shortened
from penstock.partition.recording.recording import Recording
from penstock.partition.stages.stage import Stage
from penstock.partition.units.units import has_forward


def check_complete(recording: Recording, model: nn.Module, stages: Sequence[Stage]) -> None:
    """Raises PartitionError if a parameter or buffer that training needs is on no stage. Names it."""
    on_stages = {id(t) for stage in stages for t in (*stage.parameters.values(), *stage.buffers.values())}
    lost = [name for name in recording.held if name in recording.needed and id(recording.held[name]) not in on_stages]
    used = _used(recording, model)
    lost += [name for name in recording.held if name in recording.touched - used and name not in lost]
    if lost:
        raise PartitionError(
            f"the forward uses {shortened(lost)}, but no recorded call does, so that no stage would have "
            f"{'it' if len(lost) == 1 else 'them'}. {_remedy(model, lost)}"
        )


def _remedy(model: nn.Module, lost: Sequence[str]) -> str:
    around = lost[0].rpartition(".")[0]
    while around and not (has_forward(model.get_submodule(around)) and all(n.startswith(f"{around}.") for n in lost)):
        around = around.rpartition(".")[0]
    if not around:  # the model's own forward uses them, and it cannot run as a whole
        return (
            "Give the part of the model that uses them a module of its own, with the layers that they are for in it, "
            "and name it in leaves=[...]: it runs as a whole then"
        )
    return f"Pass leaves={[around]}, or a module around it: the one whose forward uses them has to run as a whole"


def unused_note(recording: Recording, stages: Sequence[Stage]) -> tuple[str, ...]:
    """Notes on parameters that no stage holds because the forward does not use them."""
    on_stages = {id(p) for stage in stages for p in stage.parameters.values()}
    unused = [name for name, p in recording.held.items() if isinstance(p, nn.Parameter) and id(p) not in on_stages]
    if not unused:
        return ()
    return (f"the forward does not use {shortened(unused)}: on no stage",)


def _used(recording: Recording, model: nn.Module) -> set[str]:
    """The parameters and buffers that any recorded call uses."""
    canonical = {id(tensor): name for name, tensor in recording.held.items()}
    used = {str(node.target) for node, fact in recording.facts.items() if fact.kind in ("parameter", "buffer")}
    for name in {name for fact in recording.facts.values() for name in fact.units}:
        unit = model.get_submodule(name)
        used |= {canonical[id(t)] for t in (*unit.parameters(), *unit.buffers())}
    return used
