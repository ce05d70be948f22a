"""What the stages of a cut recording come to: work, memory, and calls of modules that draw."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from torch import Tensor, nn

from penstock.balance import OPTIMIZER_VALUES
from penstock.partition.recording.recording import Recording
from penstock.partition.stages.split import CutRecording


def saved_of(recording: Recording, split: CutRecording) -> tuple[int, ...]:
    """The bytes that a microbatch's forward keeps on each stage, besides parameters and buffers."""
    found = []
    for plan in split.plans:
        sizes = {s: size for node in plan.run for s, size in split.facts[node].saved_sizes.items()}
        found.append(sum(size for storage, size in sizes.items() if storage not in recording.memory))
    return tuple(found)


def work_of_stages(recording: Recording, split: CutRecording) -> tuple[int, ...]:
    """Each stage's work; see `work_of`."""
    work = [0] * split.count
    for fact in recording.facts.values():
        work[split.stage_of(fact.index)] += fact.work
    return tuple(work)


def bytes_by_start(recording: Recording, model: nn.Module, starts: Sequence[int]) -> tuple[list[int], list[int]]:
    """For the calls from each of these nodes to the next: the bytes that they hold all the time (parameters, buffers,
    gradients, and an optimizer's values), and those that a microbatch's forward keeps for its backward."""
    held: list[set[str]] = [set() for _ in starts]
    saved: list[dict[int, int]] = [{} for _ in starts]
    names = {id(tensor): name for name, tensor in recording.held.items()}
    for node, fact in recording.facts.items():
        place = max(bisect_right(starts, fact.index) - 1, 0)
        saved[place] |= {s: size for s, size in fact.saved_sizes.items() if s not in recording.memory}
        if fact.kind in ("parameter", "buffer"):
            held[place].add(str(node.target))
        for unit in fact.units:
            module = model.get_submodule(unit)
            held[place].update(names[id(t)] for t in (*module.parameters(), *module.buffers()) if id(t) in names)
    return [sum(_held(recording.held[name]) for name in each) for each in held], [sum(s.values()) for s in saved]


def _held(tensor: Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return size * (2 + OPTIMIZER_VALUES) if tensor.requires_grad else size


def draw_offsets(recording: Recording, starts: Sequence[int]) -> tuple[dict[str, int], ...]:
    """For each stage, how often each drawing module is called on the stages before it."""
    return tuple({name: bisect_left(calls, start) for name, calls in recording.calls.items()} for start in (0, *starts))
