"""Holds what a pipeline did in its steps against the unsplit model, and names the first action that is wrong.

Only results accuse: gradients that an optimizer takes, its update, and buffers. If one is wrong, its cause is the first
value on the way to it that is: forward, then the loss, then backward, then what accumulates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.errors import ArgumentError
from penstock._base.words import shortened
from penstock.distributed.launch.target import Target
from penstock.partition.values.memory import same_bits
from penstock.schedule import Action, Op, Row
from penstock.schedule.timeline import Timeline, Times
from penstock.verification.blame.causes import Causes
from penstock.verification.blame.data import batch_of, data_of
from penstock.verification.blame.finding import Blame, Finding
from penstock.verification.blame.names import Noted, Part, name_parts
from penstock.verification.blame.replay import Replay, Replayed, scale_of
from penstock.verification.blame.replicas import apart, merged
from penstock.verification.blame.updates import Updates
from penstock.verification.comparison import Comparison, compare
from penstock.verification.first_difference import in_reference
from penstock.verification.trail import Trail


def judge(noted: Noted, model: nn.Module, given: Target) -> Blame:
    """Raise ArgumentError: there is nothing to compare."""
    torch.set_num_threads(int(noted.files[min(noted.files)][0]["threads"]))
    ranks = len(noted.files)
    noted, unlike = merged(noted, model)
    if unlike is not None:
        return Blame(unlike, noted.steps, ranks, 0, 0, 0)
    name_parts(noted.parts, model)
    held = Counter(name for part in noted.parts for name in part.tensors.values())
    if (copies := min(held.values())) > 1:
        raise ArgumentError(
            f"each parameter is held {copies} times, but by ranks that do not look alike; penstock blame compares "
            "pipelines whose replicas hold the same stages with the same weights"
        )
    replay = Replay(model, given.loss)
    begun = {name: value for part in noted.parts for name, value in part.renamed(part.parameters).items()}
    others = [name for name, value in begun.items() if not same_bits(value, replay.tensors[name].to(value.device))]
    _order_parts(noted.parts, replay, batch_of(given, 0))
    found = _Judge(noted, replay, given, Updates(noted, given, replay))
    finding = next(filter(None, map(found.step, range(noted.steps))), None)
    stages = len({part.stage for part in noted.parts})
    sizes = noted.steps, ranks, stages, max(part.steps[0].count for part in noted.parts)
    compared, notes = found.compared + found.updates.compared, [*dict.fromkeys(found.updates.notes)]
    if others:
        who = f"{shortened(others)}: the pipeline begins with other values than the unsplit model's"
        notes.append(f"{who}; these were taken over, so that an initialization that is wrong is not seen")
    return Blame(finding, *sizes, compared, tuple(notes), _timeline(noted, 0 if finding is None else finding.step - 1))


def _order_parts(parts: list[Part], replay: Replay, batch: tuple[Any, ...]) -> None:
    """Sort and number parts by the order of dataflow."""
    order = [*dict.fromkeys(place.module for place in replay.left(*batch[:2]))]
    first = {name: number for number, name in enumerate(order)}
    parts.sort(key=lambda p: (min([first[m] for m in p.modules.values() if m in first] or [len(order)]), p.rank))
    for place, part in enumerate(parts):
        last, told = parts[place - 1], part.steps[0].stage
        part.place = place
        part.stage = told if told is not None else last.stage + (last.rank != part.rank) if place else 0


def _timeline(noted: Noted, step: int) -> Timeline:
    """Build the timeline of what ranks did in a step, on the clock of their hosts."""
    last = max(one.rank for part in noted.parts for one in (part, *part.replicas))
    rows: list[list[tuple[Action, Times]]] = [[] for _ in range(1 + last)]
    for part in noted.parts:
        for number, one in enumerate((part, *part.replicas)):
            for op, microbatch, start, end in one.steps[step].ran:
                action = Action(part.stage, Op(op), microbatch + number * part.each(step))
                rows[one.rank].append((action, (start, start, end)))
    ordered = [sorted(row, key=lambda each: each[1][0]) for row in rows]
    return Timeline.from_rows([Row([a for a, _ in row]) for row in ordered], [[t for _, t in row] for row in ordered])


@dataclass(slots=True)
class _Judge:
    noted: Noted
    replay: Replay
    given: Target
    updates: Updates
    compared: int = 0

    def step(self, step: int) -> Finding | None:
        """Return the first wrong action of a step."""
        parts = self.noted.parts
        steps = [part.steps[step] for part in parts]
        data, misfed = data_of(self.given, parts[0], step)
        trained = [name for name in steps[0].trained if name in steps[0].after]
        if misfed and trained and all(same_bits(steps[0].before[n], steps[0].after[n]) for n in trained):
            text = f"gradients are set to zero after microbatch {len(data.rows) - 1}, before the optimizer takes them"
            misfed = Finding("gradient", text, "gradients")
        mine, state, random = Trail(step + 1), dict[str, Tensor](), dict[tuple[str, int, int], Tensor]()
        for part, own in zip(parts, steps, strict=True):
            names = part.modules
            state |= part.renamed(own.before)
            random |= {(names[name], call, k): at for (name, call, k), at in own.random.items() if name in names}
            for place, value in own.values.items():
                if place.module in names:
                    known = place._replace(module=names[place.module])
                    mine.values[known], mine.stages[known] = value, part.place
        cast = max(own.autocast for own in steps)
        right = self.replay.step(data, state, mine.values, random, cast)
        epsilon = torch.finfo(getattr(torch, cast.rpartition(".")[2])).eps if cast else 0.0
        grads = [self._gradients(part, step, right) for part in parts]
        rows = [row for part in parts for row in self._results(part, step, grads[part.place], right, epsilon)]
        self.compared += len(rows)
        wrong = [row for row in rows if not row.ok and row.verdict != "undefined"]
        differ = next(filter(None, (apart(part, step) for part in parts)), None)
        update = None if wrong or differ else self.updates.step(step, right.expected)
        if not wrong and differ is None and update is None:
            return None
        for place in [*mine.values]:  # a stage that leaves the loss leaves no more than a number
            other = right.trail.values.get(in_reference(place))
            if other is None or other.dim() > mine.values[place].dim() == 0:
                del mine.values[place]
        causes = Causes(self.noted, self.replay, self.given, step, data, mine, right, grads)
        found = causes.first(wrong, misfed, differ, update)
        if found is None:
            return None
        whose = next((part for part in parts if part.rank == found.rank and part.replicas), None)
        if whose is not None and found.microbatch is not None:  # of one replica
            found = replace(found, rank=(whose, *whose.replicas)[found.microbatch // whose.each(step)].rank)
        return replace(found, step=step + 1)

    def _results(
        self, part: Part, step: int, grads: Mapping[str, Tensor], right: Replayed, epsilon: float
    ) -> Iterator[Comparison]:
        """Gradients before clipping, and buffers."""
        for name, buffer in part.renamed(part.steps[step].after).items():
            if name in right.buffers:
                yield compare("buffer", name, (part.place,), buffer, right.buffers[name], exact=False)
        for name, other in part.tensors.items():
            value, expected = grads.get(name), right.expected.get(other)
            if self.replay.tensors[other].requires_grad and (value is not None or expected is not None):
                noise = 0.0 if expected is None else float(expected.abs().max()) * epsilon
                if expected is not None and value is not None:
                    expected = expected.to(value.dtype)
                sizes = right.sizes.get(other)
                yield compare("gradient", other, (part.place,), value, expected, False, "rounding", sizes, noise=noise)

    def _gradients(self, part: Part, step: int, right: Replayed) -> Mapping[str, Tensor]:
        """Return the gradients by the part's own names, before they are clipped. Where clipping was not noted, as it is
        the script's own code, its factor is taken from most of them."""
        own, clips = part.steps[step], self.noted.files[part.rank][step]["clips"]
        if own.unclipped or "clip_grad_norm" not in self.given.training or clips:
            return own.unclipped or own.grads
        pairs = [(grad, right.expected.get(part.tensors.get(name, ""))) for name, grad in own.grads.items()]
        factors = sorted(s for grad, e in pairs if e is not None and e.any() and (s := scale_of(grad, e)))
        by = factors[len(factors) // 2] if factors else 1.0
        return {name: grad / by for name, grad in own.grads.items()}
