"""What ranks left in files, under the names of the unsplit model.

A stage's layers are often numbered anew. So a tensor is known by its shape and values in the first step; those that
several share, as fresh layer norms do, by what is next to them. If no values agree, since the pipeline drew its own,
the order of names and shapes decides.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.errors import ArgumentError, RankFailedError
from penstock.verification.blame.finding import Finding
from penstock.verification.blame.watch import Step
from penstock.verification.comparison import Comparison

_TRACED = ("InterpreterModule", "GraphModule")
"""Classes of modules that `torch.export` makes."""


@dataclass(slots=True)
class Part:
    """A root of one rank: a stage, or a part of one.

    Attributes:
        steps: what it did in each.
        tensors: the unsplit model's name of each parameter and buffer; none if it has no such.
        modules: that of each module.
        place: its number in the order of dataflow.
        stage: its number among stages; consecutive parts of a rank are one, unless the pipeline says otherwise.
        replicas: the same of other ranks, if the pipeline is replicated; `steps` has the microbatches of all.
    """

    rank: int
    index: int
    steps: list[Step]
    tensors: dict[str, str] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    place: int = 0
    stage: int = 0
    replicas: Sequence[Part] = ()

    def each(self, step: int) -> int:
        """Return the number of microbatches of one replica in a step."""
        return self.steps[step].count // (1 + len(self.replicas))

    def found(self, kind: str, text: str, action: str, row: Comparison | None = None, **more: Any) -> Finding:
        """A finding in it, because of a difference in it."""
        found = Finding(kind, text, action, stage=self.stage, rank=self.rank, **more)
        is_off = row is not None and 0 < row.max_difference < math.inf
        return replace(found, difference=row.max_difference, largest=row.max_reference) if row and is_off else found

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Those that are trained, as they are before the first step, by its own names."""
        return {name: self.steps[0].before[name] for name in self.steps[0].trained}

    def outside(self, step: int, what: str) -> dict[tuple[int, int], Tensor]:
        """What it takes or leaves as a whole, by microbatch and leaf; nothing before the first step."""
        values = self.steps[step].values if step >= 0 else {}
        return {(p.microbatch, p.leaf): value for p, value in values.items() if p[:3] == (what, "", 0)}

    def renamed(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of a step, by the unsplit model's names."""
        return {self.tensors[name]: value for name, value in found.items() if name in self.tensors}


@dataclass(frozen=True, slots=True)
class Noted:
    """A job.

    Attributes:
        steps: how many all ranks left.
        files: by rank, those of each step.
    """

    parts: list[Part]
    steps: int
    files: Mapping[int, Sequence[Mapping[str, Any]]]


def read(folder: Path, failure: str = "") -> Noted:
    """Read what ranks left. Of a job with a `failure`, only steps that all of them took.

    Raises:
        ArgumentError: no rank left anything.
        RankFailedError: the job failed in its first step.
    """
    processes: dict[tuple[int, str], list[Any]] = defaultdict(list)
    for file in sorted(folder.glob("step-*.pt"), key=lambda file: int(file.stem.split("-")[1])):
        noted = torch.load(file, weights_only=True)
        processes[noted["rank"], file.stem.rpartition("-")[2]].append(noted)
    world = max((found[0]["world"] for found in processes.values()), default=0)
    files = {rank: found for (rank, _), found in processes.items() if found[0]["world"] == world}
    steps = min((sum(_is_whole(step, failure) for step in found) for found in files.values()), default=0)
    if failure and (not steps or len(files) < world):
        raise RankFailedError(
            f"the job {failure} before all ranks had taken a step: see what it printed, and run it without penstock "
            "blame first"
        )
    if not files:
        raise ArgumentError(
            "no rank computed a module with gradients before the job ended; check that the command trains, and wrap "
            "its loop in penstock.verification.blame.capture(stage_module) if stages are not called as modules"
        )
    roots = {rank: [[*map(Step.of_file, step["roots"])] for step in found[:steps]] for rank, found in files.items()}
    firsts = [root for found in roots.values() for root in found[0]]
    count = min((root.count for root in firsts if root.grads), default=0)
    for root in firsts:
        if not root.grads and count:  # where nothing is trained, no update tells that a step has ended
            root.count = count
            root.values = {place: value for place, value in root.values.items() if place.microbatch < count}
    parts = [
        Part(rank, index, [step[index] for step in found])
        for rank, found in sorted(roots.items())
        for index, root in enumerate(found[0])
        if root.count and all(index < len(step) for step in found)
    ]
    return Noted(parts, steps, files)


def _is_whole(step: Mapping[str, Any], failure: str) -> bool:
    """Whether a step ended: with an update, or, of a job that trains one step without one, with the job."""
    return bool(step["is_complete"] or (not failure and step["step"] == 0))


def name_parts(parts: Sequence[Part], model: nn.Module) -> None:
    """Find the unsplit model's names. Raise ArgumentError: it has no such weights, or in another dtype."""
    reference: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    reference |= dict(model.named_buffers(remove_duplicate=False))
    classes = {name: type(module).__name__ for name, module in model.named_modules(remove_duplicate=False)}
    held = [(part, name, value) for part in parts for name, value in part.steps[0].before.items()]
    named = _by_name(held, reference)
    there = {id(reference[name]) for part in parts for name in part.tensors} if named else set()
    is_whole = {id(parameter) for parameter in model.parameters()} <= there  # without a layer those behind it move up
    if not is_whole or _are_exchanged(held, reference):
        named = _by_value(held, reference, classes) or _by_name(held, reference) or _by_order(held, reference)
    if not named:
        raise ArgumentError(
            "most of the pipeline's weights are not the unsplit model's, by name, shape or value; return the model "
            "that the script splits, or pass names= to penstock.verification.blame.capture"
        )
    for part, name, value in held:
        if name in part.tensors and (other := reference[part.tensors[name]]).dtype != value.dtype:
            both = f"{name!r} is {value.dtype} in the pipeline, and {other.dtype} in the unsplit model"
            raise ArgumentError(f"{both}; let TARGET return model.to({value.dtype}), as the script trains it")
    for part in parts:
        pairs, owners = _prefixes(part), {name.rpartition(".")[0] for name in part.tensors}
        for name, kind in part.steps[0].modules.items():
            given = _given(part.steps[0].names, name)
            found = _through(pairs, name) if given is None else given
            if found is None or found not in classes:
                continue
            inside = {other for other in reference if f".{other}".startswith(f".{found}." if found else ".")}
            is_whole = kind in (classes[found], *_TRACED) and inside <= {*part.tensors.values()}
            if name in owners or is_whole:
                part.modules[name] = found


def _are_exchanged(held: Sequence[tuple[Part, str, Tensor]], reference: Mapping[str, Tensor]) -> bool:
    """Whether a tensor has the values that the unsplit model has under another name, and not under this one."""
    known = {digest(tensor) for tensor in reference.values()}
    named = [(digest(value), digest(reference[part.tensors[name]])) for part, name, value in held]
    return any(mine != own and mine in known for mine, own in named)


def _by_name(held: Iterable[tuple[Part, str, Tensor]], reference: Mapping[str, Tensor]) -> bool:
    """Whether names are the unsplit model's own, and each is held once."""
    seen: dict[int, tuple[Part, str]] = {}
    for part, name, value in held:
        name = _given(part.steps[0].names, name) or name
        other = reference.get(name)
        if other is None or other.shape != value.shape:
            return False
        first = seen.setdefault(id(other), (part, name))
        if first[0] is not part and first[1] == name and isinstance(other, nn.Parameter):
            return False
        part.tensors[name] = name
    return True


def _by_value(
    held: Sequence[tuple[Part, str, Tensor]], reference: Mapping[str, Tensor], classes: Mapping[str, str]
) -> bool:
    """Whether most tensors were found by their values."""
    known: dict[str, list[str]] = defaultdict(list)
    for name, tensor in reference.items():
        known[digest(tensor)].append(name)
    options, used = list[tuple[bool, Part, str, list[str]]](), set[str]()
    for part, name, value in held:
        part.tensors.pop(name, None)
        names, kind = known.get(digest(value), []), part.steps[0].modules[name.rpartition(".")[0]]
        names = [n for n in names if classes[n.rpartition(".")[0]] == kind] or names
        options.append((len({id(reference[n]) for n in names}) != 1, part, name, names))
    for is_open, part, name, names in sorted(options, key=lambda one: one[0]):
        near = _through(_prefixes(part), name) if is_open else None
        left = next((n for n in names if n not in used or not is_open), None)
        best = near if near in reference else name if name in names else left
        if best is not None and (best in names or not names):
            part.tensors[name] = best
            used.add(best)
    unique, several = (
        sum(is_open is which and bool(names) for is_open, *_, names in options) for which in (False, True)
    )
    return unique * 2 >= len(held) - several


def _by_order(held: Iterable[tuple[Part, str, Tensor]], reference: Mapping[str, Tensor]) -> bool:
    """Whether the order of shapes and last names tells most, as where layers are called one by one, and drawn anew."""
    mine = sorted(held, key=lambda one: (one[0].steps[0].stage or 0, one[0].rank, one[0].index))
    keys = [(name.rpartition(".")[2], value.shape) for _, name, value in mine]
    others, names = [(name.rpartition(".")[2], tensor.shape) for name, tensor in reference.items()], [*reference]
    blocks = SequenceMatcher(None, keys, others, autojunk=False).get_matching_blocks()
    pairs = {block.a + i: names[block.b + i] for block in blocks for i in range(block.size)}
    for number, (part, name, _) in enumerate(mine):
        part.tensors.pop(name, None)
        part.tensors |= {name: pairs[number]} if number in pairs else {}
    return len(pairs) * 2 >= len(mine)


def _prefixes(part: Part) -> dict[str, str]:
    """Modules' names in the unsplit model, from those of their tensors, and of modules around them."""
    pairs: dict[str, str] = {}
    for name, other in part.tensors.items():
        mine, theirs = name.rpartition("."), other.rpartition(".")
        while mine[2] == theirs[2] and mine[0] not in pairs:
            pairs[mine[0]] = theirs[0]
            mine, theirs = mine[0].rpartition("."), theirs[0].rpartition(".")
    return pairs


def _through(pairs: Mapping[str, str], name: str) -> str | None:
    """Return a name below the longest module that is known."""
    if name in pairs:
        return pairs[name]
    above, _, last = name.rpartition(".")
    if not name or (above not in pairs and not above):
        return None
    found = _through(pairs, above)
    return None if found is None else f"{found}.{last}".strip(".")


def _given(names: Mapping[str, str], name: str) -> str | None:
    at = max((prefix for prefix in names if f"{name}.".startswith(f"{prefix}.")), key=len, default=None)
    return None if at is None else names[at] + name[len(at) :]


def digest(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous()
    content = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return f"{plain.dtype}{tuple(plain.shape)}{hashlib.sha1(content, usedforsecurity=False).hexdigest()}"
