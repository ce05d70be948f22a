"""Why results of a step are wrong: the first value on the way to them that is, and what it looks like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock._base.trees import leaf_tensors
from penstock._base.words import counted, shortened
from penstock.distributed.launch.target import Target
from penstock.verification.blame.data import batch_of
from penstock.verification.blame.finding import Finding
from penstock.verification.blame.names import Noted, Part
from penstock.verification.blame.replay import SCALE, Data, Replay, Replayed, scale_of
from penstock.verification.blame.watch import SENT
from penstock.verification.comparison import Comparison
from penstock.verification.first_difference import (
    confusable_values,
    describe_difference,
    first_value,
    in_reference,
    usual_factors,
)
from penstock.verification.trail import BACKWARD, FORWARD, Place, Trail

NOT_ZEROED = "gradients were not set to zero: those of the step before are in it"
STALE = "the receive buffer is stale"
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
        """The first."""
        causes: tuple[Callable[[], Finding | None], ...] = (
            *(self._structure, lambda: misfed, self._counts, self._value, self._weights, lambda: differ),
            *(lambda: self._sums([row for row in wrong if row.kind == "gradient"]), lambda: update),
            lambda: self._buffer([row for row in wrong if row.kind == "buffer"]),
        )
        return next(filter(None, (cause() for cause in causes)), None)

    def _structure(self) -> Finding | None:
        """A layer that no stage has, or several have."""
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
        """A stage that runs another number of forwards than the first."""
        first, *others = self.noted.parts
        number = first.steps[self.step]["count"]
        for part in others:
            if (count := part.steps[self.step]["count"]) != number:
                text = f"stage {part.stage} runs {counted(count, 'forward')} of {counted(number, 'microbatch')}"
                return Finding("extra forward" if count > number else "data", text, f"{part.stage}F", **part.where())
        return None

    def _value(self) -> Finding | None:
        """The first value on the way that differs."""
        self.mine.order = self.right.trail.order
        found = first_value(self.mine, self.right.trail, exact=False)
        if found is None:
            return None
        place, row = found
        part, k, value = self.noted.parts[self.mine.stages[place]], place.microbatch, self.mine.values[place]
        stage, expected = part.stage, self.right.trail.values[in_reference(place)]
        shape = describe_difference(
            value, expected, self._factors(), confusable_values(place, self.mine, self.right.trail)
        )
        if place.what == FORWARD[0] and not shape and (moved := self._moved(k)) is not None:
            return moved
        what = f"tensor {place.leaf + 1} of {place.text}" if place.leaf else place.text
        action, kind, text = f"{stage}F{k}", "forward", f"{what} differs{shape and '; '}{shape}"
        where = part.where(row, microbatch=k, module=place.module)
        if place.what == FORWARD[2]:
            action, kind = f"{stage}B{k}", "recomputation"
            text = f"when {place.module!r} is recomputed it leaves another value, as with another dropout mask"
        elif place.what == BACKWARD:
            action, kind = f"{stage}B{k}", "backward"
            if self.right.last is not None and place.module == self.right.last.module:
                kind, text = self._loss(value, place)
            elif message := self._message(part, k, back=True) if self._is_edge(place, part, -1) else "":
                action, kind, text = f"{stage}RECV_B{k}", "message", message
            elif self._is_edge(place, part, -1) and (later := self._beside(part, back=True)) is not part:
                return self._sent_back(later, k, expected, where)
            elif self._redrawn(part, place):
                kind = "recomputation"
                text = f"the gradient that reaches {place.module!r} differs: it is recomputed with another dropout mask"
        elif mode := self._mode(part, place.module):
            kind, text = "evaluation mode", mode
        elif place.what == FORWARD[0] and self._is_edge(place, part, 0) and (got := self._message(part, k, back=False)):
            action, kind, text = f"{stage}RECV_F{k}", "message", got
        return Finding(kind, text, action, **where)

    def _moved(self, k: int) -> Finding | None:
        """A module that takes what another one should."""
        entered = {p: v for p, v in self.right.trail.values.items() if p[0] == FORWARD[0] and p[2:] == (0, 0, k)}
        for place in filter(entered.__contains__, self.mine.values):
            value, part = self.mine.values[place], self.noted.parts[self.mine.stages[place]]
            for other, right in entered.items():
                if torch.equal(value, right) and not torch.equal(value, entered[place]) and right.is_floating_point():
                    text = f"{place.module!r} takes what {other.module!r} should take: layers run in another order"
                    return Finding(
                        "forward", text, f"{part.stage}F{k}", **part.where(microbatch=k, module=place.module)
                    )
        return None

    def _is_edge(self, place: Place, part: Part, which: int) -> bool:
        """Whether a module takes what its part receives (0), or leaves what it sends (-1)."""
        ours = [name for name in self.right.trail.order if name in part.modules.values()]
        leaves = [name for name in ours if not any(other.startswith(f"{name}.") for other in ours)]
        return not place.module or f"{leaves[which]}.".startswith(f"{place.module}.")

    def _redrawn(self, part: Part, place: Place) -> bool:
        """Whether what draws right after a module was recomputed. A checkpoint ends before it leaves a value again."""
        order, draws = self.right.trail.order, {part.modules.get(name) for name, *_ in part.steps[self.step]["random"]}
        after = {*order[order.index(place.module) + 1 :][:1]}
        return bool(after & draws) and any(p.what == FORWARD[2] for p in part.values(self.step))

    def _mode(self, part: Part, module: str) -> str:
        """Whether a module, or one in it, trains in one of the two and evaluates in the other."""
        for own, is_on in part.steps[self.step]["training"].items():
            name = part.modules.get(own, own)
            is_inside = own in part.modules and f"{name}.".startswith(f"{module}.")
            if is_inside and self.replay.model.get_submodule(name).training != is_on:
                return f"{name!r} is in {'training' if is_on else 'evaluation'} mode"
        return ""

    def _message(self, part: Part, k: int, *, back: bool) -> str:
        """What a stage received, or got back, if it is not what the one beside it computed; empty if it is."""
        sender = self._beside(part, back=back)
        took, gave = (BACKWARD, SENT) if back else FORWARD[:2]
        came, sent = part.outside(self.step, took), sender.outside(self.step, gave)
        before = sender.outside(self.step - 1, gave) if self.step else {}
        for (j, leaf), value in came.items():
            own = sent.get((j, leaf))
            if sender is part or j != k or own is None or torch.equal(own, value) or not value.is_floating_point():
                continue
            others = {
                f"it is the value of microbatch {i} of the step before; {STALE}": v for (i, _), v in before.items()
            }
            for (i, other), v in sent.items():
                if i != k and other == leaf:
                    is_swap = torch.equal(came.get((i, leaf), value), own)
                    why = "the buffer was overwritten before it was sent" if i > k else STALE
                    swap = f"microbatches {min(i, k)} and {max(i, k)} are swapped"
                    others[swap if is_swap else f"it is the value of microbatch {i}; {why}"] = v
            shape = describe_difference(value, own, self._factors(), others)
            what = "the gradient that" if back else "what"
            return (
                f"{what} stage {part.stage} received is not what stage {sender.stage} computed{shape and ': '}{shape}"
            )
        return ""

    def _beside(self, part: Part, *, back: bool) -> Part:
        """What sends to a part; itself, if nothing does."""
        near = part.place + (1 if back else -1)
        sender = self.noted.parts[near] if 0 <= near < len(self.noted.parts) else part
        return part if sender.stage == part.stage else sender

    def _sent_back(self, part: Part, k: int, expected: Tensor, where: dict[str, Any]) -> Finding:
        """Why a stage computes another gradient of what it received, though all in it are right."""
        if k in part.steps[self.step]["overwritten"]:
            return _overwritten(part, k, where)
        others = {
            f"the gradient of microbatch {j}{when} is still in it, as its receive buffer's is not set to zero": sent
            for back, when in ((0, ""), (1, " of the step before"))
            for (j, leaf), sent in (part.outside(self.step - back, SENT) if self.step >= back else {}).items()
            if leaf == 0 and sent.shape == expected.shape and (back or j != k)
        }
        every, sums = part.outside(self.step, SENT), {t: expected.double() + v for t, v in others.items()}
        own, shape = every.get((k, 0)), "" if every else "none was seen: is what it received detached?"
        shape = shape if own is None else describe_difference(own, expected, {}, sums)
        text = f"the gradient that stage {part.stage} sends back for microbatch {k} differs{shape and ': '}{shape}"
        return Finding("backward", text, f"{part.stage}B{k}", **where | part.where(module=""))

    def _loss(self, value: Tensor, place: Place) -> tuple[str, str]:
        """Why the gradient of the loss is another one, and not only scaled."""
        k = place.microbatch
        if labels := self._labels(value, k):
            return "labels", f"the loss of microbatch {k} takes {labels}"
        if not value.any():
            return "loss", f"the loss of microbatch {k} has no gradient"
        return "loss", f"the gradient of the loss at {place.module!r} differs, and not by a factor"

    def _labels(self, value: Tensor, k: int) -> str:
        """Which other labels give a microbatch's loss this gradient; empty if none do."""
        at, own = self.at, self.at.rows[k].tolist()
        for other, batch in ((0, ""), (-1, " of the batch before"), (1, " of the batch after")):
            if self.step + other < 0 or (batch and "batches" not in self.given.training):
                continue
            target = batch_of(self.given, self.step + other)[2]

            def gradient(rows: Sequence[int], target: Any = target) -> Tensor | None:
                try:
                    return self.replay.right_gradients([self.right.outputs[k]], at.cut(target, torch.tensor(rows)))[0][
                        0
                    ]
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

    def _sums(self, rows: Sequence[Comparison]) -> Finding | None:
        """Gradients that are not the sum of the right terms."""
        of = [self.noted.parts[row.stages[0]] for row in rows]
        for part in of:
            if early := part.steps[self.step]["overwritten"]:
                return _overwritten(part, min(early), {})
        if not rows:
            return None
        parts = {id(part): part for part in of}.values()
        if lost := [part.tensors.get(name, name) for part in parts for name in part.steps[self.step]["lost"]]:
            text = f"gradients of {shortened(lost)} are set to zero before the optimizer takes them"
            return Finding("gradient", text, "gradients", **of[0].where())
        named = [self._shape(row) for row in rows]
        kind, shape = named[0]
        stages = [part.stage for part, (_, text) in zip(of, named, strict=True) if text == shape]
        tail, where = f": {shape}", of[0].where(rows[0], module=rows[0].name.rpartition(".")[0])
        if shape and len(stages) == sum(len(grads) for grads in self.grads):
            if shape.startswith("it is 0.") and "clip_grad_norm" not in self.given.training:
                tail += "; if the script clips gradients, let TARGET return clip_grad_norm"
            return Finding(
                kind, f"all gradients{tail}", "gradients", **where | {"stage": None, "rank": None, "module": ""}
            )
        names = [row.name for row, part, (_, text) in zip(rows, of, named, strict=True) if text == shape]
        own = {part.tensors.get(name) for part in parts for name in part.parameters}
        is_several = len(stages) > 1 and len({*stages}) == 1
        what = f"gradients of stage {stages[0]}" if own <= {*names} else f"gradients of {shortened(names)}"
        what = what if is_several else f"the gradient of {rows[0].name!r}"
        tail = tail if shape else " are not the sums of their terms" if is_several else " is not the sum of its terms"
        return Finding(kind, what + tail, "gradients", **where)

    def _shape(self, row: Comparison) -> tuple[str, str]:
        """A kind and words for a wrong gradient."""
        part, aliases = self.noted.parts[row.stages[0]], self.replay.aliases(row.name)
        local = next(name for name, other in part.tensors.items() if other == row.name)
        value, expected = self.grads[part.place].get(local), self.right.expected.get(row.name)
        if value is None or expected is None or row.max_difference == float("inf"):
            return "gradient missing", "missing" if value is None else "not finite, or not to be there"
        before = part.steps[self.step - 1]["grads"].get(local) if self.step else None
        others = {} if before is None else {NOT_ZEROED: expected + before}
        if before is not None:  # a schedule divides what is there, too
            others[f"{NOT_ZEROED}, divided by the number of microbatches"] = expected + before / len(self.at.rows)
        uses, scales = self.right.trail.uses.get(aliases[0], {}), [*filter(None, self.right.scales.values())]
        mean = sum(scales) / len(scales) if scales else 1.0
        holders = sorted({p.stage for p in self.noted.parts if {*aliases} & {*p.tensors.values()}}, reverse=True)
        named = holders if len(holders) == len(uses) else range(len(uses))
        tie = f"of the tie {' = '.join(aliases)}"
        terms = {f"the term of stage {s} {tie}": use / mean for s, use in zip(named, uses.values(), strict=True)}
        shape = describe_difference(value, expected, self._factors(), others, terms)
        shape = shape or _weighed(value, self.right.scaled(aliases[0]))
        kind = "gradients not zeroed" if shape in others else "tie" if len(aliases) > 1 else "gradient"
        return (kind if "times" not in shape or kind == "tie" else "gradient scale"), shape

    def _buffer(self, rows: Sequence[Comparison]) -> Finding | None:
        for row in rows:
            part = self.noted.parts[row.stages[0]]
            extra = part.steps[self.step]["extra"]
            more = (
                f": its stage ran {counted(extra, 'time')} besides its microbatches, to find out shapes"
                if extra
                else ""
            )
            text = f"buffer {row.name!r} is not what the unsplit model leaves{more}"
            where = part.where(row, module=row.name.rpartition(".")[0])
            return Finding("extra forward" if extra else "buffer", text, f"{part.stage}F", **where)
        return None

    def _factors(self) -> dict[float, str]:
        first = self.noted.parts[0]
        return usual_factors(first.each(self.step), 1 + len(first.replicas), self.at.count, self.at.target)


def is_scaled(value: Tensor, right: Tensor) -> bool:
    """Whether one is a positive multiple of the other."""
    return (scale_of(value, right) or 0) > 0


def _outermost(names: Sequence[str], every: Sequence[str]) -> list[str]:
    """The largest modules all of whose parameters are among these."""
    found = dict[str, None]()
    for name in names:
        above = name.rpartition(".")[0]
        while "." in above and all(n in names for n in every if n.startswith(f"{above.rpartition('.')[0]}.")):
            above = above.rpartition(".")[0]
        found[above] = None
    return [*found]


def _overwritten(part: Part, k: int, where: dict[str, Any]) -> Finding:
    text = (
        f"the input of microbatch {k} was overwritten before its backward: its receive buffer was used again too early"
    )
    return Finding("message", text, f"{part.stage}B{k}", **where | part.where(microbatch=k))


def _weighed(value: Tensor, terms: Mapping[int, Tensor]) -> str:
    """Which microbatches' terms do not count once in a gradient, if that explains it."""
    columns, wide = torch.stack([term.flatten() for term in terms.values()], 1), value.double().flatten()[:, None]
    weights = torch.linalg.lstsq(columns, wide).solution
    if len(columns) < 2 * len(terms) or (columns @ weights - wide).abs().max() > SCALE * wide.abs().max():
        return ""
    counts, said = {k: round(float(weight), 2) for k, weight in zip(terms, weights, strict=True)}, []
    for count in sorted({*counts.values()} - {1.0}):
        those = [str(k) for k in counts if counts[k] == count]
        who = (
            f"the term of microbatch {those[0]} is"
            if len(those) == 1
            else f"the terms of microbatches {', '.join(those)} are"
        )
        said.append(
            f"{who} {'missing' if not count else 'there twice' if count == 2 else f'{count:g} times what is right'}"
        )
    return " and ".join(said)


def _counted(target: Any) -> int:
    """How many labels count for `torch.nn.functional.cross_entropy`."""
    labels = [t for t in leaf_tensors(target) if not t.is_floating_point()]
    return int((labels[0] != -100).sum()) if labels else 0
