"""What a pipeline is made with besides the model, its processes and the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from penstock.partition import Balance
from penstock.runtime.compiled import Compile
from penstock.runtime.cutting import Cutting
from penstock.runtime.engine import TransportChoice
from penstock.runtime.keeping import OffloadChoice, RecomputeChoice
from penstock.runtime.loss import Loss, Reduction
from penstock.runtime.materialize import Materialize

if TYPE_CHECKING:
    from penstock.runtime.frame import Parallelize


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of `penstock.pipeline` by the same names; `cutting` is of batch_dims, split and merge."""

    loss: Loss | None = None
    reduction: Reduction = "mean"
    cutting: Cutting = field(default_factory=lambda: Cutting.of(None))
    cuts: Sequence[str] | None = None
    leaves: Sequence[str] | None = None
    opens: Sequence[str] | None = None
    balance: Balance = "flops"
    devices: Sequence[torch.device | str] | torch.device | str | None = None
    share_loss: bool = True
    transport: TransportChoice = "auto"
    materialize: Materialize | None = None
    parallelize: Parallelize | None = None
    seed: int | None = None
    recompute: RecomputeChoice = "never"
    offload: OffloadChoice = False
    deferred_batch_norm: bool = False
    compile: Compile = False
    check_finite: bool = False
    lost_after: float | None = None
