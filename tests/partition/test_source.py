"""Whose code a file holds."""

import pytest
import torch
from torch import nn

from penstock import demo
from penstock._base import compat, pytree
from penstock._base.errors import PartitionError
from penstock.partition import NoStreams, Partitioner, source
from penstock.partition.recorder import recorder


def test_only_what_records_is_ours() -> None:
    assert all(source.is_ours(str(module.__file__)) for module in (compat, pytree, recorder))
    assert not source.is_ours(str(demo.__file__))
    assert not source.is_ours(__file__)


MODEL = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        return self.last(x) if x.sum() > 0 else x
"""


@pytest.mark.parametrize("file", ["<stdin>", "/tmp/ipykernel_7/42.py"])
def test_code_from_a_notebook_or_standard_input_has_lines(file: str) -> None:
    names: dict[str, type[nn.Module]] = {}
    exec(compile(MODEL, file, "exec"), names)
    with pytest.raises(PartitionError, match=rf"depends on the values of a tensor at {file}:11"):
        Partitioner(names["Model"](), 2, streams=NoStreams())((torch.randn(2, 4),))


def test_torchs_own_code_has_lines_if_the_user_has_none() -> None:
    class Checks(nn.Sequential):
        pass

    with pytest.raises(RuntimeError) as raised:
        Checks(nn.Linear(4, 4))(torch.randn(3))
    raised.value.__traceback__ = raised.value.__traceback__ and raised.value.__traceback__.tb_next
    assert "torch/nn/modules/linear.py" in source.raising_line(raised.value)
