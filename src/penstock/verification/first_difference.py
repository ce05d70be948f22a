"""Records what modules compute in a step of a pipeline and of the unsplit model, and finds the first difference: in
dataflow order, at modules that run as units.

Both take the same steps once more, with hooks on these modules. What enters and leaves them is compared forward, then
the gradients that reach them backward, then the accumulated gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock._base.pytree import leaf_tensors
from penstock.verification.comparison import Comparison, Difference, compare

Named = Mapping[str, Tensor]
NONE: Named = {}
ROUNDING = "no more than rounding"
CLOSE = 1e-5
"""Tolerance, relative to the largest entry, for matching a multiple or another value."""

FORWARD = ("what enters {}", "what leaves {}", "what leaves {} when it runs again")
BACKWARD = "the gradient that reaches {}"


class ValueKey(NamedTuple):
    """Identifies a value: its kind, the call of a module, the leaf and the microbatch."""

    kind: str
    module: str
    call: int
    leaf: int
    microbatch: int

    @property
    def text(self) -> str:
        return self.kind.format(repr(self.module))


@dataclass(slots=True)
class ModuleTrace:
    """The values that the pipeline or the unsplit model computed in one step.

    Attributes:
        step: the step's number.
        order: the modules to trace, in dataflow order; names may repeat.
        values: inputs and outputs of modules, and the gradients that reached them.
        terms: for each parameter, each microbatch's term of its gradient.
        uses: for each tied parameter, the sum of each use's terms; the last use comes first.
        stages: the stage of each value's call.
        random: states of the generator with which calls of modules begin, by module, call and microbatch.
        notes_random: whether to record these states for calls that draw; if not, they are set, to draw the same.
        active: whether forwards and terms are recorded.
        microbatch: the running microbatch.
    """

    step: int
    order: Sequence[str] = ()
    values: dict[ValueKey, Tensor] = field(default_factory=dict)
    terms: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    uses: Mapping[str, Mapping[int, Tensor]] = field(default_factory=dict)
    stages: dict[ValueKey, int] = field(default_factory=dict)
    random: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)
    notes_random: bool = False
    active: bool = True
    microbatch: int = 0
    _stage: int = 0
    _is_recomputing: bool = False
    _calls: dict[int, Counter[str]] = field(default_factory=dict)
    _calls_at_start: dict[tuple[int, int], Counter[str]] = field(default_factory=dict)
    _states: list[Tensor] = field(default_factory=list)

    def begin(self, microbatch: int, stage: int = 0, *, backward: bool = False) -> None:
        """Set what runs next; in a backward, the forward may be recomputed."""
        self.microbatch, self._stage, self._is_recomputing = microbatch, stage, backward
        if backward:
            self._calls[microbatch] = Counter(self._calls_at_start.get((microbatch, stage), Counter()))
        else:
            self._calls_at_start[microbatch, stage] = Counter(self._calls.setdefault(microbatch, Counter()))

    @contextmanager
    def attach(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """Attach the hooks for a step."""
        handles: list[Any] = []
        for name in {*self.order, *(name for name, *_ in self.random)}:
            module = model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(self._leave, name)))
        for name, tensor in parameters.items():
            if tensor.requires_grad:
                handles.append(tensor.register_hook(partial(self._add_term, name)))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def next_step(self) -> None:
        """Clear the trace for the next step."""
        self.step += 1
        self.values, self.terms, self.stages, self.random, self._calls, self._calls_at_start = {}, {}, {}, {}, {}, {}

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.notes_random:
            self._states.append(torch.get_rng_state())
        if self.active and not self._is_recomputing:
            self._record(FORWARD[0], name, (args, kwargs))
            saved_state = None if self.notes_random else self.random.get(self._call_key(name))
            if saved_state is not None:
                torch.set_rng_state(saved_state)

    def _leave(self, name: str, module: nn.Module, args: Any, result: Any) -> None:
        state = self._states.pop() if self.notes_random else None
        if not self.active:
            return
        if state is not None and not self._is_recomputing and not torch.equal(state, torch.get_rng_state()):
            self.random[self._call_key(name)] = state
        for key, tensor in self._record(FORWARD[1 + self._is_recomputing], name, result):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(partial(self._store, key._replace(kind=BACKWARD)))  # type: ignore[no-untyped-call]
        self._calls[self.microbatch][name] += 1

    def _call_key(self, name: str) -> tuple[str, int, int]:
        return name, self._calls.setdefault(self.microbatch, Counter())[name], self.microbatch

    def _record(self, kind: str, name: str, value: Any) -> list[tuple[ValueKey, Tensor]]:
        call, tensors = self._call_key(name)[1], enumerate(leaf_tensors(value))
        if name not in self.order:  # it only has a hook to set the generator's state
            return []
        entries = [(ValueKey(kind, name, call, leaf, self.microbatch), tensor) for leaf, tensor in tensors]
        for key, tensor in entries:
            self._store(key, tensor)
            self.stages[key] = self.stages[key._replace(kind=BACKWARD)] = self._stage
        return entries

    def _store(self, key: ValueKey, tensor: Tensor) -> None:
        self.values[key] = tensor.detach().clone()

    def _add_term(self, name: str, term: Tensor) -> None:
        if not self.active:
            return
        terms, copied = self.terms.setdefault(name, {}), term.detach().clone()
        terms[self.microbatch] = terms[self.microbatch] + copied if self.microbatch in terms else copied


# -- the first difference ---------------------------------------------------------------------------------------------


def first_difference(
    trace: ModuleTrace,
    reference: ModuleTrace,
    gradients: Mapping[str, Tensor | None],
    rows: Sequence[Comparison],
    factors: Mapping[float, str],
    exact: bool,
) -> Difference | None:
    """Return the first value of a step that differs; None if none does this time.

    Args:
        trace, reference: of the pipeline and of the unsplit model.
        gradients: the pipeline's, of parameters.
        rows: the final comparisons.
        factors: see `describe_difference`.
    """
    if (first := first_value(trace, reference, exact)) is not None:
        key, row = first
        shape = describe_difference(
            trace.values[key], reference.values[reference_key(key)], factors, confusable_values(key, trace, reference)
        )
        location = key.microbatch, trace.stages[key]
        return Difference(trace.step, key.text, *location, row.max_difference, row.max_reference, shape)
    wrong = [row for row in rows if row.kind == "gradient" and not row.ok and row.stages and row.name in gradients]
    for row in sorted(wrong, key=lambda row: -max(row.stages)):
        terms = {f"the term of microbatch {k}": term for k, term in reference.terms.get(row.name, {}).items()}
        if not terms:
            continue
        uses = reference.uses.get(row.name, {}) if len(row.stages) == len(reference.uses.get(row.name, {})) else {}
        terms |= {f"the term of stage {s}": uses[i] for i, s in enumerate(sorted(row.stages, reverse=True)) if uses}
        expected = torch.stack([*reference.terms[row.name].values()]).sum(0)
        shape = describe_difference(gradients[row.name], expected, factors, terms=terms)
        text = f"the gradient of {row.name!r}, which is computed from the right values,"
        return Difference(trace.step, text, None, max(row.stages), row.max_difference, row.max_reference, shape)
    return None


def first_value(trace: ModuleTrace, reference: ModuleTrace, exact: bool) -> tuple[ValueKey, Comparison] | None:
    """Return the first input, output or gradient of a module that differs; None if none does."""
    position = {name: index for index, name in reversed([*enumerate(trace.order)])}
    first_position = {
        name: min(p for n, p in position.items() if f"{n}.".startswith(f"{name}.") or not name) for name in position
    }

    def sort_key(key: ValueKey) -> tuple[int, ...]:
        kind, name, call, leaf, microbatch = key
        if kind == BACKWARD:
            return 1, -position[name], 0, -call, 0, microbatch, leaf
        is_entry = kind == FORWARD[0]  # what enters a module enters it before the modules in it
        order, depth = (first_position[name], name.count(".") + bool(name)) if is_entry else (position[name], len(name))
        return 0, order, call, FORWARD.index(kind), depth, microbatch, leaf

    shared = [key for key in trace.values if reference_key(key) in reference.values]
    for key in sorted(shared, key=sort_key):
        value, expected = trace.values[key], reference.values[reference_key(key)]
        comparison = compare("gradient" if key.kind == BACKWARD else "output", key.module, (), value, expected, exact)
        if not comparison.ok and comparison.verdict != "undefined":
            return key, comparison
    return None


def reference_key(key: ValueKey) -> ValueKey:
    """Return the key of the same value in the unsplit model, which has no recomputed outputs."""
    return key._replace(kind=FORWARD[1]) if key.kind == FORWARD[2] else key


def confusable_values(key: ValueKey, trace: ModuleTrace, reference: ModuleTrace) -> dict[str, Tensor]:
    """Return values that may have been used instead: the same of another microbatch, or an input or output of
    another module."""
    k, key, values = key.microbatch, reference_key(key), dict[str, Tensor]()
    for other_key, value in reference.values.items():
        j = other_key.microbatch
        if j != k and other_key == key._replace(microbatch=j):
            is_swapped = _is_close(trace.values.get(other_key), reference.values[key])
            text = f"it is the value of microbatch {j}" + (", the one before" if j == k - 1 else "")
            values[f"microbatches {min(j, k)} and {max(j, k)} are swapped" if is_swapped else text] = value
        elif j == k and other_key != key and (other_key.kind == BACKWARD) == (key.kind == BACKWARD):
            names = [*dict.fromkeys(trace.order)]
            is_next = names[: names.index(key.module)][-1:] == [other_key.module] and key.kind == FORWARD[0]
            is_late = key.leaf or not value.is_floating_point()  # an argument besides what layers hand on
            values.setdefault(
                f"it is {other_key.text}{'' if is_next or is_late else ': a layer between is left out'}", value
            )
    return values


# -- what differences look like ---------------------------------------------------------------------------------------


def usual_factors(microbatches: int, replicas: int, rows: int, target: Any) -> dict[float, str]:
    """Return factors by which values are often off, each with its name."""
    counts = {"microbatches": microbatches, "replicas": replicas, "rows": rows}
    for labels in leaf_tensors(target):
        if not labels.is_floating_point():
            counts |= {"labels": labels.numel(), "labels that count": int((labels != -100).sum())}
    names = {"twice": 2.0, "half": 0.5}
    for name, count in counts.items():
        if count > 1:
            names |= {f"the number of {name}": float(count), f"1 over the number of {name}": 1 / count}
    return {number: " or ".join(n for n, factor in names.items() if factor == number) for number in names.values()}


def candidates(
    value: Tensor, expected: Tensor, factors: Mapping[float, str], similar: Named, terms: Named
) -> Iterator[tuple[str, Tensor]]:
    """Yield the usual shapes of a difference: a sentence for each, and the value that it implies."""
    yield "it is zero", torch.zeros_like(expected)
    yield ROUNDING, expected
    yield from similar.items()
    for number, name in factors.items():
        yield f"it is {number:.6g} times what it should be: {name}", expected * number
    for name, term in terms.items():
        yield f"{name} is missing", expected - term
        yield f"{name} is there twice", expected + term
    if value.shape == expected.shape and expected.any():
        factor = float((value * expected).sum() / (expected * expected).sum())
        yield f"it is {factor:.6g} times what it should be", expected * factor


def describe_difference(
    value: Tensor | None, expected: Tensor, factors: Mapping[float, str], similar: Named = NONE, terms: Named = NONE
) -> str:
    """Describe what a difference looks like; empty if that is unknown.

    Args:
        factors: numbers by which the value may be off, with their names.
        similar: values that it may be instead, by a sentence for each.
        terms: terms that may be missing or there twice, by name.
    """
    if value is None:
        return "it is missing: the weight is frozen, or its backward did not run"
    shapes = candidates(value.double(), expected.double(), factors, similar, terms)
    return next((text for text, candidate in shapes if _is_close(value, candidate)), "")


def _is_close(value: Tensor | None, expected: Tensor) -> bool:
    """Whether a value is another but for rounding."""
    if value is None or value.shape != expected.shape or not expected.numel():
        return False
    expected = expected.double()
    return bool((value.double() - expected).abs().max() <= CLOSE * expected.abs().max())
