"""The switch's frames in flight, as a heap: the next frame due comes first, and ties are first in, first out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock._base.compiled import compiler
from penstock.network.switch.columns import DUE_NS, TURN, TURNS, WAITING, WHAT, Tables

compiled = compiler((*sorted(Path(__file__).parent.glob("*.py")), Path(__file__).parents[1] / "model.py"))
"""The decorator that compiles the switch's inner loop."""


@compiled
def _before(t: Tables, place: Any, due: Any, turn: Any) -> Any:
    return t.heap[place, DUE_NS] < due or (t.heap[place, DUE_NS] == due and t.heap[place, TURN] < turn)


@compiled
def _set(t: Tables, place: Any, due: Any, turn: Any, what: Any) -> None:
    t.heap[place, DUE_NS] = due
    t.heap[place, TURN] = turn
    t.heap[place, WHAT] = what


@compiled
def push(t: Tables, due: Any, what: Any) -> None:
    place, turn = t.state[WAITING], t.state[TURNS]
    t.state[WAITING] += 1
    t.state[TURNS] += 1
    while place > 0:
        parent = (place - 1) >> 1
        if _before(t, parent, due, turn):
            break
        _set(t, place, t.heap[parent, DUE_NS], t.heap[parent, TURN], t.heap[parent, WHAT])
        place = parent
    _set(t, place, due, turn, what)


@compiled
def pop(t: Tables) -> Any:
    first = t.heap[0, WHAT]
    t.state[WAITING] -= 1
    size = t.state[WAITING]
    due, turn, what = t.heap[size, DUE_NS], t.heap[size, TURN], t.heap[size, WHAT]
    place = 0
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and _before(t, child + 1, t.heap[child, DUE_NS], t.heap[child, TURN]):
            child += 1
        if not _before(t, child, due, turn):
            break
        _set(t, place, t.heap[child, DUE_NS], t.heap[child, TURN], t.heap[child, WHAT])
        place = child
    _set(t, place, due, turn, what)
    return first
