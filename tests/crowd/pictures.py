"""Models of timm and torchvision with what no other test has: checkpoints, dropped blocks, attention of channels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from scaffolding.models import Case

ROWS = 8

TIMM: dict[str, dict[str, Any]] = {
    "densenet121": {"block_config": (2, 2, 2, 2), "memory_efficient": True},
    "resnet18": {"drop_block_rate": 0.2, "drop_path_rate": 0.3},
    "xcit_nano_12_p16_224": {"img_size": 64, "depth": 4},
}
"""The name that timm knows each by, and what its constructor takes."""


def _case(model: nn.Module) -> Case:
    return Case(model.train(), (torch.randn(ROWS, 3, 64, 64),), {}, torch.randint(5, (ROWS,)), F.cross_entropy)


def from_timm(name: str) -> Case:
    import timm

    return _case(timm.create_model(name, num_classes=5, **TIMM[name]))


def swin_v2() -> Case:
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

    model = SwinTransformer(
        [2, 2], 16, [2, 2, 2], [2, 4, 4], [4, 4], stochastic_depth_prob=0.2, num_classes=5,
        block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2,
    )  # fmt: skip
    return _case(model)
