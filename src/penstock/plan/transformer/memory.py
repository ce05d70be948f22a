"""What one device of a tensor-parallel group holds: parameters, their states, and activations of one microbatch.

Activations are those of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", each
counted where it arises, so that other widths (a gate, fewer keys) follow. For a GPT they are the paper's: s b h (10 +
24/t + 5as/ht) with tensor parallelism, s b h (34/t + 5as/ht) with sequence parallelism too (equations 2 and 4), the
last term left out by selective recomputation (equation 6), and 2 s b h by full recomputation. FlashAttention keeps the
logarithm of each row's sum instead of scores (Dao 2023, FlashAttention-2, section 3.1).

What a backward takes while it runs follows from autograd: a node frees what it kept once it has made its gradients. The
gradient of a weight is made in 16 bits before it is added to the sum in float32; where products add to that sum
themselves, Megatron-LM still gives autograd as large a tensor (core/tensor_parallel/layers.py). With sequence
parallelism the inputs of products are gathered again for it (section 4.2.2 of the paper).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.plan.transformer.job import GRADIENT_BYTES, OPTIMIZER_BYTES, PARAMETER_BYTES, Job
from penstock.plan.transformer.operations import SUM, VALUE


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes on one device: of parameters, gradients, the optimizer's state, activations of one microbatch, and what its
    backward takes besides while it runs.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    working: float


def layer_held(job: Job, rows: int) -> Held:
    """One layer."""
    model = job.model
    parameters = model.layer_matrices / job.tensor_parallel + model.layer_vectors
    return _held(job, parameters, layer_activations(job, rows), _layer_working(job, rows))


def layer_activations(job: Job, rows: int) -> float:
    """Bytes that one layer keeps of one microbatch for its backward."""
    model, t, n = job.model, job.tensor_parallel, rows * job.sequence
    if job.recompute == "full":
        return float(VALUE * n * model.hidden)
    mask = 1 if model.dropout else 0
    by_tokens = n * model.hidden * (4 * VALUE + 2 * mask)  # inputs of norms and of products after them; dropouts' masks
    heads = VALUE * n * (2 * model.hidden + 2 * model.kv_width)  # queries, keys, values, and what they become
    inner = n * model.inner * VALUE * (3 if model.gated else 2)
    keeps_scores = job.recompute == "none" and not job.fused_attention
    scores = n * job.sequence * model.heads * (VALUE + (VALUE + 1) * mask) if keeps_scores else 0
    sums = SUM * n * model.heads if job.fused_attention else 0
    return by_tokens / (t if job.sequence_parallel else 1) + (heads + inner + scores + sums) / t


def _layer_working(job: Job, rows: int) -> float:
    """The gradient of the residual, and the most that another gradient takes beyond what has gone by then: that of what
    the activation function got, that of the first product of the feed-forward, or that of scores.
    """
    model, t, n = job.model, job.tensor_parallel, rows * job.sequence
    again = layer_activations(replace(job, recompute="none"), rows) - layer_activations(job, rows)
    inner = VALUE * n * model.inner / t
    wide = inner * (2 if model.gated else 1)
    product = _product_working(job, rows, wide / n) - inner
    scores = (1 if model.dropout else 2) * VALUE * n * job.sequence * model.heads / t - wide - inner
    residual = VALUE * n * model.hidden / (t if job.sequence_parallel else 1)
    return again + residual + max(wide, product, 0 if job.fused_attention else scores)


def _product_working(job: Job, rows: int, row_bytes: float) -> float:
    """Gradients that a product makes of its input and its weight, and its input, if that was gathered. `row_bytes`: of
    a row of the weight in 16 bits.
    """
    gathered = 2 if job.sequence_parallel and job.tensor_parallel > 1 else 1
    weight = 0 if job.keeps_dummies else row_bytes * job.model.hidden
    return gathered * VALUE * rows * job.sequence * job.model.hidden + weight


def dummies(job: Job, *, layers: bool, head: bool) -> float:
    """Gradients that nobody reads, one of each shape, on a device with any layers, or with the output layer."""
    if not job.keeps_dummies:
        return 0.0
    sizes = job.model.layer_matrices * layers + job.model.output * head
    return VALUE * sizes / job.tensor_parallel


def embedding_held(job: Job, rows: int) -> Held:
    """Before the first layer: a mask, if anything is dropped. Its gradient is dense."""
    mask = rows * job.sequence * job.model.hidden if job.model.dropout else 0
    parameters, t = job.model.embedding / job.tensor_parallel, job.tensor_parallel if job.sequence_parallel else 1
    return _held(job, parameters, mask / t, VALUE * parameters)


def head_held(job: Job, rows: int) -> Held:
    """After the last layer: the inputs of norm and output layer, and logits. Of those in float32, a gradient in 16 bits
    takes the place.
    """
    model, t, n = job.model, job.tensor_parallel, rows * job.sequence
    by_tokens = 2 * VALUE * n * model.hidden / (t if job.sequence_parallel else 1)
    half, logits = (size * n * model.vocabulary / t for size in (VALUE, VALUE if job.fused_loss else SUM))
    product = _product_working(job, rows, VALUE * model.vocabulary / t) + half - logits
    working = max(product, 0 if job.fused_loss else half)
    return _held(job, model.output / t + model.last_norm, by_tokens + logits, working)


def boundary_bytes(job: Job, rows: int) -> float:
    """What each device sends to the next stage: its part of the tokens, or all of them.

    Without sequence parallelism every device of a group has the same values; each sends its part of them, and the
    group gathers them again (the scatter/gather of Narayanan et al. 2021, section 4.1).
    """
    return VALUE * rows * job.sequence * job.model.hidden / job.tensor_parallel


def _held(job: Job, parameters: float, activations: float, working: float) -> Held:
    states = OPTIMIZER_BYTES * parameters / job.optimizer_shards
    return Held(PARAMETER_BYTES * parameters, GRADIENT_BYTES * parameters, states, activations, working)
