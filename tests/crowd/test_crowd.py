"""Models of other libraries, which the extra `zoo` brings, train as on one device.

Tiny configurations of x-transformers and diffusers, and a few models of timm and torchvision; `benchmarks/published`
verifies many more of these two, and of vit-pytorch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crowd import pictures
from crowd.torchvision_operators import declare
from penstock import verify
from scaffolding.models import Case

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # the warnings are theirs

ROWS, VOCABULARY = 8, 40

DECODERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
    "deepnorm": {"pre_norm": False, "scale_residual": True},
    "dropout": {"attn_dropout": 0.1, "ff_dropout": 0.1},
    "flash": {"attn_flash": True},
    "gate_residual": {"gate_residual": True},
    "gated_values": {"attn_gate_values": True},
    "glu_rmsnorm": {"ff_glu": True, "ff_swish": True, "use_rmsnorm": True},
    "macaron": {"macaron": True},
    "memory_kv": {"attn_num_mem_kv": 4},
    "one_kv_head": {"attn_one_kv_head": True},
    "rel_pos": {"rel_pos_bias": True},
    "relu_squared": {"ff_relu_squared": True},
    "residual_attention": {"residual_attn": True},
    "rotary": {"rotary_pos_emb": True},
    "sandwich": {"sandwich_norm": True},
    "scalenorm": {"use_scalenorm": True},
    "shift_tokens": {"shift_tokens": 1},
    "value_residual": {"add_value_residual": True},
    "weight_tied": {"weight_tie_layers": True},
}
"""What the decoder of each takes besides its size."""


def _token_error(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.transpose(1, 2), target)


def _decoder(arguments: dict[str, Any]) -> Case:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=4, heads=2, attn_dim_head=16, **arguments)
    model = TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=32, attn_layers=layers)
    tokens = torch.randint(VOCABULARY, (ROWS, 12))
    return Case(model.train(), (tokens,), {}, tokens.roll(-1, 1), _token_error)


def _squared(output: Any, target: Any) -> Tensor:
    value: Tensor = (output[0] if isinstance(output, (tuple, list)) else next(iter(output.values()))).square().mean()
    return value


IMAGE, LATENT = (ROWS, 3, 32, 32), (ROWS, 4, 8, 8)
BLOCKS = {"block_out_channels": (16, 32), "norm_num_groups": 8, "layers_per_block": 1}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
CODER = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
CROSSED = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}  # fmt: skip
DIFFUSERS: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[str, ...]]] = {
    "AutoencoderKL": ({**BLOCKS, **CODER}, IMAGE, ()),
    "AutoencoderTiny": ({f"{s}_block_out_channels": (8,) * 4 for s in ("encoder", "decoder")}, IMAGE, ()),
    "DiTTransformer2DModel": (
        {**HEADS, "in_channels": 4, "out_channels": 8, "num_layers": 4, "sample_size": 8, "patch_size": 2,
         "num_embeds_ada_norm": 1000, "norm_num_groups": 4},
        LATENT, ("timestep", "class_labels"),
    ),
    "PriorTransformer": (
        {**HEADS, "num_layers": 4, "embedding_dim": 16, "num_embeddings": 5, "additional_embeddings": 4},
        (ROWS, 16), ("timestep", "encoder_hidden_states", "proj_embedding"),
    ),
    "Transformer2DModel": (
        {**HEADS, "in_channels": 16, "num_layers": 4, "norm_num_groups": 8, "cross_attention_dim": 16},
        (ROWS, 16, 8, 8), ("encoder_hidden_states",),
    ),
    "UNet2DConditionModel": (
        {**BLOCKS, **CROSSED, "sample_size": 8, "attention_head_dim": 8, "cross_attention_dim": 16},
        LATENT, ("timestep", "encoder_hidden_states"),
    ),
    "UNet2DModel": (
        {**BLOCKS, "sample_size": 32, "attention_head_dim": 8, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
         "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        IMAGE, ("timestep",),
    ),
    "VQModel": ({**BLOCKS, **CODER, "num_vq_embeddings": 16}, IMAGE, ()),
}  # fmt: skip
"""The config of each, the shape of its first input, and its other inputs."""


def _diffusers(name: str) -> Case:
    import diffusers

    config, shape, others = DIFFUSERS[name]
    model: nn.Module = getattr(diffusers, name)(**config)
    inputs = {
        "timestep": torch.randint(1000, (ROWS,)),
        "class_labels": torch.randint(1000, (ROWS,)),
        "encoder_hidden_states": torch.randn(ROWS, 5, 16),
        "proj_embedding": torch.randn(ROWS, 16),
    }
    return Case(model.train(), (torch.randn(shape),), {name: inputs[name] for name in others}, None, _squared)


CROWD: list[tuple[str, str, Callable[[], Case]]] = [
    *(("x_transformers", name, partial(_decoder, arguments)) for name, arguments in DECODERS.items()),
    *(("diffusers", name, partial(_diffusers, name)) for name in DIFFUSERS),
    *(("timm", name, partial(pictures.from_timm, name)) for name in pictures.TIMM),
    ("torchvision", "swin_v2", pictures.swin_v2),
]


@pytest.mark.parametrize(("library", "name", "make"), [pytest.param(*case, id="-".join(case[:2])) for case in CROWD])
def test_trains_as_on_one_device(library: str, name: str, make: Callable[[], Case], one_thread: None) -> None:
    declare()
    pytest.importorskip(library, reason=f"{library} comes with the extra zoo")
    torch.manual_seed(0)
    case = make()
    given = {"kwargs": case.kwargs, "target": case.target, "loss_fn": case.loss}
    verify(case.model, case.args, **given, ranks=4, schedule="gpipe", microbatches=4).raise_if_failed()
