"""What one device of a tensor-parallel group computes for one microbatch, layer by layer: products and bytes moved.

A matrix product of the forward, of n tokens by k by m, has two in the backward: for its input's gradient and for its
weight's. What is no product is bound by memory: each kernel reads its inputs and writes its outputs once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from penstock.costs.hardware import Operation
from penstock.plan.transformer.job import TrainingConfig

HALF = 2
"""Bytes of a value in half precision, such as an activation."""

SINGLE = 4
"""Bytes of a value in single precision: weight gradients add up in it, and the loss takes logits in it."""

BACKWARD_FACTOR = 2.5
"""A fused backward does five products where the forward did two (Dao 2023, FlashAttention-2, section 3)."""


_TILE = 256, 128
"""Rows and columns of a device's usual tile; either may lie along the rows."""


def tile_waste(processors: int, rows: float, columns: float) -> float:
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
        recomputed: the part of the forward that selective recomputation does again.
        forward_reduces, backward_reduces: bytes of each tensor that the group all-reduces, in F and in I; with sequence
            parallelism each is a reduce-scatter and an all-gather, which send as much.
    """

    forward: tuple[Operation, ...] = ()
    input_gradient: tuple[Operation, ...] = ()
    weight_gradient: tuple[Operation, ...] = ()
    recomputed: tuple[Operation, ...] = ()
    forward_reduces: tuple[float, ...] = ()
    backward_reduces: tuple[float, ...] = ()

    def then(self, following: Work) -> Work:
        """Return this work and the following one together."""
        return Work(*(getattr(self, entry.name) + getattr(following, entry.name) for entry in fields(self)))


def layer_work(job: TrainingConfig, rows: int, processors: int) -> Work:
    """Return the work of one layer. With t = 1 nothing is sent."""
    model, t = job.model, job.tensor_parallel
    n = rows * job.seq_length
    norm_tokens = n / t if job.sequence_parallel else n
    parts = (
        _elementwise(norm_tokens * model.hidden_size, 2, 3),  # norm
        _matmul(job, processors, n, model.hidden_size, (model.hidden_size + 2 * model.kv_width) / t),
        _attention(job, rows),
        _matmul(job, processors, n, model.hidden_size / t, model.hidden_size),
        _residual_add(job, norm_tokens),
        _elementwise(norm_tokens * model.hidden_size, 2, 3),
        _matmul(job, processors, n, model.hidden_size, (2 if model.gated else 1) * model.inner / t),
        _elementwise(n * model.inner / t, 3, 5) if model.gated else _elementwise(n * model.inner / t, 2, 3),
        _matmul(job, processors, n, model.inner / t, model.hidden_size),
        _residual_add(job, norm_tokens),
    )
    reduced = _reduced_bytes(job, rows)
    work = Work(forward_reduces=2 * reduced, backward_reduces=2 * reduced)
    for part in parts:
        work = work.then(part)
    return work


def embedding_work(job: TrainingConfig, rows: int) -> Work:
    """Return the work before the first layer: each device looks up its part of the vocabulary, and an all-reduce adds
    them up."""
    n = rows * job.seq_length
    size = n * job.model.hidden_size
    forward, backward = _kernel(2 * HALF * size), _kernel((HALF + 2 * SINGLE) * size)
    return Work((forward,), (), (backward,), forward_reduces=_reduced_bytes(job, rows))


def head_work(job: TrainingConfig, rows: int, processors: int) -> Work:
    """Return the work after the last layer: norm, logits, and a loss that takes them divided among the devices."""
    model, t = job.model, job.tensor_parallel
    n = rows * job.seq_length
    norm_tokens = n / t if job.sequence_parallel else n
    logits = n * model.vocab_size / t
    loss = Work((_kernel((HALF + 3 * SINGLE) * logits),), (_kernel((SINGLE + HALF) * logits),))
    product = _matmul(job, processors, n, model.hidden_size, model.vocab_size / t)
    work = _elementwise(norm_tokens * model.hidden_size, 2, 3).then(product).then(loss)
    return work.then(Work(backward_reduces=_reduced_bytes(job, rows)))


def _reduced_bytes(job: TrainingConfig, rows: int) -> tuple[float, ...]:
    """Return the tensor of all tokens, if a group adds it up."""
    return (float(HALF * rows * job.seq_length * job.model.hidden_size),) if job.tensor_parallel > 1 else ()


def _attention(job: TrainingConfig, rows: int) -> Work:
    """Scores, their softmax, dropout, and values: of this device's heads."""
    model, t = job.model, job.tensor_parallel
    n = rows * job.seq_length
    flops = 2.0 * n * job.seq_length * model.hidden_size / t
    widths = HALF * n * (model.hidden_size + model.kv_width) / t
    if job.flash_attention:  # masked blocks, half of all, are left out
        forward = Operation(flops, 2 * widths, job.dtype)
        return Work((forward,), (Operation(BACKWARD_FACTOR * flops, 4 * widths, job.dtype),), (), ())
    scores = n * job.seq_length * model.num_attention_heads / t
    product = Operation(flops, widths + HALF * scores, job.dtype)
    mask = (1 if model.dropout else 0) * scores
    softmax = _kernel(2 * HALF * scores)
    dropped = (_kernel(2 * HALF * scores + mask),) if model.dropout else ()
    forward_all = (product, softmax, *dropped, product)
    backward = (
        Operation(flops, widths + HALF * scores, job.dtype, 4),
        _kernel(3 * HALF * scores),
        *((_kernel(2 * HALF * scores + mask),) if model.dropout else ()),
    )
    return Work(forward_all, backward, (), forward_all)


def _matmul(job: TrainingConfig, processors: int, n: float, k: float, m: float) -> Work:
    """n tokens by a weight of k x m."""
    flops, bytes_moved = 2.0 * n * k * m, HALF * (n * k + k * m + n * m)
    forward = Operation(flops * tile_waste(processors, n, m), bytes_moved, job.dtype)
    inputs = Operation(flops * tile_waste(processors, n, k), bytes_moved, job.dtype)
    weights = Operation(flops * tile_waste(processors, k, m), HALF * (n * k + n * m) + 2 * SINGLE * k * m, job.dtype)
    return Work((forward,), (inputs,), (weights,))


def _residual_add(job: TrainingConfig, tokens: float) -> Work:
    """Dropout and the sum with the residual, in one kernel."""
    size = tokens * job.model.hidden_size
    mask = size if job.model.dropout else 0
    return Work((_kernel(3 * HALF * size + mask),), (_kernel(2 * HALF * size + mask),))


def _elementwise(size: float, forward: int, backward: int) -> Work:
    """Return the work of a kernel that reads and writes tensors of this many values."""
    return Work((_kernel(HALF * forward * size),), (_kernel(HALF * backward * size),))


def _kernel(bytes_moved: float) -> Operation:
    return Operation(0.0, bytes_moved)
