"""Compares a pipeline's steps with the unsplit model, and finds the first wrong action.

Only results are judged: gradients that an optimizer takes, its update, and buffers. If one is wrong, its cause is the
first value on the way to it that is: forward, then the loss, then backward, then what accumulates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.errors import ArgumentError
from penstock._base.formatting import list_names
from penstock._base.memory import same_bits
from penstock.distributed.launch.target import Target
from penstock.schedule import Action, Op, Row
from penstock.schedule.timeline import Timeline, Times
from penstock.verification.blame.causes import Causes
from penstock.verification.blame.data import build_data, get_batch
from penstock.verification.blame.finding import Blame, Finding
from penstock.verification.blame.names import Part, RecordedJob, compare_replicas, merge_replicas, name_parts
from penstock.verification.blame.replay import Replay, Replayed, find_scale
from penstock.verification.blame.updates import Updates
from penstock.verification.comparison import Comparison, compare
from penstock.verification.first_difference import ModuleTrace, reference_key


def judge(job: RecordedJob, model: nn.Module, spec: Target) -> Blame:
    """Find the first wrong action of a job. Raise ArgumentError if there is nothing to compare."""
    torch.set_num_threads(int(job.files[min(job.files)][0]["threads"]))
    ranks = len(job.files)
    job, bad_replica = merge_replicas(job, model)
    if bad_replica is not None:
        return Blame(bad_replica, job.steps, ranks, 0, 0, 0)
    name_parts(job.parts, model)
    counts = Counter(name for part in job.parts for name in part.tensors.values())
    if (copies := min(counts.values())) > 1:
        raise ArgumentError(
            f"each parameter is held {copies} times, but by ranks that do not look alike; penstock blame compares "
            "pipelines whose replicas hold the same stages with the same weights"
        )
    replay = Replay(model, spec.loss)
    initial = {name: value for part in job.parts for name, value in part.to_reference_names(part.parameters).items()}
    different = [name for name, value in initial.items() if not same_bits(value, replay.tensors[name].to(value.device))]
    _order_parts(job.parts, replay, get_batch(spec, 0))
    step_judge = _StepJudge(job, replay, spec, Updates(job, spec, replay))
    finding = next(filter(None, map(step_judge.step, range(job.steps))), None)
    stages = len({part.stage for part in job.parts})
    sizes = job.steps, ranks, stages, max(part.steps[0].count for part in job.parts)
    compared, notes = step_judge.compared + step_judge.updates.compared, [*dict.fromkeys(step_judge.updates.notes)]
    if different:
        subject = f"{list_names(different)}: the pipeline begins with other values than the unsplit model's"
        notes.append(f"{subject}; the pipeline's are used, so a wrong initialization is not detected")
    return Blame(finding, *sizes, compared, tuple(notes), _build_timeline(job, finding.step - 1 if finding else 0))


def _order_parts(parts: list[Part], replay: Replay, batch: tuple[Any, ...]) -> None:
    """Sort and number parts by the order of dataflow."""
    order = [*dict.fromkeys(position.module for position in replay.module_outputs(*batch[:2]))]
    indices = {name: number for number, name in enumerate(order)}
    parts.sort(key=lambda p: (min([indices[m] for m in p.modules.values() if m in indices] or [len(order)]), p.rank))
    for position, part in enumerate(parts):
        previous, stated = parts[position - 1], part.steps[0].stage
        part.order = position
        part.stage = stated if stated is not None else previous.stage + (previous.rank != part.rank) if position else 0


def _build_timeline(job: RecordedJob, step: int) -> Timeline:
    """Build the timeline of a step, on the clocks of the ranks' hosts."""
    last_rank = max(replica.rank for part in job.parts for replica in (part, *part.replicas))
    rows: list[list[tuple[Action, Times]]] = [[] for _ in range(1 + last_rank)]
    for part in job.parts:
        for number, replica in enumerate((part, *part.replicas)):
            for op, microbatch, start, end in replica.steps[step].ran:
                action = Action(part.stage, Op(op), microbatch + number * part.microbatches(step))
                rows[replica.rank].append((action, (start, start, end)))
    ordered = [sorted(row, key=lambda entry: entry[1][0]) for row in rows]
    return Timeline.from_rows([Row([a for a, _ in row]) for row in ordered], [[t for _, t in row] for row in ordered])


@dataclass(slots=True)
class _StepJudge:
    job: RecordedJob
    replay: Replay
    spec: Target
    updates: Updates
    compared: int = 0

    def step(self, step: int) -> Finding | None:
        """Return the first wrong action of a step."""
        parts = self.job.parts
        steps = [part.steps[step] for part in parts]
        data, bad_data = build_data(self.spec, parts[0], step)
        trained = [name for name in steps[0].trained if name in steps[0].after]
        if bad_data and trained and all(same_bits(steps[0].before[n], steps[0].after[n]) for n in trained):
            text = f"gradients are set to zero after microbatch {len(data.rows) - 1}, before the optimizer takes them"
            bad_data = Finding("gradient", text, "gradients")
        trace, state, random = ModuleTrace(step + 1), dict[str, Tensor](), dict[tuple[str, int, int], Tensor]()
        for part, record in zip(parts, steps, strict=True):
            names = part.modules
            state |= part.to_reference_names(record.before)
            random |= {(names[name], call, k): rng for (name, call, k), rng in record.random.items() if name in names}
            for key, value in record.values.items():
                if key.module in names:
                    renamed_key = key._replace(module=names[key.module])
                    trace.values[renamed_key], trace.stages[renamed_key] = value, part.order
        autocast = max(record.autocast for record in steps)
        reference = self.replay.step(data, state, trace.values, random, autocast)
        epsilon = torch.finfo(getattr(torch, autocast.rpartition(".")[2])).eps if autocast else 0.0
        grads = [self._unclipped_gradients(part, step, reference) for part in parts]
        rows = [row for part in parts for row in self._compare(part, step, grads[part.order], reference, epsilon)]
        self.compared += len(rows)
        wrong = [row for row in rows if not row.ok and row.verdict != "undefined"]
        bad_replica = next(filter(None, (compare_replicas(part, step) for part in parts)), None)
        bad_update = None if wrong or bad_replica else self.updates.step(step, reference.expected)
        if not wrong and bad_replica is None and bad_update is None:
            return None
        for key in [*trace.values]:  # the output of a stage that returns the loss is a number
            expected = reference.trace.values.get(reference_key(key))
            if expected is None or expected.dim() > trace.values[key].dim() == 0:
                del trace.values[key]
        causes = Causes(self.job, self.replay, self.spec, step, data, trace, reference, grads)
        finding = causes.first(wrong, bad_data, bad_replica, bad_update)
        if finding is None:
            return None
        root = next((part for part in parts if part.rank == finding.rank and part.replicas), None)
        if root is not None and finding.microbatch is not None:  # of one replica
            finding = replace(finding, rank=(root, *root.replicas)[finding.microbatch // root.microbatches(step)].rank)
        return replace(finding, step=step + 1)

    def _compare(
        self, part: Part, step: int, grads: Mapping[str, Tensor], reference: Replayed, epsilon: float
    ) -> Iterator[Comparison]:
        """Compare gradients before clipping, and buffers."""
        for name, buffer in part.to_reference_names(part.steps[step].after).items():
            if name in reference.buffers:
                yield compare("buffer", name, (part.order,), buffer, reference.buffers[name], exact=False)
        for name, ref in part.tensors.items():
            value, expected = grads.get(name), reference.expected.get(ref)
            if self.replay.tensors[ref].requires_grad and (value is not None or expected is not None):
                noise = 0.0 if expected is None else float(expected.abs().max()) * epsilon
                if expected is not None and value is not None:
                    expected = expected.to(value.dtype)
                sizes = reference.sizes.get(ref)
                yield compare("gradient", ref, (part.order,), value, expected, False, "rounding", sizes, noise=noise)

    def _unclipped_gradients(self, part: Part, step: int, reference: Replayed) -> Mapping[str, Tensor]:
        """Return the gradients by the part's own names, before clipping. If clipping was not recorded, as it is
        the script's own code, its factor is taken from most of them."""
        record, clips = part.steps[step], self.job.files[part.rank][step]["clips"]
        if record.unclipped or "clip_grad_norm" not in self.spec.training or clips:
            return record.unclipped or record.grads
        pairs = [(grad, reference.expected.get(part.tensors.get(name, ""))) for name, grad in record.grads.items()]
        factors = sorted(s for grad, e in pairs if e is not None and e.any() and (s := find_scale(grad, e)))
        factor = factors[len(factors) // 2] if factors else 1.0
        return {name: grad / factor for name, grad in record.grads.items()}
