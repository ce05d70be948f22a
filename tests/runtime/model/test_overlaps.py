"""Parameters of several processes in one memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import ArgumentError
from penstock.runtime.model.overlaps import refuse_overlaps


def stage(index: int, name: str, tensor: Tensor) -> Any:
    return SimpleNamespace(parameters={name: nn.Parameter(tensor)}, meta=SimpleNamespace(index=index))


def refuse(one: Tensor, other: Tensor) -> None:
    refuse_overlaps([stage(0, "one", one), stage(1, "other", other)], lambda index: index)


def test_columns_of_one_matrix_are_apart() -> None:
    matrix = torch.randn(4, 8)
    refuse(matrix[:, :4], matrix[:, 4:])
    refuse(matrix[:2], matrix[2:])
    with pytest.raises(ArgumentError, match="'one' on stage 0 and 'other' on stage 1 are two parameters in the same"):
        refuse(matrix[:, :4], matrix[:, 3:])
