"""What a cut must not separate: all uses of anything that the forward updates in place must be on one stage.

An example is a batch norm in an encoder that is called once for each view of an image: a cut between two of these calls
would give each stage its own running statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx, nn

from penstock._base.words import counted
from penstock.errors import PartitionError
from penstock.partition.cut.balance import Candidate
from penstock.partition.recording.recording import Recording
from penstock.partition.stages.split import CutRecording


@dataclass(frozen=True, slots=True)
class Span:
    """The first and the last call that use something; `name` says what."""

    name: str
    first: int
    last: int

    def parts(self, position: int) -> bool:
        """Whether beginning a stage at this call would separate the uses."""
        return self.first < position <= self.last


def spans(recording: Recording, model: nn.Module) -> tuple[Span, ...]:
    """The spans of everything that the forward updates in place and uses more than once."""
    whole = CutRecording(recording, model, (), ())
    users: dict[str, list[int]] = {}
    for node, fact in recording.facts.items():
        for name in _updated(whole, node):
            users.setdefault(name, []).append(fact.index)
    return tuple(Span(name, min(used), max(used)) for name, used in users.items() if min(used) < max(used))


def _updated(whole: CutRecording, node: fx.Node) -> set[str]:
    """The names of what a node uses and the forward updates."""
    recording, fact = whole.recording, whole.facts[node]
    used = fact.storages.union(*(whole.facts[given].storages for given in node.all_input_nodes))
    found = {recording.memory[storage] for storage in used if storage in recording.memory}
    found = (found | {*whole.held_by(node)}) & whole.updated
    if fact.kind == "constant" and not whole.written.isdisjoint(fact.storages):
        found.add(str(node.target))
    return found | {each.text for each in recording.remembered if whole.uses(node, each)}


def joined(units: Sequence[Candidate], kept: Sequence[Span]) -> list[Candidate]:
    """The candidates at which a cut separates nothing. The weight of the others goes to the candidate before them."""
    found: list[Candidate] = []
    for unit in units:
        if found and any(span.parts(unit.position) for span in kept):
            found[-1] = replace(found[-1], weight=found[-1].weight + unit.weight)
        else:
            found.append(unit)
    return found


def too_few(error: PartitionError, stages: int, left: Sequence[Candidate], kept: Sequence[Span]) -> PartitionError:
    """The error for a model with too few cuts that keep such uses together. `error`: what an even cut raised."""
    longest = max(kept, key=lambda span: span.last - span.first)
    return PartitionError(
        f"{error}. For stages={stages} there is no such cut: the uses of {longest.name!r} leave "
        f"{counted(len(left), 'stage')} at most"
    )
