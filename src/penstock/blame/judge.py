"""Holds what a pipeline did in its steps against the unsplit model, and names the first action that is wrong.

Only results accuse: gradients that an optimizer takes, its update, and buffers. If one is wrong, its cause is the first
value on the way to it that is: forward, then the loss, then backward, then what accumulates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.blame import updates
from penstock.blame.data import Feed, data_of
from penstock.blame.finding import Blame, Finding
from penstock.blame.names import Noted, Part, name_parts
from penstock.blame.replay import SCALE, Data, Replay, Replayed, scale_of
from penstock.blame.watch import SENT
from penstock.errors import ArgumentError
from penstock.partition.values.memory import same_bits
from penstock.proof.comparison import Comparison, compare
from penstock.proof.first_difference import (
    confusable_values,
    describe_difference,
    first_value,
    in_reference,
    usual_factors,
)
from penstock.proof.trail import BACKWARD, FORWARD, Place, Trail
from penstock.trees import leaf_tensors
from penstock.words import shortened

NOT_ZEROED = "gradients were not set to zero: those of the step before are in it"
STALE = "the receive buffer is stale"
NOWHERE = {"stage": None, "rank": None}
MOST_ROWS = 64
"""Of a batch, whose labels are tried for a microbatch."""


def judge(noted: Noted, model: nn.Module, feed: Feed) -> Blame:
    """Raises ArgumentError: there is nothing to compare."""
    torch.set_num_threads(int(noted.files[min(noted.files)][0]["threads"]))
    name_parts(noted.parts, model)
    held = Counter(name for part in noted.parts for name in part.tensors.values())
    if (replicas := min(held.values())) > 1:
        raise ArgumentError(
            f"each parameter is held {replicas} times, as by data-parallel replicas; run one replica: penstock blame "
            "compares one pipeline"
        )
    found = _Judge(noted, Replay(model, feed.loss), feed)
    finding = next(filter(None, map(found.step, range(noted.steps))), None)
    stages = len({part.stage for part in noted.parts})
    sizes = noted.steps, len(noted.files), stages, noted.microbatches
    return Blame(finding, *sizes, found.compared, tuple(dict.fromkeys(found.notes)))


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
    epsilon: float = 0.0

    def step(self, step: int) -> Finding | None:
        """The first wrong action of a step."""
        parts = self.noted.parts
        if step == 0:
            self._order_parts()
        at, misfed = data_of(self.feed, parts, step)
        steps = [part.steps[step] for part in parts]
        if misfed is not None and all(same_bits(one["after"][n], t) for one in steps for n, t in one["before"].items()):
            text = f"gradients are set to zero after microbatch {len(at.rows) - 1}, before the optimizer takes them"
            misfed = Finding("gradient", text, "gradients")
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
        self.epsilon = torch.finfo(getattr(torch, cast.rpartition(".")[2])).eps if cast else 0.0
        right = self.right = self.replay.step(at, state, gradients, random, cast)
        wrong = [row for row in self._results(step, right) if not row.ok and row.verdict != "undefined"]
        update = None if wrong else self._update(step, right)
        if not wrong and update is None:
            return None
        mine.order, expected = right.trail.order, right.trail.values
        for place in [*mine.values]:  # a stage that leaves the loss leaves no more than a number
            right_one = expected.get(in_reference(place))
            if right_one is None or right_one.dim() > mine.values[place].dim() == 0:
                del mine.values[place]
        causes: tuple[Callable[[], Finding | None], ...] = (
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
        order = [*dict.fromkeys(place.module for place in self.replay.left(*self.feed.at(0)[:2]))]
        first = {name: number for number, name in enumerate(order)}
        parts = sorted(
            self.noted.parts,
            key=lambda p: (min([first[m] for m in p.modules.values() if m in first] or [len(order)]), p.rank),
        )
        for place, part in enumerate(parts):
            last, told = parts[place - 1], part.steps[0]["stage"]
            part.place = place
            part.stage = told if told is not None else last.stage + (last.rank != part.rank) if place else 0
        self.noted.parts[:] = parts

    def _mine(self, step: int) -> Trail:
        """The pipeline's values, by the unsplit model's names."""
        trail = Trail(step + 1)
        for part in self.noted.parts:
            for place, value in part.values(step).items():
                if place.module in part.modules:
                    known = place._replace(module=part.modules[place.module])
                    trail.values[known], trail.stages[known] = value, part.place
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
                    yield compare("buffer", name, (part.place,), value, right.buffers[name], exact=False)
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
            terms = (
                torch.stack([t.double().abs() / abs(right.scales.get(k) or 1.0) for k, t in of]).sum(0) if of else None
            )
        noise = float(expected.abs().max()) * self.epsilon if expected is not None else 0.0
        return compare("gradient", name, (part.place,), value, expected, False, "rounding", terms, noise=noise)

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
        part, k = self.noted.parts[mine.stages[place]], place.microbatch
        stage = part.stage
        expected = right.trail.values[in_reference(place)]
        confusable = confusable_values(place, mine, right.trail)
        shape = describe_difference(mine.values[place], expected, self._factors(at), confusable)
        where = part.where(row, microbatch=k, module=place.module)
        tail = f"; {shape}" if shape else ""
        if place.what == FORWARD[2]:
            text = f"when {place.module!r} is recomputed it leaves another value, as with another dropout mask{tail}"
            return Finding("recomputation", text, f"{stage}B{k}", **where)
        if place.what == BACKWARD:
            if right.last is not None and place.module == right.last.module:
                return self._loss(mine.values[place], place, right, at, step, where)
            if place.module in self._edge(part, right, last=True):
                if message := self._message(part, step, k, at, back=True):
                    return Finding("message", message, f"{stage}RECV_B{k}", **where)
                if (later := self._beside(part, back=True)) is not part:
                    return self._sent_back(later, step, k, expected, where)
            if self._redrawn(part, right, step, place):
                text = f"the gradient that reaches {place.module!r} differs: it is recomputed with another dropout mask"
                return Finding("recomputation", text, f"{stage}B{k}", **where)
            return Finding("backward", f"{place.text} differs{tail}", f"{stage}B{k}", **where)
        if (mode := self._mode(part, step, place.module)) is not None:
            return Finding("evaluation mode", f"{mode}", f"{stage}F{k}", **where)
        is_first = place.what == FORWARD[0] and place.module in self._edge(part, right, last=False)
        if is_first and (message := self._message(part, step, k, at, back=False)):
            return Finding("message", message, f"{stage}RECV_F{k}", **where)
        return Finding("forward", f"{place.text} differs{tail}", f"{stage}F{k}", **where)

    def _edge(self, part: Part, right: Replayed, *, last: bool) -> list[str]:
        """The modules that take what it receives, or leave what it sends."""
        ours = [name for name in right.trail.order if name in part.modules.values()]
        leaves = [name for name in ours if not any(other.startswith(f"{name}.") for other in ours)]
        return [name for name in ours if f"{leaves[-1 if last else 0]}.".startswith(f"{name}.")]

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
            if f"{name}.".startswith(f"{module}.") and self.replay.model.get_submodule(name).training != is_on:
                return f"{name!r} is in {'training' if is_on else 'evaluation'} mode"
        return None

    def _message(self, part: Part, step: int, k: int, at: Data, *, back: bool) -> str:
        """What a stage received, or got back, if it is not what the one beside it computed; empty if it is."""
        sender = self._beside(part, back=back)
        took, gave = (BACKWARD, SENT) if back else FORWARD[:2]
        came, sent = part.outside(step, took), sender.outside(step, gave)
        before = sender.outside(step - 1, gave) if step else {}
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
            shape = describe_difference(value, own, self._factors(at), others)
            what = "the gradient that" if back else "what"
            return (
                f"{what} stage {part.stage} received is not what stage {sender.stage} computed{shape and ': '}{shape}"
            )
        return ""

    def _beside(self, part: Part, *, back: bool) -> Part:
        """What sends to a part; itself, if nothing does."""
        at = part.place + (1 if back else -1)
        sender = self.noted.parts[at] if 0 <= at < len(self.noted.parts) else part
        return part if sender.stage == part.stage else sender

    def _sent_back(self, part: Part, step: int, k: int, expected: Tensor, where: dict[str, Any]) -> Finding:
        """Why a stage computes another gradient of what it received, though all in it are right."""
        if k in part.steps[step]["overwritten"]:
            return _overwritten(part, k, where)
        left = {
            f"the gradient of microbatch {j}{when} is still in it, as its receive buffer's is not set to zero": sent
            for back, when in ((0, ""), (1, " of the step before"))
            for (j, leaf), sent in (part.outside(step - back, SENT) if step >= back else {}).items()
            if leaf == 0 and sent.shape == expected.shape and (back or j != k)
        }
        own = part.outside(step, SENT).get((k, 0))
        others = {text: expected.double() + sent for text, sent in left.items()}
        shape = "" if own is None else describe_difference(own, expected, {}, others)
        text = f"the gradient that stage {part.stage} sends back for microbatch {k} differs{shape and ': '}{shape}"
        return Finding("backward", text, f"{part.stage}B{k}", **where | part.where(module=""))

    def _loss(
        self, value: Tensor, place: Place, right: Replayed, at: Data, step: int, where: dict[str, Any]
    ) -> Finding:
        """Why the gradient of the loss is another one, and not only scaled."""
        k, action = place.microbatch, f"{where['stage']}B{place.microbatch}"
        if labels := self._labels(value, right.outputs[k], at, step, k):
            return Finding("labels", f"the loss of microbatch {k} takes {labels}", action, **where)
        if not value.any():
            return Finding("loss", f"the loss of microbatch {k} has no gradient", action, **where)
        text = f"the gradient of the loss at {place.module!r} differs, and not by a factor"
        return Finding("loss", text, action, **where)

    def _labels(self, value: Tensor, output: Any, at: Data, step: int, k: int) -> str:
        """Which other labels give a microbatch's loss this gradient; empty if none do."""
        count, own = len(at.rows[k]), at.rows[k].tolist()
        for other, batch in ((step, ""), (step - 1, " of the batch before"), (step + 1, " of the batch after")):
            if other < 0 or (batch and self.feed.batches is None):
                continue
            target = self.feed.at(other)[2]

            def gradient(rows: Sequence[int], target: Any = target) -> Tensor | None:
                try:
                    return self.replay.right_gradients([output], at.cut(target, torch.tensor(rows)))[0][0]
                except Exception:  # from the user's code, for one of another shape
                    return None

            found = {f"the labels{batch}": own} if batch else {}
            found |= {f"the labels of microbatch {j}{batch}": rows.tolist() for j, rows in enumerate(at.rows) if j != k}
            alone = [gradient([row] * count) for row in range(min(at.count, MOST_ROWS))]
            of_rows = [
                next(
                    (r for r, g in enumerate(alone) if g is not None and len(g) > i and (scale_of(v, g[i]) or 0) > 0),
                    -1,
                )
                for i, v in enumerate(value if value.dim() else ())
            ]
            text = f"the labels of rows {', '.join(map(str, of_rows))}{batch}; its rows are {', '.join(map(str, own))}"
            found |= {text: of_rows} if -1 not in of_rows and len(of_rows) == count else {}
            for text, rows in found.items():
                if (right := gradient(rows)) is not None and (scale_of(value, right) or 0) > 0:
                    return text
        return ""

    def _weights(self, right: Replayed, at: Data) -> Finding | None:
        """Microbatches whose losses weigh more than others."""
        scales = {k: scale for k, scale in right.scales.items() if scale}
        if len(scales) < 2 or max(scales.values()) - min(scales.values()) <= SCALE * max(map(abs, scales.values())):
            return None
        samples = {k: len(at.rows[k]) for k in scales}
        labels = {k: _counted(at.cut(at.target, at.rows[k])) for k in scales}
        usual = sorted(scales.values())[len(scales) // 2]
        k = max(scales, key=lambda k: abs(scales[k] - usual))
        for count, why in ((samples, "samples"), (labels, "labels that count (ignore_index)")):
            even = [scale * count[number] for number, scale in scales.items()]
            if len({*count.values()}) > 1 and max(even) - min(even) <= SCALE * max(even):
                text = f"all microbatches weigh the same, but have {', '.join(map(str, count.values()))} {why}"
                return Finding("loss weight", text, "loss", microbatch=k)
        values = ", ".join(f"{scale:.4g}" for scale in scales.values())
        return Finding("loss weight", f"microbatches' losses are {values} times the right ones", "loss", microbatch=k)

    def _sums(self, wrong: Sequence[Comparison], right: Replayed, at: Data, step: int) -> Finding | None:
        """Gradients that are not the sum of the right terms."""
        rows = [row for row in wrong if row.kind == "gradient"]
        if not rows:
            return None
        named = [(row, *self._shape(row, right, at, step)) for row in rows]
        row, kind, shape = named[0]
        for part in (self.noted.parts[row.stages[0]] for row in rows):
            if early := part.steps[step]["overwritten"]:
                return _overwritten(part, min(early), {})
        alike = [other for other, _, text in named if text == shape]
        part = self.noted.parts[row.stages[0]]
        stages = sorted({self.noted.parts[other.stages[0]].stage for other in alike})
        if shape and len(alike) == self.gradient_count:
            return Finding(kind, f"all gradients: {shape}", "gradients", **part.where(row) | NOWHERE)
        what = (
            f"gradients of stage {stages[0]}"
            if len(alike) > 1 and len(stages) == 1
            else f"the gradient of {row.name!r}"
        )
        tail = f": {shape}" if shape else " is not the sum of its microbatches'"
        return Finding(kind, what + tail, "gradients", **part.where(row, module=row.name.rpartition(".")[0]))

    def _shape(self, row: Comparison, right: Replayed, at: Data, step: int) -> tuple[str, str]:
        """A kind and words for a wrong gradient."""
        part, aliases = self.noted.parts[row.stages[0]], self.replay.aliases(row.name)
        local = next(name for name, other in part.tensors.items() if other == row.name)
        value, expected = self.gradients(part, step).get(local), self._expected(row.name, right)
        if value is None or expected is None or row.max_difference == float("inf"):
            return "gradient missing", "it is missing" if value is None else "it is not finite, or should not be there"
        before, uses = part.steps[step - 1]["grads"].get(local) if step else None, right.trail.uses.get(aliases[0], {})
        others = {} if before is None else {NOT_ZEROED: expected + before}
        if before is not None:  # a schedule divides what is there, too
            others[f"{NOT_ZEROED}, divided by the number of microbatches"] = expected + before / len(at.rows)
        mean = sum(filter(None, right.scales.values())) / max(1, len(right.scales)) or 1.0
        holders = sorted({p.stage for p in self.noted.parts if {*aliases} & {*p.tensors.values()}}, reverse=True)
        named = holders if len(holders) == len(uses) else range(len(uses))
        tie = f"of the tie {' = '.join(aliases)}"
        terms = {f"the term of stage {s} {tie}": use / mean for s, use in zip(named, uses.values(), strict=True)}
        shape = describe_difference(value, expected, self._factors(at), others, terms)
        shape = shape or _weighed(value, right.scaled(aliases[0]))
        kind = "gradients not zeroed" if shape in others else "tie" if len(aliases) > 1 else "gradient"
        return (kind if "times" not in shape or kind == "tie" else "gradient scale"), shape

    def _update(self, step: int, right: Replayed) -> Finding | None:
        """Clipping and the optimizer."""
        expected = {n: g for n in self.replay.tensors if (g := self._expected(n, right)) is not None}
        found = self.updates.step(self.noted, step, expected, self.feed, self.replay)
        self.compared += self.updates.compared
        self.notes += self.updates.notes
        return found

    def _buffer(self, wrong: Sequence[Comparison], step: int) -> Finding | None:
        for row in wrong:
            part = self.noted.parts[row.stages[0]]
            extra = part.steps[step]["extra"]
            more = f": its stage ran {extra} more time(s) than it has microbatches, to find out shapes" if extra else ""
            text = f"buffer {row.name!r} is not what the unsplit model leaves{more}"
            where = part.where(row, module=row.name.rpartition(".")[0])
            return Finding("extra forward" if extra else "buffer", text, f"{part.stage}F", **where)
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
