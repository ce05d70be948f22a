"""Why results of a step are wrong: the first value on the way to them that is, and what it looks like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock._base.trees import leaf_tensors
from penstock._base.words import counted, shortened
from penstock.distributed.launch.target import Target
from penstock.verification.blame.data import Data, batch_of
from penstock.verification.blame.finding import Finding
from penstock.verification.blame.names import Noted, Part
from penstock.verification.blame.replay import SCALE, Replay, Replayed, scale_of
from penstock.verification.blame.watch import SENT, Step
from penstock.verification.comparison import Comparison
from penstock.verification.first_difference import (
    NONE,
    Named,
    confusable_values,
    describe_difference,
    first_value,
    in_reference,
    usual_factors,
)
from penstock.verification.trail import BACKWARD, FORWARD, Place, Trail

NOT_ZEROED = "gradients were not set to zero: those of the step before are in it"
MOST_ROWS = 64
"""Of a batch, whose labels are tried for a microbatch."""


@dataclass(frozen=True, slots=True)
class Causes:
    """Of one step.

    Attributes:
        mine: the pipeline's values, by the unsplit model's names.
        right: the unsplit model's.
        grads: each part's gradients before they are clipped, by its own names.
    """

    noted: Noted
    replay: Replay
    given: Target
    step: int
    at: Data
    mine: Trail
    right: Replayed
    grads: Sequence[Mapping[str, Tensor]]

    def first(
        self, wrong: Sequence[Comparison], misfed: Finding | None, differ: Finding | None, update: Finding | None
    ) -> Finding | None:
        """Return the first finding."""
        gradients, buffers = ([row for row in wrong if row.kind == kind] for kind in ("gradient", "buffer"))
        causes: tuple[Callable[[], Finding | None], ...] = (
            *(self._structure, lambda: misfed, self._counts, self._value, self._weights, lambda: differ),
            *(lambda: self._sums(gradients), lambda: update, lambda: self._buffer(buffers)),
        )
        return next(filter(None, (cause() for cause in causes)), None)

    def _own(self, part: Part) -> Step:
        return part.steps[self.step]

    def _like(self, value: Tensor | None, expected: Tensor, others: Named = NONE, terms: Named = NONE) -> str:
        first = self.noted.parts[0]
        counts = first.each(self.step), 1 + len(first.replicas), self.at.count
        return describe_difference(value, expected, usual_factors(*counts, self.at.target), others, terms)

    # -- what stages hold, and how often they run ---------------------------------------------------------------------

    def _structure(self) -> Finding | None:
        """Find a layer that no stage has, or several have."""
        names, tensors = [name for name, _ in self.replay.model.named_parameters()], self.replay.tensors
        held = [(id(tensors[n]), part.stage) for part in self.noted.parts for n in {*part.tensors.values()}]
        holders = {name: [stage for key, stage in held if key == id(tensors[name])] for name in names}
        if missing := [n for n in names if not holders[n] and tensors[n].requires_grad]:
            layers = _outermost(missing, names)
            return Finding("layer missing", f"{shortened(layers)}: no stage holds it", module=layers[0])
        if twice := [n for n in names if len(holders[n]) > 1 and len(self.replay.aliases(n)) == 1]:
            layers, stages = _outermost(twice, names), holders[twice[0]]
            text = f"stages {' and '.join(map(str, stages))} both hold {shortened(layers)}"
            return Finding("layer twice", text, stage=stages[1], module=layers[0])
        return None

    def _counts(self) -> Finding | None:
        """Find a stage that runs another number of forwards than the first."""
        number = self._own(self.noted.parts[0]).count
        for part in self.noted.parts:
            if (count := self._own(part).count) != number:
                text = f"stage {part.stage} runs {counted(count, 'forward')} of {counted(number, 'microbatch')}"
                return part.found("extra forward" if count > number else "data", text, f"{part.stage}F")
        return None

    # -- the first value that differs ---------------------------------------------------------------------------------

    def _value(self) -> Finding | None:
        """Find the first value on the way that differs."""
        self.mine.order = self.right.trail.order
        if (first := first_value(self.mine, self.right.trail, exact=False)) is None:
            return None
        place, row = first
        part, k, module = self.noted.parts[self.mine.stages[place]], place.microbatch, place.module
        value, expected = self.mine.values[place], self.right.trail.values[in_reference(place)]
        shape = self._like(value, expected, confusable_values(place, self.mine, self.right.trail))
        if place.what == FORWARD[0] and not shape and (moved := self._moved(k)) is not None:
            return moved
        what = f"tensor {place.leaf + 1} of {place.text}" if place.leaf else place.text
        action, kind, text = f"{part.stage}F{k}", "forward", f"{what} differs{shape and '; '}{shape}"
        if place.what in (BACKWARD, FORWARD[2]):
            action = f"{part.stage}B{k}"
        if place.what == FORWARD[2]:
            kind = "recomputation"
            text = f"when {module!r} is recomputed it leaves another value, as with another dropout mask"
        elif place.what == BACKWARD:
            kind, is_edge, later = "backward", self._is_edge(place, part, -1), self._beside(part, back=True)
            if self.right.last is not None and module == self.right.last.module:
                kind, text = self._loss(value, place)
            elif is_edge and (message := self._message(part, k, back=True)):
                action, kind, text = f"{part.stage}RECV_B{k}", "message", message
            elif is_edge and later is not part:
                return self._sent_back(later, k, expected, row)
            elif self._redrawn(part, place):
                kind = "recomputation"
                text = f"the gradient that reaches {module!r} differs: it is recomputed with another dropout mask"
        elif mode := self._mode(part, module):
            kind, text = "evaluation mode", mode
        elif place.what == FORWARD[0] and self._is_edge(place, part, 0) and (got := self._message(part, k, back=False)):
            action, kind, text = f"{part.stage}RECV_F{k}", "message", got
        return part.found(kind, text, action, row, microbatch=k, module=module)

    def _moved(self, k: int) -> Finding | None:
        """Find a module that takes what another one should."""
        entered = {p: v for p, v in self.right.trail.values.items() if p[0] == FORWARD[0] and p[2:] == (0, 0, k)}
        for place in filter(entered.__contains__, self.mine.values):
            value, part = self.mine.values[place], self.noted.parts[self.mine.stages[place]]
            for other, right in entered.items():
                if torch.equal(value, right) and not torch.equal(value, entered[place]) and right.is_floating_point():
                    text = f"{place.module!r} takes what {other.module!r} should take: layers run in another order"
                    return part.found("forward", text, f"{part.stage}F{k}", microbatch=k, module=place.module)
        return None

    def _is_edge(self, place: Place, part: Part, which: int) -> bool:
        """Whether a module takes what its part receives (0), or leaves what it sends (-1)."""
        ours = [name for name in self.right.trail.order if name in part.modules.values()]
        leaves = [name for name in ours if not any(other.startswith(f"{name}.") for other in ours)]
        return not place.module or f"{leaves[which]}.".startswith(f"{place.module}.")

    def _redrawn(self, part: Part, place: Place) -> bool:
        """Whether what draws right after a module was recomputed. A checkpoint ends before it leaves a value again."""
        own, order = self._own(part), self.right.trail.order
        draws, after = {part.modules.get(name) for name, *_ in own.random}, order[order.index(place.module) + 1 :][:1]
        return not draws.isdisjoint(after) and any(p.what == FORWARD[2] for p in own.values)

    def _mode(self, part: Part, module: str) -> str:
        """Whether a module, or one in it, trains in one of the two and evaluates in the other."""
        for own, is_on in self._own(part).training.items():
            name = part.modules.get(own, own)
            is_inside = own in part.modules and f"{name}.".startswith(f"{module}.")
            if is_inside and self.replay.model.get_submodule(name).training != is_on:
                return f"{name!r} is in {'training' if is_on else 'evaluation'} mode"
        return ""

    # -- between stages -----------------------------------------------------------------------------------------------

    def _beside(self, part: Part, *, back: bool) -> Part:
        """Return what sends to a part; itself, if nothing does."""
        near = part.place + (1 if back else -1)
        sender = self.noted.parts[near] if 0 <= near < len(self.noted.parts) else part
        return part if sender.stage == part.stage else sender

    def _message(self, part: Part, k: int, *, back: bool) -> str:
        """Describe what a stage received, or got back, if it is not what the one beside it computed; empty if it is."""
        sender = self._beside(part, back=back)
        took, gave = (BACKWARD, SENT) if back else FORWARD[:2]
        came, sent, before = part.outside(self.step, took), *(sender.outside(self.step - i, gave) for i in (0, 1))
        for (j, leaf), value in came.items():
            own = sent.get((j, leaf))
            if sender is part or j != k or own is None or torch.equal(own, value) or not value.is_floating_point():
                continue
            late = "of the step before; the receive buffer is stale"
            others = {f"it is the value of microbatch {i} {late}": v for (i, _), v in before.items()}
            for (i, other), v in sent.items():
                if i != k and other == leaf:
                    why = "the buffer was overwritten before it was sent" if i > k else "the receive buffer is stale"
                    is_swap = torch.equal(came.get((i, leaf), value), own)
                    swap = f"microbatches {min(i, k)} and {max(i, k)} are swapped"
                    others[swap if is_swap else f"it is the value of microbatch {i}; {why}"] = v
            shape, what = self._like(value, own, others), "the gradient that" if back else "what"
            text = f"{what} stage {part.stage} received is not what stage {sender.stage} computed"
            return f"{text}{shape and ': '}{shape}"
        return ""

    def _sent_back(self, part: Part, k: int, expected: Tensor, row: Comparison) -> Finding:
        """Why a stage computes another gradient of what it received, though all in it are right."""
        if k in self._own(part).overwritten:
            return _overwritten(part, k, row)
        every = part.outside(self.step, SENT)
        shape = "" if every else "none was seen: is what it received detached?"
        if (k, 0) in every:
            late = "is still in it, as its receive buffer's is not set to zero"
            sums = {
                f"the gradient of microbatch {j}{when} {late}": expected.double() + sent
                for back, when in ((0, ""), (1, " of the step before"))
                for (j, leaf), sent in part.outside(self.step - back, SENT).items()
                if leaf == 0 and sent.shape == expected.shape and (back or j != k)
            }
            shape = describe_difference(every[k, 0], expected, {}, sums)
        text = f"the gradient that stage {part.stage} sends back for microbatch {k} differs{shape and ': '}{shape}"
        return part.found("backward", text, f"{part.stage}B{k}", row, microbatch=k)

    # -- the loss -----------------------------------------------------------------------------------------------------

    def _loss(self, value: Tensor, place: Place) -> tuple[str, str]:
        """Why the gradient of the loss is another one, and not only scaled."""
        k = place.microbatch
        if labels := self._labels(value, k):
            return "labels", f"the loss of microbatch {k} takes {labels}"
        if not value.any():
            return "loss", f"the loss of microbatch {k} has no gradient"
        return "loss", f"the gradient of the loss at {place.module!r} differs, and not by a factor"

    def _labels(self, value: Tensor, k: int) -> str:
        """Describe which other labels give a microbatch's loss this gradient; empty if none do."""
        at, own = self.at, self.at.rows[k].tolist()
        for other, batch in ((0, ""), (-1, " of the batch before"), (1, " of the batch after")):
            if self.step + other < 0 or (batch and "batches" not in self.given.training):
                continue
            target = batch_of(self.given, self.step + other)[2]

            def gradient(rows: Sequence[int], target: Any = target) -> Tensor | None:
                labels = at.cut(target, torch.tensor(rows))
                try:
                    return self.replay.right_gradients([self.right.outputs[k]], labels)[0][0]
                except Exception:  # from the user's code, for one of another shape
                    return None

            found = {f"the labels{batch}": own} if batch else {}
            found |= {f"the labels of microbatch {j}{batch}": rows.tolist() for j, rows in enumerate(at.rows) if j != k}
            alone = [gradient([row] * len(own)) for row in range(min(at.count, MOST_ROWS))]
            of_rows = [
                next((r for r, g in enumerate(alone) if g is not None and len(g) > i and is_scaled(v, g[i])), -1)
                for i, v in enumerate(value if value.dim() else ())
            ]
            text = f"the labels of rows {', '.join(map(str, of_rows))}{batch}; its rows are {', '.join(map(str, own))}"
            found |= {text: of_rows} if -1 not in of_rows and len(of_rows) == len(own) else {}
            for text, rows in found.items():
                if (right := gradient(rows)) is not None and is_scaled(value, right):
                    return text
        return ""

    def _weights(self) -> Finding | None:
        """Microbatches whose losses weigh more than others."""
        scales = {k: scale for k, scale in self.right.scales.items() if scale}
        if not scales or max(scales.values()) - min(scales.values()) <= SCALE * max(map(abs, scales.values())):
            return None
        usual = sorted(scales.values())[len(scales) // 2]
        k = max(scales, key=lambda k: abs(scales[k] - usual))
        samples = [len(self.at.rows[k]) for k in scales]
        labels = [_counted(self.at.cut(self.at.target, self.at.rows[k])) for k in scales]
        text = f"microbatches' losses are {', '.join(f'{scale:.4g}' for scale in scales.values())} times the right ones"
        for counts, why in ((labels, "labels that count (ignore_index)"), (samples, "samples")):
            even = [scale * count for scale, count in zip(scales.values(), counts, strict=True)]
            if len({*counts}) > 1 and max(even) - min(even) <= SCALE * max(even):
                text = f"all microbatches weigh the same, but have {', '.join(map(str, counts))} {why}"
        return Finding("loss weight", text, "loss", microbatch=k)

    # -- what accumulates ---------------------------------------------------------------------------------------------

    def _sums(self, rows: Sequence[Comparison]) -> Finding | None:
        """Gradients that are not the sum of the right terms."""
        of = [self.noted.parts[row.stages[0]] for row in rows]
        for part in of:
            if early := self._own(part).overwritten:
                return _overwritten(part, min(early))
        if not rows:
            return None
        first, parts = of[0], {id(part): part for part in of}.values()
        if lost := [part.tensors.get(name, name) for part in parts for name in self._own(part).lost]:
            text = f"gradients of {shortened(lost)} are set to zero before the optimizer takes them"
            return first.found("gradient", text, "gradients")
        named = [self._shape(row) for row in rows]
        kind, shape = named[0]
        alike = [(row.name, part) for row, part, (_, text) in zip(rows, of, named, strict=True) if text == shape]
        names, is_several = [name for name, _ in alike], len(alike) > 1 and len({part.stage for _, part in alike}) == 1
        if shape and len(alike) == sum(map(len, self.grads)):
            text = f"all gradients: {shape}"
            if shape.startswith("it is 0.") and "clip_grad_norm" not in self.given.training:
                text += "; if the script clips gradients, let TARGET return clip_grad_norm"
            return replace(first.found(kind, text, "gradients", rows[0]), stage=None, rank=None)
        own = {part.tensors.get(name) for part in parts for name in part.parameters}
        what = f"gradients of stage {first.stage}" if own <= {*names} else f"gradients of {shortened(names)}"
        what = what if is_several else f"the gradient of {rows[0].name!r}"
        why = (
            f": {shape}"
            if shape
            else " are not the sums of their terms"
            if is_several
            else " is not the sum of its terms"
        )
        return first.found(kind, what + why, "gradients", rows[0], module=rows[0].name.rpartition(".")[0])

    def _shape(self, row: Comparison) -> tuple[str, str]:
        """Return a kind and words for a wrong gradient."""
        part, aliases = self.noted.parts[row.stages[0]], self.replay.aliases(row.name)
        local = next(name for name, other in part.tensors.items() if other == row.name)
        value, expected = self.grads[part.place].get(local), self.right.expected.get(row.name)
        if value is None or expected is None or row.max_difference == float("inf"):
            return "gradient missing", "missing" if value is None else "not finite, or not to be there"
        before = part.steps[self.step - 1].grads.get(local) if self.step else None
        others = {} if before is None else {NOT_ZEROED: expected + before}
        if before is not None:  # a schedule divides what is there, too
            others[f"{NOT_ZEROED}, divided by the number of microbatches"] = expected + before / len(self.at.rows)
        uses, scales = self.right.trail.uses.get(aliases[0], {}), [*filter(None, self.right.scales.values())]
        mean = sum(scales) / len(scales) if scales else 1.0
        holders = sorted({p.stage for p in self.noted.parts if {*aliases} & {*p.tensors.values()}}, reverse=True)
        named = holders if len(holders) == len(uses) else range(len(uses))
        tie = f"of the tie {' = '.join(aliases)}"
        terms = {f"the term of stage {s} {tie}": use / mean for s, use in zip(named, uses.values(), strict=True)}
        shape = self._like(value, expected, others, terms) or _weighed(value, self.right.scaled(aliases[0]))
        kind = "gradients not zeroed" if shape in others else "tie" if len(aliases) > 1 else "gradient"
        return (kind if "times" not in shape or kind == "tie" else "gradient scale"), shape

    def _buffer(self, rows: Sequence[Comparison]) -> Finding | None:
        if not rows:
            return None
        part, name = self.noted.parts[rows[0].stages[0]], rows[0].name
        text = f"buffer {name!r} is not what the unsplit model leaves"
        if extra := self._own(part).extra:
            text += f": its stage ran {counted(extra, 'time')} besides its microbatches, to find out shapes"
        kind = "extra forward" if extra else "buffer"
        return part.found(kind, text, f"{part.stage}F", rows[0], module=name.rpartition(".")[0])


def is_scaled(value: Tensor, right: Tensor) -> bool:
    """Whether one is a positive multiple of the other."""
    return (scale_of(value, right) or 0) > 0


def _outermost(names: Sequence[str], every: Sequence[str]) -> list[str]:
    """Return the largest modules all of whose parameters are among these."""
    found = dict[str, None]()
    for name in names:
        above = name.rpartition(".")[0]
        while "." in above and all(n in names for n in every if n.startswith(f"{above.rpartition('.')[0]}.")):
            above = above.rpartition(".")[0]
        found[above] = None
    return [*found]


def _overwritten(part: Part, k: int, row: Comparison | None = None) -> Finding:
    text = (
        f"the input of microbatch {k} was overwritten before its backward: its receive buffer was used again too early"
    )
    return part.found("message", text, f"{part.stage}B{k}", row, microbatch=k)


def _weighed(value: Tensor, terms: Mapping[int, Tensor]) -> str:
    """Describe which microbatches' terms do not count once in a gradient, if that explains it."""
    columns, wide = torch.stack([term.flatten() for term in terms.values()], 1), value.double().flatten()[:, None]
    weights = torch.linalg.lstsq(columns, wide).solution
    if len(columns) < 2 * len(terms) or (columns @ weights - wide).abs().max() > SCALE * wide.abs().max():
        return ""
    counts, said = {k: round(float(weight), 2) for k, weight in zip(terms, weights, strict=True)}, []
    for count in sorted({*counts.values()} - {1.0}):
        those = [str(k) for k in counts if counts[k] == count]
        who = f"microbatches {', '.join(those)} are" if len(those) > 1 else f"microbatch {those[0]} is"
        how = "missing" if not count else "there twice" if count == 2 else f"{count:g} times what is right"
        said.append(f"the term{'s' * (len(those) > 1)} of {who} {how}")
    return " and ".join(said)


def _counted(target: Any) -> int:
    """Return how many labels count for `torch.nn.functional.cross_entropy`."""
    labels = [t for t in leaf_tensors(target) if not t.is_floating_point()]
    return int((labels[0] != -100).sum()) if labels else 0
