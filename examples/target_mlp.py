"""A target for `penstock verify`: a function that returns a model, a batch for it, and its loss.

penstock verify examples/target_mlp.py:target --ranks 3
"""

import torch
from torch import nn


def target():
    model = nn.Sequential(
        nn.Linear(20, 48),
        nn.ReLU(),
        nn.Linear(48, 48),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(48, 5),
    )
    inputs, classes = torch.randn(24, 20), torch.randint(5, (24,))
    return model, (inputs,), classes, nn.functional.cross_entropy
