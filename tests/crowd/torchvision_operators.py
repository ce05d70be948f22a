"""Lets torchvision be imported where its compiled operators cannot be loaded.

The wheels of the package index are built for CUDA; beside a torch for the CPU their operators are missing, and
importing torchvision (which timm and vit-pytorch do) fails where it describes them. None of the models here runs them:
it is enough that they are declared.
"""

from __future__ import annotations

import torch

_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_declared: list[torch.library.Library] = []  # which live as long as the object that made them


def declare() -> None:
    """Declares the operators that torchvision describes at import, unless torchvision itself has them."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name, schema in _SCHEMAS.items():
            library.define(name + schema)
        _declared.append(library)
    except ImportError:
        pass
