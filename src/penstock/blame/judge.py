"""Holds what a pipeline did in its steps against the unsplit model, and names the first action that is wrong.

Only results accuse: gradients that an optimizer takes, its update, and buffers. If one is wrong, its cause is the first
value on the way to it that is: forward, then the loss, then backward, then what accumulates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.blame import updates
from penstock.blame.data import Feed, data_of
from penstock.blame.finding import Blame, Finding
from penstock.blame.names import Noted, Part, name_parts
from penstock.blame.replay import SCALE, Data, Replay, Replayed, scale_of
from penstock.errors import ArgumentError
from penstock.proof.comparison import Comparison, compare
from penstock.proof.first_difference import (
    confusable_values,
    describe_difference,
    first_value,
    in_reference,
    usual_factors,
)
from penstock.proof.trail import BACKWARD, FORWARD, Place, Trail
from penstock.trees import map_tensors
from penstock.words import shortened

NOTHING_MAPPED = (
    "none of the unsplit model's parameters was found in the pipeline: names, shapes and values all differ; return the "
    "model that the script splits, or pass names= to penstock.blame.capture"
)
NOT_ZEROED = "gradients were not set to zero: those of the step before are in it"
MOST_ROWS = 64
"""Of a batch, whose labels are tried for a microbatch."""


def judge(noted: Noted, model: nn.Module, feed: Feed) -> Blame:
    """Raises ArgumentError: there is nothing to compare."""
    torch.set_num_threads(int(noted.files[min(noted.files)][0]["threads"]))
    name_parts(noted.parts, model)
    if not any(part.tensors for part in noted.parts):
        raise ArgumentError(NOTHING_MAPPED)
    found = _Judge(noted, Replay(model, feed.loss), feed)
    finding = next(filter(None, map(found.step, range(noted.steps))), None)
    stages = len({part.stage for part in noted.parts})
    sizes = noted.steps, len(noted.files), stages, noted.microbatches
    return Blame(finding, *sizes, found.compared, tuple(dict.fromkeys((*found.notes, *feed.notes))))


@dataclass(slots=True)
class _Judge:
    noted: Noted
    replay: Replay
    feed: Feed
    compared: int = 0
    notes: list[str] = field(default_factory=list)
    updates: updates.Updates = field(default_factory=updates.Updates)
    right: Replayed | None = None
    gradient_count: int = 0

    def step(self, step: int) -> Finding | None:
        """The first wrong action of a step."""
        parts = self.noted.parts
        if step == 0:
            self._order_parts()
        at, misfed = data_of(self.feed, parts, step)
        mine = self._mine(step)
        gradients = {place: value for place, value in mine.values.items() if place.what == BACKWARD}
        state = {name: value for part in parts for name, value in part.of(step, "before").items()}
        random = {
            (part.modules[name], call, k): states
            for part in parts
            for (name, call, k), states in part.steps[step]["random"].items()
            if name in part.modules
        }
        cast = next((part.steps[step]["autocast"] for part in parts if part.steps[step]["autocast"]), "")
        right = self.right = self.replay.step(at, state, gradients, random, cast)
        wrong = [row for row in self._results(step, right) if not row.ok and row.verdict != "undefined"]
        update = None if wrong else self._update(step, right)
        if not wrong and update is None:
            return None
        mine.order = right.trail.order
        causes = (
            lambda: self._structure(right),
            lambda: misfed,
            lambda: self._value(mine, right, at, step),
            lambda: self._weights(right, at),
            lambda: self._sums(wrong, right, at, step),
            lambda: update,
            lambda: self._buffer(wrong, step),
        )
        found = next(filter(None, (cause() for cause in causes)), None)
        return None if found is None else replace(found, step=step + 1)

    def _order_parts(self) -> None:
        """Numbers parts by the order of dataflow."""
        order = {name: n for n, name in enumerate(self.replay.order(data_of(self.feed, self.noted.parts, 0)[0]))}
        far = len(order)
        parts = sorted(
            self.noted.parts, key=lambda p: (min((order.get(m, far) for m in p.modules.values()), default=far), p.rank)
        )
        for place, part in enumerate(parts):
            part.place = place
        self.noted.parts[:] = sorted(parts, key=lambda part: part.stage)

    def _mine(self, step: int) -> Trail:
        """The pipeline's values, by the unsplit model's names."""
        trail = Trail(step + 1)
        for part in self.noted.parts:
            for place, value in part.values(step).items():
                if place.module in part.modules:
                    known = place._replace(module=part.modules[place.module])
                    trail.values[known], trail.stages[known] = value, part.stage
        return trail

    # -- results ------------------------------------------------------------------------------------------------------

    def _results(self, step: int, right: Replayed) -> Iterator[Comparison]:
        """Gradients before clipping, and buffers."""
        self.gradient_count = 0
        buffers = {name for name, _ in self.replay.model.named_buffers()}
        trained = {name for name, tensor in self.replay.tensors.items() if tensor.requires_grad}
        for part in self.noted.parts:
            for name, value in part.of(step, "after").items():
                if name in buffers and name in right.buffers:
                    self.compared += 1
                    yield compare("buffer", name, (part.stage,), value, right.buffers[name], exact=False)
            grads = self.gradients(part, step)
            for name, other in part.tensors.items():
                if other not in trained:
                    continue
                expected = self._expected(other, right)
                if name in grads or expected is not None:
                    self.compared, self.gradient_count = self.compared + 1, self.gradient_count + 1
                    yield self._compared(part, other, grads.get(name), expected, right)

    def gradients(self, part: Part, step: int) -> Mapping[str, Tensor]:
        """By the part's own names, before they are clipped. Where clipping was not noted, as it is the script's own
        code, its factor is taken from most of them."""
        noted, grads = self.noted.files[part.rank][step], dict(part.steps[step]["grads"])
        unclipped = {name: grad for (i, name), grad in noted["unclipped"].items() if i == part.index}
        if unclipped or self.feed.max_norm is None or noted["clips"]:
            return unclipped or grads
        of = {part.tensors[name]: grad for name, grad in grads.items() if name in part.tensors}
        right = {n: e for n in of if self.right and (e := self._expected(n, self.right)) is not None and e.any()}
        factors = sorted(s for name, expected in right.items() if (s := scale_of(of[name], expected)))
        return {name: grad / factors[len(factors) // 2] for name, grad in grads.items()} if factors else grads

    def _expected(self, name: str, right: Replayed) -> Tensor | None:
        return next((g for alias in self.replay.aliases(name) if (g := right.gradient(alias)) is not None), None)

    def _compared(
        self, part: Part, name: str, value: Tensor | None, expected: Tensor | None, right: Replayed
    ) -> Comparison:
        terms = None
        if expected is not None and value is not None:
            expected = expected.to(value.dtype)
            of = [t for alias in self.replay.aliases(name) for t in right.trail.terms.get(alias, {}).items()]
            terms = torch.stack([t.double().abs() / abs(right.scales.get(k) or 1.0) for k, t in of]).sum(0) if of else None
        return compare("gradient", name, (part.stage,), value, expected, False, "rounding", terms)

    # -- causes, in order ---------------------------------------------------------------------------------------------

    def _structure(self, right: Replayed) -> Finding | None:
        """A layer that no stage has, or several have."""
        parts, tensors = self.noted.parts, self.replay.tensors
        held = {id(tensors[other]) for part in parts for other in part.tensors.values()}
        missing = [n for n, t in self.replay.model.named_parameters() if id(t) not in held and t.requires_grad]
        if missing:
            layers = _outermost(missing, [name for name, _ in self.replay.model.named_parameters()])
            return Finding("layer missing", f"{shortened(layers)}: no stage holds it", module=layers[0])
        names = [name for name, _ in self.replay.model.named_parameters()]
        holders = {name: [part.stage for part in parts if name in part.tensors.values()] for name in names}
        twice = [n for n, stages in holders.items() if len(stages) > 1 and len(self.replay.aliases(n)) == 1]
        if twice:
            layers, where = _outermost(twice, names), " and ".join(map(str, holders[twice[0]]))
            text = f"stages {where} both hold {shortened(layers)}"
            return Finding("layer twice", text, stage=holders[twice[0]][1], module=layers[0])
        return None

    def _value(self, mine: Trail, right: Replayed, at: Data, step: int) -> Finding | None:
        """The first value on the way that differs."""
        found = first_value(mine, right.trail, exact=False)
        if found is None:
            return None
        place, row = found
        stage, k = mine.stages[place], place.microbatch
        part = next(part for part in self.noted.parts if part.stage == stage and place.module in part.modules.values())
        expected = right.trail.values[in_reference(place)]
        confusable = confusable_values(place, mine, right.trail)
        shape = describe_difference(mine.values[place], expected, self._factors(at), confusable)
        size = {"difference": row.max_difference, "largest": row.max_reference}
        where = {"stage": stage, "rank": part.rank, "microbatch": k, "module": place.module, **size}
        tail = f"; {shape}" if shape else ""
        if place.what == FORWARD[2]:
            text = f"when {place.module!r} is recomputed it leaves another value, as with another dropout mask{tail}"
            return Finding("recomputation", text, f"{stage}B{k}", **where)
        if place.what == BACKWARD:
            if right.last is not None and place.module == right.last.module:
                return self._loss(mine.values[place], place, right, at, step, where)
            if place.module == self._edge(part, right, last=True):
                text = f"the gradient that stage {stage} received is not the one that stage {stage + 1} computed{tail}"
                return Finding("message", text, f"{stage}RECV_B{k}", **where)
            if self._redrawn(part, right, step, place):
                text = f"the gradient that reaches {place.module!r} is that of another dropout mask: it is recomputed with one"
                return Finding("recomputation", text, f"{stage}B{k}", **where)
            return Finding("backward", f"the gradient that reaches {place.module!r} differs{tail}", f"{stage}B{k}", **where)
        if (mode := self._mode(part, step, place.module)) is not None:
            return Finding("evaluation mode", f"{mode}", f"{stage}F{k}", **where)
        if place.what == FORWARD[0] and place.module == self._edge(part, right, last=False):
            if (message := self._message(part, step, k)) is not None:
                return Finding("message", message, f"{stage}RECV_F{k}", **where)
        return Finding("forward", f"{place.text} differs{tail}", f"{stage}F{k}", **where)

    def _edge(self, part: Part, right: Replayed, *, last: bool) -> str | None:
        """The first or last of its modules that holds no other."""
        ours = [name for name in right.trail.order if name in part.modules.values()]
        leaves = [name for name in ours if not any(other.startswith(f"{name}.") for other in ours)]
        return (leaves[-1] if last else leaves[0]) if leaves else None

    def _redrawn(self, part: Part, right: Replayed, step: int, place: Place) -> bool:
        """Whether what draws right after a module was recomputed. A checkpoint ends before it leaves a value again."""
        noted, order = part.steps[step], right.trail.order
        after = order[order.index(place.module) + 1 :][:1]
        draws = {part.modules[name] for name, *_ in noted["random"] if name in part.modules}
        return after[:1] != [] and after[0] in draws and any(p.what == FORWARD[2] for p in part.values(step))

    def _mode(self, part: Part, step: int, module: str) -> str | None:
        """Whether a module, or one in it, trains in one of the two and evaluates in the other."""
        training = {part.modules[n]: is_on for n, is_on in part.steps[step]["training"].items() if n in part.modules}
        for name, is_on in training.items():
            if (name == module or name.startswith(f"{module}.")) and self.replay.model.get_submodule(name).training != is_on:
                return f"{name!r} is in {'training' if is_on else 'evaluation'} mode"
        return None

    def _message(self, part: Part, step: int, k: int) -> str | None:
        """What a stage received, if it is not what the one before it computed."""
        before = [other for other in self.noted.parts if other.stage < part.stage]
        if not before:
            return None
        sender, here = before[-1], part.values(step)
        received = [(p, v) for p, v in here.items() if p[:3] == (FORWARD[0], "", 0) and p.microbatch == k]
        sent = {p: v for p, v in sender.values(step).items() if p.what == FORWARD[1] and p.module == ""}
        for _, value in received:
            own = next((v for p, v in sent.items() if p.microbatch == k and v.shape == value.shape), None)
            if own is None or torch.equal(own, value) or not value.is_floating_point():
                continue
            head = f"what stage {part.stage} received is not what stage {sender.stage} computed: "
            for p, other in sent.items():
                j = p.microbatch
                if j == k or not torch.equal(other, value):
                    continue
                back = next((v for q, v in here.items() if q[:3] == (FORWARD[0], "", 0) and q.microbatch == j), None)
                if back is not None and torch.equal(back, own):
                    return f"{head}microbatches {min(j, k)} and {max(j, k)} are swapped"
                why = "the buffer was overwritten before it was sent" if j > k else "the receive buffer is stale"
                return f"{head}it is the value of microbatch {j}; {why}"
            for p, other in sender.values(step - 1).items() if step else ():
                if p.what == FORWARD[1] and p.module == "" and torch.equal(other, value):
                    return f"{head}it is the value of microbatch {p.microbatch} of the step before; the receive buffer is stale"
            same = [bool(torch.equal(a, b)) for a, b in zip(own, value, strict=True)] if own.dim() else []
            some = f"rows {', '.join(str(i) for i, ok in enumerate(same) if not ok)} differ" if any(same) else ""
            return head + (describe_difference(value, own, {}) or some or "it is another value; was it overwritten?")
        return None

    def _loss(
        self, value: Tensor, place: Place, right: Replayed, at: Data, step: int, where: dict[str, Any]
    ) -> Finding:
        """Why the gradient of the loss is another one, and not only scaled."""
        k, action = place.microbatch, f"{where['stage']}B{place.microbatch}"
        for text, target in self.feed.other_targets(at, step, k):
            try:
                grads = self.replay.right_gradients([right.outputs[k]], target, replace(at, rows=[torch.arange(len(at.rows[k]))]))
            except Exception:  # noqa: BLE001,S112  (of another shape)
                continue
            if grads and value.shape == grads[0][0].shape and scale_of(value, grads[0][0]):
                return Finding("labels", f"the loss of microbatch {k} takes {text}", action, **where)
        if (rows := self._labels_of_rows(value, right.outputs[k], at)) is not None:
            mine = ", ".join(map(str, at.rows[k].tolist()))
            text = f"the loss of microbatch {k} takes the labels of rows {', '.join(map(str, rows))}; its rows are {mine}"
            return Finding("labels", text, action, **where)
        if not value.any():
            return Finding("loss", f"the loss of microbatch {k} has no gradient", action, **where)
        return Finding("loss", f"the gradient of the loss at {place.module!r} differs, and not by a factor", action, **where)

    def _labels_of_rows(self, value: Tensor, output: Any, at: Data) -> list[int] | None:
        """The rows of the batch whose labels give these gradients of a microbatch's rows."""
        found: dict[int, int] = {}
        for row in range(min(at.count, MOST_ROWS)):
            same = torch.full((len(value),), row)
            target = map_tensors(lambda x, same=same: x[same] if x.dim() and len(x) == at.count else x, at.target)
            try:
                right = self.replay.right_gradients([output], target, replace(at, rows=[torch.arange(len(value))]))[0][0]
            except Exception:  # noqa: BLE001  (of another shape)
                return None
            if right.shape != value.shape:
                return None
            found |= {i: row for i in range(len(value)) if i not in found and scale_of(value[i], right[i])}
        return [found[i] for i in range(len(value))] if len(found) == len(value) else None

    def _weights(self, right: Replayed, at: Data) -> Finding | None:
        """Microbatches whose losses weigh more than others."""
        scales = {k: scale for k, scale in right.scales.items() if scale}
        if len(scales) < 2 or max(scales.values()) - min(scales.values()) <= SCALE * max(map(abs, scales.values())):
            return None
        sizes = {k: float(len(at.rows[k])) for k in scales}
        labels = {k: float(self.feed.counted(at.target_of(k))) for k in scales}
        off = max(scales, key=lambda k: abs(scales[k] - sorted(scales.values())[len(scales) // 2]))
        counts, whys = (sizes, labels), ("samples", "labels that count (ignore_index)")
        for count, why in zip(counts, whys, strict=True):
            even = [scales[k] * count[k] for k in scales]
            if len({*count.values()}) > 1 and max(even) - min(even) <= SCALE * max(even):
                numbers = ", ".join(f"{count[k]:.0f}" for k in scales)
                text = f"all microbatches weigh the same although they have {numbers} {why}: the mean of their means is not the batch's"
                return Finding("loss weight", text, "loss", microbatch=off)
        values = ", ".join(f"{scale:.4g}" for scale in scales.values())
        return Finding("loss weight", f"microbatches' losses have other weights: {values} times the right ones", "loss", microbatch=off)

    def _sums(self, wrong: Sequence[Comparison], right: Replayed, at: Data, step: int) -> Finding | None:
        """Gradients that are not the sum of the right terms."""
        rows = [row for row in wrong if row.kind == "gradient"]
        if not rows:
            return None
        named = [(row, *self._shape(row, right, at, step)) for row in rows]
        row, kind, shape = named[0]
        alike = [other for other, _, text in named if text == shape]
        size = {"difference": row.max_difference, "largest": row.max_reference}
        stages = sorted({other.stages[0] for other in alike})
        if shape and len(alike) == self.gradient_count:
            return Finding(kind, f"all gradients: {shape}", "gradients", **size)
        rank = next(part.rank for part in self.noted.parts if part.stage == row.stages[0])
        what = f"gradients of stage {stages[0]}" if len(alike) > 1 and len(stages) == 1 else f"the gradient of {row.name!r}"
        tail = f": {shape}" if shape else " is not the sum of its microbatches'"
        where = {"stage": row.stages[0], "rank": rank, "module": row.name.rpartition(".")[0], **size}
        return Finding(kind, what + tail, "gradients", **where)

    def _shape(self, row: Comparison, right: Replayed, at: Data, step: int) -> tuple[str, str]:
        """A kind and words for a wrong gradient."""
        part = next(p for p in self.noted.parts if p.stage == row.stages[0] and row.name in p.tensors.values())
        local = next(name for name, other in part.tensors.items() if other == row.name)
        value, expected = self.gradients(part, step).get(local), self._expected(row.name, right)
        if value is None or expected is None or row.max_difference == float("inf"):
            return "gradient missing", "it is missing" if value is None else "it is not finite, or should not be there"
        before = self.noted.parts and step and part.steps[step - 1]["grads"].get(local)
        others = {}
        if isinstance(before, Tensor):
            for part_of in (1.0, 1.0 / len(at.rows)):  # a schedule divides what is there, too
                others[f"{NOT_ZEROED}{'' if part_of == 1 else ', divided by the number of microbatches'}"] = expected + before * part_of
        aliases = self.replay.aliases(row.name)
        terms = {
            f"the term of microbatch {k}": term.double() / (right.scales.get(k) or 1.0)
            for k, term in right.trail.terms.get(aliases[0], {}).items()
        }
        if len(aliases) > 1:
            mean = sum(filter(None, right.scales.values())) / max(1, len(right.scales)) or 1.0
            uses, tie = [*right.trail.uses.get(aliases[0], {}).values()], " = ".join(aliases)
            holders = sorted({p.stage for p in self.noted.parts if {*aliases} & {*p.tensors.values()}}, reverse=True)
            named = holders if len(holders) == len(uses) else range(len(uses))
            terms |= {f"the term of stage {s} of the tie {tie}": use / mean for s, use in zip(named, uses, strict=True)}
        shape = describe_difference(value, expected, self._factors(at), others, terms)
        kind = "gradients not zeroed" if shape in others else "tie" if len(aliases) > 1 else "gradient"
        return (kind if "times what" not in shape or kind == "tie" else "gradient scale"), shape

    def _update(self, step: int, right: Replayed) -> Finding | None:
        """Clipping and the optimizer."""
        expected = {n: g for n in dict(self.replay.model.named_parameters()) if (g := self._expected(n, right)) is not None}
        found = self.updates.step(self.noted, step, expected, self.feed, self.replay)
        self.compared += self.updates.compared
        self.notes += self.updates.notes
        return found

    def _buffer(self, wrong: Sequence[Comparison], step: int) -> Finding | None:
        for row in wrong:
            part = next(part for part in self.noted.parts if part.stage == row.stages[0])
            extra = part.steps[step]["extra"]
            more = f": its stage ran {extra} more time(s) than it has microbatches, to find out shapes" if extra else ""
            text = f"buffer {row.name!r} is not what the unsplit model leaves{more}"
            where = {"stage": part.stage, "rank": part.rank, "module": row.name.rpartition(".")[0]}
            size = {"difference": row.max_difference, "largest": row.max_reference}
            return Finding("extra forward" if extra else "buffer", text, f"{part.stage}F", **where, **size)
        return None

    def _factors(self, at: Data) -> dict[float, str]:
        return usual_factors(len(at.rows), 1, at.count, at.target)


def _outermost(names: Sequence[str], every: Sequence[str]) -> list[str]:
    """The largest modules all of whose parameters are among these."""
    found = dict[str, None]()
    for name in names:
        above = name.rpartition(".")[0]
        while "." in above and all(n in names for n in every if n.startswith(f"{above.rpartition('.')[0]}.")):
            above = above.rpartition(".")[0]
        found[above] = None
    return [*found]
