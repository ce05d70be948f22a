"""Turns any model, unedited, into a list of stages.

In come a model, an example batch and where to cut; out comes a `Partition`: stages, and what passes between them.

>>> import torch
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
>>> partition = Partitioner(model, 2, cuts=["2"], streams=NoStreams())((torch.randn(2, 4),), {})
>>> [[name for name, _ in stage.module.named_parameters()] for stage in partition.stages]
[['0.weight', '0.bias'], ['2.weight', '2.bias']]
"""

from penstock.partition.choose_cuts import StageBudget
from penstock.partition.cut.balance import BALANCES, Balance, BalanceChoice
from penstock.partition.cut.candidates import TooFewLayersError
from penstock.partition.given_model import default_kwargs
from penstock.partition.measure.pieces import NoStreams, UnmeasurableError
from penstock.partition.nested import leaves_of, tensors_in
from penstock.partition.partitioner import KEPT_PARTITIONS, Partitioner
from penstock.partition.recording import RandomSource
from penstock.partition.stages.partition import Partition
from penstock.partition.stages.stage import INPUT_OVERWRITTEN, Stage, gates_of

__all__ = [
    "BALANCES",
    "INPUT_OVERWRITTEN",
    "KEPT_PARTITIONS",
    "Balance",
    "BalanceChoice",
    "NoStreams",
    "Partition",
    "Partitioner",
    "RandomSource",
    "Stage",
    "StageBudget",
    "TooFewLayersError",
    "UnmeasurableError",
    "default_kwargs",
    "gates_of",
    "leaves_of",
    "tensors_in",
]
