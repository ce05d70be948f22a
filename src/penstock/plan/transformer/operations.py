"""What one device of a tensor-parallel group computes for one microbatch, layer by layer: products and bytes moved.

A matrix product of the forward, of n tokens by k by m, has two in the backward: for its input's gradient and for its
weight's. What is no product is bound by memory: each kernel reads its inputs and writes its outputs once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from penstock.costs.hardware import Operation
from penstock.plan.transformer.job import TrainingConfig

VALUE = 2
"""Bytes of an activation."""

SUM = 4
"""Bytes of a value in float32: weight gradients are added up in it, and logits are computed in it for the loss."""

ATTENTION_AGAIN = 2.5
"""A fused backward does five products where the forward did two (Dao 2023, FlashAttention-2, section 3)."""


_TILE = 256, 128
"""Rows and columns of a device's usual tile; either may lie along the rows."""


def waste(processors: int, rows: float, columns: float) -> float:
    """Return the time of a product with a result of this size, as a multiple of what its FLOPs alone take.

    A device divides it in tiles, of which each processor computes one at a time. The last wave of tiles takes as long
    as a full one, which costs products of a few hundred tiles up to a tenth (NVIDIA, "Matrix Multiplication
    Background", on wave quantization). `processors`: 0: not known, and nothing is rounded.
    """
    if not processors:
        return 1.0
    tiles = (math.ceil(rows / high) * math.ceil(columns / wide) for high, wide in (_TILE, _TILE[::-1]))
    return math.ceil(min(tiles) / processors) * processors * math.prod(_TILE) / (rows * columns)


@dataclass(frozen=True, slots=True)
class Work:
    """What a part of the model does with one microbatch on one device.

    Attributes:
        forward, input_gradient, weight_gradient: F, I and W.
        repeated: the part of the forward that selective recomputation does again.
        forward_sums, backward_sums: bytes of each tensor that an all-reduce of the group adds up, in F and in I; with
            sequence parallelism each is a reduce-scatter and an all-gather, which send as much.
    """

    forward: tuple[Operation, ...] = ()
    input_gradient: tuple[Operation, ...] = ()
    weight_gradient: tuple[Operation, ...] = ()
    repeated: tuple[Operation, ...] = ()
    forward_sums: tuple[float, ...] = ()
    backward_sums: tuple[float, ...] = ()

    def then(self, other: Work) -> Work:
        """Return this work followed by the other."""
        return Work(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


def layer_work(job: TrainingConfig, rows: int, processors: int) -> Work:
    """Return the work of one layer. With t = 1 nothing is sent."""
    model, t = job.model, job.tensor_parallel
    n = rows * job.seq_length
    whole = n / t if job.sequence_parallel else n
    parts = (
        _moved(whole * model.hidden_size, 2, 3),  # norm
        _product(job, processors, n, model.hidden_size, (model.hidden_size + 2 * model.kv_width) / t),
        _attention(job, rows),
        _product(job, processors, n, model.hidden_size / t, model.hidden_size),
        _added(job, whole),
        _moved(whole * model.hidden_size, 2, 3),
        _product(job, processors, n, model.hidden_size, (2 if model.gated else 1) * model.inner / t),
        _moved(n * model.inner / t, 3, 5) if model.gated else _moved(n * model.inner / t, 2, 3),
        _product(job, processors, n, model.inner / t, model.hidden_size),
        _added(job, whole),
    )
    sums = _sums(job, rows)
    found = Work(forward_sums=2 * sums, backward_sums=2 * sums)
    for part in parts:
        found = found.then(part)
    return found


def embedding_work(job: TrainingConfig, rows: int) -> Work:
    """Return the work before the first layer: each device looks up its part of the vocabulary, and an all-reduce adds
    them up."""
    n = rows * job.seq_length
    size = n * job.model.hidden_size
    forward, backward = _kernel(2 * VALUE * size), _kernel((VALUE + 2 * SUM) * size)
    return Work((forward,), (), (backward,), forward_sums=_sums(job, rows))


def head_work(job: TrainingConfig, rows: int, processors: int) -> Work:
    """Return the work after the last layer: norm, logits, and a loss that takes them divided among the devices."""
    model, t = job.model, job.tensor_parallel
    n = rows * job.seq_length
    whole = n / t if job.sequence_parallel else n
    logits = n * model.vocab_size / t
    loss = Work((_kernel((VALUE + 3 * SUM) * logits),), (_kernel((SUM + VALUE) * logits),))
    product = _product(job, processors, n, model.hidden_size, model.vocab_size / t)
    found = _moved(whole * model.hidden_size, 2, 3).then(product).then(loss)
    return found.then(Work(backward_sums=_sums(job, rows)))


def _sums(job: TrainingConfig, rows: int) -> tuple[float, ...]:
    """Return the tensor of all tokens, if a group adds it up."""
    return (float(VALUE * rows * job.seq_length * job.model.hidden_size),) if job.tensor_parallel > 1 else ()


def _attention(job: TrainingConfig, rows: int) -> Work:
    """Scores, their softmax, dropout, and values: of this device's heads."""
    model, t = job.model, job.tensor_parallel
    n = rows * job.seq_length
    flops = 2.0 * n * job.seq_length * model.hidden_size / t
    widths = VALUE * n * (model.hidden_size + model.kv_width) / t
    if job.flash_attention:  # masked blocks, half of all, are left out
        forward = Operation(flops, 2 * widths, job.dtype)
        return Work((forward,), (Operation(ATTENTION_AGAIN * flops, 4 * widths, job.dtype),), (), ())
    scores = n * job.seq_length * model.num_attention_heads / t
    product = Operation(flops, widths + VALUE * scores, job.dtype)
    kept = (1 if model.dropout else 0) * scores
    softmax = _kernel(2 * VALUE * scores)
    dropped = (_kernel(2 * VALUE * scores + kept),) if model.dropout else ()
    forward_all = (product, softmax, *dropped, product)
    backward = (
        Operation(flops, widths + VALUE * scores, job.dtype, 4),
        _kernel(3 * VALUE * scores),
        *((_kernel(2 * VALUE * scores + kept),) if model.dropout else ()),
    )
    return Work(forward_all, backward, (), forward_all)


def _product(job: TrainingConfig, processors: int, n: float, k: float, m: float) -> Work:
    """n tokens by a weight of k x m."""
    flops, moved = 2.0 * n * k * m, VALUE * (n * k + k * m + n * m)
    forward = Operation(flops * waste(processors, n, m), moved, job.dtype)
    inputs = Operation(flops * waste(processors, n, k), moved, job.dtype)
    weights = Operation(flops * waste(processors, k, m), VALUE * (n * k + n * m) + 2 * SUM * k * m, job.dtype)
    return Work((forward,), (inputs,), (weights,))


def _added(job: TrainingConfig, tokens: float) -> Work:
    """Dropout and the sum with the residual, in one kernel."""
    size = tokens * job.model.hidden_size
    mask = size if job.model.dropout else 0
    return Work((_kernel(3 * VALUE * size + mask),), (_kernel(2 * VALUE * size + mask),))


def _moved(size: float, forward: int, backward: int) -> Work:
    """Return the work of a kernel that reads and writes tensors of this many values."""
    return Work((_kernel(VALUE * forward * size),), (_kernel(VALUE * backward * size),))


def _kernel(moved: float) -> Operation:
    return Operation(0.0, moved)
