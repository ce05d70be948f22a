"""Reads the ranks' records, finds the unsplit model's names of their tensors, and merges data-parallel replicas of a
pipeline into one pipeline, which has the microbatches of all.

A stage's layers are often numbered anew. So a tensor is known by its shape and values in the first step; those that
several share, as fresh layer norms do, by what is next to them. If no values agree, since the pipeline drew its own,
the order of names and shapes decides.

Microbatches of the second replica are numbered on from the first's, and so on. What ranks of several replicas hold in
common, gradients and weights after a step, has to be alike.
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
from penstock.verification.comparison import Comparison, compare

_TRACED = ("InterpreterModule", "GraphModule")
"""Classes of modules that `torch.export` makes."""


@dataclass(slots=True)
class Part:
    """A root of one rank: a stage, or a part of one.

    Attributes:
        steps: its record of each step.
        tensors: the unsplit model's name of each parameter and buffer, if there is one.
        modules: the unsplit model's name of each module.
        order: its number in the order of dataflow.
        stage: its number among stages; consecutive parts of a rank are one, unless the pipeline says otherwise.
        replicas: the same of other ranks, if the pipeline is replicated; `steps` has the microbatches of all.
    """

    rank: int
    index: int
    steps: list[Step]
    tensors: dict[str, str] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    order: int = 0
    stage: int = 0
    replicas: Sequence[Part] = ()

    def microbatches(self, step: int) -> int:
        """Return the number of microbatches of one replica in a step."""
        return self.steps[step].count // (1 + len(self.replicas))

    def make_finding(self, kind: str, text: str, action: str, row: Comparison | None = None, **details: Any) -> Finding:
        """Return a finding in this part, with the difference of `row`."""
        finding = Finding(kind, text, action, stage=self.stage, rank=self.rank, **details)
        is_off = row is not None and 0 < row.max_difference < math.inf
        return replace(finding, difference=row.max_difference, largest=row.max_reference) if row and is_off else finding

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The trained parameters before the first step, by the part's own names."""
        return {name: self.steps[0].before[name] for name in self.steps[0].trained}

    def boundary(self, step: int, kind: str) -> dict[tuple[int, int], Tensor]:
        """Return the inputs or outputs of the part, by microbatch and leaf; empty before the first step."""
        values = self.steps[step].values if step >= 0 else {}
        return {(key.microbatch, key.leaf): value for key, value in values.items() if key[:3] == (kind, "", 0)}

    def to_reference_names(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of a step by the unsplit model's names."""
        return {self.tensors[name]: value for name, value in tensors.items() if name in self.tensors}


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """The records of a job.

    Attributes:
        steps: the number of steps that all ranks recorded.
        files: by rank, the records of each step.
    """

    parts: list[Part]
    steps: int
    files: Mapping[int, Sequence[Mapping[str, Any]]]


def read(folder: Path, failure: str = "") -> RecordedJob:
    """Read the ranks' records. For a job with a `failure`, only steps that all ranks took.

    Raises:
        ArgumentError: no rank recorded anything.
        RankFailedError: the job failed in its first step.
    """
    processes: dict[tuple[int, str], list[Any]] = defaultdict(list)
    for file in sorted(folder.glob("step-*.pt"), key=lambda file: int(file.stem.split("-")[1])):
        record = torch.load(file, weights_only=True)
        processes[record["rank"], file.stem.rpartition("-")[2]].append(record)
    world = max((saved[0]["world"] for saved in processes.values()), default=0)
    files = {rank: saved for (rank, _), saved in processes.items() if saved[0]["world"] == world}
    steps = min((sum(_is_complete(step, failure) for step in saved) for saved in files.values()), default=0)
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
    roots = {rank: [[*map(Step.from_file, step["roots"])] for step in saved[:steps]] for rank, saved in files.items()}
    first_roots = [root for saved in roots.values() for root in saved[0]]
    count = min((root.count for root in first_roots if root.grads), default=0)
    for root in first_roots:
        if not root.grads and count:  # without training, no update ends a step
            root.count = count
            root.values = {key: value for key, value in root.values.items() if key.microbatch < count}
    parts = [
        Part(rank, index, [step[index] for step in saved])
        for rank, saved in sorted(roots.items())
        for index, root in enumerate(saved[0])
        if root.count and all(index < len(step) for step in saved)
    ]
    return RecordedJob(parts, steps, files)


def _is_complete(step: Mapping[str, Any], failure: str) -> bool:
    """Whether a step ended: with an update, or with a job that trains one step without an update."""
    return bool(step["is_complete"] or (not failure and step["step"] == 0))


def name_parts(parts: Sequence[Part], model: nn.Module) -> None:
    """Find the unsplit model's names. Raise ArgumentError if it has no such weights, or in another dtype."""
    reference: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    reference |= dict(model.named_buffers(remove_duplicate=False))
    classes = {name: type(module).__name__ for name, module in model.named_modules(remove_duplicate=False)}
    items = [(part, name, value) for part in parts for name, value in part.steps[0].before.items()]
    named = _map_names(items, reference)
    ids = {id(reference[name]) for part in parts for name in part.tensors} if named else set()
    complete = {id(parameter) for parameter in model.parameters()} <= ids  # without a layer those behind it move up
    if not complete or _are_exchanged(items, reference):
        named = _map_values(items, reference, classes) or _map_names(items, reference) or _map_order(items, reference)
    if not named:
        raise ArgumentError(
            "most of the pipeline's weights are not the unsplit model's, by name, shape or value; return the model "
            "that the script splits, or pass names= to penstock.verification.blame.capture"
        )
    for part, name, value in items:
        if name in part.tensors and (expected := reference[part.tensors[name]]).dtype != value.dtype:
            dtypes = f"{name!r} is {value.dtype} in the pipeline, and {expected.dtype} in the unsplit model"
            raise ArgumentError(f"{dtypes}; let TARGET return model.to({value.dtype}), as the script trains it")
    for part in parts:
        pairs, owners = _match_prefixes(part), {name.rpartition(".")[0] for name in part.tensors}
        for name, kind in part.steps[0].modules.items():
            stated = _stated_name(part.steps[0].names, name)
            ref = _map_by_prefix(pairs, name) if stated is None else stated
            if ref is None or ref not in classes:
                continue
            inside = {expected for expected in reference if f".{expected}".startswith(f".{ref}." if ref else ".")}
            complete = kind in (classes[ref], *_TRACED) and inside <= {*part.tensors.values()}
            if name in owners or complete:
                part.modules[name] = ref


def _are_exchanged(entries: Sequence[tuple[Part, str, Tensor]], reference: Mapping[str, Tensor]) -> bool:
    """Whether a tensor has the values that the unsplit model has under another name, and not under this one."""
    reference_digests = {digest(tensor) for tensor in reference.values()}
    digests = [(digest(value), digest(reference[part.tensors[name]])) for part, name, value in entries]
    return any(local != expected and local in reference_digests for local, expected in digests)


def _map_names(entries: Iterable[tuple[Part, str, Tensor]], reference: Mapping[str, Tensor]) -> bool:
    """Take names as they are. Return whether the unsplit model has them, and each is held once."""
    holders: dict[int, tuple[Part, str]] = {}
    for part, name, value in entries:
        name = _stated_name(part.steps[0].names, name) or name
        tensor = reference.get(name)
        if tensor is None or tensor.shape != value.shape:
            return False
        holder = holders.setdefault(id(tensor), (part, name))
        if holder[0] is not part and holder[1] == name and isinstance(tensor, nn.Parameter):
            return False
        part.tensors[name] = name
    return True


def _map_values(
    entries: Sequence[tuple[Part, str, Tensor]], reference: Mapping[str, Tensor], classes: Mapping[str, str]
) -> bool:
    """Match tensors by their values. Return whether most were found."""
    names_by_digest: dict[str, list[str]] = defaultdict(list)
    for name, tensor in reference.items():
        names_by_digest[digest(tensor)].append(name)
    candidates, used = list[tuple[bool, Part, str, list[str]]](), set[str]()
    for part, name, value in entries:
        part.tensors.pop(name, None)
        names, kind = names_by_digest.get(digest(value), []), part.steps[0].modules[name.rpartition(".")[0]]
        names = [n for n in names if classes[n.rpartition(".")[0]] == kind] or names
        candidates.append((len({id(reference[n]) for n in names}) != 1, part, name, names))
    for is_open, part, name, names in sorted(candidates, key=lambda candidate: candidate[0]):
        neighbor = _map_by_prefix(_match_prefixes(part), name) if is_open else None
        unused = next((n for n in names if n not in used or not is_open), None)
        match = neighbor if neighbor in reference else name if name in names else unused
        if match is not None and (match in names or not names):
            part.tensors[name] = match
            used.add(match)
    unique, several = (
        sum(is_open is flag and bool(names) for is_open, *_, names in candidates) for flag in (False, True)
    )
    return unique * 2 >= len(entries) - several


def _map_order(entries: Iterable[tuple[Part, str, Tensor]], reference: Mapping[str, Tensor]) -> bool:
    """Match tensors by the order of shapes and last names, as for new weights. Return whether most were found."""
    ordered = sorted(entries, key=lambda entry: (entry[0].steps[0].stage or 0, entry[0].rank, entry[0].index))
    keys = [(name.rpartition(".")[2], value.shape) for _, name, value in ordered]
    ref_keys, names = ([(name.rpartition(".")[2], tensor.shape) for name, tensor in reference.items()], [*reference])
    blocks = SequenceMatcher(None, keys, ref_keys, autojunk=False).get_matching_blocks()
    pairs = {block.a + i: names[block.b + i] for block in blocks for i in range(block.size)}
    for number, (part, name, _) in enumerate(ordered):
        part.tensors.pop(name, None)
        part.tensors |= {name: pairs[number]} if number in pairs else {}
    return len(pairs) * 2 >= len(ordered)


def _match_prefixes(part: Part) -> dict[str, str]:
    """Return the names of modules in the unsplit model, from those of their tensors and of enclosing modules."""
    pairs: dict[str, str] = {}
    for name, reference_name in part.tensors.items():
        local, reference = name.rpartition("."), reference_name.rpartition(".")
        while local[2] == reference[2] and local[0] not in pairs:
            pairs[local[0]] = reference[0]
            local, reference = local[0].rpartition("."), reference[0].rpartition(".")
    return pairs


def _map_by_prefix(pairs: Mapping[str, str], name: str) -> str | None:
    """Return the unsplit model's name of a module, below the nearest enclosing module that is known."""
    if name in pairs:
        return pairs[name]
    parent, _, last = name.rpartition(".")
    if not name or (parent not in pairs and not parent):
        return None
    mapped = _map_by_prefix(pairs, parent)
    return None if mapped is None else f"{mapped}.{last}".strip(".")


def _stated_name(names: Mapping[str, str], name: str) -> str | None:
    longest = max((prefix for prefix in names if f"{name}.".startswith(f"{prefix}.")), key=len, default=None)
    return None if longest is None else names[longest] + name[len(longest) :]


def digest(tensor: Tensor) -> str:
    contiguous = tensor.detach().cpu().contiguous()
    content = contiguous.reshape(-1).view(torch.uint8).numpy().tobytes() if contiguous.numel() else b""
    return f"{contiguous.dtype}{tuple(contiguous.shape)}{hashlib.sha1(content, usedforsecurity=False).hexdigest()}"


# -- replicas ----------------------------------------------------------------------------------------------------------

_AFTER = "weights after the step differ, as if their optimizers had other options or states"


def merge_replicas(job: RecordedJob, model: nn.Module) -> tuple[RecordedJob, Finding | None]:
    """Merge all replicas of each part into one, if there are any; also return whether they begin with other weights.

    Stages that were all drawn from one seed look like replicas, but their parameters are not too many for one model.
    """
    count = sum(value.numel() for part in job.parts for value in part.parameters.values())
    replicas = count // max(1, sum(p.numel() for p in model.parameters() if p.requires_grad))
    if replicas < 2:
        return job, None
    ranks = {rank: [part for part in job.parts if part.rank == rank] for rank in sorted(job.files)}
    alike: dict[Any, list[list[Part]]] = defaultdict(list)
    for rank_parts in ranks.values():
        alike[tuple((p.steps[0].stage, *map(digest, p.parameters.values())) for p in rank_parts)].append(rank_parts)
    if {*map(len, alike.values())} == {replicas}:
        parts = [_merge_parts(group) for groups in alike.values() for group in zip(*groups, strict=True)]
        return RecordedJob(parts, job.steps, {part.rank: job.files[part.rank] for part in parts}), None
    shapes: dict[Any, list[int]] = defaultdict(list)
    for rank, rank_parts in ranks.items():
        shapes[tuple((name, value.shape) for p in rank_parts for name, value in p.parameters.items())].append(rank)
    if any(len(group) % replicas for group in shapes.values()):
        return job, None
    text = f"ranks hold {replicas} replicas of the model, but these begin with different weights"
    return job, Finding("replicas", text, "0F", rank=max(shapes.values(), key=len)[-1])


def compare_replicas(part: Part, step: int) -> Finding | None:
    """Find values that ranks of several replicas should have in common, but do not."""
    first = part.steps[step]
    for replica, second in ((replica, replica.steps[step]) for replica in part.replicas):
        for first_values, replica_values, text, action in (
            (first.grads, second.grads, "gradients differ, as if they were not averaged over replicas", "gradients"),
            (first.after, second.after, _AFTER, "update"),
        ):
            for name in (name for name in part.parameters if name in first_values and name in replica_values):
                row = compare("gradient", name, (), replica_values[name], first_values[name], exact=False)
                if not row.ok:
                    subject = f"ranks {part.rank} and {replica.rank} hold replicas of {part.tensors.get(name, name)!r}"
                    return part.make_finding("replicas", f"{subject}, but their {text}", action, row)
    return None


def _merge_parts(parts: Sequence[Part]) -> Part:
    first, *replicas = parts
    steps = [_merge_steps(records) for records in zip(*(part.steps for part in parts), strict=True)]
    return Part(first.rank, first.index, steps, replicas=replicas)


def _merge_steps(steps: Sequence[Step]) -> Step:
    """Merge one step of all replicas. Batch norm's statistics are each replica's own, so are left out."""
    first, offset = steps[0], 0
    merged = replace(first, values={}, random={}, overwritten=[])
    for record in steps:
        merged.values |= {p._replace(microbatch=p.microbatch + offset): value for p, value in record.values.items()}
        merged.random |= {(name, call, k + offset): state for (name, call, k), state in record.random.items()}
        merged.overwritten += [k + offset for k in record.overwritten]
        offset += record.count
    unchanged = {name for name, value in first.before.items() if value.equal(first.after[name])}
    after = {name: value for name, value in first.after.items() if name in first.trained or name in unchanged}
    return replace(merged, count=offset, after=after)
