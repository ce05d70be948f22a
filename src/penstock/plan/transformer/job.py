"""How a transformer is trained: all that its operations, messages and memory depend on, besides the pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock._base.errors import ArgumentError, check_counts
from penstock.plan.transformer.model import Transformer

Recompute = Literal["none", "selective", "full"]
"""What the backward computes again: nothing, attention's scores and what follows from them, or each layer."""

PARAMETER_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12
"""Of each parameter in mixed precision with Adam: 16 bits; a sum in float32; a copy and two moments in float32."""


@dataclass(frozen=True, slots=True)
class Job:
    """Training of a transformer in mixed precision on groups of devices that share each layer.

    Attributes:
        model: what is trained.
        sequence: tokens of a row.
        tensor_parallel: t, the devices that divide each layer among them (Shoeybi et al. 2019).
        sequence_parallel: whether they also divide norms, dropouts and residuals by tokens (Korthikanti et al. 2022).
        recompute: what the backward computes again.
        fused_attention: whether one kernel computes attention and keeps no scores, as FlashAttention does.
        fused_loss: whether one kernel computes the loss and leaves the gradient in place of logits of 16 bits, as the
            cross entropy of TransformerEngine does; otherwise logits are kept in float32.
        keeps_dummies: whether each shape of a matrix has a gradient of 16 bits that nobody reads, all the time: what
            TransformerEngine (from 2.3, `get_dummy_wgrad`) gives autograd where its products add to float32 sums.
        dtype: of activations and products, with 2 bytes each.
        optimizer_shards: the replicas that divide the optimizer's state among them (ZeRO-1).

    Raises:
        ArgumentError: t does not divide heads, the feed-forward or the sequence, or a number is less than one.
    """

    model: Transformer
    sequence: int
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    fused_attention: bool = False
    fused_loss: bool = False
    keeps_dummies: bool = False
    dtype: str = "bfloat16"
    optimizer_shards: int = 1

    def __post_init__(self) -> None:
        shards = self.optimizer_shards
        check_counts(sequence=self.sequence, tensor_parallel=self.tensor_parallel, optimizer_shards=shards)
        if self.recompute not in ("none", "selective", "full"):
            raise ArgumentError(f"recompute={self.recompute!r}: expected 'none', 'selective' or 'full'")
        shared = {"heads": self.model.heads, "feedforward": self.model.inner}
        if self.sequence_parallel:
            shared["sequence"] = self.sequence
        for name, value in shared.items():
            if value % self.tensor_parallel:
                raise ArgumentError(
                    f"tensor_parallel={self.tensor_parallel} does not divide {name}={value}: each device has as much "
                    "of it as any other"
                )
