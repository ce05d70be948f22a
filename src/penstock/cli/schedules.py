"""`penstock schedules`: lists the schedules, with their requirements and formulas."""

from __future__ import annotations

from typing import Any

from penstock.cli._options import output_option, print_json, screen
from penstock.report.text import print_columns, table
from penstock.schedule import ScheduleSpec, schedule_specs

_SYMBOLS = (
    "p ranks, m microbatches, v stages per rank, r the rank; F, I and W: duration of the forward, the input-gradient "
    "backward and the weight-gradient backward of a microbatch on one rank; B = I + W; // rounds down; - means there "
    "is no formula.\n"
    "Memory: activations, in those of one microbatch on all stages of a rank. Idle time: within the longest span of "
    "any rank. Bubble: its share of that span. The formulas hold if links cost nothing and m is a multiple of p, at "
    "least 2p, and for any F, I and W unless they contain an `if`; `penstock simulate` computes them for any numbers "
    "and costs."
)

_JSON_FIELDS = (
    *("name", "aliases", "rule", "placement", "chunks", "splits_backward", "rules"),
    *("memory", "idle", "bubble"),
)


def schedules(as_json: bool = output_option("Print only one JSON list.", "--json", default=False)) -> None:
    """List the named schedules: order, requirements, and formulas for memory and bubble."""
    if as_json:
        print_json([_describe(entry) for entry in schedule_specs()])
        return
    console = screen()
    lines = table("schedule", "stages\nper rank", "back-\nward", "order", left=4)
    for entry in schedule_specs():
        rules = ", ".join(rule.text for rule in entry.rules)
        needs = f"; needs {rules}" if rules else ""
        aliases = f"; also called {', '.join(entry.aliases)}" if entry.aliases else ""
        stages = f"{entry.chunks} {entry.placement}"
        lines.add_row(entry.name, stages, "I, W" if entry.splits_backward else "B", f"{entry.rule}{needs}{aliases}")
    console.print(lines)
    console.print()
    columns = {
        "schedule": [entry.name for entry in schedule_specs()],
        "memory (peak,\nin microbatches)": [formula(entry.memory) for entry in schedule_specs()],
        "idle time\nper rank": [formula(entry.idle) for entry in schedule_specs()],
        "bubble, where\nF = I = W": [formula(entry.bubble) for entry in schedule_specs()],
    }
    print_columns(console, columns, left=4)
    console.print()
    console.print(_SYMBOLS, style="dim")


def _describe(entry: ScheduleSpec) -> dict[str, Any]:
    """Convert an entry of the registry for JSON. Formulas are Python expressions."""
    rules = [{"argument": rule.argument, "text": rule.text} for rule in entry.rules]
    return {name: getattr(entry, name) for name in _JSON_FIELDS} | {"aliases": list(entry.aliases), "rules": rules}


def formula(text: str | None) -> str:
    """Format a formula as in a text: products without a sign, sums without spaces."""
    if text is None:
        return "-"
    short = text.replace(" else None", "").replace("*", "").replace(" == ", "=")
    return short.replace(" + ", "+").replace(" - ", "-")
