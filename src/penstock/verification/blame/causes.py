"""Finds the cause of a step's wrong results: the first wrong value on the way to them, and its shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock._base.formatting import list_names, pluralize
from penstock._base.pytree import leaf_tensors
from penstock.distributed.launch.target import Target
from penstock.verification.blame.data import Data, get_batch
from penstock.verification.blame.finding import Finding
from penstock.verification.blame.names import Part, RecordedJob
from penstock.verification.blame.replay import TOLERANCE, Replay, Replayed, find_scale
from penstock.verification.blame.watch import SENT, Step
from penstock.verification.comparison import Comparison
from penstock.verification.first_difference import (
    BACKWARD,
    FORWARD,
    NONE,
    ModuleTrace,
    Named,
    ValueKey,
    confusable_values,
    describe_difference,
    first_value,
    reference_key,
    usual_factors,
)

NOT_ZEROED = "gradients were not set to zero: those of the step before are in it"
MAX_ROWS = 64
"""Maximum number of samples of a batch whose labels are tried for a microbatch."""


@dataclass(frozen=True, slots=True)
class Causes:
    """The possible causes in one step.

    Attributes:
        trace: the pipeline's values, by the unsplit model's names.
        reference: the unsplit model's values.
        grads: each part's gradients before they are clipped, by its own names.
    """

    job: RecordedJob
    replay: Replay
    spec: Target
    step: int
    data: Data
    trace: ModuleTrace
    reference: Replayed
    grads: Sequence[Mapping[str, Tensor]]

    def first(
        self, wrong: Sequence[Comparison], data: Finding | None, replica: Finding | None, update: Finding | None
    ) -> Finding | None:
        """Return the first finding."""
        gradients, buffers = ([row for row in wrong if row.kind == kind] for kind in ("gradient", "buffer"))
        inner = self._find_structure() or data or self._find_count() or self._find_value() or self._find_weights()
        return inner or replica or self._find_sum(gradients) or update or self._find_buffer(buffers)

    def _part_step(self, part: Part) -> Step:
        return part.steps[self.step]

    def _describe(self, value: Tensor | None, expected: Tensor, similar: Named = NONE, terms: Named = NONE) -> str:
        first = self.job.parts[0]
        counts = first.microbatches(self.step), 1 + len(first.replicas), self.data.count
        return describe_difference(value, expected, usual_factors(*counts, self.data.target), similar, terms)

    # -- the stages' layers, and their number of forwards -------------------------------------------------------------

    def _find_structure(self) -> Finding | None:
        """Find a layer that no stage has, or several have."""
        names, tensors = [name for name, _ in self.replay.model.named_parameters()], self.replay.tensors
        holder_pairs = [(id(tensors[n]), part.stage) for part in self.job.parts for n in {*part.tensors.values()}]
        holders = {name: [stage for key, stage in holder_pairs if key == id(tensors[name])] for name in names}
        if missing := [n for n in names if not holders[n] and tensors[n].requires_grad]:
            layers = _outermost_modules(missing, names)
            return Finding("layer missing", f"{list_names(layers)}: no stage holds it", module=layers[0])
        if duplicated := [n for n in names if len(holders[n]) > 1 and len(self.replay.aliases(n)) == 1]:
            layers, stages = _outermost_modules(duplicated, names), holders[duplicated[0]]
            text = f"stages {' and '.join(map(str, stages))} both hold {list_names(layers)}"
            return Finding("layer twice", text, stage=stages[1], module=layers[0])
        return None

    def _find_count(self) -> Finding | None:
        """Find a stage that runs another number of forwards than the first."""
        number = self._part_step(self.job.parts[0]).count
        for part in self.job.parts:
            if (count := self._part_step(part).count) != number:
                text = f"stage {part.stage} runs {pluralize(count, 'forward')} of {pluralize(number, 'microbatch')}"
                return part.make_finding("extra forward" if count > number else "data", text, f"{part.stage}F")
        return None

    # -- the first value that differs ---------------------------------------------------------------------------------

    def _find_value(self) -> Finding | None:
        """Find the first value on the way that differs."""
        self.trace.order = self.reference.trace.order
        if (first := first_value(self.trace, self.reference.trace, exact=False)) is None:
            return None
        key, comparison = first
        part, k, module = self.job.parts[self.trace.stages[key]], key.microbatch, key.module
        value, expected = self.trace.values[key], self.reference.trace.values[reference_key(key)]
        shape = self._describe(value, expected, confusable_values(key, self.trace, self.reference.trace))
        if key.kind == FORWARD[0] and not shape and (moved := self._find_moved_module(k)) is not None:
            return moved
        subject = f"tensor {key.leaf + 1} of {key.text}" if key.leaf else key.text
        action, kind, text = f"{part.stage}F{k}", "forward", f"{subject} differs{shape and '; '}{shape}"
        if key.kind in (BACKWARD, FORWARD[2]):
            action = f"{part.stage}B{k}"
        if key.kind == FORWARD[2]:
            kind = "recomputation"
            text = f"when {module!r} is recomputed it leaves another value, as with another dropout mask"
        elif key.kind == BACKWARD:
            kind, is_edge, next_part = "backward", self._is_edge(key, part, -1), self._neighbor(part, back=True)
            if self.reference.last is not None and module == self.reference.last.module:
                kind, text = self._describe_loss(value, key)
            elif is_edge and (message := self._check_link(part, k, back=True)):
                action, kind, text = f"{part.stage}RECV_B{k}", "message", message
            elif is_edge and next_part is not part:
                return self._find_sent_gradient(next_part, k, expected, comparison)
            elif self._is_redrawn(part, key):
                kind = "recomputation"
                text = f"the gradient that reaches {module!r} differs: it is recomputed with another dropout mask"
        elif mode_text := self._describe_mode(part, module):
            kind, text = "evaluation mode", mode_text
        elif key.kind == FORWARD[0] and self._is_edge(key, part, 0) and (bad := self._check_link(part, k, back=False)):
            action, kind, text = f"{part.stage}RECV_F{k}", "message", bad
        return part.make_finding(kind, text, action, comparison, microbatch=k, module=module)

    def _find_moved_module(self, k: int) -> Finding | None:
        """Find a module that takes another one's input."""
        inputs = {p: v for p, v in self.reference.trace.values.items() if p[0] == FORWARD[0] and p[2:] == (0, 0, k)}
        for key in filter(inputs.__contains__, self.trace.values):
            value, part = self.trace.values[key], self.job.parts[self.trace.stages[key]]
            for other, right in inputs.items():
                if torch.equal(value, right) and not torch.equal(value, inputs[key]) and right.is_floating_point():
                    text = f"{key.module!r} takes what {other.module!r} should take: layers run in another order"
                    return part.make_finding("forward", text, f"{part.stage}F{k}", microbatch=k, module=key.module)
        return None

    def _is_edge(self, key: ValueKey, part: Part, index: int) -> bool:
        """Whether a module's input is what its part receives (0), or its output what the part sends (-1)."""
        names = [name for name in self.reference.trace.order if name in part.modules.values()]
        innermost = [name for name in names if not any(nested.startswith(f"{name}.") for nested in names)]
        return not key.module or f"{innermost[index]}.".startswith(f"{key.module}.")

    def _is_redrawn(self, part: Part, key: ValueKey) -> bool:
        """Whether a random module right after this one was recomputed. Checkpoints never redo their last output."""
        record, order = self._part_step(part), self.reference.trace.order
        draws = {part.modules.get(name) for name, *_ in record.random}
        after = order[order.index(key.module) + 1 :][:1]
        return not draws.isdisjoint(after) and any(k.kind == FORWARD[2] for k in record.values)

    def _describe_mode(self, part: Part, module: str) -> str:
        """Describe a module, or one in it, whose mode differs from the unsplit model's; empty if there is none."""
        for local_name, is_on in self._part_step(part).training.items():
            name = part.modules.get(local_name, local_name)
            is_inside = local_name in part.modules and f"{name}.".startswith(f"{module}.")
            if is_inside and self.replay.model.get_submodule(name).training != is_on:
                return f"{name!r} is in {'training' if is_on else 'evaluation'} mode"
        return ""

    # -- between stages -----------------------------------------------------------------------------------------------

    def _neighbor(self, part: Part, *, back: bool) -> Part:
        """Return the part that sends to this one; itself if there is none."""
        position = part.order + (1 if back else -1)
        sender = self.job.parts[position] if 0 <= position < len(self.job.parts) else part
        return part if sender.stage == part.stage else sender

    def _check_link(self, part: Part, k: int, *, back: bool) -> str:
        """Describe what a stage received if it is not what its neighbor computed; empty if it is."""
        sender = self._neighbor(part, back=back)
        received_kind, sent_kind = (BACKWARD, SENT) if back else FORWARD[:2]
        received = part.boundary(self.step, received_kind)
        sent, sent_before = (sender.boundary(self.step - i, sent_kind) for i in (0, 1))
        for (j, leaf), value in received.items():
            right = sent.get((j, leaf))
            if sender is part or j != k or right is None or torch.equal(right, value) or not value.is_floating_point():
                continue
            stale = "of the step before; the receive buffer is stale"
            similar = {f"it is the value of microbatch {i} {stale}": v for (i, _), v in sent_before.items()}
            for (i, other_leaf), v in sent.items():
                if i != k and other_leaf == leaf:
                    reason = "the buffer was overwritten before it was sent" if i > k else "the receive buffer is stale"
                    is_swap = torch.equal(received.get((i, leaf), value), right)
                    swap_text = f"microbatches {min(i, k)} and {max(i, k)} are swapped"
                    similar[swap_text if is_swap else f"it is the value of microbatch {i}; {reason}"] = v
            shape, subject = self._describe(value, right, similar), "the gradient that" if back else "what"
            text = f"{subject} stage {part.stage} received is not what stage {sender.stage} computed"
            return f"{text}{shape and ': '}{shape}"
        return ""

    def _find_sent_gradient(self, part: Part, k: int, expected: Tensor, comparison: Comparison) -> Finding:
        """Explain a wrong gradient of a stage's input, although all gradients inside the stage are right."""
        if k in self._part_step(part).overwritten:
            return _overwritten_finding(part, k, comparison)
        sent_gradients = part.boundary(self.step, SENT)
        shape = "" if sent_gradients else "none was seen: is what it received detached?"
        if (k, 0) in sent_gradients:
            suffix = "is still in it, as its receive buffer's is not set to zero"
            sums = {
                f"the gradient of microbatch {j}{when_text} {suffix}": expected.double() + sent
                for steps_back, when_text in ((0, ""), (1, " of the step before"))
                for (j, leaf), sent in part.boundary(self.step - steps_back, SENT).items()
                if leaf == 0 and sent.shape == expected.shape and (steps_back or j != k)
            }
            shape = describe_difference(sent_gradients[k, 0], expected, {}, sums)
        text = f"the gradient that stage {part.stage} sends back for microbatch {k} differs{shape and ': '}{shape}"
        return part.make_finding("backward", text, f"{part.stage}B{k}", comparison, microbatch=k)

    # -- the loss -----------------------------------------------------------------------------------------------------

    def _describe_loss(self, value: Tensor, key: ValueKey) -> tuple[str, str]:
        """Explain a wrong gradient of the loss that is not only scaled."""
        k = key.microbatch
        if labels := self._describe_labels(value, k):
            return "labels", f"the loss of microbatch {k} takes {labels}"
        if not value.any():
            return "loss", f"the loss of microbatch {k} has no gradient"
        return "loss", f"the gradient of the loss at {key.module!r} differs, and not by a factor"

    def _describe_labels(self, value: Tensor, k: int) -> str:
        """Describe other labels that give a microbatch's loss this gradient; empty if there are none."""
        data, own_rows = self.data, self.data.rows[k].tolist()
        for offset, batch in ((0, ""), (-1, " of the batch before"), (1, " of the batch after")):
            if self.step + offset < 0 or (batch and "batches" not in self.spec.training):
                continue
            target = get_batch(self.spec, self.step + offset)[2]

            def gradient(rows: Sequence[int], target: Any = target) -> Tensor | None:
                labels = data.cut(target, torch.tensor(rows))
                try:
                    return self.replay.loss_gradients([self.reference.outputs[k]], labels)[0][0]
                except Exception:  # from the user's code, for one of another shape
                    return None

            options = {f"the labels{batch}": own_rows} if batch else {}
            options |= {f"the labels of microbatch {j}{batch}": r.tolist() for j, r in enumerate(data.rows) if j != k}
            gradients = [gradient([row] * len(own_rows)) for row in range(min(data.count, MAX_ROWS))]
            matched_rows = [
                next((r for r, g in enumerate(gradients) if g is not None and len(g) > i and is_scaled(v, g[i])), -1)
                for i, v in enumerate(value if value.dim() else ())
            ]
            matched, correct = (", ".join(map(str, rows)) for rows in (matched_rows, own_rows))
            text = f"the labels of rows {matched}{batch}; its rows are {correct}"
            options |= {text: matched_rows} if -1 not in matched_rows and len(matched_rows) == len(own_rows) else {}
            for text, rows in options.items():
                if (expected := gradient(rows)) is not None and is_scaled(value, expected):
                    return text
        return ""

    def _find_weights(self) -> Finding | None:
        """Find microbatches whose losses have another weight."""
        scales = {k: scale for k, scale in self.reference.scales.items() if scale}
        if not scales or max(scales.values()) - min(scales.values()) <= TOLERANCE * max(map(abs, scales.values())):
            return None
        median = sorted(scales.values())[len(scales) // 2]
        k = max(scales, key=lambda k: abs(scales[k] - median))
        samples = [len(self.data.rows[k]) for k in scales]
        labels = [_count_labels(self.data.cut(self.data.target, self.data.rows[k])) for k in scales]
        text = f"microbatches' losses are {', '.join(f'{scale:.4g}' for scale in scales.values())} times the right ones"
        for counts, reason in ((labels, "labels that count (ignore_index)"), (samples, "samples")):
            weighted = [scale * count for scale, count in zip(scales.values(), counts, strict=True)]
            if len({*counts}) > 1 and max(weighted) - min(weighted) <= TOLERANCE * max(weighted):
                text = f"all microbatches weigh the same, but have {', '.join(map(str, counts))} {reason}"
        return Finding("loss weight", text, "loss", microbatch=k)

    # -- accumulated gradients, and buffers ---------------------------------------------------------------------------

    def _find_sum(self, rows: Sequence[Comparison]) -> Finding | None:
        """Find gradients that are not the sum of the right terms."""
        row_parts = [self.job.parts[row.stages[0]] for row in rows]
        for part in row_parts:
            if overwritten := self._part_step(part).overwritten:
                return _overwritten_finding(part, min(overwritten))
        if not rows:
            return None
        first, parts = row_parts[0], {id(part): part for part in row_parts}.values()
        if zeroed := [part.tensors.get(name, name) for part in parts for name in self._part_step(part).lost]:
            text = f"gradients of {list_names(zeroed)} are set to zero before the optimizer takes them"
            return first.make_finding("gradient", text, "gradients")
        shapes = [self._describe_gradient(row) for row in rows]
        kind, shape = shapes[0]
        alike = [
            (row.name, part) for row, part, (_, text) in zip(rows, row_parts, shapes, strict=True) if text == shape
        ]
        names, is_several = [name for name, _ in alike], len(alike) > 1 and len({part.stage for _, part in alike}) == 1
        if shape and len(alike) == sum(map(len, self.grads)):
            text = f"all gradients: {shape}"
            if shape.startswith("it is 0.") and "clip_grad_norm" not in self.spec.training:
                text += "; if the script clips gradients, let TARGET return clip_grad_norm"
            return replace(first.make_finding(kind, text, "gradients", rows[0]), stage=None, rank=None)
        part_names = {part.tensors.get(name) for part in parts for name in part.parameters}
        subject = f"gradients of stage {first.stage}" if part_names <= {*names} else f"gradients of {list_names(names)}"
        subject = subject if is_several else f"the gradient of {rows[0].name!r}"
        suffix = " are not the sums of their terms" if is_several else " is not the sum of its terms"
        suffix = f": {shape}" if shape else suffix
        return first.make_finding(kind, subject + suffix, "gradients", rows[0], module=rows[0].name.rpartition(".")[0])

    def _describe_gradient(self, row: Comparison) -> tuple[str, str]:
        """Return the kind and the shape of a wrong gradient."""
        part, aliases = self.job.parts[row.stages[0]], self.replay.aliases(row.name)
        local_name = next(name for name, reference_name in part.tensors.items() if reference_name == row.name)
        value, expected = self.grads[part.order].get(local_name), self.reference.expected.get(row.name)
        if value is None or expected is None or row.max_difference == float("inf"):
            return "gradient missing", "missing" if value is None else "not finite, or not to be there"
        before = part.steps[self.step - 1].grads.get(local_name) if self.step else None
        similar = {} if before is None else {NOT_ZEROED: expected + before}
        if before is not None:  # a schedule divides old gradients, too
            similar[f"{NOT_ZEROED}, divided by the number of microbatches"] = expected + before / len(self.data.rows)
        uses, scales = self.reference.trace.uses.get(aliases[0], {}), [*filter(None, self.reference.scales.values())]
        mean = sum(scales) / len(scales) if scales else 1.0
        holders = sorted({p.stage for p in self.job.parts if {*aliases} & {*p.tensors.values()}}, reverse=True)
        stages = holders if len(holders) == len(uses) else range(len(uses))
        tie = f"of the tie {' = '.join(aliases)}"
        terms = {f"the term of stage {s} {tie}": use / mean for s, use in zip(stages, uses.values(), strict=True)}
        shape = self._describe(value, expected, similar, terms)
        shape = shape or _describe_weights(value, self.reference.scaled(aliases[0]))
        kind = "gradients not zeroed" if shape in similar else "tie" if len(aliases) > 1 else "gradient"
        return (kind if "times" not in shape or kind == "tie" else "gradient scale"), shape

    def _find_buffer(self, rows: Sequence[Comparison]) -> Finding | None:
        if not rows:
            return None
        part, name = self.job.parts[rows[0].stages[0]], rows[0].name
        text = f"buffer {name!r} is not what the unsplit model leaves"
        if extra := self._part_step(part).extra:
            text += f": its stage ran {pluralize(extra, 'time')} besides its microbatches, to find out shapes"
        kind = "extra forward" if extra else "buffer"
        return part.make_finding(kind, text, f"{part.stage}F", rows[0], module=name.rpartition(".")[0])


def is_scaled(value: Tensor, expected: Tensor) -> bool:
    """Whether a value is a positive multiple of the expected one."""
    return (find_scale(value, expected) or 0) > 0


def _outermost_modules(names: Sequence[str], all_names: Sequence[str]) -> list[str]:
    """Return the largest modules all of whose parameters are among these."""
    modules = dict[str, None]()
    for name in names:
        parent = name.rpartition(".")[0]
        while "." in parent and all(n in names for n in all_names if n.startswith(f"{parent.rpartition('.')[0]}.")):
            parent = parent.rpartition(".")[0]
        modules[parent] = None
    return [*modules]


def _overwritten_finding(part: Part, k: int, row: Comparison | None = None) -> Finding:
    text = (
        f"the input of microbatch {k} was overwritten before its backward: its receive buffer was used again too early"
    )
    return part.make_finding("message", text, f"{part.stage}B{k}", row, microbatch=k)


def _describe_weights(value: Tensor, terms: Mapping[int, Tensor]) -> str:
    """Describe microbatches whose terms have a weight other than 1 in a gradient, if that explains it."""
    columns, target = torch.stack([term.flatten() for term in terms.values()], 1), value.double().flatten()[:, None]
    weights = torch.linalg.lstsq(columns, target).solution
    if len(columns) < 2 * len(terms) or (columns @ weights - target).abs().max() > TOLERANCE * target.abs().max():
        return ""
    counts, texts = {k: round(float(weight), 2) for k, weight in zip(terms, weights, strict=True)}, []
    for count in sorted({*counts.values()} - {1.0}):
        ks = [str(k) for k in counts if counts[k] == count]
        subject = f"microbatches {', '.join(ks)} are" if len(ks) > 1 else f"microbatch {ks[0]} is"
        state = "missing" if not count else "there twice" if count == 2 else f"{count:g} times what is right"
        texts.append(f"the term{'s' * (len(ks) > 1)} of {subject} {state}")
    return " and ".join(texts)


def _count_labels(target: Any) -> int:
    """Return the number of labels that `torch.nn.functional.cross_entropy` counts."""
    labels = [t for t in leaf_tensors(target) if not t.is_floating_point()]
    return int((labels[0] != -100).sum()) if labels else 0
