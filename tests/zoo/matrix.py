"""Every model of the zoo under every schedule: which cells work, which are refused, and why.

`refusal` says it beforehand, the tests hold it against what happens, `table` draws it for the documentation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from penstock.schedule import ScheduleSpec, names, schedule_spec, schedule_specs
from penstock.schedule.generators import ScheduleParams
from zoo import MICROBATCHES, ZOO

RANKS = (1, 2, 4)
ALIKE = ("mistral", "qwen2", "llama_left_padded", "bert", "mixtral", "t5", "vit")
"""Models not in the sample: three are nearly `llama`; of the kind of the others, test_transformers_zoo.py has one."""


class Cell(NamedTuple):
    model: str
    schedule: str
    ranks: int

    @property
    def sampled(self) -> bool:
        """Whether every run of the tests tries it: of each model, each schedule and each number of ranks, one in 26."""
        place = 3 * list(ZOO).index(self.model) + 15 * names().index(self.schedule) - 2 * RANKS.index(self.ranks)
        return place % 26 == 0 and self.model not in ALIKE


def cells() -> Iterator[Cell]:
    for model in ZOO:
        for entry in schedule_specs():
            for ranks in RANKS:
                yield Cell(model, entry.name, ranks)


def refusal(cell: Cell) -> str | None:
    """Part of the text with which the cell is refused; None where it works."""
    model, schedule = ZOO[cell.model], schedule_spec(cell.schedule)
    if (broken := schedule.violated_constraint(ScheduleParams(cell.ranks, MICROBATCHES, schedule.chunks))) is not None:
        return f"works with {broken.text}"
    if cell.ranks * schedule.chunks > model.layers:
        return f"the model has only {model.layers} layers"
    if model.updates is not None and _copies(schedule) > 1:
        return f"the forward updates '{model.updates}' of stage 0, but this schedule runs {_copies(schedule)} copies"
    return None


def _copies(schedule: ScheduleSpec) -> int:
    return 2 if schedule.placement == "bidirectional" else 1


def table() -> str:
    """Markdown: a row a model, a column a schedule; letters where a number of ranks is refused, explained below."""
    letters: dict[str, str] = {}
    columns = [entry.name for entry in schedule_specs()]
    lines = [
        f"| model | | {' | '.join(columns)} |",
        f"|---|---|{'---|' * len(columns)}",
    ]
    for model in ZOO.values():
        marks = []
        for column in columns:
            found = {ranks: refusal(Cell(model.name, column, ranks)) for ranks in RANKS}
            reasons = [_reason(text, ranks, found) for ranks, text in found.items() if text is not None]
            marks.append(" ".join(letters.setdefault(r, chr(ord("a") + len(letters))) for r in dict.fromkeys(reasons)))
        lines.append(f"| {model.name} | {model.about} | {' | '.join(mark or 'ok' for mark in marks)} |")
    return "\n".join([*lines, "", *(f"- {letter}: {reason}" for reason, letter in letters.items())])


def page() -> str:
    """What `docs/zoo.md` says."""
    return f"""# Tested models

Models of the tests, each under every schedule. *ok*: with {", ".join(map(str, RANKS[:-1]))} and {RANKS[-1]} ranks, in
{MICROBATCHES} microbatches of 2, 1, 1 and 1 rows, outputs, loss, gradients and buffers are those of the unsplit model:
to the bit, but for parameters that several stages hold. A letter: refused, with the text below. Schedules have
the number of chunks that they are known for. The table is printed by `PYTHONPATH=tests python -m zoo`.

{table()}"""


def _reason(text: str, ranks: int, found: dict[int, str | None]) -> str:
    """With the numbers of ranks for which it is given, unless these are all."""
    alike = [str(r) for r in RANKS if found[r] == text]
    return text if len(alike) == len(RANKS) else f"with {' or '.join(alike)} rank{'s' * (alike != ['1'])}: {text}"
