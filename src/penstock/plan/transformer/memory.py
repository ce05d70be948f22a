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

from penstock.plan.transformer.job import GRADIENT_BYTES, OPTIMIZER_BYTES, PARAMETER_BYTES, TrainingConfig
from penstock.plan.transformer.operations import HALF, SINGLE


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """Bytes on one device: of parameters, gradients, the optimizer's state, activations of one microbatch, and what its
    backward takes besides while it runs.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    working: float


def layer_memory(job: TrainingConfig, rows: int) -> UnitMemory:
    """Return the memory of one layer."""
    model = job.model
    parameters = model.layer_matrices / job.tensor_parallel + model.layer_vectors
    return _unit_memory(job, parameters, layer_activations(job, rows), _layer_workspace(job, rows))


def layer_activations(job: TrainingConfig, rows: int) -> float:
    """Return the activation bytes of one layer for one microbatch."""
    model, t, n = job.model, job.tensor_parallel, rows * job.seq_length
    if job.recompute == "full":
        return float(HALF * n * model.hidden_size)
    mask = 1 if model.dropout else 0
    by_tokens = (
        n * model.hidden_size * (4 * HALF + 2 * mask)
    )  # inputs of norms and of products after them; dropouts' masks
    heads = HALF * n * (2 * model.hidden_size + 2 * model.kv_width)  # queries, keys, values, and what they become
    inner = n * model.inner * HALF * (3 if model.gated else 2)
    keeps_scores = job.recompute == "none" and not job.flash_attention
    scores = n * job.seq_length * model.num_attention_heads * (HALF + (HALF + 1) * mask) if keeps_scores else 0
    log_sums = SINGLE * n * model.num_attention_heads if job.flash_attention else 0
    return by_tokens / (t if job.sequence_parallel else 1) + (heads + inner + scores + log_sums) / t


def _layer_workspace(job: TrainingConfig, rows: int) -> float:
    """Return the gradient of the residual, and the most that another gradient takes beyond what has been freed by then:
    that of the activation function's input, of the first product of the feed-forward, or of scores."""
    model, t, n = job.model, job.tensor_parallel, rows * job.seq_length
    recomputed = layer_activations(replace(job, recompute="none"), rows) - layer_activations(job, rows)
    inner = HALF * n * model.inner / t
    wide = inner * (2 if model.gated else 1)
    product = _matmul_workspace(job, rows, wide / n) - inner
    scores = (1 if model.dropout else 2) * HALF * n * job.seq_length * model.num_attention_heads / t - wide - inner
    residual = HALF * n * model.hidden_size / (t if job.sequence_parallel else 1)
    return recomputed + residual + max(wide, product, 0 if job.flash_attention else scores)


def _matmul_workspace(job: TrainingConfig, rows: int, row_bytes: float) -> float:
    """Gradients that a product makes of its input and its weight, and its input, if that was gathered. `row_bytes`: of
    a row of the weight in 16 bits."""
    gathered = 2 if job.sequence_parallel and job.tensor_parallel > 1 else 1
    return (gathered * HALF * rows * job.seq_length + row_bytes) * job.model.hidden_size


def embedding_memory(job: TrainingConfig, rows: int) -> UnitMemory:
    """Return the memory before the first layer: a mask, if there is dropout. Its gradient is dense."""
    mask = rows * job.seq_length * job.model.hidden_size if job.model.dropout else 0
    parameters, t = job.model.embedding / job.tensor_parallel, job.tensor_parallel if job.sequence_parallel else 1
    return _unit_memory(job, parameters, mask / t, HALF * parameters)


def head_memory(job: TrainingConfig, rows: int) -> UnitMemory:
    """Return the memory after the last layer: the inputs of norm and output layer, and logits. A gradient in 16 bits
    takes the place of those in float32."""
    model, t, n = job.model, job.tensor_parallel, rows * job.seq_length
    by_tokens = 2 * HALF * n * model.hidden_size / (t if job.sequence_parallel else 1)
    half_logits, logits = (size * n * model.vocab_size / t for size in (HALF, HALF if job.fused_loss else SINGLE))
    product = _matmul_workspace(job, rows, HALF * model.vocab_size / t) + half_logits - logits
    working = max(product, 0 if job.fused_loss else half_logits)
    return _unit_memory(job, model.output / t + model.final_norm, by_tokens + logits, working)


def boundary_bytes(job: TrainingConfig, rows: int) -> float:
    """Return the bytes that each device sends to the next stage: its part of the tokens, or all of them.

    Without sequence parallelism every device of a group has the same values; each sends its part of them, and the
    group gathers them again (the scatter/gather of Narayanan et al. 2021, section 4.1).
    """
    return HALF * rows * job.seq_length * job.model.hidden_size / job.tensor_parallel


def _unit_memory(job: TrainingConfig, parameters: float, activations: float, working: float) -> UnitMemory:
    states = OPTIMIZER_BYTES * parameters / job.optimizer_shards
    return UnitMemory(PARAMETER_BYTES * parameters, GRADIENT_BYTES * parameters, states, activations, working)
