"""What one device of a tensor-parallel group holds: parameters, their states, and activations of one microbatch.

Activations are those of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", each
counted where it arises, so that other widths (a gate, fewer keys) follow. For a GPT they are the paper's: s b h (10 +
24/t + 5as/ht) with tensor parallelism, s b h (34/t + 5as/ht) with sequence parallelism too (equations 2 and 4), the
last term left out by selective recomputation (equation 6), and 2 s b h by full recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.transformer.job import GRADIENT_BYTES, OPTIMIZER_BYTES, PARAMETER_BYTES, Job
from penstock.transformer.operations import SUM, VALUE


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes on one device: of parameters, gradients, the optimizer's state, and activations of one microbatch."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float


def layer_held(job: Job, rows: int) -> Held:
    """One layer."""
    model = job.model
    return _held(job, model.layer_matrices / job.tensor_parallel + model.layer_vectors, layer_activations(job, rows))


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
    return by_tokens / (t if job.sequence_parallel else 1) + (heads + inner + scores) / t


def embedding_held(job: Job, rows: int) -> Held:
    """Before the first layer: a mask, if anything is dropped."""
    mask = rows * job.sequence * job.model.hidden if job.model.dropout else 0
    return _held(
        job, job.model.embedding / job.tensor_parallel, mask / (job.tensor_parallel if job.sequence_parallel else 1)
    )


def head_held(job: Job, rows: int) -> Held:
    """After the last layer: the inputs of norm and output layer, and logits in float32."""
    model, t, n = job.model, job.tensor_parallel, rows * job.sequence
    by_tokens = 2 * VALUE * n * model.hidden / (t if job.sequence_parallel else 1)
    return _held(job, model.output / t + model.last_norm, by_tokens + SUM * n * model.vocabulary / t)


def boundary_bytes(job: Job, rows: int) -> float:
    """What each device sends to the next stage: its part of the tokens, or all of them.

    Without sequence parallelism every device of a group has the same values; each sends its part of them, and the
    group gathers them again (the scatter/gather of Narayanan et al. 2021, section 4.1).
    """
    return VALUE * rows * job.sequence * job.model.hidden / job.tensor_parallel


def _held(job: Job, parameters: float, activations: float) -> Held:
    states = OPTIMIZER_BYTES * parameters / job.optimizer_shards
    return Held(PARAMETER_BYTES * parameters, GRADIENT_BYTES * parameters, states, activations)
