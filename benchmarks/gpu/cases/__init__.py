"""What one GPU can show. `TABLE` has every case by name; each belongs to a part of the run."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from cases import environment, proofs
from cases.case import Case

_EVERY: Iterable[Case] = chain(environment.cases(), proofs.cases())

TABLE: dict[str, Case] = {case.name: case for case in _EVERY}
