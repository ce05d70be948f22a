"""The rows of the table: each trap tried with `torch.distributed.pipelining`, used as documented, and with Penstock.

Each function runs on two gloo ranks and returns what it found, in words, on one of them or on both.
"""

from rows import batches, gradients, modules, schedules
from rows.common import Row

TABLE = {
    "tied": Row(1, "the gradient of a tied weight", "right", gradients.tied_torch, gradients.tied_penstock),
    "accumulated": Row(
        2, "two steps without zero_grad", "2.00 times", gradients.accumulated_torch, gradients.accumulated_penstock
    ),
    "evaluated": Row(
        2, "an evaluation after a step", "1.00 times", gradients.evaluated_torch, gradients.evaluated_penstock
    ),
    "mean": Row(3, "a loss that is a mean", "right", gradients.mean_torch, gradients.mean_penstock),
    "normed": Row(
        4, "batch norm, one step of 4 microbatches", "4 batches counted", modules.normed_torch, modules.normed_penstock
    ),
    "smaller": Row(5, "8 rows, then 4", "4 rows", batches.smaller_torch, batches.smaller_penstock),
    "dropped": Row(
        6, "eval() of a traced model with dropout", "right", modules.dropped_torch, modules.dropped_penstock
    ),
    "ordered": Row(
        7,
        "losses, where microbatch 1 runs first",
        "in order of microbatch",
        schedules.ordered_torch,
        schedules.ordered_penstock,
    ),
    "validated": Row(9, "illegal schedules", "both refused", schedules.validated_torch, schedules.validated_penstock),
    "buffered": Row(10, "receive buffers of a stage", "2", schedules.buffered_torch, schedules.buffered_penstock),
    "raised": Row(
        11, "a rank raises, and its process lives on", "told at once", schedules.raised_torch, schedules.raised_penstock
    ),
    "few": Row(12, "fewer microbatches than ranks", "runs", batches.few_torch, batches.few_penstock),
    "uneven": Row(12, "7 rows in 4 microbatches", "right", batches.uneven_torch, batches.uneven_penstock),
    "skipped": Row(
        13, "a value that is used two stages later", "right", modules.skipped_torch, modules.skipped_penstock
    ),
    "structured": Row(14, "a dict as the target", "runs", batches.structured_torch, batches.structured_penstock),
    "in_place": Row(
        18, "an update in place of what was received", "runs", modules.in_place_torch, modules.in_place_penstock
    ),
    "recomputed": Row(
        19,
        "batch norm that is run again in backward",
        "4 batches counted",
        modules.recomputed_torch,
        modules.recomputed_penstock,
    ),
    "masked": Row(21, "targets with ignore_index", "right", gradients.masked_torch, gradients.masked_penstock),
    "frozen": Row(22, "a frozen first stage", "runs", gradients.frozen_torch, gradients.frozen_penstock),
    "bare": Row(
        22, "an optimizer for a rank without parameters", "runs", gradients.bare_torch, gradients.bare_penstock
    ),
}
