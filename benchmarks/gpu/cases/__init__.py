"""What one GPU can show. `TABLE` has every case by name; each belongs to a part of the run."""

from __future__ import annotations

from cases import environment, failures, features, figures, nccl, over_nccl, synchronizations, verification
from cases.case import Case

_KINDS = (environment, synchronizations, features, failures, verification, figures, nccl, over_nccl)

TABLE: dict[str, Case] = {case.name: case for kind in _KINDS for case in kind.cases()}
