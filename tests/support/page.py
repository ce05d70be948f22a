"""`docs/support.md`: the matrix in words."""

from __future__ import annotations

from support.features import FAMILIES, FEATURES, PAIRED, Cell, pairs, refusal, splits_nothing

REASONS = {
    "parallelize= works": "refused: `parallelize` is applied to a stage once; these schedules have two copies of it",
    "compile the blocks": "refused: compile blocks within `parallelize` (`block.compile()` after `fully_shard(block)`)",
    "check_finite=True looks": "refused: compiled code has no calls to look at",
    "adds up its": "refused: `fully_shard` sums gradients itself (`MixedPrecisionPolicy(reduce_dtype=torch.float32)`)",
    "runs layers again": "refused: torch's compiler loses what is around a layer that runs again; recompute stages",
}


def page() -> str:
    letters: dict[str, str] = {}

    def said(*cells: Cell) -> str:
        return " / ".join(dict.fromkeys(_said(cell, letters) for cell in cells))

    rows = [["", *(family.name for family in FAMILIES)]]
    rows += [[feature.name, *(said((family.name, feature.name)) for family in FAMILIES)] for feature in FEATURES]
    known = set(pairs())
    names = [feature.name for feature in FEATURES]
    crossed = [["", *names[1:]]]
    for one in names[:-1]:
        crossed.append([one])
        for other in names[1:]:
            pair = (one, other)
            crossed[-1].append(said(*((family, *pair) for family in PAIRED)) if pair in known else "")
    footnotes = "\n".join(f"- {letter}: {text}" for text, letter in letters.items())
    return f"""# Feature compatibility

Every cell is run by `tests/distributed/test_support_matrix.py`, on four processes: *ok* means that two steps of
training give the gradients of plain torch with the whole batch; a letter that it is refused by name, for the reason
below; *W empty* that I runs the whole of a split backward. Printed by `PYTHONPATH=tests python -m support`.

{_table(rows)}

Two at once, under {" and ".join(PAIRED)}:

{_table(crossed)}

{footnotes}

- *FSDP2* is `fully_shard` through `parallelize`, *TP* is `parallelize_module`. With FSDP2 the last backward of each
  stage is whole; the guide says what that costs. With TP,
  weights that are divided do not wait for W.
- *recompute stages* is `"always"` (so is `"except_last"`), *recompute layers* a number.
- *grad_dtype* is float64 for a model in float32, as float32 would be for one in bfloat16.
- Batch norm with deferred statistics, `GradScaler`, autocast and checkpoints have tests of their own.
"""


def _said(cell: Cell, letters: dict[str, str]) -> str:
    text = refusal(cell)
    if text:
        reason = next(words for start, words in REASONS.items() if text.startswith(start))
        return letters.setdefault(reason, chr(ord("a") + len(letters)))
    return "ok, W empty" if splits_nothing(cell) else "ok"


def _table(rows: list[list[str]]) -> str:
    head, *body = rows
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in body)])
