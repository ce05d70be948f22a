"""timm and torchvision: their smallest models, or small ones built from their parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaffolding.models import Case

ROWS = 8


def _classified(output: Any, target: Tensor) -> Tensor:
    outputs = output if isinstance(output, tuple) else (output,)
    return sum((F.cross_entropy(each, target) for each in outputs), torch.zeros(()))


def _case(model: nn.Module, size: int) -> Case:
    images, target = torch.randn(ROWS, 3, size, size), torch.randint(5, (ROWS,))
    return Case(model.train(), (images,), {}, target, _classified)


TINY_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2}
TIMM: dict[str, dict[str, Any]] = {
    "cait_xxs24_224": {"img_size": 64, "depth": 4},
    "convit_tiny": {"img_size": 64, "depth": 4},
    "convnext_atto": {"depths": (1, 1, 2, 1), "drop_path_rate": 0.3},
    "deit_tiny_patch16_224": TINY_VIT,
    "densenet121": {"block_config": (2, 2, 2, 2), "memory_efficient": True},
    "dla46_c": {},
    "efficientvit_b0": {},
    "efficientvit_m0": {"img_size": 64},
    "levit_128": {"img_size": 64},
    "resnest14d": {},
    "resnet18": {"drop_block_rate": 0.2, "drop_path_rate": 0.3},
    "skresnet18": {"layers": (1, 1, 1, 1)},
    "starnet_s050": {},
    "test_byobnet": {},
    "test_convnext": {},
    "test_efficientnet_gn": {},
    "test_efficientnet_ln": {},
    "test_mambaout": {},
    "test_maxvit": {"img_size": 64},
    "test_nfnet": {},
    "test_resnet": {},
    "test_vit": {"img_size": 64},
    "test_vit2": {"img_size": 64},
    "test_vit_relpos": {"img_size": 64},
    "vit_tiny_patch16_224": {**TINY_VIT, "drop_path_rate": 0.3},
    "xcit_nano_12_p16_224": {"img_size": 64, "depth": 4},
}
"""The name that timm knows each by, and what its constructor takes."""


def _timm(name: str, arguments: dict[str, Any]) -> Case:
    import timm

    size = 32 if arguments.get("img_size") == 32 else 64
    return _case(timm.create_model(name, num_classes=5, **arguments), size)


def _torchvision(name: str) -> Case:
    from torchvision import models
    from torchvision.models.maxvit import MaxVit
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2
    from torchvision.models.vision_transformer import VisionTransformer

    made: dict[str, Callable[[], nn.Module]] = {
        "densenet": lambda: models.DenseNet(8, (2, 2, 2), 16, num_classes=5, memory_efficient=True),
        "maxvit": lambda: MaxVit(
            (64, 64), 8, 2, [8, 16], [2, 2], head_dim=8, stochastic_depth_prob=0.2, num_classes=5
        ),
        "mobilenet_v2": lambda: models.mobilenet_v2(num_classes=5, width_mult=0.25),
        "mobilenet_v3_small": lambda: models.mobilenet_v3_small(num_classes=5, width_mult=0.5),
        "resnet18": lambda: models.resnet18(num_classes=5),
        "shufflenet_v2_x0_5": lambda: models.shufflenet_v2_x0_5(num_classes=5),
        "squeezenet1_1": lambda: models.squeezenet1_1(num_classes=5),
        "swin_v2": lambda: SwinTransformer(
            [2, 2], 16, [2, 2, 2], [2, 4, 4], [4, 4], stochastic_depth_prob=0.2, num_classes=5,
            block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2,
        ),
        "vit": lambda: VisionTransformer(64, 16, 6, 4, 32, 64, num_classes=5, dropout=0.1),
    }  # fmt: skip
    return _case(made[name](), 64)


TORCHVISION = (
    "densenet", "maxvit", "mobilenet_v2", "mobilenet_v3_small", "resnet18", "shufflenet_v2_x0_5", "squeezenet1_1",
    "swin_v2", "vit",
)  # fmt: skip


def cases() -> Iterator[tuple[str, str, Callable[[], Case]]]:
    """Library, name, and what makes the model with a batch."""
    for name, arguments in TIMM.items():
        yield "timm", name, lambda name=name, arguments=arguments: _timm(name, arguments)  # type: ignore[misc]
    for name in TORCHVISION:
        yield "torchvision", name, lambda name=name: _torchvision(name)  # type: ignore[misc]
