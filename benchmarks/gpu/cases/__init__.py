"""What one GPU can show. `TABLE` has every case by name; each belongs to a part of the run."""

from __future__ import annotations

from cases import environment, falls, features, figures, nccl, over_nccl, proofs, waits
from cases.case import Case

_KINDS = (environment, waits, features, falls, proofs, figures, nccl, over_nccl)

TABLE: dict[str, Case] = {case.name: case for kind in _KINDS for case in kind.cases()}
