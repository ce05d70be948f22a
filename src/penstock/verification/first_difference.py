"""Where a pipeline first differs from the unsplit model: in dataflow order, at the modules that run as a whole.

Both take the same steps once more, with hooks on these modules. What enters and leaves them is compared forward, then
the gradients that reach them backward, then what they accumulate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock._base.trees import leaf_tensors
from penstock.verification.comparison import Comparison, Difference, compare
from penstock.verification.trail import BACKWARD, FORWARD, Place, Trail

Named = Mapping[str, Tensor]
NONE: Named = {}
ROUNDING = "no more than rounding"
ALIKE = 1e-5
"""How far from a multiple, or from another value, a difference may be, over the largest entry."""


def first_difference(
    mine: Trail,
    other: Trail,
    gradients: Mapping[str, Tensor | None],
    rows: Sequence[Comparison],
    factors: Mapping[float, str],
    exact: bool,
) -> Difference | None:
    """Return the first value of a step that differs; None if none does this time.

    Args:
        mine, other: of the pipeline and of the unsplit model.
        gradients: the pipeline's, of parameters.
        rows: what was compared in the end.
        factors: see `describe_difference`.
    """
    if (found := first_value(mine, other, exact)) is not None:
        place, row = found
        shape = describe_difference(
            mine.values[place], other.values[in_reference(place)], factors, confusable_values(place, mine, other)
        )
        at = place.microbatch, mine.stages[place]
        return Difference(mine.step, place.text, *at, row.max_difference, row.max_reference, shape)
    wrong = [row for row in rows if row.kind == "gradient" and not row.ok and row.stages and row.name in gradients]
    for row in sorted(wrong, key=lambda row: -max(row.stages)):
        terms = {f"the term of microbatch {k}": term for k, term in other.terms.get(row.name, {}).items()}
        if not terms:
            continue
        uses = other.uses.get(row.name, {}) if len(row.stages) == len(other.uses.get(row.name, {})) else {}
        terms |= {f"the term of stage {s}": uses[i] for i, s in enumerate(sorted(row.stages, reverse=True)) if uses}
        expected = torch.stack([*other.terms[row.name].values()]).sum(0)
        shape = describe_difference(gradients[row.name], expected, factors, terms=terms)
        what = f"the gradient of {row.name!r}, which is computed from the right values,"
        return Difference(mine.step, what, None, max(row.stages), row.max_difference, row.max_reference, shape)
    return None


def first_value(mine: Trail, other: Trail, exact: bool) -> tuple[Place, Comparison] | None:
    """Return the first value that modules take or leave, or gradient that reaches them, that differs; None if none
    does."""
    position = {name: index for index, name in reversed([*enumerate(mine.order)])}
    begins = {
        name: min(p for n, p in position.items() if f"{n}.".startswith(f"{name}.") or not name) for name in position
    }

    def in_order(place: Place) -> tuple[int, ...]:
        what, name, call, leaf, microbatch = place
        if what == BACKWARD:
            return 1, -position[name], 0, -call, 0, microbatch, leaf
        is_entry = what == FORWARD[0]  # what enters a module enters it before the modules in it
        at, depth = (begins[name], name.count(".") + bool(name)) if is_entry else (position[name], len(name))
        return 0, at, call, FORWARD.index(what), depth, microbatch, leaf

    shared = [place for place in mine.values if in_reference(place) in other.values]
    for place in sorted(shared, key=in_order):
        value, expected = mine.values[place], other.values[in_reference(place)]
        row = compare("gradient" if place.what == BACKWARD else "output", place.module, (), value, expected, exact)
        if not row.ok and row.verdict != "undefined":
            return place, row
    return None


def in_reference(place: Place) -> Place:
    """Return the same value of the unsplit model, in which a module that runs again leaves what it left."""
    return place._replace(what=FORWARD[1]) if place.what == FORWARD[2] else place


def confusable_values(place: Place, mine: Trail, other: Trail) -> dict[str, Tensor]:
    """Return what a value may have been taken for: the same of another microbatch, or what another module takes or
    leaves."""
    k, place, found = place.microbatch, in_reference(place), dict[str, Tensor]()
    for known, value in other.values.items():
        j = known.microbatch
        if j != k and known == place._replace(microbatch=j):
            is_swap = _is(mine.values.get(known), other.values[place])
            text = f"it is the value of microbatch {j}" + (", the one before" if j == k - 1 else "")
            found[f"microbatches {min(j, k)} and {max(j, k)} are swapped" if is_swap else text] = value
        elif j == k and known != place and (known.what == BACKWARD) == (place.what == BACKWARD):
            names = [*dict.fromkeys(mine.order)]
            is_next = names[: names.index(place.module)][-1:] == [known.module] and place.what == FORWARD[0]
            is_late = place.leaf or not value.is_floating_point()  # an argument besides what layers hand on
            found.setdefault(
                f"it is {known.text}{'' if is_next or is_late else ': a layer between is left out'}", value
            )
    return found


# -- what differences look like ---------------------------------------------------------------------------------------


def usual_factors(microbatches: int, replicas: int, rows: int, target: Any) -> dict[float, str]:
    """Numbers by which a value is often off, and what these are."""
    counts = {"microbatches": microbatches, "replicas": replicas, "rows": rows}
    for labels in leaf_tensors(target):
        if not labels.is_floating_point():
            counts |= {"labels": labels.numel(), "labels that count": int((labels != -100).sum())}
    names = {"twice": 2.0, "half": 0.5}
    for name, count in counts.items():
        if count > 1:
            names |= {f"the number of {name}": float(count), f"1 over the number of {name}": 1 / count}
    return {number: " or ".join(n for n, same in names.items() if same == number) for number in names.values()}


def candidates(
    value: Tensor, expected: Tensor, factors: Mapping[float, str], others: Named, terms: Named
) -> Iterator[tuple[str, Tensor]]:
    """Yield the usual shapes of a difference: a sentence for each, and what the value is if it is that."""
    yield "it is zero", torch.zeros_like(expected)
    yield ROUNDING, expected
    yield from others.items()
    for number, name in factors.items():
        yield f"it is {number:.6g} times what it should be: {name}", expected * number
    for name, term in terms.items():
        yield f"{name} is missing", expected - term
        yield f"{name} is there twice", expected + term
    if value.shape == expected.shape and expected.any():
        factor = float((value * expected).sum() / (expected * expected).sum())
        yield f"it is {factor:.6g} times what it should be", expected * factor


def describe_difference(
    value: Tensor | None, expected: Tensor, factors: Mapping[float, str], others: Named = NONE, terms: Named = NONE
) -> str:
    """Describe what a difference looks like; empty if that is unknown.

    Args:
        factors: numbers by which the value may be off, and what these are.
        others: values that it may be instead, each with a sentence that says so.
        terms: what it may lack or have twice, each with a name.
    """
    if value is None:
        return "it is missing: the weight is frozen, or its backward did not run"
    found = candidates(value.double(), expected.double(), factors, others, terms)
    return next((text for text, candidate in found if _is(value, candidate)), "")


def _is(value: Tensor | None, other: Tensor) -> bool:
    """Whether a value is another but for rounding."""
    if value is None or value.shape != other.shape or not other.numel():
        return False
    other = other.double()
    return bool((value.double() - other).abs().max() <= ALIKE * other.abs().max())
